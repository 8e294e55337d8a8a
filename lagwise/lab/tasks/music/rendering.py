"""Files of a piece of music: MIDI, a picture of its notes, what it sounds like, and numbers."""

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lagwise.lab.tasks.music.styles import note_density, notes_of, pitch_class_entropy, pitch_classes, style_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from symusic.core import ScoreTick as Score


def write_piece(
    score: "Score", stem: Path, *, start: float, reference: "Score | None", facts: dict[str, Any]
) -> list[Path]:  # fmt: skip
    """Writes all files of a piece and returns them."""
    midi, picture, sound, numbers = (stem.with_suffix(ending) for ending in (".mid", ".png", ".wav", ".json"))
    score.dump_midi(midi)
    draw_roll(score, prompt=start, title=stem.name).savefig(picture, dpi=120)
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


DRUMS = {
    22: "closed hi-hat, edge", 26: "open hi-hat, edge", 35: "bass drum 2", 36: "bass drum", 37: "side stick", 38: "snare",
    39: "clap", 40: "snare 2 or rim", 41: "low floor tom", 42: "closed hi-hat", 43: "floor tom", 44: "pedal hi-hat",
    45: "low tom", 46: "open hi-hat", 47: "mid tom or rim", 48: "high tom", 49: "crash", 50: "highest tom or rim", 51: "ride",
    52: "china or crash 2, edge", 53: "ride bell", 54: "tambourine", 55: "splash or crash, edge", 56: "cowbell", 57: "crash 2",
    58: "vibraslap or tom rim", 59: "ride 2 or edge",
}  # fmt: skip
"""What the pitches of drums are in General MIDI, or on the electronic kit of the Groove MIDI Dataset, which has rims and edges in
places of rare instruments."""


def draw_roll(score: "Score", *, prompt: float = 0.0, title: str = "") -> "Figure":
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
