"""The nine tasks of GLUE."""

import warnings
from functools import cached_property
from math import ceil
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryF1Score, BinaryMatthewsCorrCoef
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from lagwise.lab.tasks.base import Batch, Facts, Split
from lagwise.lab.tasks.text.glue import SHARE, Glue
from lagwise.lab.tasks.text.glue_files import HUB_NAME, Item, Layout

SPLIT_WORDS = "test is GLUE's dev, whose labels are public; validation is a fixed tenth of train"
LICENCE = "each task has its sources' own, see https://gluebenchmark.com"
PUBLISHED = "none found: Huang et al. 2020 evaluate on GLUE, but their numbers were not to be had"


def glue_facts(words: str, metric: str, source: str, size: str, layout: Layout, note: str = SPLIT_WORDS) -> Facts:
    """Returns the facts of a task of GLUE."""
    names = ("train", *layout.dev, *layout.test)
    files = f"{layout.folder}/{{{','.join(names)}}}.tsv or the same without the folder, plain or as .xz or .gz"
    return Facts(words, metric, source, f"{size}; {note}", LICENCE, PUBLISHED, files, f"{HUB_NAME} ({layout.hub})")


def glue_presets(train: int) -> dict[str, dict[str, Any]]:
    """Returns the presets of a task with so many official training examples."""
    # What the paper used for GLUE was not found: rate, batch and two epochs are those of its SQuAD runs.
    return {
        "paper2-base": {
            "task_options": {"model": "hf", "path": "google-bert/bert-base-uncased"}, "encoding": "huang4",
            "encoding_options": {"max_lag": 511}, "per_layer": True, "dropout": 0.1, "attention_dropout": 0.1, "batch": 48,
            "rate": 3e-5, "schedule": "linear", "warmup": 0, "steps": 2 * ceil((train - train // SHARE) / 48),
        }
    }  # fmt: skip


class Cola(Glue):
    """Is a sentence English that a speaker accepts?"""

    layout = Layout(
        "CoLA", "cola", ("sentence",), "label", ("0", "1"), ("shuffled", "plain"),
        columns=("source", "label", "mark", "sentence"),
    )  # fmt: skip
    facts: ClassVar[Facts] = glue_facts(
        "is a sentence grammatical?", "matthews", "CoLA (Warstadt et al. 2019) in GLUE", "8,551 train, 1,043 dev", layout
    )
    classes = 2
    presets = glue_presets(8_551)

    def metrics(self) -> dict[str, Metric]:
        return {"matthews": BinaryMatthewsCorrCoef(), **super().metrics()}


class Sst2(Glue):
    """Does a sentence, or a part of one, praise a film?"""

    layout = Layout("SST-2", "sst2", ("sentence",), "label", ("0", "1"), ("bad", "good"))
    facts: ClassVar[Facts] = glue_facts(
        "does a phrase of a review praise the film?", "accuracy", "SST-2 (Socher et al. 2013) in GLUE", "67,349 train, 872 dev",
        layout, f"{SPLIT_WORDS}, and easier: many of its phrases are parts of sentences of which other parts are trained on",
    )  # fmt: skip
    classes = 2
    presets = glue_presets(67_349)


class Paraphrases(Glue):
    """Do two texts mean the same? Most of the data has one answer, and so F1 counts first."""

    classes = 2

    def metrics(self) -> dict[str, Metric]:
        return {"f1": BinaryF1Score(), **super().metrics()}


class Mrpc(Paraphrases):
    """Do two sentences of the news mean the same?"""

    layout = Layout(
        "MRPC", "mrpc", ("#1 String", "#2 String"), "Quality", ("0", "1"), ("other", "same"), ("sentence1", "sentence2")
    )
    facts: ClassVar[Facts] = glue_facts(
        "do two sentences of the news mean the same?", "f1", "MRPC (Dolan and Brockett 2005) in GLUE", "3,668 train, 408 dev",
        layout,
    )  # fmt: skip
    presets = glue_presets(3_668)


class Qqp(Paraphrases):
    """Do two questions ask the same?"""

    layout = Layout("QQP", "qqp", ("question1", "question2"), "is_duplicate", ("0", "1"), ("other", "same"), broken=10)
    facts: ClassVar[Facts] = glue_facts(
        "do two questions ask the same?", "f1", "Quora Question Pairs in GLUE", "363,846 train, 40,430 dev", layout
    )
    presets = glue_presets(363_846)


class Stsb(Glue):
    """How much do two sentences mean the same, from 0 to 5?"""

    layout = Layout("STS-B", "stsb", ("sentence1", "sentence2"), "score", (), ("other", "near", "same"))
    facts: ClassVar[Facts] = glue_facts(
        "how much do two sentences mean the same, from 0 to 5?", "pearson", "STS benchmark (Cer et al. 2017) in GLUE",
        "5,749 train, 1,500 dev", layout,
    )  # fmt: skip
    classes = 1
    presets = glue_presets(5_749)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return F.mse_loss(outputs[:, 0].float(), batch["label"], reduction="sum"), outputs.new_tensor(len(outputs))

    def metrics(self) -> dict[str, Metric]:
        with warnings.catch_warnings():
            # Spearman's ranks need all predictions, and there are not many.
            warnings.filterwarnings("ignore", "Metric `SpearmanCorrcoef` will save", UserWarning)
            return {"pearson": Correlation(), "spearman": SpearmanCorrCoef()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs[:, 0].float(), batch["label"]

    def predicted(self, outputs: Float[Tensor, "batch outputs"]) -> list[float]:
        return outputs[:, 0].tolist()


class Correlation(PearsonCorrCoef):
    """Pearson's, of which a higher one is better here; torchmetrics leaves that open, since -1 is a perfect relation too."""

    higher_is_better = True


class Mnli(Glue):
    """Does a sentence follow from another one? Dev has texts of the genres of train (matched), and of others (mismatched)."""

    layout = Layout(
        "MNLI", "mnli", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"),
        ("same", "other", "opposite"), ("premise", "hypothesis"), dev=("dev_matched", "dev_mismatched"),
        test=("test_matched", "test_mismatched"), predictions=("MNLI-m", "MNLI-mm"),
    )  # fmt: skip
    facts: ClassVar[Facts] = glue_facts(
        "does a sentence follow from another, contradict it, or neither?", "matched", "MultiNLI (Williams et al. 2018) in GLUE",
        "392,702 train, 9,815 dev matched, 9,832 dev mismatched", layout,
        "test is both parts of dev by turns, whose labels are public; validation is a fixed tenth of train, all of it matched",
    )  # fmt: skip
    classes = 3
    presets = glue_presets(392_702)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Which example of which part of dev comes when: by turns, so that any first ones stand for both."""
        return sorted(
            ((part, index) for part, items in enumerate(self.parts) for index in range(len(items))), key=lambda p: p[::-1]
        )

    def items(self, split: Split) -> list[Item]:
        return [self.parts[part][index] for part, index in self.places] if split == "test" else super().items(split)

    def columns(self, split: Split) -> dict[str, Tensor]:
        parts = [part for part, _ in self.places] if split == "test" else [0] * len(self.training_items[split])
        return {"part": torch.tensor(parts)}

    def metrics(self) -> dict[str, Metric]:
        return {"matched": PartAccuracy(0), "mismatched": PartAccuracy(1)}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.argmax(1), torch.stack([batch["label"], batch["part"]], dim=1)


class PartAccuracy(MeanMetric):
    """The accuracy on the examples of one part; NaN where there are none of it.

    >>> metric = PartAccuracy(1)
    >>> metric.update(torch.tensor([2, 0, 1]), torch.tensor([[2, 1], [1, 0], [0, 1]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    higher_is_better = True

    def __init__(self, part: int):
        super().__init__()
        self.part = part

    def update(self, classes: Int[Tensor, " batch"], targets: Int[Tensor, "batch 2"]) -> None:
        """Takes predicted classes, and rows of the right class and the part."""
        super().update((classes == targets[:, 0])[targets[:, 1] == self.part].float())


class Qnli(Glue):
    """Does a sentence have the answer to a question?"""

    layout = Layout("QNLI", "qnli", ("question", "sentence"), "label", ("entailment", "not_entailment"), ("same", "other"))
    facts: ClassVar[Facts] = glue_facts(
        "does a sentence answer a question?", "accuracy", "QNLI, made of SQuAD 1.1 (Rajpurkar et al. 2016), in GLUE",
        "104,743 train, 5,463 dev", layout,
    )  # fmt: skip
    classes = 2
    presets = glue_presets(104_743)


class Rte(Glue):
    """Does a sentence follow from a text?"""

    layout = Layout("RTE", "rte", ("sentence1", "sentence2"), "label", ("entailment", "not_entailment"), ("same", "other"))
    facts: ClassVar[Facts] = glue_facts(
        "does a sentence follow from a text?", "accuracy", "RTE 1, 2, 3 and 5 in GLUE", "2,490 train, 277 dev", layout
    )
    classes = 2
    presets = glue_presets(2_490)


class Wnli(Glue):
    """Does a sentence follow from a text, whose pronoun has to be understood?"""

    layout = Layout("WNLI", "wnli", ("sentence1", "sentence2"), "label", ("0", "1"), ("other", "same"))
    facts: ClassVar[Facts] = glue_facts(
        "who is meant by a pronoun? A sentence names one: is it so?", "accuracy",
        "Winograd schemas (Levesque et al. 2011) in GLUE", "635 train, 71 dev", layout,
        f"{SPLIT_WORDS}. Dev is adversarial: its sentences are those of train with the other answer, so that a model that learns "
        "train by heart is below chance",
    )  # fmt: skip
    classes = 2
    presets = glue_presets(635)
