"""Music as tokens: pop piano and drum grooves, of which models tell the next token and go on from a prompt."""

import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from torchmetrics import Metric

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch, Examples, Facts, Sampling, Split
from lagwise.lab.tasks.generation import generate_tokens
from lagwise.lab.tasks.models import CausalModel
from lagwise.lab.tasks.music.midi import (
    Grammar,
    Notation,
    Remi,
    StoredRemi,
    kind_of,
    music_package,
    note_density,
    notes_of,
    pitch_class_entropy,
    pitch_classes,
    read_midi,
    roll,
    style_similarity,
    write_audio,
)
from lagwise.lab.tasks.music.music_files import TABLE, Piece, listed, midi_files, shares, stored_in
from lagwise.lab.tasks.music.music_sample import sample_band, sample_drums, sample_piano, sample_pieces
from lagwise.lab.tasks.token_prediction import MeanLoss, Perplexity, TokenPrediction, losses_by_position, token_losses

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


@dataclass(frozen=True)
class GrooveOptions(MusicOptions):
    """What can be chosen of grooves.

    Args:
        accompaniment: All instruments with the drums, each note with its program; otherwise drums alone.
        fills: Take short fills too, not beats alone; of the Groove MIDI Dataset.
    """

    accompaniment: bool = False
    fills: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transpose and not self.accompaniment:
            raise ValueError(f"transpose must be 0 for drums, which have no pitch, but is {self.transpose}")


class Pieces(Examples):
    """Stretches of pieces. Those of one length make rows [batch, time]; others are packed, one behind the other [1, time].

    A batch has `tokens`, `targets` (one token further) and `positions`, and `cu_seqlens` where it is packed.
    """

    def __init__(
        self, pieces: Sequence[Piece], stretches: Int[Tensor, "stretches 3"], shifts: Int[Tensor, "shifts symbols"], length: int
    ):  # fmt: skip
        self.stream = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces]).astype(np.int32))
        self.stretches, self.shifts, self.length = stretches, shifts, length

    def __len__(self) -> int:
        return len(self.stretches)

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = self.stretches[torch.as_tensor(indices)].tolist()
        rows = [self.shifts[shift][self.stream[start : start + size + 1]] for start, size, shift in chosen]
        sizes = [size for _, size, _ in chosen]
        packed = len(set(sizes)) > 1
        join: Callable[[list[Tensor]], Tensor] = (lambda parts: torch.cat(parts)[None]) if packed else torch.stack
        found = {
            "tokens": join([row[:-1] for row in rows]),
            "targets": join([row[1:] for row in rows]),
            "positions": join([torch.arange(size) for size in sizes]),
        }
        return {**found, "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0)} if packed else found


def stretches_of(bars: Int[np.ndarray, " bars"], size: int, length: int) -> list[tuple[int, int]]:
    """Returns where the training stretches of a piece of `size` tokens begin, and how many tokens are predicted in each.

    Each begins with a bar where the one before it ended; the last one ends with the piece and is as long as the others.

    >>> stretches_of(np.array([0, 4, 9]), 13, 6)
    [(0, 6), (4, 6), (6, 6)]
    """
    last, found = max(0, size - 1 - length), []
    start = 0
    while start < last:
        found.append((start, length))
        bar = int(bars[np.searchsorted(bars, start + length, side="right") - 1])
        start = bar if bar > start else start + length
    return [*found, (last, size - 1 - last)]


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

    def examples(self, split: Split, length: int | None = None) -> Pieces:
        """Returns stretches of the training pieces in all keys, and the beginnings of the others, as far as they go."""
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
            places = stretches_of(bars, size, length) if split == "train" else [(0, min(length, size - 1))]
            found += [(begin + start, count, key) for key in keys for start, count in places]
            begin += size
        return Pieces(pieces, torch.tensor(found), shifts, min(length, longest))

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
        found = np.array(losses_by_position(model, examples, examples.length, examples.length, batch=batch, limit=limit))
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
            paths += self.write_piece(self.notation.score(row), stem, start=drawn.start, reference=drawn.reference, facts=facts)
        return paths

    def continuations(self, model: nn.Module, prompt: str | None, sampling: Sampling) -> Continuations:
        """Draws pieces that go on from a prompt, see `generate`."""
        assert isinstance(model, CausalModel)
        given, reference = self.prompt(prompt)
        device = next(model.parameters()).device
        prompts = torch.tensor([given] * sampling.count, device=device)
        grammar = Grammar(self.notation, sampling.count, device)
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

    def write_piece(
        self, score: "Score", stem: Path, *, start: float, reference: "Score | None", facts: dict[str, Any]
    ) -> list[Path]:  # fmt: skip
        """Writes all files of a piece and returns them."""
        midi, picture, sound, numbers = (stem.with_suffix(ending) for ending in (".mid", ".png", ".wav", ".json"))
        score.dump_midi(midi)
        roll(score, prompt=start, title=stem.name).savefig(picture, dpi=120)
        silent = write_audio(midi, sound)
        if silent:
            warnings.warn(silent, stacklevel=2)
        notes = notes_of(score)
        facts = {
            **facts,
            "notes": len(notes.onsets),
            "notes_per_beat": note_density(notes),
            "pitch_classes": int((pitch_classes(notes) > 0).sum()),
            "pitch_class_entropy": pitch_class_entropy(notes),
            "style_by_quarter": {} if reference is None else style_similarity(score, reference, start=start),
            "sound": silent or sound.name,
        }
        numbers.write_text(json.dumps(facts, indent=2) + "\n")
        return [midi, picture, numbers] if silent else [midi, picture, sound, numbers]

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


def presets(*, sines: int, ungated: bool, absolute: dict[str, Any], **fields: Any) -> dict[str, dict[str, Any]]:
    """Returns the paper's models: absolute positions, sines and convolutions, which all layers share, with a gate for each.

    Args:
        sines: Number of sinusoids.
        ungated: Add the models without gates.
        absolute: Fields of the model with absolute positions that differ.
        fields: Fields of all models.

    >>> list(presets(sines=5, ungated=True, absolute={}))
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


PIANO_EPOCH, GROOVE_EPOCH = 393, 552
"""Steps in which the paper's training sees as many examples as there are pieces: 1,572 by batches of 4, 5,522 by 10."""

LAPTOP = {
    "dim": 128, "layers": 4, "heads": 4, "batch": 8, "steps": 300, "warmup": 30, "rate": 1e-3, "evaluate_examples": 100,
}  # fmt: skip


class Piano(Music):
    """Pop piano, as stored tokens or MIDI files."""

    sines = 5
    facts: ClassVar[Facts] = Facts(
        words="the next token of a piano piece, in REMI tokens",
        metric="nll",
        source="AILabs1k7 pop piano (Hsiao et al. 2021) as stored tokens, or any MIDI files, tokenised by miditok",
        size="1,572 / 87 / 88 pieces as in Liutkus et al. 2021; 80 / 10 / 10 % of MIDI files without folders for the splits",
        licence="none stated for AILabs1k7; the sample is generated",
        published="Liutkus et al. 2021 show the loss against the position as a figure; its numbers were not found",
        files="one .npz of tokens, offsets, split and vocab; or .mid files, in folders or in one .zip",
    )
    defaults: ClassVar[dict[str, Any]] = LAPTOP
    # How far the paper transposes is not known. It draws features anew with probability 0.05 at each step.
    presets: ClassVar[dict[str, dict[str, Any]]] = presets(
        sines=sines, ungated=True, absolute={"rate": 1e-4, "steps": 160 * PIANO_EPOCH},
        task_options={"length": 2048, "transpose": 6}, batch=4, rate=2e-4, warmup=200, steps=140 * PIANO_EPOCH, redraw=20,
    )  # fmt: skip

    @cached_property
    def stored(self) -> tuple[list[str], dict[Split, list[Piece]]] | None:
        """The words of stored tokens and the pieces of each split, or None for MIDI files."""
        return stored_in(self.data)

    def find_notation(self) -> Notation:
        if self.stored is not None:
            return StoredRemi(self.stored[0])
        # As in the stored pieces: sixteen positions in a bar, durations to its length.
        config = music_package("miditok").TokenizerConfig(
            pitch_range=(21, 109), beat_res={(0, 4): 4}, num_velocities=32, special_tokens=["PAD", "EOS"],
            use_pitchdrum_tokens=False, use_chords=True, chord_tokens_with_root_note=True, use_tempos=True, num_tempos=65,
            tempo_range=(32, 224), use_time_signatures=False,
        )  # fmt: skip
        return Remi(config, drums=False)

    def read_pieces(self, split: Split) -> list[Piece]:
        if self.stored is not None:
            return self.stored[1][split]
        if self.data is not None:
            files = midi_files(Path(self.data))
            return [self.piece(name, read_midi(files[name](), name)) for name in shares(files)[split]]
        return [self.piece(f"{split}:{number}", score) for number, score in enumerate(sample_pieces(split, sample_piano))]


class Unread(Notation):
    """Stored tokens where miditok is missing, which is said wherever they should be notes: they are only trained on."""

    def __init__(self, words: Sequence[str]):
        super().__init__(words, {})

    def score(self, tokens: Sequence[int]) -> "Score":
        return music_package("miditok")

    def tokens(self, score: "Score") -> list[int]:
        return music_package("miditok")


class Groove(Music):
    """Drums, alone or with accompaniment, as MIDI files, or as the tokens that `store_pieces` made of them."""

    sines = 8
    facts: ClassVar[Facts] = Facts(
        words="the next token of drums, with or without accompaniment",
        metric="nll",
        source="the Groove MIDI Dataset (Gillick et al. 2019), in place of Groove2Groove's accompaniments, or any MIDI files",
        size="897 / 124 / 129 recordings; 80 / 10 / 10 % of MIDI files without info.csv or folders for the splits",
        licence="CC BY 4.0; the sample is generated",
        published="Liutkus et al. 2021 on Groove2Groove, medians read from a figure, 1st to 4th quarter: time-pitch APE .59 .41 "
        ".31 .28, sine .56 .59 .56 .38, conv .59 .57 .56 .43; onset-duration APE .35 .29 .25 .08, sine .37 .43 .36 .27, conv "
        ".43 .41 .38 .35. Not comparable with drums alone",
        files="info.csv with the .mid files that it names, in a folder or one .zip; any .mid files; or one .npz of stored tokens",
    )
    defaults: ClassVar[dict[str, Any]] = LAPTOP
    presets: ClassVar[dict[str, dict[str, Any]]] = presets(
        sines=sines, ungated=False, absolute={}, task_options={"length": 512}, batch=10, rate=4e-4, warmup=1000,
        steps=24 * GROOVE_EPOCH, redraw=40,
    )  # fmt: skip
    Options: ClassVar[type] = GrooveOptions
    options: GrooveOptions

    @cached_property
    def stored(self) -> tuple[list[str], dict[Split, list[Piece]]] | None:
        """The words of stored tokens and the pieces of each split, or None for MIDI files."""
        found = stored_in(self.data)
        if found is not None and not self.options.fills:
            raise ValueError(
                "fills must be true with stored tokens, which do not tell them apart, but is false: store them without"
            )
        return found

    def find_notation(self) -> Notation:
        if self.stored is None:
            return self.read_by_miditok()
        words = self.stored[0]
        has_programs, both = any(kind_of(word) == "Program" for word in words), self.options.accompaniment
        if has_programs != both:
            raise ValueError(f"accompaniment must be {has_programs} for the stored tokens of {self.data}, but is {both}")
        if find_spec("miditok") is None:
            return Unread(words)
        found = self.read_by_miditok()
        if list(found.words) != words:
            raise ValueError(f"data must have the tokens of miditok here, but those of {self.data} are others: store them again")
        return found

    def read_by_miditok(self) -> Notation:
        """Returns the tokens that miditok makes of MIDI files."""
        both = self.options.accompaniment
        # Twelve positions in a beat, as in the paper. How long a drum is written says nothing.
        config = music_package("miditok").TokenizerConfig(
            pitch_range=(21, 109), beat_res={(0, 4): 12}, num_velocities=16, special_tokens=["PAD", "EOS"],
            use_programs=both, use_pitchdrum_tokens=both, use_note_duration_programs=list(range(-1, 128)) if both else [],
            use_tempos=True, num_tempos=32, tempo_range=(40, 300), use_time_signatures=True,
            time_signature_range={8: [3, 5, 6, 7, 9, 12], 4: [1, 2, 3, 4, 5, 6, 7]},
        )  # fmt: skip
        return Remi(config, drums=None if both else True)

    def read_pieces(self, split: Split) -> list[Piece]:
        if self.data is None:
            make = sample_band if self.options.accompaniment else sample_drums
            return [self.piece(f"{split}:{number}", score) for number, score in enumerate(sample_pieces(split, make))]
        if self.stored is not None:
            return self.stored[1][split]
        files = midi_files(Path(self.data))
        table = next((name for name in files if name.rsplit("/", 1)[-1] == TABLE), None)
        if table is None:
            return [self.piece(name, read_midi(files[name](), name)) for name in shares(files)[split]]
        names = listed(files, table, split, fills=self.options.fills)
        return [self.piece(name, read_midi(files[name](), name)) for name in names]
