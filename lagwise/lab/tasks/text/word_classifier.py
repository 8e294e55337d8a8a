"""The model of the tasks on words: vectors of words, a stack of layers, and scores of classes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import encoder_of, pool
from lagwise.lab.tasks.text.glue_models import FIRST_STD
from lagwise.lab.tasks.text.words import SPECIAL


class WordClassifier(nn.Module):
    """Vectors of words, a stack of layers, and scores [batch, classes] of the last word's vector.

    Vectors from a file have zeros for padding and for unknown words. Those that are learnt from the start begin small and are
    normalised, as in `SentenceEncoder`.

    Args:
        config: Sizes of the stack.
        symbols: Number of words, padding and unknown words counted.
        classes: Number of scores.
        vectors: From a file.
        frozen: Leave these as they are.
        input_dropout: Dropout of the words' vectors.
        first_only: Only the first layer has the position encoding.
    """

    def __init__(
        self, config: Config, *, symbols: int, classes: int, vectors: Float[Tensor, "words dim"] | None, frozen: bool,
        input_dropout: float, first_only: bool,
    ):  # fmt: skip
        super().__init__()
        if vectors is None:
            self.embedding = nn.Embedding(symbols, config.dim)
            nn.init.normal_(self.embedding.weight, std=FIRST_STD)
        elif vectors.shape[1] != config.dim:
            raise ValueError(f"dim must be the {vectors.shape[1]} of the vectors, but is {config.dim}: dim={vectors.shape[1]}")
        else:
            table = torch.cat([vectors.new_zeros(SPECIAL, config.dim), vectors])
            self.embedding = nn.Embedding.from_pretrained(table, freeze=frozen)
        self.norm = nn.LayerNorm(config.dim) if vectors is None else nn.Identity()
        self.dropout = nn.Dropout(input_dropout)
        self.encoder = encoder_of(config, first_only=first_only)
        self.choice = nn.Linear(config.dim, classes)

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes"]:
        x = self.dropout(self.norm(self.embedding(batch["tokens"])))
        return self.choice(pool(self.encoder(x, lengths=batch["lengths"]), batch["lengths"], "last"))
