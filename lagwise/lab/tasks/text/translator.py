"""The model of translation: an encoder, a decoder, and beam search with a cache."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

import lagwise
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import TokenModel, decoder_of, encoder_of
from lagwise.lab.tasks.text.beam import BeamOptions, Translation, beam_search


class Translator(TokenModel):
    """An encoder of one language and a decoder of the other, with one embedding, and encodings of their own.

    Cross-attention has no positions.
    """

    encoder: lagwise.nn.Encoder

    def __init__(self, config: Config, *, symbols: int, end: int, first_only: bool = False):
        super().__init__(config, symbols=symbols)
        self.end = end
        self.encoder = encoder_of(config, first_only=first_only)
        self.decoder = decoder_of(config, cross=True, first_only=first_only)

    def forward(self, batch: Batch, search: BeamOptions | None = None) -> Float[Tensor, "tokens symbols"] | list[Translation]:
        """Returns the scores of the target's tokens; with a search, translations instead, which need no target."""
        if search is None:
            return self.scores(self.hidden(batch).flatten(0, 1)[batch["chosen"]])
        if self.training:
            raise ValueError("model must be in evaluation mode, but is in training, where it is random: call model.eval()")
        with torch.no_grad():
            return beam_search(Decoding(self, batch), batch["limits"], start=self.end, end=self.end, search=search)

    def hidden(self, batch: Batch) -> Float[Tensor, "batch time dim"]:
        """Returns one vector for each token of the target."""
        return self.decoder(self.embedding(batch["inputs"]), self.context(batch), context_lengths=batch["lengths"])

    def context(self, batch: Batch) -> Float[Tensor, "batch time dim"]:
        """Returns one vector for each token of the source."""
        return self.encoder(self.embedding(batch["tokens"]), lengths=batch["lengths"])


class Decoding:
    """A translator in the middle of some translations: a `Step` of beam search, with a cache."""

    def __init__(self, model: Translator, batch: Batch):
        self.model, self.cache = model, model.decoder.new_cache()
        self.context, self.lengths = model.context(batch), batch["lengths"]

    def __call__(self, tokens: Int[Tensor, " now"], origins: Int[Tensor, " now"]) -> Float[Tensor, "now symbols"]:
        self.cache.select(origins)
        self.context, self.lengths = self.context[origins], self.lengths[origins]
        x = self.model.embedding(tokens[:, None])
        return self.model.scores(self.model.decoder(x, self.context, cache=self.cache, context_lengths=self.lengths)[:, 0])
