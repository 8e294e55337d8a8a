"""Measures what the page on SPE's seeds says, as lines of results.

    python tools/findings_spe.py sums image --data data/cifar >> results/spe-seeds.jsonl
    python tools/findings_spe.py swaps runs/listops/sine-spe/*-seed* >> results/spe-swaps.jsonl
    python tools/findings_spe.py casts >> results/spe-seeds.jsonl

`sums` adds up the queries of each layer of fresh models with the published sizes: the published code seeds its codes by that sum.
`swaps` evaluates trained models with other codes than those of their training. `casts` needs jax, and nothing of this project.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = (2**31 - 1) / 1e7
"""The size from which a sum of queries no longer fits the published seed, `int32(ceil(1e7 * sum))`."""

SUMS = {
    "image": {"batch": 96, "presets": ("relu-sine", "performer-sine"), "options": {}},
    "text": {"batch": 8, "presets": ("relu-sine", "performer-sine"), "options": {}},
    "listops": {
        "batch": 8,
        "presets": ("relu-sine", "performer-sine"),
        "options": {"train": 1000, "shortest": 500, "longest": 2000},
    },
}
"""The published batch of each task, and what its data needs."""


def sums(task: str, data: Path | None, seeds: int) -> Iterator[dict[str, Any]]:
    """Yields a line for each fresh model: the sum of the queries of each layer, for one batch of the training data."""
    import torch

    from lagwise.lab.environment import machine
    from lagwise.lab.experiment import make_config
    from lagwise.lab.tasks import TASKS

    known = SUMS[task]
    for preset in known["presets"]:
        for seed in range(seeds):
            source = TASKS[task](data, seed=0, **known["options"])
            torch.manual_seed(seed)
            model = source.model(make_config(task, "sine-spe", preset=preset, **{"encoding.fixed": False})).eval()
            first = seed * known["batch"]
            found = query_sums(model, source.examples("train").batch(range(first, first + known["batch"])))
            facts = {"task": task, "preset": preset, "seed": seed, "batch": known["batch"], "sums": found}
            yield {"bench": "spe-seeds", "kind": "sums", **facts, "environment": machine(torch.device("cpu"))}


def query_sums(model: Any, batch: Any) -> list[float]:
    """Returns the sum of all queries of each layer."""
    import torch

    found: list[float] = []
    for name, module in model.named_modules():
        if name.endswith("attention.q"):
            module.register_forward_hook(lambda module, given, queries: found.append(queries.double().sum().item()))
    with torch.no_grad():
        model(batch)
    return found


def swaps(folder: Path, draws: int) -> dict[str, Any]:
    """Returns the test accuracy of a trained model with its own codes, and with those of other draws."""
    import torch

    from lagwise.encodings.stochastic import StochasticEncoding
    from lagwise.lab.checkpoint import checkpoint_of
    from lagwise.lab.loop import Session, Settings
    from lagwise.lab.run_folder import Run

    run = Run.open(folder)
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise ValueError(f"{folder} must have a checkpoint, but has none: train it to the end")
    session = Session(run.config, Settings(device="cpu"), run)
    session.load(checkpoint)
    own, others = session.evaluate("test")["accuracy"], []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        for module in session.model.modules():
            if isinstance(module, StochasticEncoding):
                module.fixed_seed = torch.randint(2**62, (), generator=generator)
        others.append(session.evaluate("test")["accuracy"])
    facts = {"own": own, "others": others, "config": run.config.to_json(), "environment": run.environment}
    return {"bench": "spe-swaps", **facts}


def casts() -> dict[str, Any]:
    """Returns what jax makes of sums of queries on this device, by the published expression."""
    import jax

    given = [214.0, 215.0, 1e4, -3e5]
    seeds = jax.lax.convert_element_type(jax.numpy.ceil(jax.numpy.float32(given) * 1e7), "int32")
    device = jax.devices()[0]
    environment = {"jax": jax.__version__, "device": device.device_kind, "platform": device.platform}
    return {"bench": "spe-seeds", "kind": "casts", "sums": given, "seeds": seeds.tolist(), "environment": environment}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("sums")
    command.add_argument("task", choices=sorted(SUMS))
    command.add_argument("--data", type=Path)
    command.add_argument("--seeds", type=int, default=3)
    command = commands.add_parser("swaps")
    command.add_argument("folders", type=Path, nargs="+")
    command.add_argument("--draws", type=int, default=5)
    commands.add_parser("casts")
    given = parser.parse_args()
    if given.command == "sums":
        lines = sums(given.task, given.data, given.seeds)
    elif given.command == "swaps":
        lines = (swaps(folder, given.draws) for folder in given.folders)
    else:
        lines = iter([casts()])
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
