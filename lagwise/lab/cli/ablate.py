"""`lagwise ablate`."""

from rich.table import Table

from lagwise.lab.cli.console import console, in_words
from lagwise.lab.cli.options import Data, Device, Runs, Save, settings_of


@in_words()
def command(
    runs: Runs,
    data: Data = None,
    device: Device = "auto",
    save: Save = None,
) -> None:
    """Evaluate runs with the priors of more and more heads: which of them does the model need?

        lagwise ablate runs/squad/*/*-seed0
        lagwise ablate runs/squad/at5/* --save ablation.jsonl

    The first paper's ablation: all biases are switched off, and those of single heads on again, from the lowest to the highest
    peak of the prior. The metric is that of the validation split.
    """
    from lagwise.lab.json_files import add_line
    from lagwise.lab.look_run import ablation_of
    from lagwise.lab.run import line_start, load_trained

    table = Table("run", "metric", "no priors", "a quarter", "a half", "three quarters", "all", "heads")
    for folder in runs:
        session = load_trained(folder, settings_of(device, data))
        metric, found = next(iter(session.task.metrics())), ablation_of(session)
        heads = [{"layers": head.layers, "head": head.head, "peak": head.peak, "lag": head.peak_lag} for head in found.order]
        if save is not None:
            known = {**line_start("ablation", session), "split": "validation", "metric": metric}
            add_line(save, {**known, "values": found.values, "heads": heads})
        parts = (found.values[round(share * len(heads) / 4)] for share in range(5))
        name = f"{session.config.task}, {session.config.encoding}, seed {session.config.seed}"
        table.add_row(name, metric, *(f"{value:.4f}" for value in parts), str(len(heads)))
    console.print(table)
    if save is not None:
        console.print(f"added to {save}")
