"""Folders of runs: one owner at a time, and files that are damaged, cut off, or written by somebody else meanwhile."""

import json
import os
import random
import resource
import time
from multiprocessing import get_context

import pytest
import torch
from test_compare import ENVIRONMENT, stored
from typer.testing import CliRunner

from lagwise.lab import checkpoint as checkpoints
from lagwise.lab import lock, records
from lagwise.lab.checkpoint import Checkpoint
from lagwise.lab.cli import app
from lagwise.lab.config import Config, difference_words
from lagwise.lab.json_files import add_line, replace_text
from lagwise.lab.run_folder import CONFIG, FAILURE, METRICS, PRIORS, RESULT, Run, runs_in

CONTEXT = get_context("fork")
"""Processes that have the library loaded already."""

CUT = b'{"encoding": "t'
NO_TEXT = b'{"encoding": "\xff\xfe"}'
OTHER = b"12"


def test_a_difference_is_told_field_by_field():
    there = Config("adding", "t5", seed=1, encoding_options={"max_lag": 9, "buckets": 8}, lengths=(3,))
    here = Config("adding", "t5", steps=7, encoding_options={"buckets": 8}, task_options={"length": None})
    assert difference_words(there, here) == (
        "steps is 1000 there and 7 here, lengths is [3] there and [] here, seed is 1 there and 0 here, "
        "encoding.max_lag is 9 there and not given here, task.length is not given there and null here"
    )
    assert difference_words(there, Config.from_json(json.loads(json.dumps(there.to_json())))) == ""


def test_a_folder_says_in_what_its_run_differs(tmp_path):
    Run.create(tmp_path, Config("adding"), ENVIRONMENT)
    with pytest.raises(ValueError, match=r"another config \(seed is 0 there and 3 here\): choose another folder"):
        Run.create(tmp_path, Config("adding", seed=3), ENVIRONMENT)
    with pytest.raises(ValueError, match=r"on other data \(generated or built-in sample, not files\): give the data"):
        Run.create(tmp_path, Config("adding"), {**ENVIRONMENT, "data": "files"})


def test_data_may_be_named_by_another_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Run.create(tmp_path / "run", Config("adding"), {**ENVIRONMENT, "data": "data"})
    assert Run.create(tmp_path / "run", Config("adding"), {**ENVIRONMENT, "data": str(tmp_path / "data")}).exists


@pytest.mark.parametrize("content", [CUT, NO_TEXT, OTHER, b"", b"{}"], ids=["cut", "no text", "other", "empty", "no fields"])
@pytest.mark.parametrize("name", [CONFIG, "environment.json", RESULT, METRICS, PRIORS])
def test_a_damaged_file_is_named_and_the_others_are_compared(tmp_path, name, content):
    good, bad = stored(tmp_path, "t5", 0, 0.7), stored(tmp_path, "none", 0, 0.5)
    bad.log({"step": 1, "loss": 1.0})
    if name == METRICS and content == b"":
        content = b"\n"
    (bad.folder / name).write_bytes(content + (b"\n" if name == METRICS else b""))
    told = []
    assert [run.folder for run in records.stored_runs([tmp_path], told.append)] == [good.folder]
    (words,) = told
    assert str(bad.folder / name) in words and "cannot be read" in words
    assert any(remedy in words for remedy in ("restore it, or delete the folder", "delete result.json", "mend the line"))


@pytest.mark.parametrize("name", [CONFIG, "environment.json"])
def test_a_run_that_has_lost_a_file_is_told(tmp_path, name):
    run = stored(tmp_path, "none", 0, 0.5)
    (run.folder / name).unlink()
    told = []
    assert records.stored_runs([tmp_path], told.append) == []
    assert f"{run.folder / name} cannot be read (No such file or directory): restore it" in told[0]


def test_the_table_and_the_page_say_what_is_left_out(tmp_path):
    stored(tmp_path / "runs", "t5", 0, 0.7)
    bad = stored(tmp_path / "runs", "none", 0, 0.5)
    (bad.folder / RESULT).write_bytes(CUT)
    begun = Run.create(tmp_path / "runs" / "begun", Config("process-50", "shaw"), ENVIRONMENT)
    saved = tmp_path / "lines.jsonl"
    options = ["--from", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--save", str(saved)]
    done = CliRunner().invoke(app, ["compare", *options])
    assert done.exit_code == 1 and "0.7" in done.output and len(saved.read_text().splitlines()) == 1
    page = (tmp_path / "out" / "report.html").read_text()
    for words in (f"{bad.folder / RESULT} cannot be read", f"{begun.folder}: it was stopped before its end"):
        assert words in " ".join(done.output.split()) and words in page


def test_a_line_that_cannot_be_read_is_named_and_the_others_are_compared(tmp_path):
    path = tmp_path / "lines.jsonl"
    records.save_runs([stored(tmp_path / "runs", name, 0, 0.5) for name in ("at5", "t5")], path)
    first, second = path.read_bytes().splitlines()
    no_metric = json.loads(first) | {"result": {**json.loads(first)["result"], "test": {"loss": 1.0}}}
    no_task = json.loads(first) | {"config": {**json.loads(first)["config"], "task": "proces-50"}}
    bad = [first[:50], NO_TEXT, b"", b'{"bench": "run"}', json.dumps(no_metric).encode(), json.dumps(no_task).encode()]
    path.write_bytes(b"\n".join([*bad, second]) + b"\n")
    told = []
    assert [run.config.encoding for run in records.read_runs(path, told.append)] == ["t5"]
    assert len(told) == len(bad) and all(f"lines.jsonl, line {number}" in words for number, words in enumerate(told, 1))
    assert "has no accuracy" in told[4] and "did you mean 'process-50'?" in told[5]
    with pytest.raises(ValueError, match=r"lines.jsonl, line 1 cannot be read"):
        records.read_runs(path)
    done = CliRunner().invoke(app, ["compare", "--from", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "\nt5 " in done.output and "lines.jsonl, line 6" in done.output


def test_a_reason_that_is_damaged_is_no_reason_to_stop(tmp_path):
    run = Run.create(tmp_path, Config("process-50"), ENVIRONMENT)
    (tmp_path / FAILURE).write_bytes(CUT)
    assert f"{tmp_path / FAILURE} cannot be read" in run.failure


def test_a_config_that_was_changed_after_the_run_is_told(tmp_path):
    run = stored(tmp_path, "t5", 0, 0.5)
    state = {"config": run.config.to_json()}
    checkpoints.save_checkpoint(run.checkpoints, Checkpoint(4, {"model": {"x": torch.zeros(1)}}, state))
    assert len(records.stored_runs([tmp_path])) == 1
    replace_text(run.folder / CONFIG, json.dumps({**run.config.to_json(), "dim": 64}))
    told = []
    assert records.stored_runs([tmp_path], told.append) == []
    assert "is of another run than" in told[0] and "dim is 128 there and 64 here" in told[0]


def test_what_was_read_stays_when_the_folder_changes(tmp_path):
    run = stored(tmp_path, "t5", 0, 0.5)
    (found,) = records.stored_runs([tmp_path])
    run.forget_after(0)
    assert run.result is None and found.result["test"]["accuracy"] == 0.5 and found.lines == []


def test_runs_are_found_while_folders_go(tmp_path, monkeypatch):
    run = stored(tmp_path, "t5", 0, 0.5)
    (run.folder / "a").mkdir()
    real = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("a"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [found.folder for found in runs_in([tmp_path])] == [run.folder]


def test_a_line_after_one_that_was_cut_off_stands_by_itself(tmp_path):
    path = tmp_path / "lines.jsonl"
    for text in ("", "{", '{"a": 1}\n'):
        path.write_text(text)
        add_line(path, {"b": 2})
        assert path.read_text().splitlines()[-1] == '{"b": 2}'
        assert len(path.read_text().splitlines()) == (2 if text else 1)


def test_a_draft_that_cannot_be_finished_goes(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    replace_text(path, "before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        replace_text(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["file.json"]


def test_a_checkpoint_that_goes_while_it_is_read_is_no_damaged_one(tmp_path, monkeypatch):
    def save(step):
        checkpoints.save_checkpoint(tmp_path, Checkpoint(step, {"model": {"x": torch.zeros(1)}}, {}), keep=1)

    save(1)
    real = checkpoints.digest

    def digest(path):
        monkeypatch.setattr(checkpoints, "digest", real)
        save(2)
        return real(path)

    monkeypatch.setattr(checkpoints, "digest", digest)
    found = checkpoints.load_latest(tmp_path)
    assert found is not None and found.step == 2


def hold(folder, ready, done):
    with lock.owned(folder):
        ready.set()
        done.wait()


def test_a_folder_has_one_owner_and_a_killed_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "MOMENT", 0.2)
    ready, done = CONTEXT.Event(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(60)
    words = rf"in use by process {process.pid} on .* since 20.*: wait until that ends, or stop it"
    with pytest.raises(lock.Held, match=words), lock.owned(tmp_path):
        pass
    process.kill()
    process.join()
    with lock.owned(tmp_path):
        assert json.loads((tmp_path / lock.OWNER).read_text())["process"] == os.getpid()
    assert not (tmp_path / lock.OWNER).exists()


def test_a_process_that_was_forked_does_not_keep_what_its_parent_owned(tmp_path, monkeypatch):
    """As processes that make batches are, which end some seconds after a parent that was killed."""
    monkeypatch.setattr(lock, "MOMENT", 0.2)
    orphan, ready = CONTEXT.Value("i", 0), CONTEXT.Event()
    parent = CONTEXT.Process(target=own_and_fork, args=(tmp_path, orphan, ready))
    parent.start()
    assert ready.wait(60)
    parent.kill()
    parent.join()
    try:
        with lock.owned(tmp_path):
            pass
    finally:
        os.kill(orphan.value, 9)


def own_and_fork(folder, orphan, ready):
    with lock.owned(folder):
        child = os.fork()
        if child:
            orphan.value = child
            ready.set()
        time.sleep(60)


def save_for_ever(folder):
    """Trains nothing, and saves as a run does."""
    with lock.owned(folder):
        run = Run.create(folder, Config("adding"), ENVIRONMENT)
        last = checkpoints.load_latest(run.checkpoints)
        step = 0 if last is None else last.step
        run.forget_after(step)
        while True:
            step += 1
            run.log({"step": step, "loss": 1.0})
            tensors = {name: {"x": torch.full((1000,), float(step))} for name in ("model", "optimizer")}
            checkpoints.save_checkpoint(run.checkpoints, Checkpoint(step, tensors, {"config": run.config.to_json()}), keep=2)


def test_nothing_that_was_saved_is_lost_at_twenty_moments_of_kill(tmp_path):
    moments = random.Random(3)
    last = 0
    for _ in range(20):
        process = CONTEXT.Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        while not (tmp_path / "checkpoints" / f"step-{last + 1:08d}").exists() and process.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.03))
        seen = int(checkpoints.steps_in(tmp_path / "checkpoints")[-1].name.removeprefix("step-"))
        process.kill()
        process.join()
        # A damaged one would be told, and here what is told raises.
        found = checkpoints.load_latest(tmp_path / "checkpoints")
        assert found is not None and found.step >= seen > last
        assert all(x.eq(found.step).all() for own in found.tensors.values() for x in own.values())
        steps = [line["step"] for line in Run(tmp_path).lines]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= found.step
        last = found.step


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for command in (["train", "process-50"], ["compare", "--encodings", "t5"]):
        done = CliRunner().invoke(app, [*command, "--device", "cpu", "--out", str(tmp_path / "file" / "runs")])
        assert done.exit_code == 2, done.output
        assert "must be a folder, but cannot be made (Not a directory): choose another place" in " ".join(done.output.split())


def test_brackets_in_names_are_no_markup(tmp_path):
    odd = tmp_path / "a[/b][red]c"
    stored(odd, "t5", 0, 0.7)
    done = CliRunner().invoke(app, ["compare", "--from", str(odd), "--out", str(odd), "--save", str(odd / "[/i].jsonl")])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert f"written to {odd / '[/i].jsonl'}" in shown and f"open {odd / 'report.html'} in a browser" in shown


def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path):
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    add_line(path, {"kept": True})
    for write in (lambda: add_line(path, {"text": "x" * 9000}), lambda: replace_text(path, "x" * 9000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large, make room on the disk or raise its limit: '{path}'"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["file"] and path.read_text().startswith('{"kept": true}\n')
