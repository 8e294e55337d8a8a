"""Metrics of translations: corpus BLEU, and how many tokens are right."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lagwise.extras import install_command

WORDS = ("13a", "intl", "char", "zh", "none")
"""Of the ways in which sacrebleu splits words, those that need nothing else."""


class MeasuredTranslations(NamedTuple):
    """What the metrics are told beside the loss of each token."""

    correct: Bool[Tensor, " tokens"]
    """Whether the likeliest token was the right one, with the right ones before it."""
    translations: list[str]
    references: list[str]


class Bleu(Metric):
    """Corpus BLEU of sacrebleu, in percent: the sums over all sentences that it is made of.

    Args:
        lowercase: Large letters are not told from small ones.
        words: How words are split.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    lengths: Tensor
    matched: Tensor
    total: Tensor

    def __init__(self, *, lowercase: bool = False, words: str = "13a"):
        super().__init__()
        try:
            from sacrebleu.metrics.bleu import BLEU
        except ImportError as error:
            raise ValueError(f"the package sacrebleu must be there for BLEU, but is not: {install_command('train')}") from error
        # Text with spaces between all words is what "none" is for, and no mistake to be told about.
        self.bleu = BLEU(lowercase=lowercase, tokenize=words, force=words == "none")
        self.add_state("lengths", default=torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("matched", "total"):
            self.add_state(name, default=torch.zeros(self.bleu.max_ngram_order, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Float[Tensor, " tokens"], told: MeasuredTranslations) -> None:
        own: Any = self.bleu.corpus_score(told.translations, [told.references])
        self.lengths += self.lengths.new_tensor([own.sys_len, own.ref_len])
        self.matched += self.matched.new_tensor(own.counts)
        self.total += self.total.new_tensor(own.totals)

    def compute(self) -> Tensor:
        given, wanted = self.lengths.tolist()
        matched, total = self.matched.tolist(), self.total.tolist()
        score = self.bleu.compute_bleu(matched, total, given, wanted, smooth_method=self.bleu.smooth_method).score
        return torch.tensor(score, dtype=torch.float64)


class TokenAccuracy(MeanMetric):
    """The share of tokens that are the likeliest, with the right ones before them."""

    higher_is_better = True

    def update(self, losses: Float[Tensor, " tokens"], told: MeasuredTranslations) -> None:
        super().update(told.correct.float())
