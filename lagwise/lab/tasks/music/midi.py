"""Notes: scores as tokens and back, what may follow what, pictures and sound, and measures of style."""

import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lagwise.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
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


class Grammar:
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


class Notes(NamedTuple):
    """Notes in the order of their onsets, with times in beats."""

    onsets: Float[np.ndarray, " notes"]
    durations: Float[np.ndarray, " notes"]
    pitches: Int[np.ndarray, " notes"]
    drums: Bool[np.ndarray, " notes"]

    def where(self, chosen: Bool[np.ndarray, " notes"]) -> "Notes":
        """Returns some of the notes."""
        return Notes(*(column[chosen] for column in self))


def notes_of(score: "Score") -> Notes:
    """Returns the notes of all tracks."""
    columns = [
        (found["time"] / score.ticks_per_quarter, found["duration"] / score.ticks_per_quarter, found["pitch"].astype(np.int64),
         np.full(len(found["time"]), track.is_drum))
        for track in score.tracks if len(found := track.notes.numpy())
    ]  # fmt: skip
    empty = (np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    onsets, durations, pitches, drums = (np.concatenate(parts) for parts in zip(empty, *columns, strict=True))
    order = np.lexsort((pitches, onsets))
    return Notes(onsets[order], durations[order], pitches[order], drums[order])


BEATS, PARTS, INTERVAL = 4, 6, 20
"""Histograms have bins of a sixth of a beat over four beats; intervals are at most 20 semitones."""
BINS = BEATS * PARTS


def sixths(beats: Float[np.ndarray, " notes"]) -> Int[np.ndarray, " notes"]:
    """Returns the bins of times; a time at the border, which may be rounded down, is in the later one."""
    return np.floor(beats * PARTS + 1e-6).astype(np.int64)


def time_pitch(notes: Notes) -> Float[np.ndarray, "24 41"]:
    """Returns how often a note follows another at each gap and interval, over all pairs of pitched notes.

    Gaps are from 0 to below four beats, in bins of a sixth; intervals from -20 to 20 semitones, later minus earlier. Two notes
    at the same time count in both orders. After Cífka et al. as used by Liutkus et al. (2021).
    """
    notes = notes.where(~notes.drums)
    found = np.zeros((BINS, 2 * INTERVAL + 1))
    # A note and the one `step` later in the order, until all pairs are too far apart.
    for step in range(1, len(notes.onsets)):
        beats, intervals = notes.onsets[step:] - notes.onsets[:-step], notes.pitches[step:] - notes.pitches[:-step]
        gaps, together = sixths(beats), beats == 0.0
        if gaps.min() >= BINS:
            break
        for gap, interval in ((gaps, intervals), (gaps[together], -intervals[together])):
            near = (gap < BINS) & (np.abs(interval) <= INTERVAL)
            np.add.at(found, (gap[near], interval[near] + INTERVAL), 1)
    return found


def onset_duration(notes: Notes) -> Float[np.ndarray, "24 24"]:
    """Returns how often pitched notes have each onset, modulo four beats, and duration; longer ones count as four beats."""
    notes, found = notes.where(~notes.drums), np.zeros((BINS, BINS))
    np.add.at(found, (sixths(notes.onsets) % BINS, np.minimum(sixths(notes.durations), BINS - 1)), 1)
    return found


def onset_drum(notes: Notes) -> Float[np.ndarray, "24 128"]:
    """Returns how often each drum has each onset, modulo four beats."""
    notes, found = notes.where(notes.drums), np.zeros((BINS, 128))
    np.add.at(found, (sixths(notes.onsets) % BINS, notes.pitches), 1)
    return found


STYLES = {"time-pitch": time_pitch, "onset-duration": onset_duration, "onset-drum": onset_drum}


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the cosine between two histograms; an empty one is like no other, 0."""
    size = np.linalg.norm(first) * np.linalg.norm(second)
    return float((first * second).sum() / size) if size else 0.0


def style_similarity(continuation: "Score", reference: "Score", *, start: float = 0.0) -> dict[str, list[float]]:
    """Returns how like the whole reference each quarter of a continuation is, by each histogram.

    Histograms of which the reference has nothing, such as those of drums, are left out.

    Args:
        continuation: May begin with a prompt.
        reference: What the style is that of.
        start: The beat at which the continuation begins; its quarters last from there to the end of its last note.
    """
    notes, other = notes_of(continuation), notes_of(reference)
    last = float((notes.onsets + notes.durations).max(initial=start))
    borders = np.linspace(start, last, 5)
    quarters = [notes.where((notes.onsets >= a) & (notes.onsets < b)) for a, b in pairwise(borders)]
    wanted = {name: histogram(other) for name, histogram in STYLES.items()}
    return {
        name: [similarity(STYLES[name](quarter), whole) for quarter in quarters] for name, whole in wanted.items() if whole.any()
    }


def note_density(notes: Notes) -> float:
    """Returns the notes of a beat, from the first onset to the end of the last note; 0 without notes."""
    if not len(notes.onsets):
        return 0.0
    return len(notes.onsets) / float((notes.onsets + notes.durations).max() - notes.onsets.min())


def pitch_classes(notes: Notes) -> Int[np.ndarray, "12"]:
    """Returns how often each pitch class occurs, from C on, drums left out."""
    return np.bincount(notes.pitches[~notes.drums] % 12, minlength=12)


def pitch_class_entropy(notes: Notes) -> float:
    """Returns how evenly the pitch classes are used, in bits: from 0 for one of them to 3.58 for all twelve alike."""
    counts = pitch_classes(notes)
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum()) + 0.0


DRUMS = {
    22: "closed hi-hat, edge", 26: "open hi-hat, edge", 35: "bass drum 2", 36: "bass drum", 37: "side stick", 38: "snare",
    39: "clap", 40: "snare 2 or rim", 41: "low floor tom", 42: "closed hi-hat", 43: "floor tom", 44: "pedal hi-hat",
    45: "low tom", 46: "open hi-hat", 47: "mid tom or rim", 48: "high tom", 49: "crash", 50: "highest tom or rim", 51: "ride",
    52: "china or crash 2, edge", 53: "ride bell", 54: "tambourine", 55: "splash or crash, edge", 56: "cowbell", 57: "crash 2",
    58: "vibraslap or tom rim", 59: "ride 2 or edge",
}  # fmt: skip
"""What the pitches of drums are in General MIDI, or on the electronic kit of the Groove MIDI Dataset, which has rims and edges in
places of rare instruments."""


def roll(score: "Score", *, prompt: float = 0.0, title: str = "") -> "Figure":
    """Draws the notes: time to the right in beats, pitch upwards, drums as points; drums alone have a line each, with its name.

    Args:
        score: The notes.
        prompt: The beat at which what was given ends; it is shown in grey.
        title: Above the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    notes = notes_of(score)
    end = float((notes.onsets + notes.durations).max(initial=4.0))
    figure = Figure(figsize=(min(24.0, max(8.0, end / 6)), 4.5), layout="constrained")
    panel = figure.subplots()
    if len(notes.drums) and notes.drums.all():
        used, places = np.unique(notes.pitches, return_inverse=True)
        notes = notes._replace(pitches=places)
        panel.set_yticks(range(len(used)), [DRUMS.get(pitch, f"drum {pitch}") for pitch in used.tolist()])
    else:
        panel.set_ylabel("pitch (60 is middle C)")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    for given, colour in ((True, "0.55"), (False, "tab:blue")):
        mine = notes.where((notes.onsets < prompt) == given)
        pitched, drums = mine.where(~mine.drums), mine.where(mine.drums)
        panel.barh(pitched.pitches, pitched.durations, left=pitched.onsets, height=0.8, color=colour)
        panel.scatter(drums.onsets, drums.pitches, s=8, marker="s", color=colour, clip_on=False, zorder=3)
    if prompt:
        panel.axvline(prompt, color="0.3", linewidth=1.0, linestyle="--")
    panel.set(xlim=(0.0, end), xlabel="beats; what is grey was given" if prompt else "beats", title=title)
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    return figure


def write_audio(midi: Path, path: Path) -> str:
    """Writes what a MIDI file sounds like where fluidsynth is installed; returns "", or else why there is no sound."""
    synthesiser = shutil.which("fluidsynth")
    if synthesiser is None:
        return "no synthesiser is installed, so that no sound was written: install fluidsynth and a sound font"
    command = [synthesiser, "-n", "-i", "-q", "-F", str(path), "-r", "44100", str(midi)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not path.is_file():
        return f"fluidsynth wrote no sound: {(done.stderr or done.stdout).strip()[-300:]}"
    return ""
