"""Comparisons: what is planned, what becomes of runs that are kept, resumed, fail or are stopped, and the statistics."""

import json
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lagwise
from lagwise.train import compare, loop
from lagwise.train.compare import FAILURE, estimate, folder_of, groups, league, leagues, plan, run_all, t_quantile
from lagwise.train.config import Config
from lagwise.train.loop import Diverged, Interrupted, Settings
from lagwise.train.store import Run

CPU = Settings(device="cpu")
ENVIRONMENT = {"device": "a CPU", "data": "generated or built-in sample"}


def result_of(test, *, metric="accuracy", **others):
    """Returns what a run of the given score leaves behind."""
    scores = {"loss": 1.0, metric: test}
    return {
        "parameters": 100, "encoding_parameters": 10, "steps": 4, "seconds": 2.0, "tokens_per_second": 50.0, "peak_memory": 1000,
        "sample": False, "validation": scores, "test": scores, "lengths": {}, **others,
    }  # fmt: skip


def stored(out, encoding, seed, test, *, config=None, environment=ENVIRONMENT, **others):
    """Makes the folder of a run that is complete."""
    config = replace(config or Config("process-50"), encoding=encoding, seed=seed)
    run = Run.create(folder_of(out, config), config, environment)
    run.finish(result_of(test, **others))
    return run


def fake_train(config, folder, settings, *, resume=False, watch=None):
    """Trains nothing: writes a run whose score is its seed, or goes wrong as the encoding says."""
    run = Run.create(folder, config, {**ENVIRONMENT, "threads": torch.get_num_threads(), "process": os.getpid()})
    run.log({"step": 1, "loss": 1.0, "resume": resume})
    if config.encoding == "shaw":
        raise Diverged("the loss is nan at step 1")
    if config.encoding == "xl":
        raise ValueError("heads must be at least 1, but is 0")
    if config.encoding == "xpos":
        raise RuntimeError("out of memory")
    if config.encoding == "kerple":
        os._exit(9)
    if watch is not None:
        watch({"step": 1, "loss": 1.0})
    run.finish(result_of(float(config.seed)))
    return run.result


def slow_train(config, folder, settings, *, resume=False, watch=None):
    """Trains nothing, until it is asked to stop, and then leaves a file for a checkpoint."""
    run = Run.create(folder, config, ENVIRONMENT)
    if resume and run.checkpoints.exists():
        run.finish(result_of(1.0))
        return
    with loop.stop_on_signal() as stopped:
        watch({"step": 1, "loss": 1.0})
        until = time.monotonic() + 60
        while not stopped and time.monotonic() < until:
            time.sleep(0.02)
    run.checkpoints.mkdir()
    raise Interrupted(1)


def configs_of(*encodings, seeds=1):
    return [Config("process-50", encoding, seed=seed) for encoding in encodings for seed in range(seeds)]


def test_a_plan_has_each_encoding_with_each_seed():
    found = plan("process-50", ["t5", "rotary", "t5"], seeds=2, changes={"dim": 16})
    assert [(config.encoding, config.seed, config.dim) for config in found] == [
        ("t5", 0, 16), ("t5", 1, 16), ("rotary", 0, 16), ("rotary", 1, 16),
    ]  # fmt: skip
    assert [config.seed for config in plan("process-50", "t5", seeds=[3, 8])] == [3, 8]
    assert [config.encoding for config in plan("listops", ["rotary"], seeds=1, preset="relu-sine")] == ["rotary"]
    assert {config.encoding for config in plan("process-50")} == set(compare.DEFAULT_ENCODINGS)


def test_all_are_those_that_the_attention_can_use_and_the_others_are_told():
    for attention, without in (
        ("softmax", {"permute"}),
        ("linear", {"shaw", "huang1", "huang2", "huang3", "huang4", "xl", "xpos"}),
    ):
        told = []
        found = plan("process-50", "all", seeds=1, changes={"attention": attention, "dim": 16}, tell=told.append)
        assert {config.encoding for config in found} == lagwise.ENCODINGS.keys() - without
        assert sorted(words.split()[0] for words in told) == sorted(without)


def test_what_is_left_out_is_not_left_out_in_silence():
    with pytest.warns(UserWarning, match="permute is left out: .* linear attention"):
        plan("process-50", "all", seeds=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"encodings": ["t6"]}, "'t6'.*did you mean"),
        ({"seeds": 0}, "seeds must be at least one"),
        ({"changes": {"seed": 1}}, "give seeds"),
        ({"changes": {"encoding": "t5"}}, "give encodings"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan("process-50", **arguments)


def test_seeds_of_a_config_lie_beside_each_other():
    first, second = configs_of("t5", seeds=2)
    assert folder_of(Path("out"), first).parent == Path("out/process-50/t5") == folder_of(Path("out"), second).parent
    assert folder_of(Path("out"), first).name.removesuffix("seed0") == folder_of(Path("out"), second).name.removesuffix("seed1")
    assert folder_of(Path("out"), replace(first, dim=8)).name != folder_of(Path("out"), first).name


def test_as_many_jobs_as_cores_on_a_cpu_and_one_on_a_gpu(monkeypatch):
    monkeypatch.setattr(compare, "cores", lambda: 6)
    assert (compare.default_jobs("cpu"), compare.default_jobs("cuda")) == (6, 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_are_done_kept_resumed_and_may_fail(tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(loop, "train", fake_train)
    monkeypatch.setattr(compare, "cores", lambda: 6)
    configs = configs_of("t5", "shaw", "xl", "xpos", "none", "rotary", seeds=1)
    kept, begun = configs[4], configs[5]
    stored(tmp_path, "none", 0, 0.5)
    Run.create(folder_of(tmp_path, begun), begun, ENVIRONMENT)
    (folder_of(tmp_path, begun) / FAILURE).write_text('{"error": "from before"}')
    events = []
    outcomes = run_all(configs, tmp_path, CPU, jobs=jobs, watch=events.append)
    assert [outcome.config for outcome in outcomes] == configs
    assert [outcome.status for outcome in outcomes] == ["ran", "failed", "failed", "failed", "kept", "resumed"]
    assert [outcome.error for outcome in outcomes] == [
        None, "the loss is nan at step 1", "heads must be at least 1, but is 0", "RuntimeError: out of memory", None, None,
    ]  # fmt: skip
    assert compare.failure_of(outcomes[1].run) == "the loss is nan at step 1"
    assert not (outcomes[5].folder / FAILURE).exists()
    assert Run(folder_of(tmp_path, kept)).result["test"]["accuracy"] == 0.5
    assert outcomes[5].run.lines[0]["resume"] is True
    lines = [(event["run"], event["of"], event["config"].encoding) for event in events if "line" in event]
    assert sorted(lines) == [(0, 6, "t5"), (5, 6, "rotary")]
    assert sorted(event["run"] for event in events if "outcome" in event) == list(range(6))
    environment = outcomes[0].run.environment
    assert (environment["process"] == os.getpid()) == (jobs == 1)
    assert environment["threads"] == (torch.get_num_threads() if jobs == 1 else 3)


def test_again_runs_what_is_complete_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train", fake_train)
    run = stored(tmp_path, "t5", 0, 0.5)
    run_all([run.config], tmp_path, CPU)
    assert run.result["test"]["accuracy"] == 0.5
    assert [outcome.status for outcome in run_all([run.config], tmp_path, CPU, again=True)] == ["ran"]
    assert run.result["test"]["accuracy"] == 0.0


def test_a_run_on_other_data_is_not_taken_for_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train", fake_train)
    run = stored(tmp_path, "t5", 0, 0.5)
    (outcome,) = run_all([run.config], tmp_path, replace(CPU, data=Path("files")))
    assert outcome.status == "failed" and "other data (generated or built-in sample, not files)" in str(outcome.error)


def test_a_process_that_dies_takes_its_run_alone_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train", fake_train)
    outcomes = run_all(configs_of("kerple", "t5", "rotary"), tmp_path, CPU, jobs=2)
    assert [outcome.status for outcome in outcomes] == ["failed", "ran", "ran"]
    assert "exit code 9" in str(outcomes[0].error)


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_stops_all_and_the_next_call_goes_on(tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(loop, "train", slow_train)
    configs = configs_of("t5", "rotary", "none")
    begun = []

    def watch(event):
        # A run that ends by itself has an outcome.
        assert "line" in event, event
        begun.append(event["run"])
        if len(begun) == jobs:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(Interrupted):
        run_all(configs, tmp_path, CPU, jobs=jobs, watch=watch)
    saved = [Run(folder_of(tmp_path, config)).checkpoints.exists() for config in configs]
    assert saved == [number < jobs for number in range(3)]
    found = run_all(configs[:jobs], tmp_path, CPU, jobs=1)
    assert [outcome.status for outcome in found] == ["resumed"] * jobs


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


def test_a_league_by_hand(tmp_path):
    scores = {"t5": [0.7, 0.8, 0.9], "none": [0.5, 0.5, 0.5], "rotary": [0.81]}
    for encoding, values in scores.items():
        for seed, value in enumerate(values):
            lengths = {"64": {"loss": 1.0, "accuracy": value - 0.1}, "128": {"refused": "it ends at 100"}}
            stored(tmp_path, encoding, seed, value, seconds=1.0 + seed, peak_memory=100 * seed or None, lengths=lengths)
    rows = league(store_runs(tmp_path))
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


def test_a_metric_of_which_less_is_better_sorts_the_other_way(tmp_path, monkeypatch):
    runs = [stored(tmp_path, "t5", 0, 0.2, metric="error"), stored(tmp_path, "none", 0, 0.1, metric="error")]
    monkeypatch.setattr(compare, "main_metric", lambda config: ("error", False))
    assert [row.encoding for row in league(runs)] == ["none", "t5"]


def test_what_is_no_number_comes_last(tmp_path):
    runs = [stored(tmp_path, name, 0, value) for name, value in (("t5", math.nan), ("none", 0.1), ("shaw", 0.2))]
    assert [row.encoding for row in league(runs)] == ["shaw", "none", "t5"]


def test_differences_are_taken_within_seeds(tmp_path):
    scores = {"t5": [0.5, 0.7, 0.9], "at5": [0.6, 0.9, 1.0], "none": [0.49, 0.69, 0.89], "rotary": [0.9]}
    runs = [stored(tmp_path, name, seed, value) for name, values in scores.items() for seed, value in enumerate(values)]
    runs.append(stored(tmp_path, "xl", 7, 0.5))
    found = {each.encoding: each for each in compare.differences(runs, "t5")}
    assert list(found) == ["rotary", "at5", "none", "xl"]
    # 0.1, 0.2, 0.1: mean 2 / 15, deviation 1 / sqrt(300); 4.302653 / 30 = 0.143422.
    assert found["at5"].estimate.mean == pytest.approx(0.4 / 3)
    assert found["at5"].estimate.half_width == pytest.approx(0.143422, abs=1e-6)
    assert found["at5"].better is None and found["at5"].seeds == (0, 1, 2)
    # The same difference in each seed is told apart, though the seeds differ by far more.
    assert found["none"].better is False
    assert found["rotary"].seeds == (0,) and found["rotary"].better is None
    assert found["xl"].estimate is None
    assert {each.encoding: each.better for each in compare.differences(runs, "none")}["t5"] is True
    with pytest.raises(ValueError, match=r"baseline must be one of t5, at5.*did you mean 'at5'"):
        compare.differences(runs, "at-5")


def test_runs_that_differ_in_more_are_in_tables_of_their_own(tmp_path):
    wide = Config("process-50", dim=256)
    runs = [stored(tmp_path, "t5", 0, 0.5), stored(tmp_path, "none", 0, 0.4), stored(tmp_path, "t5", 0, 0.6, config=wide)]
    found = leagues(runs)
    assert {title: [row.encoding for row in rows] for title, rows in found.items()} == {
        "process-50, dim=128": ["t5", "none"], "process-50, dim=256": ["t5"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"differ in more .process-50, dim=128; process-50, dim=256"):
        league(runs)
    elsewhere = stored(tmp_path / "other", "none", 0, 0.9, environment={**ENVIRONMENT, "data": "files"})
    assert [group.title for group in groups([runs[0], elsewhere])] == [
        "process-50, data=generated or built-in sample", "process-50, data=files",
    ]  # fmt: skip


def test_options_tell_runs_of_one_encoding_apart(tmp_path):
    runs = [
        stored(tmp_path, "t5", 0, value, config=Config("process-50", encoding_options={"buckets": buckets, "max_lag": 64}))
        for buckets, value in ((16, 0.5), (32, 0.6))
    ]
    assert [row.encoding for row in league([*runs, stored(tmp_path, "none", 0, 0.1)])] == [
        "t5 (buckets=32)", "t5 (buckets=16)", "none",
    ]  # fmt: skip


def test_the_same_run_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hold the same run"):
        league([stored(tmp_path / name, "t5", 0, 0.5) for name in "ab"])


def test_runs_that_are_not_complete_take_no_part(tmp_path):
    config = Config("process-50", "none")
    begun = Run.create(folder_of(tmp_path, config), config, ENVIRONMENT)
    assert [row.encoding for row in league([begun, stored(tmp_path, "t5", 0, 0.5)])] == ["t5"]
    with pytest.raises(ValueError, match="at least one that is complete"):
        league([begun])


def test_numbers_do_not_depend_on_the_jobs(tmp_path, monkeypatch):
    # As many threads for each run as the suite has here: one.
    monkeypatch.setattr(compare, "cores", lambda: 2)
    tiny = {"steps": 3, "dim": 16, "batch": 8, "examples": 32, "evaluate_examples": 16, "evaluate_batch": 16}
    configs = plan("process-50", ["t5", "rotary"], seeds=1, changes=tiny)
    lines = []
    for jobs in (1, 2):
        outcomes = run_all(configs, tmp_path / str(jobs), CPU, jobs=jobs)
        assert [outcome.error for outcome in outcomes] == [None, None]
        lines.append([without_time(outcome.run) for outcome in outcomes])
    assert lines[0] == lines[1] and len(lines[0][0]) >= 3
    again = run_all(configs, tmp_path / "1", CPU)
    assert [outcome.status for outcome in again] == ["kept", "kept"]


def without_time(run):
    return [json.dumps({name: value for name, value in line.items() if name != "seconds"}) for line in run.lines]
