"""Encoders that classify one or two texts: a batch in, scores [batch, outputs] out."""

from jaxtyping import Float
from torch import Tensor, nn

from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import Pooling, encoder_of, pool, sides_of
from lagwise.lab.tasks.text.pretrained import Pretrained

FIRST_STD = 0.02


class SentenceEncoder(nn.Module):
    """A stack of layers over one or two texts, which a learned vector tells apart, and scores of the pooled vectors.

    Embeddings start small, so that a few hundred steps turn them where they have to be, and are normalised, so that all encodings
    find vectors of the same size.
    """

    def __init__(self, config: Config, *, symbols: int, outputs: int, pooling: Pooling):
        super().__init__()
        self.embedding = nn.Embedding(symbols, config.dim)
        self.side = nn.Embedding(2, config.dim)
        for table in (self.embedding, self.side):
            nn.init.normal_(table.weight, std=FIRST_STD)
        self.norm = nn.LayerNorm(config.dim)
        self.encoder = encoder_of(config)
        self.dropout = nn.Dropout(config.dropout)
        self.choice = nn.Linear(config.dim, outputs)
        self.pooling: Pooling = pooling

    def forward(self, batch: Batch) -> Float[Tensor, "batch outputs"]:
        x = self.dropout(self.norm(self.embedding(batch["tokens"]) + self.side(sides_of(batch))))
        return self.choice(self.dropout(pool(self.encoder(x, lengths=batch["lengths"]), batch["lengths"], self.pooling)))


class HuggingFaceChoice(Pretrained):
    """An encoder of Hugging Face with its head for classes."""

    head = "AutoModelForSequenceClassification"

    def forward(self, batch: Batch) -> Float[Tensor, "batch outputs"]:
        return self.outputs(batch).logits
