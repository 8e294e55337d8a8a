"""A training loop of a few lines, for tests of tasks."""

import torch

from lagwise.tasks.base import Task
from lagwise.train.config import Config


def losses_of(task: Task, config: Config, steps: int) -> list[float]:
    """Returns the mean loss of each step of training a fresh model with Adam."""
    torch.manual_seed(config.seed)
    model = task.model(config)
    examples = task.examples("train")
    optimizer = torch.optim.Adam(model.parameters(), lr=config.rate)
    order = torch.Generator().manual_seed(config.seed)
    losses = []
    for _ in range(steps):
        batch = examples.batch(torch.randint(len(examples), (config.batch,), generator=order).tolist())
        total, count = task.loss(model(batch), batch)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
