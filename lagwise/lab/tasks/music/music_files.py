"""Files of music: MIDI files in folders or in one .zip, a table of them, and stored tokens."""

import csv
import io
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Int

from lagwise.lab.tasks.base import SPLITS, Split
from lagwise.lab.tasks.files import fixed_order

TABLE = "info.csv"
COLUMNS = ("midi_filename", "split", "beat_type")

Reader = Callable[[], bytes]

ARRAYS: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}
"""What the file of stored pieces calls the splits."""

FOLDERS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
"""Names of folders that say which split their files belong to."""


class Piece(NamedTuple):
    """A piece of music as tokens, with its end."""

    name: str
    tokens: Int[np.ndarray, " tokens"]


def midi_files(folder: Path) -> dict[str, Reader]:
    """Returns how each MIDI file and table of a folder, or of the one .zip file in it, is read, by name in the order of names."""
    endings = (".mid", ".midi")

    def wanted(name: str) -> bool:
        return name.lower().endswith(endings) or name.rsplit("/", 1)[-1] == TABLE

    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found: dict[str, Reader] = {name: path.read_bytes for name, path in paths.items() if wanted(name)}
    zips = [path for name, path in paths.items() if name.endswith(".zip")]
    if not any(name.lower().endswith(endings) for name in found) and len(zips) == 1:
        try:
            with zipfile.ZipFile(zips[0]) as archive:
                content = {name: archive.read(name) for name in sorted(archive.namelist()) if wanted(name)}
        except zipfile.BadZipFile as error:
            raise ValueError(f"{zips[0]} must be a zip file, but cannot be read: {error}") from error
        found = {name: (lambda own=own: own) for name, own in content.items()}
    if not any(name.lower().endswith(endings) for name in found):
        raise ValueError(f"data must be a folder with .mid files or with one .zip of them, but {folder} has none")
    return found


def split_files(files: dict[str, Reader]) -> dict[Split, list[str]]:
    """Returns the files of each split: by the folders that are named after them, or 80, 10 and 10 % in one fixed order."""
    names = [name for name in files if name.rsplit("/", 1)[-1] != TABLE]
    found: dict[Split, list[str]] = {split: [] for split in SPLITS}
    named = {name: [FOLDERS[part] for part in name.split("/")[:-1] if part in FOLDERS] for name in names}
    if all(named.values()):
        for name, splits in named.items():
            found[cast(Split, splits[0])].append(name)
        return found
    mixed = [names[place] for place in fixed_order(len(names))]
    tenth = max(1, len(names) // 10)
    return {"train": mixed[2 * tenth :], "validation": mixed[:tenth], "test": mixed[tenth : 2 * tenth]}


def listed_files(files: dict[str, Reader], table: str, split: Split, *, fills: bool) -> list[str]:
    """Returns the files that the table of the Groove MIDI Dataset gives to a split."""
    rows = csv.DictReader(io.StringIO(files[table]().decode("utf-8", errors="replace"), newline=""))
    missing = [column for column in COLUMNS if column not in (rows.fieldnames or [])]
    if missing:
        raise ValueError(f"{table}, line 1: has no column {missing[0]}, but expected are {', '.join(COLUMNS)} and others")
    base = table.removesuffix(TABLE)
    found = []
    for row in rows:
        place = f"{table}, line {rows.line_num}"
        if row["split"] not in SPLITS:
            raise ValueError(f"{place}: the split is {row['split']!r}, but expected is one of {', '.join(SPLITS)}")
        name = f"{base}{row['midi_filename']}"
        if name not in files:
            raise ValueError(f"{place}: names {row['midi_filename']}, which is missing, but expected is a .mid file")
        if row["split"] == split and (fills or row["beat_type"] != "fill"):
            found.append(name)
    return found


def stored_in(data: Path | str | None) -> tuple[list[str], dict[Split, list[Piece]]] | None:
    """Returns the words of stored tokens and the pieces of each split, or None where the data has MIDI files."""
    path = None if data is None else stored_file(Path(data))
    return None if path is None else read_stored(path)


def stored_file(folder: Path) -> Path | None:
    """Returns the one file of stored pieces in a folder, or None."""
    found = sorted(folder.glob("*.npz"))
    if len(found) > 1:
        raise ValueError(f"data must be a folder with one .npz file, but {folder} has {len(found)}")
    return found[0] if found else None


def read_stored(path: Path) -> tuple[list[str], dict[Split, list[Piece]]]:
    """Returns the words of stored pieces, and the pieces of each split."""
    wanted = ("tokens", "offsets", "split", "vocab")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in wanted if name not in arrays.files]
            if missing:
                raise ValueError(f"{path} must have the arrays {', '.join(wanted)}, but has no {', '.join(missing)}")
            tokens, offsets, split, vocabulary = (arrays[name] for name in wanted)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} must be a file of arrays, but cannot be read: {error}") from error
    words = [str(word) for word in vocabulary]
    lost = [word for word in ("Bar_None", "EOS_None") if word not in words]
    if lost:
        raise ValueError(f"{path} must have the words Bar_None and EOS_None, but has no {lost[0]}")
    if len(offsets) != len(split) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 2).any():
        raise ValueError(
            f"{path} must have rising offsets from 0 to the {len(tokens)} tokens, one more than the {len(split)} pieces, but has "
            f"{len(offsets)}, or a piece of less than two tokens"
        )
    if len(tokens) and int(tokens.max()) >= len(words):
        raise ValueError(f"{path} must have tokens below its {len(words)} words, but has {int(tokens.max())}")
    strange = set(split.tolist()) - set(ARRAYS.values())
    if strange:
        raise ValueError(f"{path} must have splits of {', '.join(ARRAYS.values())}, but has {', '.join(sorted(strange))}")
    found = [Piece(f"{path.name}:{number}", tokens[start:stop]) for number, (start, stop) in enumerate(pairwise(offsets))]
    return words, {name: [found[n] for n in np.flatnonzero(split == own)] for name, own in ARRAYS.items()}
