"""Notation: scores as REMI tokens and back, and which token may follow which."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lagwise.extras import install_command

if TYPE_CHECKING:
    from miditok import REMI, TokenizerConfig
    from symusic.core import ScoreTick as Score

TICKS = 480
"""Ticks of a beat in what is written."""

ROOTS = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
CHORD = re.compile(r"(Chord_)([A-G]#?)([_:].+)")

STORED_GRAPH = {
    "Bar": {"Bar", "Position", "EOS"},
    "Position": {"Chord", "Tempo", "Pitch"},
    "Chord": {"Tempo", "Pitch", "Position", "Bar"},
    "Tempo": {"Pitch", "Position", "Bar"},
    "Pitch": {"Velocity"},
    "Velocity": {"Duration"},
    "Duration": {"Pitch", "Position", "Bar"},
}
"""Which kinds of tokens follow each other in stored pieces of pop piano."""

STORED_TICKS = 120
"""Ticks of a position in them; durations are in ticks."""

AT_LEAST = STORED_TICKS // 2
"""What notes of duration 0 get, in ticks: without any they would not sound."""


def music_package(name: str) -> Any:
    """Returns symusic or miditok; raises in words where it is not installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"the package {name} must be there for music, but is not: {install_command('music')}") from error


def read_midi(content: bytes, name: str) -> "Score":
    """Returns the score of a MIDI file's content; `name` is that of the file, for the error."""
    try:
        return music_package("symusic").Score.from_midi(content)
    # The library raises these two for broken files.
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} must be a MIDI file, but cannot be read: {error}") from error


def kind_of(word: str) -> str:
    """Returns the kind of a token; both vocabularies have the same kinds.

    >>> kind_of("Note_Pitch_60"), kind_of("Pitch_60"), kind_of("Beat_3"), kind_of("Chord_A#_m7")
    ('Pitch', 'Pitch', 'Position', 'Chord')
    """
    kind = word.removeprefix("Note_").split("_")[0]
    return "Position" if kind == "Beat" else kind


def value_of(word: str) -> str:
    """Returns what stands behind the kind."""
    return word.rsplit("_", 1)[1]


class Notation(ABC):
    """A vocabulary of REMI tokens: bars, positions in them, and notes as pitch, velocity and duration.

    Args:
        words: The tokens as words, by number.
        graph: For each kind of token those that may follow.
    """

    def __init__(self, words: Sequence[str], graph: Mapping[str, Iterable[str]]):
        self.words = tuple(words)
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.kinds = tuple(kind_of(word) for word in self.words)
        self.bar, self.end = (self.numbers[word] for word in ("Bar_None", "EOS_None"))
        self.follows = self._follows(graph)

    @abstractmethod
    def score(self, tokens: Sequence[int]) -> "Score":
        """Returns the notes of tokens."""

    @abstractmethod
    def tokens(self, score: "Score") -> list[int]:
        """Returns the tokens of notes, without an end."""

    def is_kind(self, *kinds: str) -> Bool[Tensor, " symbols"]:
        """Says which tokens are of some kinds."""
        return torch.tensor([kind in kinds for kind in self.kinds])

    def _follows(self, graph: Mapping[str, Iterable[str]]) -> Bool[Tensor, "symbols symbols"]:
        """Returns which token may follow which; nothing but the end follows the end, so that a row can be filled up with it."""
        kinds = sorted(set(self.kinds))
        allowed = torch.tensor([[after in graph.get(kind, ()) for after in kinds] for kind in kinds])
        own = torch.tensor([kinds.index(kind) for kind in self.kinds])
        follows = allowed[own][:, own]
        follows[self.end, self.end] = True
        drums, pitched = self.is_kind("PitchDrum"), self.is_kind("Pitch")
        for number in self.is_kind("Program").nonzero()[:, 0].tolist():
            follows[number] &= ~(pitched if value_of(self.words[number]) == "-1" else drums)
        return follows

    def transposed(self, shift: int) -> Int[Tensor, " symbols"]:
        """Returns what each token becomes some semitones higher: pitches and roots of chords move, and -1 is no token."""
        return torch.tensor([self.numbers.get(transposed_word(word, shift), -1) for word in self.words])

    def bars(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns the first bars of tokens."""
        found = [place for place, token in enumerate(tokens) if token == self.bar]
        return list(tokens[: found[count]] if len(found) > count else tokens)


def transposed_word(word: str, shift: int) -> str:
    """Returns a token some semitones higher.

    >>> transposed_word("Pitch_60", 2), transposed_word("Chord_B:maj", 1), transposed_word("PitchDrum_36", 3)
    ('Pitch_62', 'Chord_C:maj', 'PitchDrum_36')
    """
    if kind_of(word) == "Pitch":
        return f"{word.rsplit('_', 1)[0]}_{int(value_of(word)) + shift}"
    chord = CHORD.fullmatch(word)
    if chord is None:
        return word
    return chord[1] + ROOTS[(ROOTS.index(chord[2]) + shift) % len(ROOTS)] + chord[3]


class Remi(Notation):
    """The tokens that miditok makes of MIDI files.

    Args:
        config: Of miditok.
        drums: Whether the one track is of drums, and others are left out; of drums and others with None, as programs.
    """

    def __init__(self, config: "TokenizerConfig", *, drums: bool | None):
        self.tokenizer: REMI = music_package("miditok").REMI(config)
        self.drums = drums
        # The library lets a piece end anywhere, in the middle of a note too: here it ends where a bar may begin.
        graph = {kind: set(after) - {"EOS"} for kind, after in self.tokenizer.tokens_types_graph.items() if kind != "PAD"}
        for kind, after in graph.items():
            after -= {"PAD"}
            if "Bar" in after or kind == "Bar":
                after.add("EOS")
        numbers = self.tokenizer.vocab
        assert isinstance(numbers, dict)
        super().__init__(sorted(numbers, key=lambda word: numbers[word]), graph)

    def score(self, tokens: Sequence[int]) -> "Score":
        kept = [token for token in tokens if token != self.end]
        one_stream = self.drums is None
        given: Any = kept if one_stream else [kept]
        found = self.tokenizer.decode(given, programs=None if one_stream else [(0, bool(self.drums))])
        return found.resample(TICKS, min_dur=1)

    def tokens(self, score: "Score") -> list[int]:
        found: Any = self.tokenizer(score if self.drums is None else one_track(score, drums=self.drums))
        ids = (found[0] if isinstance(found, list) else found).ids
        return list(ids)


def one_track(score: "Score", *, drums: bool) -> "Score":
    """Returns a score whose one track has all notes of the drums, or all others."""
    symusic = music_package("symusic")
    merged = score.copy()
    track = symusic.Track("drums" if drums else "piano", 0, drums)
    for own in score.tracks:
        if own.is_drum == drums:
            track.notes.extend(own.notes)
    track.sort()
    merged.tracks.clear()
    merged.tracks.append(track)
    return merged


class StoredRemi(Notation):
    """The tokens of stored pieces of pop piano: 16 positions in each bar of 4/4, with chords and tempos."""

    def __init__(self, words: Sequence[str]):
        super().__init__(words, STORED_GRAPH)

    def score(self, tokens: Sequence[int]) -> "Score":
        symusic = music_package("symusic")
        score, track = symusic.Score(TICKS), symusic.Track("piano", 0, False)
        score.time_signatures.append(symusic.TimeSignature(0, 4, 4))
        bar, time, pitch, velocity = -1, 0, 0, 0
        for token in tokens:
            kind, value = self.kinds[token], value_of(self.words[token])
            if kind == "Bar":
                bar += 1
                time = bar * 16 * STORED_TICKS
            elif kind == "Position":
                time = (bar * 16 + int(value)) * STORED_TICKS
            elif kind == "Tempo":
                score.tempos.append(symusic.Tempo(time, float(value)))
            elif kind == "Pitch":
                pitch = int(value)
            elif kind == "Velocity":
                velocity = int(value)
            elif kind == "Duration":
                track.notes.append(symusic.Note(time, max(int(value), AT_LEAST), pitch, velocity))
        score.tracks.append(track)
        return score

    def tokens(self, score: "Score") -> list[int]:
        raise ValueError(
            "prompt must be none or a piece of the data such as test:0, since these tokens were made by another program, but is "
            "a MIDI file: train on MIDI files to go on from one"
        )


class UnreadableNotation(Notation):
    """Stored tokens where miditok is missing, which is said wherever they should be notes: they are only trained on."""

    def __init__(self, words: Sequence[str]):
        super().__init__(words, {})

    def score(self, tokens: Sequence[int]) -> "Score":
        return music_package("miditok")

    def tokens(self, score: "Score") -> list[int]:
        return music_package("miditok")


class TokenGrammar:
    """Says which tokens may come next: kinds in their order, and in a bar only later positions.

    It looks at each token once, so that a step costs the same however long the piece is: one is made for each generation.
    """

    def __init__(self, notation: Notation, rows: int, device: torch.device):
        self.follows = notation.follows.to(device)
        is_place, is_bar = notation.is_kind("Position"), notation.is_kind("Bar")
        values = [int(value_of(word)) if place else -1 for word, place in zip(notation.words, is_place.tolist(), strict=True)]
        self.values, self.is_place, self.resets = (x.to(device) for x in (torch.tensor(values), is_place, is_bar))
        self.latest = torch.full((rows,), -1, device=device)
        self.seen = 0

    def __call__(self, tokens: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch symbols"]:
        for column in tokens[:, self.seen :].unbind(1):
            moved = self.is_place[column] | self.resets[column]
            self.latest = torch.where(moved, self.values[column], self.latest)
        self.seen = tokens.shape[1]
        return self.follows[tokens[:, -1]] & (~self.is_place | (self.values > self.latest[:, None]))
