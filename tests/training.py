"""A training loop of a few lines, and a model of Hugging Face, for tests of tasks."""

from pathlib import Path
from typing import Any

import torch

from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Task


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


def random_bert(path: Path, tokenizer: Any) -> Path:
    """Stores a small BERT with random weights and its tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64)).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path
