"""Which encoding tells two Markov chains apart? A demonstration that trains a small model with each of them.

Process-50 of the first paper: strings of 50 zeros and ones from one of two chains, P(0 -> 1) = 0.2, P(1 -> 0) = 0.4
or 0.3 and 0.6. Both have two zeros for each one in the long run, so that counts say little (the best possible
accuracy is 57.8 %) and only the order says more (85.3 %). Without positions, attention sees counts alone.

    python examples/process50.py --steps 500
"""

import argparse
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import lagwise

LENGTH = 50
TRAINING_EXAMPLES, TEST_EXAMPLES = 5000, 2000
RATE = 2e-3
CHAINS = torch.tensor([[0.2, 0.4], [0.3, 0.6]])  # [class, state] -> probability of leaving the state


def strings(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws strings, [count, LENGTH], and the chains that they come from; the first symbol has the chains' long-run shares."""
    label = torch.randint(2, (count,), generator=generator)
    state = (torch.rand(count, generator=generator) < 1 / 3).long()
    symbols = [state]
    for _ in range(LENGTH - 1):
        leaves = torch.rand(count, generator=generator) < CHAINS[label, state]
        state = torch.where(leaves, 1 - state, state)
        symbols.append(state)
    return torch.stack(symbols, dim=1), label


class Classifier(nn.Module):
    """One layer of attention over the symbols, the mean over time, and a choice."""

    def __init__(self, encoding: str, dim: int = 64, heads: int = 4):
        super().__init__()
        options = {"max_lag": LENGTH - 1} if encoding not in ("t5",) else {}
        made = lagwise.make(encoding, heads=heads, head_dim=dim // heads, dim=dim, **options)
        self.embedding = nn.Embedding(2, dim)
        self.encoder = lagwise.nn.Encoder(dim, layers=1, heads=heads, hidden=2 * dim, norm="post", encoding=made)
        self.choice = nn.Linear(dim, 2)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.choice(self.encoder(self.embedding(symbols)).mean(1))


def train(encoding: str, steps: int, seed: int, step_done) -> tuple[float, float, int]:
    """Returns the accuracy in percent, the seconds of training and the number of the encoding's parameters."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    symbols, label = strings(TRAINING_EXAMPLES, generator)
    model = Classifier(encoding)
    # Tables of a few numbers have to move further than weights.
    tables = list(model.encoder.encoding.parameters())
    others = [parameter for name, parameter in model.named_parameters() if "encoder.encoding." not in name]
    rates = {RATE: others, 10 * RATE: tables}
    optimizer = torch.optim.Adam([{"params": group, "lr": rate} for rate, group in rates.items() if group])
    peaks = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=steps)
    began = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(TRAINING_EXAMPLES, (64,), generator=generator)
        loss = F.cross_entropy(model(symbols[chosen]), label[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step_done()
    seconds = time.perf_counter() - began
    model.eval()
    symbols, label = strings(TEST_EXAMPLES, generator)
    with torch.no_grad():
        accuracy = 100.0 * (model(symbols).argmax(1) == label).double().mean().item()
    return accuracy, seconds, sum(parameter.numel() for parameter in model.encoder.encoding.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--encodings", default="none,sinusoidal,t5,at5,huang2,shaw,huang4,rotary", help="names, with commas between"
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps for each (64 strings each)")
    parser.add_argument("--seeds", type=int, default=1, help="runs for each; their mean is shown")
    options = parser.parse_args()
    console = Console()
    table = Table("encoding", "accuracy %", "its parameters", "seconds", title="Process-50 (counts alone: 57.8 %, order: 85.3 %)")
    names = options.encodings.split(",")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(names) * options.seeds * options.steps)
        for name in names:
            progress.update(task, description=name)
            runs = [train(name, options.steps, seed, lambda: progress.advance(task)) for seed in range(options.seeds)]
            accuracy, seconds = (sum(run[i] for run in runs) / len(runs) for i in (0, 1))
            table.add_row(name, f"{accuracy:.1f}", f"{runs[0][2]:,}", f"{seconds:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
