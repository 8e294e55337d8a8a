"""Pop piano."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lagwise.lab.tasks.base import Facts, Split
from lagwise.lab.tasks.music.music_files import Piece, midi_files, split_files, stored_in
from lagwise.lab.tasks.music.music_sample import sample_piano, sample_pieces
from lagwise.lab.tasks.music.music_task import LAPTOP, Music, music_presets
from lagwise.lab.tasks.music.notation import Notation, Remi, StoredRemi, music_package, read_midi

EPOCH = 393
"""Steps in which the paper's training sees as many examples as there are pieces: 1,572 by batches of 4."""


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
    presets: ClassVar[dict[str, dict[str, Any]]] = music_presets(
        sines=sines, ungated=True, absolute={"rate": 1e-4, "steps": 160 * EPOCH},
        task_options={"length": 2048, "transpose": 6}, batch=4, rate=2e-4, warmup=200, steps=140 * EPOCH, redraw=20,
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
            return [self.piece(name, read_midi(files[name](), name)) for name in split_files(files)[split]]
        return [self.piece(f"{split}:{number}", score) for number, score in enumerate(sample_pieces(split, sample_piano))]
