"""The style of music: histograms of notes, how like two are, and other numbers on a piece."""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    from symusic.core import ScoreTick as Score


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
