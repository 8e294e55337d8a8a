"""Drum grooves, alone or with accompaniment."""

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lagwise.lab.tasks.base import SPLITS, Facts, Split
from lagwise.lab.tasks.music.music_files import ARRAYS, TABLE, Piece, listed_files, midi_files, split_files, stored_in
from lagwise.lab.tasks.music.music_sample import sample_band, sample_drums, sample_pieces
from lagwise.lab.tasks.music.music_task import LAPTOP, Music, MusicOptions, music_presets
from lagwise.lab.tasks.music.notation import Notation, Remi, UnreadableNotation, kind_of, music_package, read_midi

EPOCH = 552
"""Steps in which the paper's training sees as many examples as there are pieces: 5,522 by batches of 10."""


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
    presets: ClassVar[dict[str, dict[str, Any]]] = music_presets(
        sines=sines, ungated=False, absolute={}, task_options={"length": 512}, batch=10, rate=4e-4, warmup=1000,
        steps=24 * EPOCH, redraw=40,
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
            return UnreadableNotation(words)
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
            return [self.piece(name, read_midi(files[name](), name)) for name in split_files(files)[split]]
        names = listed_files(files, table, split, fills=self.options.fills)
        return [self.piece(name, read_midi(files[name](), name)) for name in names]


def store_pieces(task: Groove, path: Path) -> None:
    """Writes the tokens of all pieces of a task to a file, from which it reads them without MIDI files and miditok."""
    pieces = [(ARRAYS[split], piece.tokens) for split in SPLITS for piece in task.pieces(split)]
    splits, tokens = zip(*pieces, strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, tokens=np.concatenate(tokens).astype(np.uint16), offsets=np.cumsum([0, *map(len, tokens)]), split=np.array(splits),
        vocab=np.array(task.notation.words),
    )  # fmt: skip
