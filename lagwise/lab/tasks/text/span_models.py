"""Encoders that answer questions: a batch in, scores of starts and ends [batch, time, 2] out."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import encoder_of, sides_of
from lagwise.lab.tasks.text.pretrained import Pretrained


class SpanEncoder(nn.Module):
    """A stack of layers over question and window, which a learned vector tells apart."""

    def __init__(self, config: Config, *, symbols: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, config.dim)
        self.side = nn.Embedding(2, config.dim)
        if config.start:
            # What was trained before knows no sides, and vectors as large as its embeddings would drown these.
            nn.init.zeros_(self.side.weight)
        self.encoder = encoder_of(config)
        self.span = nn.Linear(config.dim, 2)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        x = self.embedding(batch["tokens"]) + self.side(sides_of(batch))
        return self.span(self.encoder(x, lengths=batch["lengths"]))


class HuggingFaceSpans(Pretrained):
    """An encoder of Hugging Face with its head for questions."""

    head = "AutoModelForQuestionAnswering"

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        found = self.outputs(batch)
        return torch.stack([found.start_logits, found.end_logits], dim=-1)
