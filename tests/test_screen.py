"""What a comparison shows: tables that fit the screen, rows as they finish, and a verdict."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from test_compare import fake_train, stored
from typer.testing import CliRunner

from lagwise.lab import run
from lagwise.lab.cli import app, standings
from lagwise.lab.compare import DEFAULT_ENCODINGS
from lagwise.lab.config import Config
from lagwise.lab.grouping import groups


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Returns a function that shows a comparison of eight encodings on a screen of some width, and returns what stands there."""

    def show(width, *, wide=False, **others):
        monkeypatch.setattr(standings, "console", Console(width=width, file=io.StringIO()))
        runs = [
            stored(tmp_path / "runs", name, seed, 0.9 - 0.03 * number + 0.01 * (seed * number % 3), **others)
            for number, name in enumerate(DEFAULT_ENCODINGS) for seed in range(3)
        ]  # fmt: skip
        (group,) = groups(runs)
        standings.show_comparison(group, "t5", wide=wide)
        return standings.console.file.getvalue()

    return show


@pytest.mark.parametrize("width", [60, 80, 160])
def test_nothing_of_the_table_is_cut_off(shown, width):
    text = shown(width)
    lines = text.splitlines()
    assert "…" not in text and max(map(len, lines)) <= width
    (header,) = [line for line in lines if line.strip().startswith("encoding ")]
    assert header.split() == ["encoding", "test", "accuracy", "minus", "t5", "runs", "seconds"]
    for name in DEFAULT_ENCODINGS:
        (row,) = [line for line in lines if line.strip().startswith(f"{name} ") and "±" in line]
        assert len(re.findall(r" -?\d\.\d{3} ± \d\.\d{3} ", row)) == (1 if name == "t5" else 2)


def test_decimals_stand_below_each_other(shown):
    rows = [line for line in shown(80).splitlines() if line.strip().startswith(DEFAULT_ENCODINGS) and "±" in line]
    places = [[place for place, letter in enumerate(row) if letter == "."] for row in rows if not row.strip().startswith("t5")]
    assert len(places) == 7 and all(row == places[0] for row in places)


def test_a_wide_table_has_everything_in_lines_as_long_as_they_have_to_be(shown):
    (header,) = [line for line in shown(60, wide=True).splitlines() if line.strip().startswith("encoding ")]
    assert len(header) > 60
    assert header.split()[7:] == ["validation", "accuracy", "its", "parameters", "tokens/s", "peak", "MiB"]


def test_other_lengths_have_a_table_of_their_own(shown):
    lengths = {"100": {"accuracy": 0.25, "loss": 1.0}, "200": {"refused": "the table ends at 150"}}
    text = shown(80, lengths=lengths)
    assert "test accuracy at other lengths" in text and "0.2500 ± 0.0000" in text
    assert "t5 at 200: the table ends at 150" in text and max(map(len, text.splitlines())) <= 80


def test_it_ends_with_a_verdict(shown):
    last = " ".join(" ".join(shown(80).splitlines()[-5:]).split())
    assert last.endswith("(Paired t-tests within seeds at 5 % for each encoding, with Bonferroni's correction for its 7 others.)")
    assert "supports no claim: pass --data" in " ".join(shown(80, sample=True).split())


def test_the_rows_of_encodings_appear_as_they_finish_and_the_page_is_named_last(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", fake_train)
    options = ["--seeds", "2", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["compare", "--encodings", "t5,at5", *options])
    lines = [" ".join(line.split()) for line in done.output.splitlines() if line.strip()]
    assert done.exit_code == 0, done.output
    assert lines[:2] == ["t5 test accuracy 0.5 ± 6.4, 2.0 s a run", "at5 test accuracy 0.5 ± 6.4, 2.0 s a run"]
    assert any("t5 and at5 lead; no significant difference between them." in line for line in lines)
    assert lines[-1].startswith(f"open {tmp_path / 'report.html'} in a browser")


def test_runs_that_fail_are_told_once_for_each_reason_and_count(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", fake_train)
    options = ["--seeds", "2", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["compare", "--encodings", "t5,xl", *options])
    assert done.exit_code == 1 and "xl 2 of 2 runs failed" in " ".join(done.output.split())
    assert done.output.count("heads must be at least 1, but is 0") == 1 and "xl, seed 0; xl, seed 1 failed:" in done.output


def test_differences_of_single_runs_are_as_exact_as_the_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(standings, "console", Console(width=80, file=io.StringIO()))
    config = replace(Config("process-50"), steps=1)
    (group,) = groups([stored(tmp_path, name, 0, value, config=config) for name, value in (("t5", 0.8328), ("at5", 0.8406))])
    standings.show_comparison(group, "t5")
    text = standings.console.file.getvalue()
    assert "0.0078 " in text and "one seed supports no claim" in text and "confidence" not in text
