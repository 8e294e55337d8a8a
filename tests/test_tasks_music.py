"""Music: tokens and grammar, files, augmentation, training, generation, and measures of style on notes counted by hand."""

import json
import math
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import symusic
import torch
from training import losses_of
from typer.testing import CliRunner

from lagwise.feature_maps import Favor
from lagwise.lab.cli import app
from lagwise.lab.config import Config, with_fields
from lagwise.lab.curves import styles_by_quarter
from lagwise.lab.tasks.base import SPLITS, Sampling
from lagwise.lab.tasks.generation import generate_tokens
from lagwise.lab.tasks.music.excerpts import excerpt_places
from lagwise.lab.tasks.music.groove import Groove, store_pieces
from lagwise.lab.tasks.music.music_sample import add_track, sample_drums, sample_piano, sample_pieces
from lagwise.lab.tasks.music.notation import StoredRemi, TokenGrammar
from lagwise.lab.tasks.music.piano import Piano
from lagwise.lab.tasks.music.rendering import draw_roll
from lagwise.lab.tasks.music.styles import (
    note_density,
    notes_of,
    onset_drum,
    onset_duration,
    pitch_class_entropy,
    pitch_classes,
    similarity,
    style_similarity,
    time_pitch,
)

SILENT = "no synthesiser is installed"
WORDS = [
    "Bar_None", "EOS_None", "Beat_0", "Beat_4", "Beat_8", "Chord_C_M", "Chord_D_M", "Chord_N_N", "Tempo_110", "Note_Pitch_60",
    "Note_Pitch_62", "Note_Pitch_64", "Note_Velocity_60", "Note_Duration_0", "Note_Duration_480",
]  # fmt: skip
PIECE = [
    "Bar_None", "Beat_0", "Chord_C_M", "Tempo_110", "Note_Pitch_60", "Note_Velocity_60", "Note_Duration_480",
    "Beat_8", "Note_Pitch_62", "Note_Velocity_60", "Note_Duration_0",
    "Bar_None", "Beat_4", "Note_Pitch_62", "Note_Velocity_60", "Note_Duration_480", "Bar_None", "EOS_None",
]  # fmt: skip


def config_of(name, **fields):
    sizes = {"dim": 16, "layers": 2, "heads": 2, "batch": 4, "rate": 1e-2, "encoding": "rotary"}
    return with_fields(Config(task=name), {**sizes, **fields})


def score_of(notes, *, drums=False, ticks=480):
    score = symusic.Score(ticks)
    add_track(score, notes, drums=drums)
    return score


def codes(words):
    return [WORDS.index(word) for word in words]


def store(folder, **changes):
    """Writes two training pieces, a validation and a test piece in the format of the stored ones."""
    tokens = np.array(codes(PIECE) * 4, dtype=np.uint16)
    arrays = {
        "tokens": tokens, "offsets": np.arange(5) * len(PIECE), "split": np.array(["train", "train", "val", "test"]),
        "piece": np.arange(4), "vocab": np.array(WORDS), **changes,
    }  # fmt: skip
    np.savez(folder / "pieces.npz", **{name: array for name, array in arrays.items() if array is not None})


@pytest.fixture
def midi_folder(tmp_path):
    for split in SPLITS:
        (tmp_path / split).mkdir()
        for number, score in enumerate(sample_pieces(split, sample_piano)[:2]):
            score.dump_midi(tmp_path / split / f"{number}.mid")
    return tmp_path


def groove_files(rows=None):
    """Returns the members of a small Groove MIDI Dataset: three beats and a fill."""
    score = sample_pieces("train", sample_drums)[0]
    rows = rows or [("a/1.mid", "train", "beat"), ("a/2.mid", "validation", "beat"), ("b/3.mid", "test", "beat"),
                    ("b/4.mid", "train", "fill")]  # fmt: skip
    table = "drummer,midi_filename,split,beat_type\n" + "".join(f"drummer1,{','.join(row)}\n" for row in rows)
    return {"groove/info.csv": table.encode(), **{f"groove/{n}.mid": score.dumps_midi() for n in ("a/1", "a/2", "b/3", "b/4")}}


def groove_zip(folder, rows=None):
    with zipfile.ZipFile(folder / "groove.zip", "w") as archive:
        for name, content in groove_files(rows).items():
            archive.writestr(name, content)
    return folder


TASKS = {"piano": lambda **options: Piano(**options), "groove": lambda **options: Groove(**options),
         "band": lambda **options: Groove(accompaniment=True, **options)}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_fixed_its_splits_differ_and_it_obeys_the_grammar(name):
    task, again = TASKS[name](), TASKS[name](seed=3)
    assert task.is_sample
    seen = set()
    for split in SPLITS:
        own = [piece.tokens for piece in task.pieces(split)]
        assert all(np.array_equal(a, b.tokens) for a, b in zip(own, again.pieces(split), strict=True))
        assert not seen & {row.tobytes() for row in own}
        seen |= {row.tobytes() for row in own}
        row = torch.from_numpy(own[0])
        grammar = TokenGrammar(task.notation, 1, torch.device("cpu"))
        assert all(bool(grammar(row[None, :time])[0, row[time]]) for time in range(1, len(row)))


@pytest.mark.parametrize("name", TASKS)
def test_tokens_become_the_notes_that_they_were(name):
    task = TASKS[name]()
    make = {"piano": sample_piano, "groove": sample_drums}.get(name)
    tokens = task.pieces("test")[0].tokens.tolist()
    score = task.notation.score(tokens)
    assert task.notation.tokens(score) == tokens[:-1]
    assert {track.is_drum for track in score.tracks} == {"piano": {False}, "groove": {True}, "band": {True, False}}[name]
    if make is not None:
        was, found = notes_of(sample_pieces("test", make)[0]), notes_of(score)
        np.testing.assert_allclose(found.onsets, was.onsets)
        assert found.pitches.tolist() == was.pitches.tolist()


@pytest.mark.parametrize("name", ["piano", "groove"])
def test_thirty_steps_lower_the_loss(name):
    losses = losses_of(TASKS[name](length=64), config_of(name), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_stretches_cover_a_piece_and_begin_with_bars():
    bars = np.array([0, 30, 75, 110, 190])
    found = excerpt_places(bars, 200, 64)
    assert found == [(0, 64), (30, 64), (75, 64), (110, 64), (135, 64)]
    assert {target for start, size in found for target in range(start + 1, start + size + 1)} == set(range(1, 200))
    assert excerpt_places(bars, 40, 64) == [(0, 39)]
    # A bar that is longer than a stretch is cut.
    assert excerpt_places(np.array([0]), 200, 64) == [(0, 64), (64, 64), (128, 64), (135, 64)]


def test_rows_of_one_length_are_stacked_and_others_packed(tmp_path):
    store(tmp_path, offsets=np.array([0, 10, 36, 54, 72]))
    batch = Piano(tmp_path, length=100).examples("train").batch([0, 1])
    tokens = torch.tensor(codes(PIECE) * 2)
    assert batch["cu_seqlens"].tolist() == [0, 9, 34]
    assert torch.equal(batch["tokens"][0], torch.cat([tokens[:9], tokens[10:35]]))
    assert torch.equal(batch["targets"][0], torch.cat([tokens[1:10], tokens[11:36]]))
    assert batch["positions"][0].tolist() == [*range(9), *range(25)]
    rows = Piano(tmp_path, length=8).examples("train").batch([0, 1])
    assert rows["tokens"].shape == (2, 8) and "cu_seqlens" not in rows
    assert torch.equal(rows["targets"][:, :-1], rows["tokens"][:, 1:])


def test_packed_rows_have_the_losses_of_each_alone():
    task = Groove(length=600)
    model, test = task.model(config_of("groove")).eval(), task.examples("test")
    batch = test.batch([0, 1, 2, 3])
    assert "cu_seqlens" in batch
    alone = [task.loss(model(one), one) for one in (test.batch([number]) for number in range(4))]
    total, count = task.loss(model(batch), batch)
    assert int(count) == sum(int(own) for _, own in alone)
    torch.testing.assert_close(total, torch.stack([own for own, _ in alone]).sum(), rtol=1e-4, atol=1e-3)


def test_transposition_moves_pitches_and_chords_and_leaves_out_what_has_no_token(tmp_path):
    store(tmp_path)
    task = Piano(tmp_path, length=100, transpose=2)
    examples = task.examples("train")
    # 60 and 62 can go up by two semitones to 62 and 64, and not down; by one there is no token.
    assert len(examples) == 4 and len(task.examples("test")) == 1
    rows = [[WORDS[token] for token in examples.batch([number])["tokens"][0]] for number in range(2)]
    assert rows[0] == PIECE[:-1]
    moved = {"Note_Pitch_60": "Note_Pitch_62", "Note_Pitch_62": "Note_Pitch_64", "Chord_C_M": "Chord_D_M"}
    assert rows[1] == [moved.get(word, word) for word in PIECE[:-1]]


def test_transposed_midi_sounds_so_many_semitones_higher():
    task = Piano(transpose=3)
    tokens = torch.from_numpy(task.pieces("train")[0].tokens)
    low, high = (notes_of(task.notation.score(task.notation.transposed(shift)[tokens].tolist())) for shift in (0, 3))
    assert (high.pitches - low.pitches).tolist() == [3] * len(low.pitches)
    assert high.onsets.tolist() == low.onsets.tolist()


def test_stored_pieces_are_read_and_become_notes(tmp_path):
    store(tmp_path)
    task = Piano(tmp_path)
    assert [len(task.pieces(split)) for split in SPLITS] == [2, 1, 1]
    score = task.notation.score(task.pieces("test")[0].tokens.tolist())
    found = notes_of(score)
    # Beats 0 and 2 of the first bar, and beat 1 of the second, which begins after four.
    assert found.onsets.tolist() == [0.0, 2.0, 5.0] and found.pitches.tolist() == [60, 62, 62]
    assert found.durations.tolist() == [1.0, 0.125, 1.0]
    assert score.tempos[0].qpm == pytest.approx(110, abs=0.01)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab": None}, "must have the arrays .* but has no vocab"),
        ({"vocab": np.array(WORDS[1:])}, "but has no Bar_None"),
        ({"vocab": np.array(WORDS[:8])}, "tokens below its 8 words"),
        ({"offsets": np.arange(4)}, "must have rising offsets from 0 to the 72 tokens"),
        ({"split": np.array(["train", "dev", "val", "test"])}, "splits of train, val, test, but has dev"),
    ],
)
def test_malformed_stored_pieces_are_named(tmp_path, changes, words):
    store(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"pieces\.npz must .*{words}" if not words.startswith("must") else words):
        Piano(tmp_path).examples("train")


def test_midi_files_are_read_in_their_folders_or_shared_out(midi_folder, tmp_path):
    task, own = Piano(midi_folder), Piano()
    for split in SPLITS:
        assert len(task.pieces(split)) == 2
        assert np.array_equal(task.pieces(split)[1].tokens, own.pieces(split)[1].tokens)
    other = tmp_path / "other"
    other.mkdir()
    for number, score in enumerate(sample_pieces("train", sample_piano)[:10]):
        score.dump_midi(other / f"{number}.mid")
    names = {split: {piece.name for piece in Piano(other).pieces(split)} for split in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [8, 1, 1] and len(set().union(*names.values())) == 10


def test_broken_missing_and_silent_midi_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data must be a folder with \.mid files"):
        Piano(tmp_path).examples("train")
    for name in ("train", "val", "test"):
        (tmp_path / name).mkdir()
        score_of([(0.0, 1.0, 36, 80)], drums=True).dump_midi(tmp_path / name / "drums.mid")
    with pytest.raises(ValueError, match=r"drums\.mid must have notes"):
        Piano(tmp_path).examples("train")
    (tmp_path / "train" / "drums.mid").write_bytes(b"no music at all")
    with pytest.raises(ValueError, match=r"drums\.mid must be a MIDI file"):
        Piano(tmp_path).examples("train")


def test_groove_has_its_official_splits_from_a_zip_or_a_folder(tmp_path):
    task = Groove(groove_zip(tmp_path))
    assert [[piece.name for piece in task.pieces(split)] for split in SPLITS] == [
        ["groove/a/1.mid", "groove/b/4.mid"], ["groove/a/2.mid"], ["groove/b/3.mid"],
    ]  # fmt: skip
    assert [piece.name for piece in Groove(tmp_path, fills=False).pieces("train")] == ["groove/a/1.mid"]
    folder = tmp_path / "unpacked"
    for name, content in groove_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert [piece.name for piece in Groove(folder).pieces("test")] == ["groove/b/3.mid"]


@pytest.mark.parametrize("accompaniment", [False, True])
def test_stored_grooves_are_those_of_the_files_and_train_without_miditok(tmp_path, monkeypatch, accompaniment):
    task = Groove(accompaniment=accompaniment, length=64)
    store_pieces(task, tmp_path / "grooves" / "tokens.npz")
    stored = Groove(tmp_path / "grooves", accompaniment=accompaniment, length=64)
    for split in SPLITS:
        ours, theirs = ([piece.tokens.tolist() for piece in each.pieces(split)] for each in (task, stored))
        assert ours == theirs
    assert stored.prompt("test:0")[0] == task.prompt("test:0")[0] and torch.equal(stored.notation.follows, task.notation.follows)
    for name in ("miditok", "symusic"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("lagwise.lab.tasks.music.groove.find_spec", lambda name: None)
    alone = Groove(tmp_path / "grooves", accompaniment=accompaniment, length=64)
    losses = losses_of(alone, config_of("groove"), 20)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]) and alone.notation.words == task.notation.words
    with pytest.raises(ValueError, match="the package miditok must be there for music"):
        alone.prompt("test:0")


def test_stored_grooves_that_do_not_fit_the_options(tmp_path):
    store_pieces(Groove(), tmp_path / "tokens.npz")
    with pytest.raises(ValueError, match=r"accompaniment must be False for the stored tokens of .*, but is True"):
        Groove(tmp_path, accompaniment=True).examples("train")
    with pytest.raises(ValueError, match="fills must be true with stored tokens"):
        Groove(tmp_path, fills=False).examples("train")
    store(tmp_path)
    (tmp_path / "tokens.npz").unlink()
    with pytest.raises(ValueError, match=r"data must have the tokens of miditok here, but those of .* are others"):
        Groove(tmp_path).examples("train")


@pytest.mark.parametrize(
    "row, words",
    [
        (("a/9.mid", "train", "beat"), r"info\.csv, line 2: names a/9\.mid, which is missing"),
        (("a/1.mid", "dev", "beat"), r"info\.csv, line 2: the split is 'dev', but expected is one of train"),
    ],
)
def test_malformed_lines_of_groove_are_named(tmp_path, row, words):
    with pytest.raises(ValueError, match=words):
        Groove(groove_zip(tmp_path, [row])).examples("train")


def test_a_broken_zip_and_a_table_without_splits_are_named(tmp_path):
    (tmp_path / "groove.zip").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"groove\.zip must be a zip file"):
        Groove(tmp_path).examples("train")
    (tmp_path / "groove.zip").unlink()
    for name, content in groove_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.replace(b",split,", b",part,", 1) if name.endswith(".csv") else content)
    with pytest.raises(ValueError, match=r"info\.csv, line 1: has no column split"):
        Groove(tmp_path).examples("train")


def test_options_are_checked():
    with pytest.raises(ValueError, match="transpose must be 0 for drums"):
        Groove(transpose=2)
    with pytest.raises(ValueError, match="transpose must be a whole number"):
        Piano(transpose=-1)
    with pytest.raises(ValueError, match="length must not be more than the training's 5000"):
        Piano(length=5000).examples("test", 6000)


def test_the_grammar_allows_what_may_follow_and_only_later_positions():
    notation = StoredRemi(WORDS)

    def after(*words):
        rows = torch.tensor([codes(words)])
        return {WORDS[token] for token in TokenGrammar(notation, 1, torch.device("cpu"))(rows)[0].nonzero()[:, 0].tolist()}

    pitches = {"Note_Pitch_60", "Note_Pitch_62", "Note_Pitch_64"}
    assert after("Bar_None") == {"Bar_None", "EOS_None", "Beat_0", "Beat_4", "Beat_8"}
    assert after("Bar_None", "Beat_4", "Note_Pitch_60") == {"Note_Velocity_60"}
    note = ("Note_Pitch_60", "Note_Velocity_60", "Note_Duration_480")
    assert after("Bar_None", "Beat_4", *note) == {*pitches, "Beat_8", "Bar_None"}
    assert after("Bar_None", "Beat_8", *note, "Bar_None") >= {"Beat_0", "Beat_4", "Beat_8"}
    assert after("Bar_None", "EOS_None") == {"EOS_None"}


def test_programs_are_followed_by_their_own_pitches():
    notation = TASKS["band"]().notation
    for program, pitch, other in (("Program_-1", "PitchDrum_36", "Pitch_60"), ("Program_33", "Pitch_60", "PitchDrum_36")):
        follows = notation.follows[notation.numbers[program]]
        assert follows[notation.numbers[pitch]] and not follows[notation.numbers[other]]


@pytest.mark.parametrize("fields", [{}, {"attention": "linear", "encoding": "sine-spe", "encoding.realizations": 8}])
@pytest.mark.parametrize("name", ["piano", "groove"])
def test_what_is_generated_obeys_the_grammar_and_equals_teacher_forcing(name, fields):
    task = TASKS[name]()
    model = task.model(config_of(name, **fields)).eval()
    prompts = torch.tensor([task.prompt("test:0:1")[0]] * 2)
    sampling = Sampling(length=prompts.shape[1] + 40, temperature=1.5, nucleus=0.95, seed=4)
    drawn = [
        generate_tokens(
            model, prompts, sampling, allowed=TokenGrammar(task.notation, 2, torch.device("cpu")), end=task.notation.end
        )
        for _ in range(2)
    ]
    tokens = drawn[0].tokens
    assert torch.equal(tokens, drawn[1].tokens)
    assert bool(task.notation.follows[tokens[:, :-1], tokens[:, 1:]].all())
    forced = model({"tokens": tokens[:, :-1]}).log_softmax(-1).gather(2, tokens[:, 1:, None])[:, prompts.shape[1] - 1 :, 0]
    ended = (tokens[:, prompts.shape[1] - 1 : -1] == task.notation.end).cummax(1).values
    torch.testing.assert_close(drawn[0].log_probabilities[~ended], forced[~ended], rtol=1e-3, atol=1e-3)


def test_files_are_written_and_the_same_under_a_seed(tmp_path):
    task = Piano()
    model = task.model(config_of("piano")).eval()
    sampling = Sampling(count=2, length=120, temperature=1.2, nucleus=0.9, seed=1)
    with pytest.warns(UserWarning, match=SILENT):
        paths = task.generate(model, "test:1", sampling, tmp_path / "a")
    with pytest.warns(UserWarning, match=SILENT):
        task.generate(model, "test:1", sampling, tmp_path / "b")
    assert [path.name for path in paths] == [f"piece-{n}.{kind}" for n in (0, 1) for kind in ("mid", "png", "json")]
    assert (tmp_path / "a/piece-1.mid").read_bytes() == (tmp_path / "b/piece-1.mid").read_bytes()
    assert (tmp_path / "a/piece-0.png").read_bytes()[:4] == b"\x89PNG"
    facts = json.loads((tmp_path / "a/piece-0.json").read_text())
    assert facts["prompt_tokens"] == len(task.prompt("test:1")[0]) < facts["tokens"] <= 120
    assert set(facts["style_by_quarter"]) == {"time-pitch", "onset-duration"} and SILENT in facts["sound"]
    written = symusic.Score(tmp_path / "a/piece-0.mid")
    assert len(notes_of(written).onsets) == facts["notes"] > 0


def test_styles_are_those_of_the_pieces_that_are_generated(tmp_path):
    task = Groove(length=60)
    model, sampling = task.model(config_of("groove")).eval(), Sampling(count=2, length=200, seed=5)
    prompts = task.long_pieces("test", 2)
    found = task.styles(model, prompts, sampling)
    for number, prompt in enumerate(prompts):
        with pytest.warns(UserWarning, match=SILENT):
            task.generate(model, prompt, replace(sampling, seed=5 + number), tmp_path / str(number))
    paths = [tmp_path / str(number) / f"piece-{piece}.json" for number in range(2) for piece in range(2)]
    assert {name: torch.tensor(rows).tolist() for name, rows in found.items()} == {
        name: rows.tolist() for name, rows in styles_by_quarter(paths).items()
    }
    assert list(found) == ["onset-drum"] and len(found["onset-drum"]) == 4 and any(map(any, found["onset-drum"]))
    with pytest.raises(ValueError, match="prompts must be pieces, whose style is compared with, but one is 'none'"):
        task.styles(model, ["none"], sampling)


def test_styles_go_on_from_pieces_that_are_as_long_as_a_training_example():
    # A piece has one token more than are predicted in it.
    size = len(Groove().pieces("test")[0].tokens)
    assert Groove(length=size - 1).long_pieces("test", 1) == ["test:0"]
    longer = sum(len(piece.tokens) > size for piece in Groove().pieces("test"))
    assert "test:0" not in Groove(length=size).long_pieces("test", longer)
    with pytest.raises(ValueError, match=r"pieces must be at most 0, .* more than 99999 tokens, but are 1"):
        Groove(length=99999).long_pieces("test", 1)


def test_the_command_tells_the_styles_of_runs(tmp_path):
    groove, reber, save = tmp_path / "groove", tmp_path / "reber", tmp_path / "lines" / "styles.jsonl"
    small = ["dim=8", "heads=2", "batch=2", "evaluate_examples=2", "--steps", "1", "--device", "cpu"]
    for task, folder, more in (("groove", groove, ["layers=1", "task.length=60"]), ("reber", reber, [])):
        assert CliRunner().invoke(app, ["train", task, "--folder", str(folder), *small, *more]).exit_code == 0

    def call(*words: str):
        return CliRunner().invoke(
            app, ["styles", *words, "--pieces", "2", "--count", "1", "--device", "cpu", "--save", str(save)]
        )

    # Nothing is drawn before all runs are known to be of music.
    refused = call(str(groove), str(reber), "--length", "150")
    assert refused.exit_code == 2 and "runs must be of music (piano, groove)" in refused.output and not save.exists()
    short = call(str(groove), "--length", "5")
    assert short.exit_code == 2 and f"{groove}: length must be more than" in " ".join(short.output.split())
    found = call(str(groove), "--length", "150")
    assert found.exit_code == 0 and "onset-drum" in found.output and "these numbers mean nothing" in found.output
    line = json.loads(save.read_text())
    assert line["bench"] == "styles" and line["prompts"] == ["test:0", "test:1"] and line["sampling"]["length"] == 150
    assert [len(row) for row in line["styles"]["onset-drum"]] == [4, 4]
    assert line["environment"]["data"] == line["trained_on"]["data"] == "generated or built-in sample"
    save.unlink()
    save.mkdir()
    assert "is a directory" in call(str(groove)).output
    save = groove / "config.json" / "styles.jsonl"
    assert "no folder can be made" in call(str(groove)).output


def test_sound_is_written_where_fluidsynth_is(tmp_path, monkeypatch):
    (tmp_path / "fluidsynth").write_text('#!/bin/sh\nwhile [ "$1" != "-F" ]; do shift; done\necho sound > "$2"\n')
    (tmp_path / "fluidsynth").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    task = Groove()
    model = task.model(config_of("groove")).eval()
    paths = task.generate(model, "none", Sampling(length=60), tmp_path / "out")
    assert tmp_path / "out/piece-0.wav" in paths and (tmp_path / "out/piece-0.wav").read_text() == "sound\n"
    (tmp_path / "fluidsynth").write_text("#!/bin/sh\necho no sound font >&2\nexit 1\n")
    with pytest.warns(UserWarning, match="fluidsynth wrote no sound: no sound font"):
        task.generate(model, None, Sampling(length=60), tmp_path / "none")


def test_prompts_are_midi_files_or_pieces(midi_folder, tmp_path):
    task = Piano()
    whole = task.pieces("test")[0].tokens[:-1].tolist()
    tokens, reference = task.prompt(str(midi_folder / "test/0.mid"))
    assert tokens == whole and reference is not None
    bars = [place for place, token in enumerate(whole) if token == task.notation.bar]
    assert task.prompt("test:0")[0] == whole[: bars[2]] and task.prompt("test:0:3")[0] == whole[: bars[3]]
    assert task.prompt("none") == task.prompt(None) == ([task.notation.bar], None)
    with pytest.raises(ValueError, match="prompt must be test:0 to test:3"):
        task.prompt("test:4")
    with pytest.raises(ValueError, match="prompt must be a MIDI file, a piece such as test:0, or none, but is 'song'"):
        task.prompt("song")
    store(tmp_path)
    with pytest.raises(ValueError, match="prompt must be none or a piece of the data"):
        Piano(tmp_path).prompt(str(midi_folder / "test/0.mid"))


def test_the_loss_is_told_by_position_within_and_beyond_the_training_length():
    task = Groove(length=160)
    model = task.model(config_of("groove")).eval()
    found = task.curves(model, "test", 320, batch=3, limit=None)
    bins = found["loss_by_position"]
    assert [first for first, _, _ in bins] == [0, 128, 256]
    examples = task.examples("test", 320)
    parts = [(task.answers(model(one), one)) for one in (examples.batch([number]) for number in range(4))]
    losses, places = (torch.cat(columns).detach() for columns in zip(*parts, strict=True))
    for first, nats, count in bins:
        own = losses[(places >= first) & (places < first + 128)]
        assert len(own) == count and nats == pytest.approx(float(own.mean()), rel=1e-4)
    assert found["loss_within"] == pytest.approx(float(losses[places < 160].mean()), rel=1e-4)
    assert found["loss_beyond"] == pytest.approx(float(losses[places >= 160].mean()), rel=1e-4)
    assert "loss_beyond" not in task.curves(model, "test", None, batch=4, limit=2)
    metric = task.metrics()["nll"]
    metric.update(losses, places)
    assert float(metric.compute()) == pytest.approx(float(losses.mean()), rel=1e-4)


def test_time_and_pitch_are_counted_over_pairs():
    # Beats 0, 0, 1 and 4.5; the last is too far from the first two.
    notes = notes_of(score_of([(0.0, 1.0, 60, 80), (0.0, 1.0, 64, 80), (1.0, 1.0, 67, 80), (4.5, 1.0, 60, 80)]))
    found = time_pitch(notes)
    counted = {(int(gap), int(interval) - 20): int(found[gap, interval]) for gap, interval in np.argwhere(found)}
    assert counted == {(0, 4): 1, (0, -4): 1, (6, 7): 1, (6, 3): 1, (21, -7): 1}


def test_gaps_of_just_under_four_beats_and_intervals_to_twenty_count():
    notes = notes_of(score_of([(0.0, 1.0, 40, 80), (3.99, 1.0, 60, 80), (4.0, 1.0, 40, 80), (4.1, 1.0, 61, 80)]))
    found = time_pitch(notes)
    # Up by 20 after just under four beats, down by 20 and up by 1 after a little; four beats and 21 semitones are too far.
    assert found[23, 40] == found[0, 0] == found[0, 21] == 1 and found.sum() == 3


def test_onsets_durations_and_drums_are_counted():
    notes = notes_of(score_of([(0.5, 0.5, 60, 80), (4.5, 0.5, 72, 80), (1.0, 9.0, 60, 80)]))
    found = onset_duration(notes)
    assert found[3, 3] == 2 and found[6, 23] == 1 and found.sum() == 3
    assert onset_drum(notes).sum() == 0
    drums = notes_of(score_of([(0.0, 0.1, 36, 80), (8.0, 0.1, 36, 80), (1.0, 0.1, 38, 80)], drums=True))
    found = onset_drum(drums)
    assert found[0, 36] == 2 and found[6, 38] == 1 and found.sum() == 3
    assert onset_duration(drums).sum() == time_pitch(drums).sum() == 0


def test_a_picture_of_drums_names_them():
    beat = [(0.0, 0.1, 36, 80), (1.0, 0.1, 38, 80), (2.0, 0.1, 36, 80), (3.0, 0.1, 81, 80)]
    (panel,) = draw_roll(score_of(beat, drums=True), prompt=2.0).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["bass drum", "snare", "drum 81"]
    given, new = (np.asarray(points.get_offsets()).tolist() for points in panel.collections)
    assert given == [[0.0, 0.0], [1.0, 1.0]] and new == [[2.0, 0.0], [3.0, 2.0]]
    (panel,) = draw_roll(score_of(beat)).axes
    assert panel.get_ylabel() == "pitch (60 is middle C)" and [bar.get_y() + 0.4 for bar in panel.patches] == [36, 38, 36, 81]
    assert len(draw_roll(score_of([])).axes) == 1


def test_similarity_is_a_cosine():
    assert similarity(np.array([[3.0, 0.0], [0.0, 4.0]]), np.array([[1.0, 0.0], [0.0, 0.0]])) == pytest.approx(0.6)
    assert similarity(np.zeros(3), np.ones(3)) == 0.0


def test_each_quarter_is_compared_with_the_whole_reference():
    beat = [(float(time), 0.5, 36, 80) for time in range(16)]
    # The reference has the bass drum on all beats; the third quarter has another drum, and the last one nothing but a snare.
    other = [*beat[:8], *[(float(time), 0.5, 38, 80) for time in range(8, 12)], *beat[12:14], (14.0, 2.0, 38, 80)]
    found = style_similarity(score_of(other, drums=True), score_of(beat, drums=True))
    assert list(found) == ["onset-drum"]
    assert found["onset-drum"] == pytest.approx([1.0, 1.0, 0.0, 2 / math.sqrt(3 * 4)])
    shifted = style_similarity(score_of(other, drums=True), score_of(beat, drums=True), start=8.0)
    assert shifted["onset-drum"][:2] == [0.0, 0.0]


def test_density_and_pitch_classes_are_those_of_the_notes():
    notes = notes_of(score_of([(2.0, 1.0, 60, 80), (3.0, 1.0, 72, 80), (4.0, 1.0, 67, 80), (5.0, 1.0, 55, 80)]))
    assert note_density(notes) == 1.0
    assert pitch_classes(notes).tolist() == [2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert pitch_class_entropy(notes) == pytest.approx(1.0)
    nothing = notes_of(symusic.Score(480))
    assert note_density(nothing) == pitch_class_entropy(nothing) == 0.0
    assert pitch_class_entropy(notes_of(score_of([(0.0, 1.0, 36, 80)], drums=True))) == 0.0


def test_presets_have_the_papers_sizes_and_make_models():
    names = ["performer-ape", "performer-sine", "performer-conv"]
    assert list(Groove.presets) == names
    assert list(Piano.presets) == [*names, "performer-sine-ungated", "performer-conv-ungated"]
    piano, groove = Piano.presets["performer-sine"], Groove.presets["performer-conv"]
    fields = ("layers", "heads", "dim", "hidden", "features", "batch", "rate", "warmup", "steps", "clip", "redraw", "per_layer")
    assert [piano[field] for field in fields] == [24, 8, 512, 2048, 128, 4, 2e-4, 200, 55_020, 0.5, 20, "gate"]
    assert [groove[field] for field in fields] == [24, 8, 512, 2048, 128, 10, 4e-4, 1000, 13_248, 0.5, 40, "gate"]
    assert piano["encoding_options"] == {"sines": 5, "realizations": 64, "gated": True}
    assert groove["encoding_options"] == {"kernel_size": 128, "realizations": 64, "gated": True}
    assert [Piano.presets["performer-ape"][field] for field in ("rate", "steps")] == [1e-4, 62_880]
    for kind in (Piano, Groove):
        for preset in kind.presets.values():
            options = {"task_options": {"length": 64}}
            config = with_fields(Config("piano"), {**preset, **options, "dim": 16, "heads": 2, "hidden": 16, "layers": 2})
            task = kind(**config.task_options)
            model, batch = task.model(config), task.examples("train").batch([0, 1])
            assert model(batch).shape == (2, 64, len(task.notation.words))
            maps = [module for module in model.modules() if isinstance(module, Favor)]
            assert [len(each.projection) for each in maps] == [128, 128]
            assert not torch.equal(maps[0].projection, maps[1].projection)


def test_the_packages_of_music_are_loaded_by_music_alone():
    code = "import sys; from lagwise.lab.tasks import TASKS; TASKS['piano'](); print({'symusic', 'miditok'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_encodings_get_the_papers_options():
    assert Piano().encoding_options("sine-spe") == {"sines": 5, "realizations": 64}
    assert Groove().encoding_options("sine-spe") == {"sines": 8, "realizations": 64}
    assert Piano(length=99).encoding_options("learned") == {"length": 99}
    assert Piano().encoding_options("rotary") == {}
