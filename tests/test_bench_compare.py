"""`lagwise bench compare`: what is the same case, what became slower, and what cannot be read."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lagwise.lab.bench import changes
from lagwise.lab.cli import app

MACHINE = {"device": "a machine", "torch": "2", "commit": "abc", "date": "2026-11-18"}


def line(contender="lagwise", *, encoding="t5", time=512, **numbers):
    shape = {"batch": 1, "heads": 2, "time": time, "head_dim": 8, "options": {}, "causal": False, "graph": True}
    return {
        "bench": "attention",
        "contender": contender,
        "encoding": encoding,
        **shape,
        "dtype": "bfloat16",
        **MACHINE,
        **numbers,
    }


def written(path, lines):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


@pytest.fixture
def compare(tmp_path):
    """Returns a function that compares two lists of lines by the command."""

    def invoke(old, new, *options):
        old, new = written(tmp_path / "old.jsonl", old), written(tmp_path / "new.jsonl", new)
        return CliRunner().invoke(app, ["bench", "compare", str(old), str(new), *options])

    return invoke


def rows(result):
    """Returns the cells of the rows of the table on the screen."""
    lines = [text.strip("│").split("│") for text in result.output.splitlines() if text.startswith("│")]
    return [[cell.strip() for cell in cells] for cells in lines]


def compared(old, new):
    return changes.compare_lines(*({changes.identity(each): each for each in lines} for lines in (old, new)))


def test_ratios_of_ratios_and_of_times():
    (change,) = compared([line(training_ms=2.0, training_ratio=1.5)], [line(training_ms=3.0, training_ratio=1.8)]).changes
    assert change.what == "training ms" and change.number_change == 1.5 and change.ratio_change == pytest.approx(1.2)


def test_speeds_are_ratios_the_other_way_round():
    model = {"bench": "hf", "contender": "lagwise", "model": "t5-base", "batch": 2, "time": 64, "dropout": 0.0}
    old = {**model, "training_ms": 10.0, "training_speedup": 2.0, "inference_ms": 4.0, "inference_speedup": 1.0}
    new = {**model, "training_ms": 10.0, "training_speedup": 4.0, "inference_ms": 4.0, "inference_speedup": 0.5}
    training, inference = compared([old], [new]).changes
    assert training.ratios == (0.5, 0.25) and training.verdict(0.05) == "faster"
    assert inference.ratios == (1.0, 2.0) and inference.verdict(0.05) == "slower"
    encoder = {"bench": "models", "contender": "t5", "attention": "softmax", "step_ms": 5.0}
    found = compared([{**encoder, "speed_ratio": 0.8}], [{**encoder, "speed_ratio": 0.4}])
    assert found.changes[0].ratio_change == 2.0 and found.got_worse(0.05)


@pytest.mark.parametrize(
    "ratio, verdict", [(1.04, ""), (1.06, "slower"), (0.96, ""), (0.94, "faster"), (1.0, "")], ids=str
)  # fmt: skip
def test_a_change_beyond_the_threshold_is_marked(ratio, verdict):
    """The ratios decide: here all times have doubled, as on a machine with other work."""
    old, new = line(training_ms=1.0, training_ratio=1.0), line(training_ms=2.0, training_ratio=ratio)
    assert compared([old], [new]).changes[0].verdict(0.05) == verdict


def test_without_ratios_the_numbers_decide():
    old, new = line(first_s=4.0, second_s=1.0, kernels=12), line(first_s=8.0, second_s=1.0, kernels=10)
    assert [change.verdict(0.05) for change in compared([old], [new]).changes] == ["slower", "", "faster"]
    # A ratio on one side alone is none.
    (change,) = compared([line(training_ms=1.0)], [line(training_ms=2.0, training_ratio=1.0)]).changes
    assert change.ratios is None and change.verdict(0.05) == "slower"


def test_lines_of_older_versions_lack_fields_that_are_off():
    old, new = line(training_ms=1.0), line(training_ms=1.0, eager=False, ragged=None)
    assert len(compared([old], [new]).changes) == 1
    for other in ({"eager": True}, {"ragged": "lengths"}, {"options": {"max_lag": 2}}, {"dtype": "float32"}, {"position": 100}):
        found = compared([old], [{**new, **other}])
        assert not found.changes and found.old_only == [old] and found.new_only == [{**new, **other}]


def test_the_command_shows_numbers_and_marks(compare):
    old = [
        line("plain", training_ms=1.0, training_ratio=1.0),
        line(training_ms=2.0, training_ratio=2.0),
        line(time=64, kernels=9),
    ]
    new = [line("plain", training_ms=1.1, training_ratio=1.0), line(training_ms=3.3, training_ratio=3.0), line(encoding="at5")]
    result = compare(old, new)
    assert result.exit_code == 0, result.output
    assert rows(result) == [
        ["attention: t5", "B1 H2 T512 D8 graph", "plain", "training ms", "1", "1.1", "1.10", "1.00", "1.00", "1.00", ""],
        ["attention: t5", "B1 H2 T512 D8 graph", "lagwise", "training ms", "2", "3.3", "1.65", "2.00", "3.00", "1.50", "slower"],
    ]
    assert "old: a machine, torch 2, 2026-11-18, commit abc\n" in result.output
    assert "only in old: attention, B1 H2 T64 D8 graph: t5 (lagwise)\n" in result.output
    assert "only in new: attention, B1 H2 T512 D8 graph: at5 (lagwise)\n" in result.output
    assert "ours: 1 numbers compared, 0 faster and 1 slower by more than 5 %\n" in result.output
    assert "others: 1 numbers compared, 0 faster and 0 slower by more than 5 %\n" in result.output
    assert len(rows(compare(old, new, "--changed"))) == 1 and not rows(compare(old, new, "--changed", "--threshold", "60"))


def test_lines_without_a_counterpart_are_told_by_shape(compare):
    old = [line(name, encoding=each, kernels=1) for each in ("t5", "at5") for name in ("plain", "lagwise")]
    new = [line(graph=False, kernels=1), line(time=64, kernels=1), line(time=32, error="out of memory")]
    told = compare(old, new).output.splitlines()
    assert "only in old: attention, B1 H2 T512 D8 graph: t5 / at5 (plain / lagwise)" in told
    assert "only in new: attention, B1 H2 T512 D8: t5 (lagwise)" in told
    assert "only in new: attention, B1 H2 T64 D8 graph: t5 (lagwise)" in told
    assert "only in new: attention: t5, B1 H2 T32 D8 graph, lagwise: out of memory" in told
    assert next(words for words in told if "CUDA graphs" in words).startswith("1 of these lines are in both files")


def test_origins_are_told_once_for_a_machine_and_a_day():
    lines = [{**MACHINE, "commit": commit} for commit in ("abc", "def", None, "abc")]
    assert changes.origins(lines) == "a machine, torch 2, 2026-11-18, commit abc, def, unknown"


def test_of_two_lines_for_the_same_the_last_counts(compare):
    assert rows(compare([line(kernels=9), line(kernels=8)], [line(kernels=4)]))[0][4:7] == ["8", "4", "0.50"]


@pytest.mark.parametrize(
    "contender, after, status",
    [
        ("lagwise", {"training_ms": 1.2}, 1),
        ("lagwise, deterministic", {"training_ms": 1.2}, 1),
        ("lagwise", {"error": "out of memory"}, 1),
        ("lagwise", {"training_ms": 1.04}, 0),
        ("lagwise", {"training_ms": 0.5}, 0),
        ("plain", {"training_ms": 1.2}, 0),
        ("plain", {"error": "out of memory"}, 0),
    ],
)
def test_strict_fails_where_ours_became_slower(compare, contender, after, status):
    old, new = [line(contender, training_ms=1.0)], [line(contender, **after)]
    assert compare(old, new, "--strict").exit_code == status and compare(old, new).exit_code == 0


def test_what_fails_and_what_works_now_is_told(compare):
    broken = compare([line(training_ms=1.0)], [line(error="out of memory")])
    assert "fails now: attention: t5, B1 H2 T512 D8 graph, lagwise: out of memory" in broken.output
    mended = compare([line(error="out of memory")], [line(training_ms=1.0)])
    assert "works now: attention: t5, B1 H2 T512 D8 graph, lagwise" in mended.output
    assert "works now" not in compare([line(error="it")], [line(error="it")]).output


@pytest.mark.parametrize(
    "bad, reason",
    [
        ("{", "Expecting property name"),
        ("[1]", "expected is a dict, but it holds a list"),
        ('{"bench": "loop"}', "it has no contender"),
        (line(training_ms=-1.0), "training_ms must be a positive number, but is -1.0"),
        (line(kernels="many"), "kernels must be a positive number, but is 'many'"),
        (line(training_ms=float("nan")), "training_ms must be a positive number, but is nan"),
        (line(training_ms=1.0, training_ratio=0.0), "training_ratio must be a positive number, but is 0.0"),
    ],
)
def test_a_bad_line_is_named(compare, bad, reason):
    result = compare([line(kernels=3)], [line(kernels=3), bad])
    words = " ".join(result.output.split())
    assert result.exit_code == 2 and "new.jsonl, line 2 cannot be read" in words and reason in words, result.output


def test_a_file_without_lines_is_refused(compare, tmp_path):
    result = compare([], [line(kernels=3)])
    assert result.exit_code == 2 and "old.jsonl has no lines" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "missing"), str(tmp_path / "missing")])
    assert result.exit_code == 2


def test_published_lines_of_all_benches_can_be_compared():
    results = Path(__file__).parent.parent / "results"
    for name in ("attention", "linear", "linear-decode", "sweep", "hf", "models"):
        paths = list(results.glob(f"{name}-cuda-2026-*.jsonl"))
        assert paths, name
        for path in paths:
            lines = changes.read_lines(path)
            found = changes.compare_lines(lines, lines)
            assert found.changes and not found.old_only and not found.new_only and not found.got_worse(0.0), path.name
