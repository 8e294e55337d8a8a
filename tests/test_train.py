"""The harness: configs, order, checkpoints, and training that goes on as if it had never been stopped."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from typer.testing import CliRunner

from lagwise.extras import install_command
from lagwise.lab import checkpoint as checkpoints
from lagwise.lab import signals
from lagwise.lab.checkpoint import Checkpoint
from lagwise.lab.cli import app
from lagwise.lab.compare import plan
from lagwise.lab.config import Config, parse_fields, with_fields
from lagwise.lab.data import Order
from lagwise.lab.experiment import make_config
from lagwise.lab.grouping import OWN_FIELDS
from lagwise.lab.loop import Diverged, Session, Settings, encoding_parameters, make_optimizer
from lagwise.lab.run import Halted, load_trained, train
from lagwise.lab.run_folder import Run, runs_in
from lagwise.lab.schedule import factor
from lagwise.lab.signals import Interrupted

SMALL = {"dim": 16, "heads": 2, "layers": 1, "hidden": 32, "batch": 8, "steps": 20, "examples": 64, "evaluate_examples": 32}
CPU = Settings(device="cpu", report_every=1, save_every=5)


def small_config(encoding: str = "at5", **changes) -> Config:
    """Returns a config that trains in a second; its dropout draws random numbers."""
    return make_config("process-50", encoding, **{**SMALL, "dropout": 0.1, **changes})


def losses(folder: Path) -> dict[int, float]:
    """Returns the training loss at each step of a run."""
    return {line["step"]: line["loss"] for line in Run(folder).lines if "split" not in line}


def test_an_order_goes_through_all_examples_before_it_repeats_one():
    order = Order(examples=10, batch=4, seed=3)
    taken = [index for step in range(5) for index in order.indices(step)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert Order(examples=10, batch=4, seed=3).indices(4) == order.indices(4) != Order(examples=10, batch=4, seed=4).indices(4)


def test_a_batch_may_be_larger_than_the_data():
    taken = Order(examples=3, batch=7, seed=0).indices(0)
    assert sorted(taken[:3]) == sorted(taken[3:6]) == [0, 1, 2] and len(taken) == 7


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5), ("rsqrt", (10 / 60) ** 0.5)],
)
def test_rates_half_way(schedule, expected):
    step = 59 if schedule == "rsqrt" else 60
    assert factor(schedule, step, steps=110, warmup=10) == pytest.approx(expected)
    assert factor(schedule, 4, steps=110, warmup=10) == 0.5


def test_fields_in_words():
    changes = parse_fields(
        ["dim=256", "rate=3e-4", "norm=post", "encoding.max_lag=9", "task.length=20", "lengths=[100,200]", "head_dim=none"]
    )
    config = with_fields(Config("process-50"), changes)
    assert (config.dim, config.rate, config.norm, config.lengths, config.head_dim) == (256, 3e-4, "post", (100, 200), None)
    assert config.encoding_options == {"max_lag": 9} and config.task_options == {"length": 20}
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layer=3", "'layer' is no field of a run: did you mean 'layers'?"),
        ("dim=wide", "dim must be int, but is 'wide'"),
        ("dim=true", "dim must be int, but is True"),
        ("norm=mid", "norm must be 'pre', 'post', but is 'mid'"),
        ("model.dim=3", "options of the encoding and of the task are encoding.NAME and task.NAME"),
        ("dim", "fields are given as NAME=VALUE, such as dim=256, but 'dim' was given"),
    ],
)
def test_wrong_fields_say_what_to_do(words, message):
    with pytest.raises(ValueError) as raised:
        with_fields(Config("process-50"), parse_fields([words]))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("batch=0", "batch must be a whole number of at least 1, but is 0"),
        ("evaluate_batch=0", "evaluate_batch must be a whole number of at least 1, but is 0"),
        ("steps=-1", "steps must be at least 0, but is -1"),
        ("rate=-1", "rate must be at least 0, but is -1.0"),
        ("dropout=1", "dropout must be below 1, but is 1.0"),
        ("lengths=[9,0]", r"lengths[1] must be a whole number of at least 1, but is 0"),
    ],
)
def test_values_that_no_run_can_have(words, message):
    with pytest.raises(ValueError) as raised:
        with_fields(Config("process-50"), parse_fields([words]))
    assert message in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there():
    done = CliRunner().invoke(app, ["train", "process-50", "--device", "cuda"])
    assert done.exit_code == 2 and "torch finds no CUDA device" in done.output
    done = CliRunner().invoke(app, ["train", "process-50", "--device", "gpu"])
    assert done.exit_code == 2 and "--device must be auto, cpu or cuda, but is 'gpu'" in done.output


def test_all_of_the_time_is_counted_between_reports(tmp_path, monkeypatch):
    """Evaluations between reports are not training, and the steps before them are."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("lagwise.lab.loop.time.perf_counter", lambda: float(next(ticks)))
    result = train(small_config("t5", steps=6, evaluate_every=2), tmp_path, replace(CPU, report_every=4, save_every=0))
    # A clock that ticks when it is read: once for each of the reports at steps 2, 4 and 6.
    assert result["seconds"] == 3.0
    assert [line["step"] for line in Run(tmp_path).lines if "split" not in line] == [2, 4, 6]


def test_unknown_options_of_tasks_presets_and_tasks():
    with pytest.raises(ValueError, match=r"'lenght' is no option of the task: did you mean 'length'\?"):
        make_config("process-50", **{"task.lenght": 3})
    with pytest.raises(ValueError, match="preset must be one of process-50's"):
        make_config("process-50", preset="peper")
    with pytest.raises(ValueError, match=r"'process50' is no task: did you mean 'process-50'\?"):
        make_config("process50")


def test_configs_hold_the_one_name_of_an_encoding():
    assert make_config("process-50", "RoPE") == make_config("process-50", "rotary")
    assert [config.encoding for config in plan("process-50", ["rope", "T5", "t5"], seeds=1)] == ["rotary", "t5"]
    with pytest.raises(ValueError, match="unknown encoding 'rop': did you mean 'rope'"):
        plan("process-50", ["rop"], seeds=1)


def test_equal_configs_have_equal_fingerprints():
    config = small_config()
    assert config.fingerprint() == small_config().fingerprint() != replace(config, dim=18).fingerprint()
    assert replace(config, seed=5).fingerprint(without=["seed"]) == config.fingerprint(without=["seed"])


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoints.save_checkpoint(
            folder, Checkpoint(step, {"model": {"x": torch.full((3,), float(step))}}, {"seconds": 1.5}), keep=2
        )


def test_checkpoints_come_back_and_old_ones_go(tmp_path):
    write_steps(tmp_path, 1, 2, 3)
    found = checkpoints.load_latest(tmp_path)
    assert found is not None and found.step == 3 and found.state == {"seconds": 1.5}
    assert torch.equal(found.tensors["model"]["x"], torch.full((3,), 3.0))
    assert [path.name for path in checkpoints.steps_in(tmp_path)] == ["step-00000002", "step-00000003"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flip", "missing"])
@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, file):
    write_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / file)
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        found = checkpoints.load_latest(tmp_path)
    assert found is not None and found.step == 1


def test_a_checkpoint_that_was_never_finished_does_not_count(tmp_path):
    write_steps(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001")
    assert checkpoints.load_latest(tmp_path) is None
    write_steps(tmp_path, 1)
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_that_are_all_damaged_are_not_trained_over(tmp_path):
    write_steps(tmp_path, 1, 2)
    for step in checkpoints.steps_in(tmp_path):
        cut(step / "state.json")
    with pytest.raises(
        ValueError, match=r"no checkpoint that is whole \(.*state.json is not what.*\): restore one, or delete them"
    ):
        checkpoints.load_latest(tmp_path)


def test_a_damaged_checkpoint_of_a_later_step_is_not_kept_instead_of_a_whole_one(tmp_path):
    write_steps(tmp_path, 5, 20)
    cut(tmp_path / "step-00000020" / "state.json")
    checkpoints.save_checkpoint(tmp_path, Checkpoint(10, {}, {}), keep=1)
    with pytest.warns(UserWarning, match=r"step-00000020 is damaged .*: going on from step-00000010"):
        assert checkpoints.load_latest(tmp_path).step == 10


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    write_steps(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            OSError, match=r"File too large, make room on the disk or raise its limit: '.*step-00000002'"
        ) as raised:
            checkpoints.save_checkpoint(tmp_path, Checkpoint(2, {"model": {"x": torch.zeros(9999)}}, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG and os.listdir(tmp_path) == ["step-00000001"]


def test_weights_decay_and_encodings_have_a_rate_of_their_own():
    config = small_config("t5", weight_decay=0.1, rate=0.5, encoding_rate=3.0)
    model = Session(config, CPU).model
    groups = {(group["lr"], group["weight_decay"]): group["params"] for group in make_optimizer(model, config).param_groups}
    assert set(groups) == {(0.5, 0.1), (0.5, 0.0), (1.5, 0.0)}
    assert [id(x) for x in groups[1.5, 0.0]] == [id(x) for x in encoding_parameters(model).values()]
    assert all(x.ndim == 1 for x in groups[0.5, 0.0])
    assert sum(len(group) for group in groups.values()) == len(list(model.parameters()))


def test_a_run_is_a_folder_with_all_its_numbers(tmp_path):
    config = small_config("t5", dropout=0.0, steps=40, rate=3e-3, evaluate_every=20, lengths=(100,))
    result = train(config, tmp_path / "run", CPU)
    run = Run.open(tmp_path / "run")
    assert run.config == config and run.result == json.loads(json.dumps(result)) and "commit" in run.environment
    found = losses(run.folder)
    assert list(found) == list(range(1, 41)) and sum(list(found.values())[-5:]) < sum(list(found.values())[:5])
    evaluations = [line for line in run.lines if "split" in line]
    assert [(line["step"], line["split"], line.get("length")) for line in evaluations] == [
        (20, "validation", None), (40, "validation", None), (40, "test", None), (40, "test", 100),
    ]  # fmt: skip
    assert evaluations[-1]["loss"] == result["lengths"]["100"]["loss"] != result["test"]["loss"]
    assert result["encoding_parameters"] == 64 and result["peak_memory"] > 0 and not result["sample"]
    assert [each.folder for each in runs_in([tmp_path])] == [run.folder]


def test_a_folder_holds_one_run(tmp_path):
    train(small_config(steps=2), tmp_path, CPU)
    with pytest.raises(ValueError, match="holds a run that was begun: pass --resume"):
        train(small_config(steps=2), tmp_path, CPU)
    with pytest.raises(ValueError, match="holds a run with another config"):
        train(small_config(steps=3), tmp_path, CPU)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    own, other = small_config("t5", steps=5), small_config("t5", steps=5, seed=3, rate=0.1)
    for name, config in (("own", own), ("other", other)):
        train(config, tmp_path / name, CPU)
    shutil.rmtree(tmp_path / "own" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "own" / "checkpoints")
    words = "the checkpoint of step 5 in .* is of another run than .*config.json says .rate is 0.1 there .* here, seed is 3 there"
    with pytest.raises(ValueError, match=words):
        train(own, tmp_path / "own", CPU, resume=True)
    with pytest.raises(ValueError, match=words):
        load_trained(tmp_path / "own", CPU)
    with pytest.raises(ValueError, match=words):
        Session(small_config("t5", start=str(tmp_path / "own")), CPU)
    assert Run(tmp_path / "own").result is not None


def test_a_checkpoint_of_a_run_on_other_data_is_refused(tmp_path):
    config = small_config("t5", steps=5)
    (tmp_path / "files").mkdir()
    train(config, tmp_path / "own", CPU)
    train(config, tmp_path / "other", replace(CPU, data=tmp_path / "files"))
    shutil.rmtree(tmp_path / "own" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "own" / "checkpoints")
    with pytest.raises(ValueError, match=r"was trained on other data \(.*files, not generated or built-in sample\)"):
        train(config, tmp_path / "own", CPU, resume=True)


def test_a_disk_that_fills_up_is_told_with_what_is_saved(tmp_path, monkeypatch):
    real = checkpoints.write_tensors

    def full(path, tensors):
        if "step-00000010" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, tensors)

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(Halted, match=r"No space left on device.*make room.*step-00000005 is saved. Run it again to go on"):
        train(small_config(), tmp_path, CPU)
    monkeypatch.setattr(checkpoints, "write_tensors", real)
    train(small_config(), tmp_path, CPU, resume=True)
    assert list(losses(tmp_path)) == list(range(1, 21))


def test_a_process_that_makes_batches_and_dies_is_told_with_what_is_saved(tmp_path):
    def kill(line):
        if line["step"] == 7:
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()

    with pytest.raises(Halted, match=r"makes batches has ended.*fewer --workers.*step-00000005 is saved. Run it again to go on"):
        train(small_config(steps=2000), tmp_path, replace(CPU, workers=1), watch=kill)


def at_step(step, act):
    """Returns what is told of a run, and acts when it reports a step."""
    return lambda line: act() if line["step"] == step and "split" not in line else None


def ask(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_several_requests_in_a_row_save_once(tmp_path, number):
    with pytest.raises(Interrupted, match="saved after step 8; the same command with --resume goes on"):
        train(small_config(), tmp_path, CPU, watch=at_step(7, lambda: ask(number, number, signal.SIGINT)))
    assert checkpoints.load_latest(tmp_path / "checkpoints").step == 8


def test_a_request_during_the_last_step_is_heard(tmp_path):
    with pytest.raises(Interrupted, match="saved after step 20"):
        train(small_config(), tmp_path, CPU, watch=at_step(20, lambda: ask(signal.SIGINT)))
    assert Run(tmp_path).result is None


def test_a_later_request_ends_at_once_and_says_what_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE", 0.0)
    with pytest.raises(Interrupted, match=r"stopped at once, and saved nothing more: .*step-00000005 is saved"):
        train(small_config(), tmp_path, CPU, watch=at_step(7, lambda: ask(signal.SIGINT, signal.SIGINT)))
    assert checkpoints.load_latest(tmp_path / "checkpoints").step == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_outside_of_the_steps_says_what_is_saved(tmp_path, number):
    with pytest.raises(Interrupted, match=r"stopped at once.*step-00000020 is saved"):
        train(small_config(), tmp_path, CPU, watch=lambda line: ask(number) if "split" in line else None)


@pytest.mark.parametrize("encoding", ["at5", "sine-spe"])
def test_a_run_that_goes_on_computes_the_same(tmp_path, encoding):
    linear = {"attention": "linear", "redraw": 3} if encoding == "sine-spe" else {}
    config = small_config(encoding, **linear)
    train(config, tmp_path / "whole", CPU)
    # A run that has lost its last checkpoints and lines.
    train(config, tmp_path / "parts", replace(CPU, keep=9))
    for step in (15, 20):
        flip(tmp_path / "parts" / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")
    with pytest.warns(UserWarning, match="damaged"):
        train(config, tmp_path / "parts", CPU, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (checkpoints.load_latest(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    assert all(torch.equal(x, parts.tensors["model"][name]) for name, x in whole.tensors["model"].items())


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    config = small_config("t5", rate=1e36, warmup=0, clip=0.0, schedule="constant")
    with pytest.raises(Diverged, match=r"the loss is nan at step .*: the last checkpoint is from before. Try a smaller rate"):
        train(config, tmp_path, replace(CPU, report_every=7, save_every=1))
    found = checkpoints.load_latest(tmp_path / "checkpoints")
    assert found is None or all(x.isfinite().all() for x in found.tensors["sums"].values())
    assert Run(tmp_path).result is None


def command(folder: Path, *more: str) -> list[str]:
    fields = [f"{name}={value}" for name, value in {**SMALL, "dropout": 0.1, "steps": 300}.items()]
    return [
        "train",
        "process-50",
        "--encoding",
        "at5",
        "--folder",
        str(folder),
        "--device",
        "cpu",
        "--save-every",
        "5",
        *fields,
        *more,
    ]


def start(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "lagwise", *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen) -> None:
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        # Asked, not killed: a launcher takes its processes with it.
        process.terminate()
        raise AssertionError(f"not done after five minutes: {process.communicate()[0]}") from None
    assert process.returncode == 0, output


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    for _ in range(1200):
        if list((folder / "checkpoints").glob("step-*")):
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.05)
    raise AssertionError("no checkpoint after a minute")


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, by):
    process = start(*command(tmp_path / "parts"))
    wait_for_checkpoint(tmp_path / "parts", process)
    process.send_signal(by)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if by == signal.SIGKILL else 130), output
    if by == signal.SIGINT:
        assert "the same command with --resume goes on" in output
    last = checkpoints.load_latest(tmp_path / "parts" / "checkpoints").step
    assert last < 300 and Run(tmp_path / "parts").result is None
    finish(start(*command(tmp_path / "parts", "--resume")))
    finish(start(*command(tmp_path / "whole")))
    assert losses(tmp_path / "parts")[300] == losses(tmp_path / "whole")[300]
    assert Run(tmp_path / "parts").result["test"] == Run(tmp_path / "whole").result["test"]


def test_two_processes_compute_what_one_does(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    for folder, own in ((tmp_path / "one", ()), (tmp_path / "two", launcher)):
        finish(start(*command(folder, "dropout=0.0", "steps=20"), launcher=own))
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-4)
    assert two.result["test"] == pytest.approx(one.result["test"], rel=1e-3)
    # Two sum in another order, which shows that there were two.
    assert losses(two.folder) != losses(one.folder)


def test_nothing_holds_the_model_when_the_group_of_processes_ends(tmp_path, monkeypatch):
    """A wrapped model that is the last owner of its group waits for ever for the group's thread, now and then."""
    sessions, held = [], []

    class Watched(Session):
        def __init__(self, *given):
            super().__init__(*given)
            sessions.append(weakref.ref(self))

    monkeypatch.setattr("lagwise.lab.run.Session", Watched)
    monkeypatch.setattr(Accelerator, "end_training", lambda own: held.append((sessions[0](), own._models, own._optimizers)))
    train(small_config("t5", steps=1), tmp_path / "run", CPU)
    assert held == [(None, [], [])]


def test_the_command_line_from_training_to_evaluation(tmp_path):
    run = CliRunner().invoke
    done = run(app, command(tmp_path / "run", "steps=4"))
    assert done.exit_code == 0, done.output
    assert "parameters" in done.output and f"the run is in {tmp_path / 'run'}" in done.output.replace("\n", "")
    done = run(app, ["evaluate", str(tmp_path / "run"), "--lengths", "80", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [line["length"] for line in lines] == [None, 80] and lines[0]["loss"] == Run(tmp_path / "run").result["test"]["loss"]
    done = run(app, ["generate", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 2 and "nothing to generate" in done.output
    done = run(app, ["tasks"])
    assert done.exit_code == 0 and "process-50" in done.output
    done = run(app, command(tmp_path / "run", "--fields", "dim=48"))
    assert done.exit_code == 0 and "48" in done.output
    done = run(app, command(tmp_path / "other", "layer=3"))
    assert done.exit_code == 2 and "did you mean 'layers'?" in done.output


def test_a_model_starts_from_the_encoder_of_another(tmp_path):
    train(small_config("t5", steps=3), tmp_path / "first", CPU)
    first = checkpoints.load_latest(tmp_path / "first" / "checkpoints").tensors["model"]
    model = Session(small_config("t5", seed=9, start=str(tmp_path / "first")), CPU).model.state_dict()
    assert all(torch.equal(x, first[name]) == name.startswith(("embedding", "encoder")) for name, x in model.items())
    with pytest.raises(ValueError, match="start must be a run whose embedding and encoder have the sizes of this one"):
        Session(small_config("t5", dim=32, start=str(tmp_path / "first")), CPU)
    second = train(small_config("t5", steps=3, start=str(tmp_path / "first")), tmp_path / "second", CPU)
    shutil.rmtree(tmp_path / "first")
    assert load_trained(tmp_path / "second", CPU).evaluate("test") == second["test"]


def test_absolute_encodings_are_one_for_all_layers(tmp_path):
    """So that they can stand beside encodings of which each layer has its own."""
    layers = {name: Session(small_config(name, layers=2, per_layer=True), CPU).encoding_parameters for name in ("t5", "learned")}
    alone = {name: Session(small_config(name, layers=2), CPU).encoding_parameters for name in layers}
    assert layers == {"t5": 2 * alone["t5"], "learned": alone["learned"]}


def test_each_encoding_starts_from_a_run_of_its_own(tmp_path):
    pattern = str(tmp_path / "runs" / "{encoding}" / "*-seed{seed}")
    configs = [small_config(name, seed=seed, start=pattern) for name in ("t5", "rotary") for seed in (0, 1)]
    for config in configs:
        train(small_config(config.encoding, steps=1, seed=config.seed + 5), given_folder(tmp_path, config), CPU)
    (tmp_path / "runs" / "t5" / "empty-seed0").mkdir()
    for config in configs:
        given = checkpoints.load_latest(given_folder(tmp_path, config) / "checkpoints").tensors["model"]
        model = Session(config, CPU).model.state_dict()
        assert all(torch.equal(x, given[name]) == name.startswith(("embedding", "encoder")) for name, x in model.items())
    assert len({config.fingerprint(without=OWN_FIELDS) for config in configs}) == 1
    with pytest.raises(ValueError, match=r"start must describe one run .*/shaw/\*-seed0 describes 0 \(none\)"):
        Session(small_config("shaw", start=pattern), CPU)
    with pytest.raises(ValueError, match=r"describes 2 \(.*/t5/a-seed0, .*/t5/a-seed1\): write more of its name"):
        Session(small_config("t5", start=str(tmp_path / "runs" / "{encoding}" / "*")), CPU)


def given_folder(folder, config):
    return folder / "runs" / config.encoding / f"a-seed{config.seed}"


def test_bench_loop_measures_the_share_of_the_input(tmp_path):
    fields = [f"{name}={value}" for name, value in SMALL.items()]
    done = CliRunner().invoke(
        app, ["bench", "loop", "process-50", *fields, "--steps", "3", "--device", "cpu", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("loop-cpu-*.jsonl")
    record = json.loads(file.read_text())
    assert record["share"] == pytest.approx(record["fixed_ms"] / record["loop_ms"]) and record["config"]["dim"] == 16


def test_options_of_encodings_are_as_files_have_them():
    config = make_config("process-50", "at5", **{"encoding.widths": (15, 2)})
    assert config.encoding_options["widths"] == [15, 2] and Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_evaluation_uses_the_data_of_the_training(tmp_path):
    train(small_config("t5", steps=2), tmp_path / "run", CPU)
    written = tmp_path / "run" / "environment.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), "data": str(tmp_path / "gone")}))
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 2 and "is not there: pass --data" in done.output
    (tmp_path / "gone").mkdir()
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 0, done.output


def test_what_is_not_installed_is_said_in_words(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lagwise.lab.", "lagwise.lab.tasks"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    done = CliRunner().invoke(app, ["tasks"])
    assert done.exit_code == 1 and f"this needs torchmetrics: {install_command('train')}" in done.output
