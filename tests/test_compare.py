"""Comparisons: what is planned, and what becomes of runs that are kept, resumed, fail or are stopped."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lagwise
from lagwise.lab import compare, lock
from lagwise.lab import run as run_module
from lagwise.lab.compare import folder_of, plan, run_all
from lagwise.lab.config import Config
from lagwise.lab.jobs import Job, do_run
from lagwise.lab.json_files import write_json
from lagwise.lab.lock import owned
from lagwise.lab.loop import Diverged, Settings
from lagwise.lab.run_folder import FAILURE, Run
from lagwise.lab.signals import Interrupted, interrupt, on_signal, stop_on_signal

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
    with stop_on_signal() as stopped:
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


def test_an_encoding_beside_a_preset_has_the_options_of_the_preset_that_is_alike():
    own, beside = plan("image", ["sine-spe", "conv-spe"], seeds=1, preset="relu-sine", changes={"task.grid": True})
    assert own.encoding_options["fixed"] is beside.encoding_options["fixed"] is True
    assert beside.encoding_options["kernel_size"] == 16  # what suits the task comes first: the preset has 128
    (alone,) = plan("image", "conv-spe", seeds=1)
    assert "fixed" not in alone.encoding_options
    (wider,) = plan("text", "sine-spe", seeds=1, preset="performer-ape")
    assert "fixed" not in wider.encoding_options  # its batch and rate are its own, so that no other is like it


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
    monkeypatch.setattr(run_module, "train", fake_train)
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
    assert outcomes[1].run.failure == "the loss is nan at step 1"
    assert not (outcomes[5].folder / FAILURE).exists()
    assert Run(folder_of(tmp_path, kept)).result["test"]["accuracy"] == 0.5
    assert outcomes[5].run.lines[0]["resume"] is True
    lines = [(event["run"], event["of"], event["config"].encoding) for event in events if "line" in event]
    assert sorted(lines) == [(0, 6, "t5"), (5, 6, "rotary")]
    assert sorted(event["run"] for event in events if "outcome" in event) == list(range(6))
    environment = outcomes[0].run.environment
    assert (environment["process"] == os.getpid()) == (jobs == 1)
    assert environment["threads"] == (torch.get_num_threads() if jobs == 1 else 3)


def test_one_process_does_runs_of_several_precisions(tmp_path):
    fields = {"steps": 1, "warmup": 0, "dim": 8, "batch": 2, "heads": 2, "evaluate_examples": 2}
    configs = plan("process-50", ["none"], seeds=1, changes=fields, tune={"precision": ["fp32", "bf16"]})
    outcomes = run_all(configs, tmp_path, CPU)
    assert [(outcome.status, outcome.error) for outcome in outcomes] == [("ran", None)] * 2
    losses = [run.result["test"]["loss"] for run in (outcome.run for outcome in outcomes) if run.result is not None]
    assert losses[0] != losses[1]


def test_again_runs_what_is_complete_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "train", fake_train)
    run = stored(tmp_path, "t5", 0, 0.5)
    run_all([run.config], tmp_path, CPU)
    assert run.result["test"]["accuracy"] == 0.5
    assert [outcome.status for outcome in run_all([run.config], tmp_path, CPU, again=True)] == ["ran"]
    assert run.result["test"]["accuracy"] == 0.0


def test_a_run_on_other_data_is_not_taken_for_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "train", fake_train)
    run = stored(tmp_path, "t5", 0, 0.5)
    (outcome,) = run_all([run.config], tmp_path, replace(CPU, data=Path("files")))
    assert outcome.status == "failed" and "other data (generated or built-in sample, not files)" in str(outcome.error)


def test_a_process_that_dies_takes_its_run_alone_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "train", fake_train)
    outcomes = run_all(configs_of("kerple", "t5", "rotary"), tmp_path, CPU, jobs=2)
    assert [outcome.status for outcome in outcomes] == ["failed", "ran", "ran"]
    assert "exit code 9" in str(outcomes[0].error)


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_stops_all_and_the_next_call_goes_on(tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(run_module, "train", slow_train)
    configs = configs_of("t5", "rotary", "none")
    begun, hurried = [], threading.Timer(0.1, hurry)

    def watch(event):
        # A run that ends by itself has an outcome.
        assert "line" in event, event
        begun.append(event["run"])
        if len(begun) == jobs:
            hurried.start()

    # As a command does, which hears what comes after the runs have stopped.
    with on_signal(interrupt):
        with pytest.raises(Interrupted, match="stopped; the same command goes on"):
            run_all(configs, tmp_path, CPU, jobs=jobs, watch=watch)
        hurried.join()
    saved = [Run(folder_of(tmp_path, config)).checkpoints.exists() for config in configs]
    assert saved == [number < jobs for number in range(3)]
    found = run_all(configs[:jobs], tmp_path, CPU, jobs=1)
    assert [outcome.status for outcome in found] == ["resumed"] * jobs


def hurry():
    """Asks to stop as somebody does who cannot wait."""
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)


def test_what_is_saved_of_runs_that_were_stopped_is_told(tmp_path, monkeypatch):
    def train(config, folder, settings, *, resume, watch):
        run = Run.create(folder, config, ENVIRONMENT)
        (run.checkpoints / "step-00000012").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", train)
    with pytest.raises(Interrupted, match=r"the same command goes on.*\n.*/t5/.*step-00000012 is saved$"):
        run_all(configs_of("t5", "rotary"), tmp_path, CPU)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_somebody_is_at_is_left_to_them(tmp_path, monkeypatch, again):
    def train(config, folder, settings, *, resume, watch):
        with owned(folder):
            return fake_train(config, folder, settings, resume=resume, watch=watch)

    monkeypatch.setattr(run_module, "train", train)
    monkeypatch.setattr(lock, "MOMENT", 0.1)
    configs = configs_of("t5", "rotary")
    theirs = Run.create(folder_of(tmp_path, configs[0]), configs[0], ENVIRONMENT)
    theirs.log({"step": 1, "loss": 1.0})
    with owned(theirs.folder):
        outcomes = run_all(configs, tmp_path, CPU, again=again)
    assert [outcome.status for outcome in outcomes] == ["failed", "ran"]
    assert f"in use by process {os.getpid()} on " in str(outcomes[0].error)
    assert len(theirs.lines) == 1 and not (theirs.folder / FAILURE).exists()


def test_a_run_that_another_comparison_has_done_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "train", fake_train)
    (config,) = configs_of("t5")
    job = Job(0, config, folder_of(tmp_path, config), CPU, fake_train)
    stored(tmp_path, "t5", 0, 0.5)
    assert do_run(job, print).status == "kept"


def test_one_run_that_cannot_be_read_or_written_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "train", fake_train)
    damaged, changed, _, last = configs = configs_of("t5", "at5", "none", "rotary")
    (stored(tmp_path, damaged.encoding, 0, 0.5).folder / "result.json").write_text("{")
    write_json(stored(tmp_path, changed.encoding, 0, 0.5).folder / "config.json", replace(changed, dim=4).to_json())
    (tmp_path / "process-50" / "rotary").write_text("a file")
    outcomes = run_all(configs, tmp_path, CPU)
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "ran", "failed"]
    assert "result.json cannot be read" in outcomes[0].error and "dim is 4 there and 128 here" in outcomes[1].error
    assert str(folder_of(tmp_path, last)) in outcomes[3].error


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
