"""Made-up music for the built-in sample: chords, scales and arpeggios, drum patterns, and a band."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lagwise.lab.tasks.base import SPLITS, Split
from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.music.notation import music_package

if TYPE_CHECKING:
    from symusic.core import ScoreTick as Score

SAMPLE_SIZES: dict[Split, int] = {"train": 24, "validation": 4, "test": 4}
SAMPLE_BARS = 16
BEAT = 480
SCALE = (0, 2, 4, 5, 7, 9, 11)
PROGRESSIONS = ((0, 4, 5, 3), (0, 5, 3, 4), (5, 3, 0, 4), (0, 3, 1, 4))
"""Degrees of a scale that chords stand on, one for each bar."""

MELODIES = ((0, 2, 4, 7, 4, 2, 4, 2), (0, 1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1, 0))
"""Steps of a scale that the right hand plays in a bar."""

KICK, SNARE, HAT, CRASH = 36, 38, 42, 49
KICKS = ((0, 8), (0, 6, 8), (0, 3, 8, 11), (0, 8, 10))
"""Sixteenths of a bar at which the bass drum is played."""


def sample_pieces(split: Split, add_notes: Callable[["Score", Chooser], None]) -> list["Score"]:
    """Returns made-up pieces of a split: always the same, and no two splits have one in common."""
    symusic = music_package("symusic")
    one_of = Chooser(SPLITS.index(split))
    found = []
    for _ in range(SAMPLE_SIZES[split]):
        score = symusic.Score(BEAT)
        score.time_signatures.append(symusic.TimeSignature(0, 4, 4))
        score.tempos.append(symusic.Tempo(0, float(one_of(range(80, 150, 10)))))
        add_notes(score, one_of)
        found.append(score)
    return found


def pitch_on(key: int, degree: int) -> int:
    """Returns the pitch of a degree of a major scale, which goes on over octaves.

    >>> [pitch_on(60, degree) for degree in (0, 2, 7)]
    [60, 64, 72]
    """
    return key + 12 * (degree // len(SCALE)) + SCALE[degree % len(SCALE)]


def add_track(score: "Score", notes: Sequence[tuple[float, float, int, int]], *, program: int = 0, drums: bool = False) -> None:
    """Adds a track of notes: onset and duration in beats, pitch and velocity."""
    symusic = music_package("symusic")
    track = symusic.Track("drums" if drums else "", program, drums)
    for onset, duration, pitch, velocity in sorted(notes):
        track.notes.append(symusic.Note(round(onset * BEAT), round(duration * BEAT), pitch, velocity))
    score.tracks.append(track)


def sample_piano(score: "Score", one_of: Chooser) -> None:
    """Adds chords in the left hand and arpeggios or scales in the right, over one of some progressions in any key."""
    key, chords, steps = one_of(range(48, 60)), one_of(PROGRESSIONS), one_of(MELODIES)
    notes = []
    for bar in range(SAMPLE_BARS):
        degree = chords[bar % len(chords)]
        notes += [(4.0 * bar, 4.0, pitch_on(key, degree + third), 60) for third in (0, 2, 4)]
        first = degree + one_of((7, 9))
        notes += [(4.0 * bar + 0.5 * number, 0.5, pitch_on(key, first + step), 80) for number, step in enumerate(steps)]
    add_track(score, notes)


def sample_drums(score: "Score", one_of: Chooser) -> None:
    """Adds bass drum, snare drum, also softly between the beats, and cymbals, with a fill in every fourth bar."""
    kicks, hats = one_of(KICKS), one_of((2, 4))
    soft = [one_of(range(1, 16, 2)) for _ in range(3)]
    notes = [(0.0, 0.25, CRASH, 100)]
    for bar in range(SAMPLE_BARS):
        hits = [(place, KICK, 100) for place in kicks] + [(place, HAT, 70) for place in range(0, 16, hats)]
        fill = range(12, 16) if bar % 4 == 3 else (12,)
        hits += [(place, SNARE, 90) for place in (4, *fill)]
        hits += [(place, SNARE, 40) for place in sorted({*soft} - {*fill})]
        notes += [(4.0 * bar + place / 4, 0.25, pitch, velocity) for place, pitch, velocity in hits]
    add_track(score, notes, drums=True)


def sample_band(score: "Score", one_of: Chooser) -> None:
    """Adds drums, a bass and chords on another instrument."""
    sample_drums(score, one_of)
    key, chords = one_of(range(36, 48)), one_of(PROGRESSIONS)
    degrees = [chords[bar % len(chords)] for bar in range(SAMPLE_BARS)]
    bass = [(4.0 * bar + beat, 1.0, pitch_on(key, degree), 90) for bar, degree in enumerate(degrees) for beat in range(4)]
    add_track(score, bass, program=33)
    harmony = [(4.0 * bar, 4.0, pitch_on(key + 12, each + third), 70) for bar, each in enumerate(degrees) for third in (0, 2, 4)]
    add_track(score, harmony, program=48)
