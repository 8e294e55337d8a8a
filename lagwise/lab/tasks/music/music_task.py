"""Music as tokens: what pop piano and drum grooves share. Models tell the next token and go on from a prompt."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch, Sampling, Split
from lagwise.lab.tasks.generation import generate_tokens
from lagwise.lab.tasks.models import CausalModel
from lagwise.lab.tasks.music.excerpts import Excerpts, excerpt_places
from lagwise.lab.tasks.music.music_files import Piece
from lagwise.lab.tasks.music.notation import Notation, TokenGrammar, read_midi
from lagwise.lab.tasks.music.rendering import write_piece
from lagwise.lab.tasks.music.styles import notes_of, style_similarity
from lagwise.lab.tasks.token_prediction import MeanLoss, Perplexity, TokenPrediction, mean_loss_by_position, token_losses

if TYPE_CHECKING:
    from symusic.core import ScoreTick as Score

BIN = 128
"""Positions of a bin of the loss, as in the paper."""

PROMPT = re.compile(r"(train|validation|test):(\d+)(?::(\d+))?")
PROMPT_BARS = 2


@dataclass(frozen=True)
class MusicOptions:
    """What can be chosen of pieces of music.

    Args:
        length: Tokens that are predicted in one training example.
        transpose: Training pieces are also played up to so many semitones higher and lower; 0 for as they are.
    """

    length: int = 256
    transpose: int = 0

    def __post_init__(self) -> None:
        require_sizes(length=self.length)
        if not isinstance(self.transpose, int) or self.transpose < 0:
            raise ValueError(f"transpose must be a whole number of semitones of at least 0, but is {self.transpose!r}")


class Continuations(NamedTuple):
    """Pieces that go on from one prompt."""

    given: int  # tokens of the prompt
    rows: list[list[int]]  # all tokens of each piece
    nlls: list[float]  # nats per token that was drawn
    start: float  # the beat at which the prompt ends
    reference: "Score | None"  # the piece that the prompt is from


class Music(TokenPrediction):
    """Pieces of music as REMI tokens, whose next one is asked for."""

    Options: ClassVar[type] = MusicOptions
    options: MusicOptions
    sines: ClassVar[int]
    """Sinusoids of the paper's encodings."""

    def __init__(self, data: Path | str | None = None, *, seed: int = 0, **options: Any):
        super().__init__(data, seed=seed, **options)
        self._pieces: dict[Split, list[Piece]] = {}

    @cached_property
    def notation(self) -> Notation:
        """The tokens and what is to know of them."""
        return self.find_notation()

    @abstractmethod
    def find_notation(self) -> Notation:
        """Returns the tokens of the data."""

    @abstractmethod
    def read_pieces(self, split: Split) -> list[Piece]:
        """Returns the pieces of a split of the data."""

    def pieces(self, split: Split) -> list[Piece]:
        """Returns the pieces of a split, which are read once."""
        if split not in self._pieces:
            self._pieces[split] = self.read_pieces(split)
            if not self._pieces[split]:
                raise ValueError(f"data must have pieces for all splits, but {self.data} leaves none for {split}")
        return self._pieces[split]

    def piece(self, name: str, score: "Score") -> Piece:
        """Returns a score as tokens with an end."""
        tokens = self.notation.tokens(score)
        if not any(self.notation.kinds[token] in ("Pitch", "PitchDrum") for token in tokens):
            raise ValueError(f"{name} must have notes for this task, but has none")
        return Piece(name, np.array([*tokens, self.notation.end]))

    def examples(self, split: Split, length: int | None = None) -> Excerpts:
        """Returns excerpts of the training pieces in all keys, and the beginnings of the others, as far as they go."""
        pieces, own = self.pieces(split), self.options.length
        length = own if length is None else length
        require_sizes(length=length)
        longest = max(len(piece.tokens) for piece in pieces) - 1
        if length > own and longest <= own:
            raise ValueError(
                f"length must not be more than the training's {own}, since the longest {split} piece has {longest} tokens to "
                f"predict, but is {length}"
            )
        most = self.options.transpose if split == "train" else 0
        shifts = torch.stack([self.notation.transposed(shift) for shift in range(-most, most + 1)])
        found: list[tuple[int, int, int]] = []
        begin = 0
        for piece in pieces:
            size = len(piece.tokens)
            keys = (shifts[:, np.unique(piece.tokens)] >= 0).all(1).nonzero()[:, 0].tolist()
            bars = np.flatnonzero(piece.tokens == self.notation.bar)
            places = excerpt_places(bars, size, length) if split == "train" else [(0, min(length, size - 1))]
            found += [(begin + start, count, key) for key in keys for start, count in places]
            begin += size
        return Excerpts(pieces, torch.tensor(found), shifts, min(length, longest))

    def model(self, config: Config) -> CausalModel:
        return CausalModel(config, symbols=len(self.notation.words))

    def metrics(self) -> dict[str, Metric]:
        return {"nll": MeanLoss(), "perplexity": Perplexity()}

    def answers(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss of each token in nats, and its position."""
        return token_losses(outputs, batch), batch["positions"].flatten()

    def curves(self, model: nn.Module, split: Split, length: int | None, *, batch: int, limit: int | None) -> dict[str, Any]:
        """Returns the mean loss in bins of 128 positions (the first one, nats, tokens), within and beyond the training length."""
        examples = self.examples(split, length)
        found = np.array(mean_loss_by_position(model, examples, examples.length, examples.length, batch=batch, limit=limit))
        first, nats, count = found[:, 0].astype(int), found[:, 1] * found[:, 2], found[:, 2]
        starts = range(0, int(first.max()) + 1, BIN)
        bins = [(start, (first >= start) & (first < start + BIN)) for start in starts]
        shares = {"loss_within": first < self.options.length, "loss_beyond": first >= self.options.length}
        return {
            "loss_by_position": [[start, nats[own].sum() / count[own].sum(), int(count[own].sum())] for start, own in bins],
            **{name: nats[own].sum() / count[own].sum() for name, own in shares.items() if own.any()},
        }

    def generate(self, model: nn.Module, prompt: str | None, sampling: Sampling, out: Path) -> list[Path]:
        """Writes pieces that go on from a prompt: MIDI, a picture, numbers, and sound where there is a synthesiser.

        Args:
            model: In evaluation mode.
            prompt: A MIDI file, the first bars of a piece such as `test:0` (two) or `test:0:4` (four), or none.
            sampling: How many, how long, and how they are drawn; tokens that cannot come next are never drawn.
            out: A folder.
        """
        drawn = self.continuations(model, prompt, sampling)
        out.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, (row, nll) in enumerate(zip(drawn.rows, drawn.nlls, strict=True)):
            facts = {"prompt": prompt, "prompt_tokens": drawn.given, "tokens": len(row), "nll": nll}
            stem = out / f"piece-{number}"
            paths += write_piece(self.notation.score(row), stem, start=drawn.start, reference=drawn.reference, facts=facts)
        return paths

    def continuations(self, model: nn.Module, prompt: str | None, sampling: Sampling) -> Continuations:
        """Draws pieces that go on from a prompt, see `generate`."""
        assert isinstance(model, CausalModel)
        given, reference = self.prompt(prompt)
        device = next(model.parameters()).device
        prompts = torch.tensor([given] * sampling.count, device=device)
        grammar = TokenGrammar(self.notation, sampling.count, device)
        found = generate_tokens(model, prompts, sampling, allowed=grammar, end=self.notation.end)
        rows, nlls = [], []
        for row, nats in zip(found.tokens.tolist(), -found.log_probabilities, strict=True):
            size = row.index(self.notation.end) + 1 if self.notation.end in row else len(row)
            rows.append(row[:size])
            nlls.append(float(nats[: size - len(given)].mean()))
        start = 0.0 if len(given) == 1 else self.beats(given)
        return Continuations(len(given), rows, nlls, start, reference)

    def styles(self, model: nn.Module, prompts: Iterable[str], sampling: Sampling) -> dict[str, list[list[float]]]:
        """Returns how like the piece of its prompt each quarter of continuations is, by each histogram, in the order of prompts.

        Args:
            model: In evaluation mode.
            prompts: Those of `generate`, but for none, which is like nothing.
            sampling: How many pieces go on from each prompt, and how they are drawn; each prompt has a seed of its own.
        """
        found: dict[str, list[list[float]]] = {}
        for number, prompt in enumerate(prompts):
            drawn = self.continuations(model, prompt, replace(sampling, seed=sampling.seed + number))
            if drawn.reference is None:
                raise ValueError(f"prompts must be pieces, whose style is compared with, but one is {prompt!r}")
            for row in drawn.rows:
                quarters = style_similarity(self.notation.score(row), drawn.reference, start=drawn.start)
                for name, values in quarters.items():
                    found.setdefault(name, []).append(values)
        return found

    def long_pieces(self, split: Split, count: int) -> list[str]:
        """Returns prompts: the first bars of the first so many pieces that are as long as a training example."""
        pieces = self.pieces(split)
        long = [f"{split}:{number}" for number, piece in enumerate(pieces) if len(piece.tokens) > self.options.length]
        if len(long) < count:
            raise ValueError(
                f"pieces must be at most {len(long)}, which is how many pieces of the {split} split have more than "
                f"{self.options.length} tokens, but are {count}"
            )
        return long[:count]

    def prompt(self, prompt: str | None) -> tuple[list[int], "Score | None"]:
        """Returns the tokens to go on from, and the piece whose style they have."""
        if prompt is None or prompt == "none":
            return [self.notation.bar], None
        named = PROMPT.fullmatch(prompt)
        if named is None:
            path = Path(prompt)
            if not path.is_file():
                raise ValueError(f"prompt must be a MIDI file, a piece such as test:0, or none, but is {prompt!r}")
            score = read_midi(path.read_bytes(), prompt)
            return self.piece(prompt, score).tokens[:-1].tolist(), score
        split, number, bars = cast(Split, named[1]), int(named[2]), int(named[3] or PROMPT_BARS)
        pieces = self.pieces(split)
        if number >= len(pieces) or bars < 1:
            raise ValueError(f"prompt must be {split}:0 to {split}:{len(pieces) - 1}, with a bar at least, but is {prompt!r}")
        tokens = pieces[number].tokens[:-1].tolist()
        return self.notation.bars(tokens, bars), self.notation.score(tokens)

    def beats(self, tokens: Sequence[int]) -> float:
        """Returns where a prompt ends: after the onset of its last note."""
        return float(np.nextafter(notes_of(self.notation.score(tokens)).onsets.max(initial=0.0), np.inf))

    def encoding_options(self, encoding: str) -> dict[str, Any]:
        stochastic = {"realizations": REALIZATIONS}
        own = {
            "sine-spe": {"sines": self.sines, **stochastic},
            "conv-spe": {"kernel_size": KERNEL_SIZE, **stochastic},
            "learned": {"length": self.options.length},
        }
        return own.get(encoding, {})

    def token_names(self, tokens: Sequence[int]) -> list[str]:
        return [self.notation.words[token] for token in tokens]


REALIZATIONS, KERNEL_SIZE = 64, 128

SIZES: dict[str, Any] = {
    "layers": 24, "heads": 8, "dim": 512, "hidden": 2048, "dropout": 0.1, "clip": 0.5, "schedule": "cosine",
    "attention": "linear", "feature_map": "favor", "features": 128,
}  # fmt: skip
"""What the paper's models of piano and of grooves have in common. Their cosine ends a little above 0, and ours at 0; their
embeddings begin smaller."""


def music_presets(*, sines: int, ungated: bool, absolute: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    """Returns the paper's models: absolute positions, sines and convolutions, which all layers share, with a gate for each.

    Args:
        sines: Number of sinusoids.
        ungated: Add the models without gates.
        absolute: Fields of the model with absolute positions that differ.
        fields: Fields of all models.

    >>> list(music_presets(sines=5, ungated=True, absolute={}))
    ['performer-ape', 'performer-sine', 'performer-conv', 'performer-sine-ungated', 'performer-conv-ungated']
    """
    common = {**SIZES, **fields}
    found = {"performer-ape": {**common, "encoding": "sinusoidal", **absolute}}
    encodings = {
        "sine": ("sine-spe", {"sines": sines, "realizations": REALIZATIONS}),
        "conv": ("conv-spe", {"kernel_size": KERNEL_SIZE, "realizations": REALIZATIONS}),
    }
    for gated in (True, False) if ungated else (True,):
        for name, (encoding, options) in encodings.items():
            own = {"encoding": encoding, "encoding_options": {**options, "gated": gated}, "per_layer": "gate" if gated else False}
            found[f"performer-{name}{'' if gated else '-ungated'}"] = {**common, **own}
    return found


LAPTOP = {
    "dim": 128, "layers": 4, "heads": 4, "batch": 8, "steps": 300, "warmup": 30, "rate": 1e-3, "evaluate_examples": 100,
}  # fmt: skip
