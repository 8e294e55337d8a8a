"""What runs say together: intervals, standings, paired differences, tuning, and runs as lines of a file."""

import json
import math

import pytest
from test_compare import ENVIRONMENT, stored
from typer.testing import CliRunner

from lagwise.lab import grouping, records
from lagwise.lab.cli import app
from lagwise.lab.compare import folder_of, plan
from lagwise.lab.config import Config
from lagwise.lab.estimates import estimate, t_quantile
from lagwise.lab.experiment import main_metric
from lagwise.lab.grouping import best_tuned, groups, only_group
from lagwise.lab.report.page import make_page
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import baselines, differences_of, rows_of
from lagwise.lab.tasks import TASKS


def standings_of(runs):
    """Returns the standings of runs that may all be compared."""
    return rows_of(only_group(runs))


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_quantiles_of_students_t_are_those_of_the_tables(confidence):
    tables = {
        0.9: {1: 6.3138, 2: 2.9200, 3: 2.3534, 9: 1.8331, 10: 1.8125, 120: 1.6577},
        0.95: {1: 12.7062, 2: 4.3027, 3: 3.1824, 9: 2.2622, 10: 2.2281, 120: 1.9799},
        0.99: {1: 63.6567, 2: 9.9248, 3: 5.8409, 9: 3.2498, 10: 3.1693, 120: 2.6174},
    }
    for freedom, expected in tables[confidence].items():
        assert t_quantile(freedom, confidence) == pytest.approx(expected, abs=6e-5)


def test_one_degree_of_freedom_is_cauchys_distribution():
    assert t_quantile(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)


def test_an_estimate_by_hand():
    # 4, 6, 11: mean 7, squares 9 + 1 + 16 = 26, variance 13; 4.302653 sqrt(13 / 3) = 8.956686.
    found = estimate([4.0, 6.0, 11.0])
    assert (found.mean, found.count) == (7.0, 3)
    assert found.half_width == pytest.approx(8.956686, abs=1e-5)
    assert estimate([4.0]).half_width is None


def test_standings_by_hand(tmp_path):
    scores = {"t5": [0.7, 0.8, 0.9], "none": [0.5, 0.5, 0.5], "rotary": [0.81]}
    for encoding, values in scores.items():
        for seed, value in enumerate(values):
            lengths = {"64": {"loss": 1.0, "accuracy": value - 0.1}, "128": {"refused": "it ends at 100"}}
            stored(tmp_path, encoding, seed, value, seconds=1.0 + seed, peak_memory=100 * seed or None, lengths=lengths)
    rows = standings_of(store_runs(tmp_path))
    assert [row.encoding for row in rows] == ["rotary", "t5", "none"]
    t5 = rows[1]
    assert t5.seeds == (0, 1, 2) and t5.test.mean == pytest.approx(0.8)
    # The deviation is 0.1: 4.302653 x 0.1 / sqrt(3).
    assert t5.test.half_width == pytest.approx(0.248414, abs=1e-6)
    assert (t5.parameters, t5.seconds, t5.tokens_per_second, t5.peak_memory) == (10, 2.0, 50.0, 200)
    assert t5.lengths[64].mean == pytest.approx(0.7) and t5.lengths[128] == "it ends at 100"
    assert rows[0].test.half_width is None and rows[0].peak_memory is None
    assert rows[2].test.half_width == 0.0


def store_runs(out):
    return [Run(path.parent) for path in sorted(out.rglob("config.json"))]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_metric_with_a_direction(task):
    name, higher = main_metric(Config(task, "t5"))
    assert name == TASKS[task].facts.metric
    assert higher is (name not in ("bits_per_byte", "nll", "perplexity"))


def test_a_metric_of_which_less_is_better_sorts_the_other_way(tmp_path, monkeypatch):
    runs = [stored(tmp_path, "t5", 0, 0.2, metric="error"), stored(tmp_path, "none", 0, 0.1, metric="error")]
    monkeypatch.setattr(grouping, "main_metric", lambda config: ("error", False))
    assert [row.encoding for row in standings_of(runs)] == ["none", "t5"]


def test_what_is_no_number_comes_last(tmp_path):
    runs = [stored(tmp_path, name, 0, value) for name, value in (("t5", math.nan), ("none", 0.1), ("shaw", 0.2))]
    assert [row.encoding for row in standings_of(runs)] == ["shaw", "none", "t5"]


def test_differences_are_taken_within_seeds(tmp_path):
    scores = {"t5": [0.5, 0.7, 0.9], "at5": [0.6, 0.9, 1.0], "none": [0.49, 0.69, 0.89], "rotary": [0.9]}
    runs = [stored(tmp_path, name, seed, value) for name, values in scores.items() for seed, value in enumerate(values)]
    runs.append(stored(tmp_path, "xl", 7, 0.5))
    found = {each.encoding: each for each in differences_of(only_group(runs), "t5")}
    assert list(found) == ["rotary", "at5", "none", "xl"]
    # 0.1, 0.2, 0.1: mean 2 / 15, deviation 1 / sqrt(300); 4.302653 / 30 = 0.143422.
    assert found["at5"].estimate.mean == pytest.approx(0.4 / 3)
    assert found["at5"].estimate.half_width == pytest.approx(0.143422, abs=1e-6)
    assert found["at5"].better is None and found["at5"].seeds == (0, 1, 2)
    # The same difference in each seed is told apart, though the seeds differ by far more.
    assert found["none"].better is False
    assert found["rotary"].seeds == (0,) and found["rotary"].better is None
    assert found["xl"].estimate is None
    assert {each.encoding: each.better for each in differences_of(only_group(runs), "none")}["t5"] is True
    with pytest.raises(ValueError, match=r"baseline must be one of t5, at5.*did you mean 'at5'"):
        differences_of(only_group(runs), "at-5")


def test_runs_that_differ_in_more_are_in_tables_of_their_own(tmp_path):
    wide = Config("process-50", dim=256)
    runs = [stored(tmp_path, "t5", 0, 0.5), stored(tmp_path, "none", 0, 0.4), stored(tmp_path, "t5", 0, 0.6, config=wide)]
    found = {group.title: rows_of(group) for group in groups(runs)}
    assert {title: [row.encoding for row in rows] for title, rows in found.items()} == {
        "process-50, dim=128": ["t5", "none"], "process-50, dim=256": ["t5"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"differ in more .process-50, dim=128; process-50, dim=256"):
        standings_of(runs)
    elsewhere = stored(tmp_path / "other", "none", 0, 0.9, environment={**ENVIRONMENT, "data": "files"})
    assert [group.title for group in groups([runs[0], elsewhere])] == [
        "process-50, data=generated or built-in sample", "process-50, data=files",
    ]  # fmt: skip


def test_an_option_that_was_left_out_is_its_default(tmp_path):
    left_out, spelled = Config("process-50"), Config("process-50", task_options={"length": 50})
    runs = [stored(tmp_path, "t5", 0, 0.5, config=left_out), stored(tmp_path, "none", 0, 0.5, config=spelled)]
    assert [[*group.runs] for group in groups(runs)] == [["t5", "none"]]


def test_titles_tell_what_differs_within_a_task_by_single_options(tmp_path):
    short = Config("process-50", task_options={"length": 20, "train": 64})
    adding = Config("adding", steps=7)
    runs = [
        stored(tmp_path, "t5", 0, 0.5, config=Config("process-50", task_options={"train": 64})),
        stored(tmp_path, "none", 0, 0.5, config=short),
        stored(tmp_path, "none", 0, 0.5, config=adding),
    ]
    found = groups(runs)
    assert [group.title for group in found] == ["process-50, task.length=50", "process-50, task.length=20", "adding"]
    assert baselines(found, "none") == ["t5", "none", "none"] and baselines(found, None) == ["t5", "none", "none"]
    with pytest.raises(ValueError, match=r"baseline must be one of t5, none, but is 'non'.*did you mean 'none'"):
        baselines(found, "non")


def test_options_tell_runs_of_one_encoding_apart(tmp_path):
    runs = [
        stored(tmp_path, "t5", 0, value, config=Config("process-50", encoding_options={"buckets": buckets, "max_lag": 64}))
        for buckets, value in ((16, 0.5), (32, 0.6))
    ]
    assert [row.encoding for row in standings_of([*runs, stored(tmp_path, "none", 0, 0.1)])] == [
        "t5 (buckets=32)", "t5 (buckets=16)", "none",
    ]  # fmt: skip


def test_options_tell_runs_of_one_encoding_apart_in_tables_side_by_side(tmp_path):
    runs = [
        stored(tmp_path, "sine-spe", 0, 0.5, config=Config("process-50", dim=dim, encoding_options={"fixed": fixed}))
        for dim, fixed in ((128, False), (256, True), (256, False))
    ]
    elsewhere = stored(tmp_path, "sine-spe", 0, 0.5, config=Config("adding", encoding_options={"sines": 3}))
    found = groups([*runs, stored(tmp_path, "t5", 0, 0.4), elsewhere])
    assert [[*group.runs] for group in found] == [
        ["sine-spe (fixed=false)", "t5"], ["sine-spe (fixed=true)", "sine-spe (fixed=false)"], ["sine-spe"],
    ]  # fmt: skip
    assert baselines([found[0], found[2]], "sine-spe") == ["sine-spe (fixed=false)", "sine-spe"]
    assert baselines(found, "sine-spe (fixed=false)") == ["sine-spe (fixed=false)", "sine-spe (fixed=false)", "sine-spe"]
    with pytest.raises(ValueError, match=r"'sine-spe' may be sine-spe .fixed=true., sine-spe .fixed=false.: name one of them"):
        baselines(found, "sine-spe")


def test_an_option_of_an_encoding_that_was_left_out_is_its_default(tmp_path):
    given = ({}, {"gated": True, "sines": 10}, {"gated": False})
    runs = [
        stored(tmp_path, "sine-spe", seed, 0.5, config=Config("process-50", encoding_options=options))
        for seed, options in enumerate(given)
    ]
    assert {row.encoding: row.seeds for row in standings_of(runs)} == {
        "sine-spe (gated=true)": (0, 1), "sine-spe (gated=false)": (2,),
    }  # fmt: skip
    slow, fast = (
        stored(tmp_path, "t5", 0, test, config=Config("process-50", rate=rate, encoding_options=options))
        for test, rate, options in ((0.5, 1e-4, {}), (0.6, 1e-3, {"buckets": 32}))
    )
    assert best_tuned([slow, fast], ["rate"]) == [fast]


def test_the_same_run_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hold the same run"):
        standings_of([stored(tmp_path / name, "t5", 0, 0.5) for name in "ab"])


def test_models_of_two_sizes_are_refused_though_their_fields_are_equal(tmp_path):
    runs = [stored(tmp_path, "t5", seed, 0.5, parameters=size) for seed, size in enumerate((100, 100, 120))]
    assert standings_of(runs[:2])[0].seeds == (0, 1)
    with pytest.raises(ValueError, match=r"of t5 must be of one model, but .*seed0 has 100 parameters and .*seed2 120"):
        standings_of(runs)


def test_runs_that_are_not_complete_take_no_part(tmp_path):
    config = Config("process-50", "none")
    begun = Run.create(folder_of(tmp_path, config), config, ENVIRONMENT)
    assert [row.encoding for row in standings_of([begun, stored(tmp_path, "t5", 0, 0.5)])] == ["t5"]
    with pytest.raises(ValueError, match="at least one that is complete"):
        standings_of([begun])


def with_rate(out, encoding, seed, rate, validation, test):
    """Makes the folder of a complete run of a learning rate."""
    scores = {"loss": 1.0, "accuracy": validation}
    return stored(out, encoding, seed, test, config=Config("process-50", rate=rate), validation=scores)


def test_each_encoding_has_what_is_best_for_it_on_the_validation_split(tmp_path):
    numbers = {
        # By validation 1e-3 is best for t5, though 1e-2 is on test; for none it is 1e-2.
        ("t5", 1e-3): [(0.9, 0.5), (0.8, 0.6)], ("t5", 1e-2): [(0.7, 0.9), (0.8, 0.8)],
        ("none", 1e-3): [(0.3, 0.3), (0.3, 0.3)], ("none", 1e-2): [(0.2, 0.4), (0.6, 0.2)],
    }  # fmt: skip
    runs = [
        with_rate(tmp_path, encoding, seed, rate, *found)
        for (encoding, rate), both in numbers.items()
        for seed, found in enumerate(both)
    ]
    chosen = best_tuned(runs, ["rate"])
    assert {(run.config.encoding, run.config.rate) for run in chosen} == {("t5", 1e-3), ("none", 1e-2)} and len(chosen) == 4
    (group,) = groups(runs, ["rate"])
    rows = rows_of(group)
    assert [(row.encoding, row.options["rate"], round(row.test.mean, 6)) for row in rows] == [
        ("t5", 1e-3, 0.55),
        ("none", 1e-2, 0.3),
    ]
    assert "rate" not in group.fields and len(groups(runs)) == 2
    assert '"mean": 0.55' in make_page(runs, "lagwise compare", ["rate"])
    # By the first seed alone 1e-3 is best for none; the other seed of the chosen value takes part all the same.
    assert {run.config.rate for run in best_tuned(runs[4:-1], ["rate"])} == {1e-3} and len(best_tuned(runs[4:-1], ["rate"])) == 2
    with pytest.raises(ValueError, match="must have a seed in common, but those of none on process-50 do not"):
        best_tuned([runs[4], runs[7]], ["rate"])
    with pytest.raises(
        ValueError, match="what is tuned must be a field of a run beside the encoding, its options and the seed, but is 'seed'"
    ):
        best_tuned(runs, ["seed"])


def test_all_combinations_of_what_is_tuned_are_planned():
    found = plan("process-50", ["t5", "at5"], seeds=2, tune={"rate": [1e-3, 1e-4], "dropout": [0.0, 0.1, 0.2]})
    assert len(found) == 2 * 2 * 6 == len(set(config.fingerprint() for config in found))
    with pytest.raises(ValueError, match=r"but is 'ratee': did you mean 'rate'\?"):
        plan("process-50", ["t5"], tune={"ratee": [1e-3]})
    with pytest.raises(ValueError, match="what is tuned must have values to try, such as rate=1,2, but rate has none"):
        plan("process-50", ["t5"], tune={"rate": []})
    assert {(config.rate, config.dropout) for config in found} == {(a, b) for a in (1e-3, 1e-4) for b in (0.0, 0.1, 0.2)}


def test_presets_are_only_where_fields_came_from(tmp_path):
    runs = [
        stored(tmp_path, name, 0, 0.5, config=Config("process-50", preset=preset))
        for name, preset in (("t5", ""), ("at5", "paper"))
    ]
    assert [row.encoding for row in standings_of(runs)] == ["t5", "at5"]


def test_runs_come_back_from_lines(tmp_path):
    runs = [stored(tmp_path / "runs", name, seed, 0.5 + seed / 10) for name in ("at5", "none") for seed in range(2)]
    runs.append(stored(tmp_path / "runs", "t5", 0, 0.9))
    for step in range(1, 101):
        runs[0].log({"step": step, "loss": 1 / step, "seconds": 0.5, "tokens": step})
    runs[0].log({"step": 100, "split": "validation", "loss": 0.1, "accuracy": 0.5})
    path = tmp_path / "lines.jsonl"
    records.save_runs(runs, path)
    back = records.stored_runs([path])
    assert standings_of(back) == standings_of(runs)
    (first,) = [run for run in back if run.config == runs[0].config]
    assert first.environment == ENVIRONMENT and first.result == runs[0].result and first.priors is None
    steps = [line["step"] for line in first.lines if "split" not in line]
    assert len(steps) == records.MOST_POINTS and (steps[0], steps[-1]) == (1, 100)
    assert first.lines[-1] == {"step": 100, "split": "validation", "loss": 0.1, "accuracy": 0.5}
    assert first.lines[0]["loss"] == 1.0 and first.lines[1]["loss"] == float(f"{1 / steps[1]:.6g}")
    with pytest.raises(ValueError, match="hold the same run"):
        standings_of([*back, *runs])


def test_lines_that_are_no_runs_are_refused(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"bench": "attention"}\n')
    with pytest.raises(
        ValueError, match=r"lines.jsonl, line 1: is no line of 'run': expected are those of `lagwise compare --save`"
    ):
        records.read_runs(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"lines.jsonl, line 1 cannot be read .*: mend the line, or delete it"):
        records.read_runs(path)
    begun = Run.create(tmp_path / "begun", Config("process-50"), ENVIRONMENT)
    with pytest.raises(ValueError, match="must be a complete run"):
        records.line_about(begun)
    with pytest.raises(ValueError, match="--from must be a folder of runs, or a file of their lines"):
        records.stored_runs([tmp_path / "nothing"])


def test_repeat_trains_published_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    tiny = ["dim=8", "heads=2", "layers=1", "batch=4", "examples=20", "evaluate_examples=20", "data_seed=0"]
    saved = tmp_path / "lines.jsonl"
    common = ["--device", "cpu", "--jobs", "1", "--workers", "0"]
    places = ["--out", str(tmp_path / "first"), "--save", str(saved)]
    made = CliRunner().invoke(app, ["compare", "--encodings", "t5,none", "--seeds", "2", "--steps", "3", *tiny, *common, *places])
    assert made.exit_code == 0, made.output
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    changed = [{**line, "result": {**line["result"], "test": {"loss": 1.0, "accuracy": 0.25}}} for line in lines]
    saved.write_text("".join(json.dumps(line) + "\n" for line in changed))
    options = ["repeat", str(saved), *common, "--out", str(tmp_path / "again")]
    ended = CliRunner().invoke(app, [*options, "--encodings", "t5", "--seeds", "1"])
    assert ended.exit_code == 0, ended.output
    (first,) = [line for line in lines if line["config"]["encoding"] == "t5" and line["config"]["seed"] == 0]
    score = first["result"]["test"]["accuracy"]
    rows = [row for row in ended.output.splitlines() if "process-50" in row and "│" in row]
    assert [[cell.strip() for cell in row.strip("│ ").split("│")] for row in rows] == [
        ["process-50", "t5", "0", "accuracy", "0.2500", f"{score:.4f}", f"{score - 0.25:+.4f}"]
    ]
    saved.write_text(saved.read_text() + '{"bench": "r')
    cut = CliRunner().invoke(app, options)
    assert cut.exit_code == 1 and cut.output.count("│ process-50 ") == 4 and "line 5 cannot be read" in cut.output, cut.output
    saved.write_text("".join(json.dumps(line) + "\n" for line in changed))
    everything = CliRunner().invoke(app, options)
    assert everything.exit_code == 0 and everything.output.count("│ process-50 ") == 4, everything.output
    assert "not the published model" not in everything.output
    size = lines[0]["result"]["parameters"]
    larger = [{**line, "result": {**line["result"], "parameters": size + 8}} for line in lines[:1]]
    saved.write_text("".join(json.dumps(line) + "\n" for line in larger))
    other = CliRunner().invoke(app, options)
    assert f"has {size + 8:,} parameters and" in " ".join(other.output.split()), other.output


def test_repeat_says_what_it_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = stored(tmp_path / "runs", "t5", 0, 0.5, environment={**ENVIRONMENT, "data": "data/imdb", "device": "x", "commit": None})
    saved = tmp_path / "lines.jsonl"
    records.save_runs([run], saved)
    empty, mixed, damaged = (tmp_path / f"{name}.jsonl" for name in ("empty", "mixed", "damaged"))
    empty.write_text("")
    damaged.write_text("{\n")
    records.save_runs([run, stored(tmp_path / "others", "t5", 1, 0.5, environment={**ENVIRONMENT, "commit": None})], mixed)
    for arguments, words in (
        ([str(saved)], "trained on data/imdb, which is not there: pass --data"),
        ([str(saved), "--encodings", "at5"], "encodings must be among those of the runs, t5, but one is 'at5'"),
        ([str(saved), "--seeds", "0"], "should be greater than or equal to 1"),
        ([str(mixed)], "must have one kind of data, but have data/imdb, generated or built-in sample"),
        ([str(empty)], "there must be runs to repeat, but there are none"),
        ([str(damaged)], "damaged.jsonl, line 1 cannot be read"),
    ):
        ended = CliRunner().invoke(app, ["repeat", *arguments, "--device", "cpu", "--out", str(tmp_path / "out")])
        assert ended.exit_code == 2 and words in " ".join(ended.output.split()), ended.output


def cells(output):
    """Returns the first four words of each line that a command showed."""
    return [line.split()[:4] for line in output.splitlines()]


def test_compare_saves_lines_tunes_and_reads_them_again(tmp_path):
    runs = [with_rate(tmp_path / "runs", "t5", 0, rate, value, value) for rate, value in ((1e-3, 0.5), (1e-2, 0.7))]
    options = ["compare", "--tune", "rate", "--out", str(tmp_path / "out")]
    saved = tmp_path / "lines.jsonl"
    first = CliRunner().invoke(app, [*options, "--from", str(tmp_path / "runs"), "--save", str(saved)])
    assert first.exit_code == 0 and ["t5", "0.7000", "1", "0.01"] in cells(first.output), first.output
    assert len(saved.read_text().splitlines()) == len(runs) and json.loads(saved.read_text().splitlines()[0])["bench"] == "run"
    again = CliRunner().invoke(app, [*options, "--from", str(saved)])
    assert again.exit_code == 0 and ["t5", "0.7000", "1", "0.01"] in cells(again.output), again.output
