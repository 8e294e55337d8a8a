"""What one call takes the host: every encoding has a line, kernels are counted, and first calls happen in new programs."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import lagwise
from lagwise.lab.bench import host as bench
from lagwise.lab.bench import timing
from lagwise.lab.bench.cases import Case
from lagwise.lab.bench.timing import Measured
from lagwise.lab.cli import app

CPU, GPU = torch.device("cpu"), torch.device("cuda")

SCALAR, VECTOR = (0.45, 0.15), (0.65, 0.25)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "cpu", Case("none", 1, 2, 8, 8))
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)


def invoke(folder, *options):
    return CliRunner().invoke(app, ["bench", "host", "--device", "cpu", "--out", str(folder), *options])


def read_lines(folder, name):
    (path,) = folder.glob(f"{name}-cpu-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_encoding_that_softmax_attention_takes_has_a_line(tmp_path):
    result = invoke(tmp_path, "--repeats", "1")
    assert result.exit_code == 0, result.output
    lines = read_lines(tmp_path, "host")
    names = [name for name in lagwise.ENCODINGS if name not in ("sinusoidal", "learned", "permute")]
    assert [line["contender"] for line in lines] == ["sdpa", *(f"lagwise, {name}" for name in names)]
    for line in lines:
        assert line["training_ms"] > 0 and line["forward_ms"] > 0 and line["training_ratio"] > 0, line
        assert line["kernels"] is line["training_goal_ms"] is line["forward_goal_ms"] is line["kernels_goal"] is None
    assert lines[0]["training_ratio"] == lines[0]["forward_ratio"] == 1.0 and "lagwise, huang4, max_lag=128" in result.output


def test_encodings_are_chosen_by_name(tmp_path):
    assert invoke(tmp_path, "--repeats", "1", "--encoding", "t5").exit_code == 0
    assert [line["contender"] for line in read_lines(tmp_path, "host")] == ["sdpa", "lagwise, t5"]
    refused = invoke(tmp_path, "--encoding", "learned")
    assert refused.exit_code == 2 and "no case of 'learned'" in refused.output


def test_goals_are_for_a_gpu_and_for_every_encoding_but_stochastic_ones():
    goals = {name: bench.goals_of(name, GPU) for name in bench.host_encodings()}
    times = {name: (goal["training_goal_ms"], goal["forward_goal_ms"]) for name, goal in goals.items()}
    assert times == {
        "none": (0.25, 0.10), "t5": SCALAR, "t5-free": SCALAR, "at5": VECTOR, "at5-free": VECTOR, "alibi": SCALAR,
        "kerple": SCALAR, "sandwich": SCALAR, "shaw": VECTOR, "huang1": SCALAR, "huang2": SCALAR, "huang3": VECTOR,
        "huang4": VECTOR, "xl": VECTOR, "rotary": SCALAR, "xpos": SCALAR, "sine-spe": (None, None), "conv-spe": (None, None),
    }  # fmt: skip
    kernels = {name: goal["kernels_goal"] for name, goal in goals.items() if goal["kernels_goal"]}
    assert kernels == {"t5": 12, "huang4": 20, "at5": 25}
    assert set(bench.goals_of("t5", CPU).values()) == {None}


def test_the_shape_on_a_gpu_is_that_of_the_goals():
    shape = bench.host_case("t5", GPU)
    assert (shape.batch, shape.heads, shape.time, shape.head_dim) == (8, 12, 256, 64) and not shape.graph
    assert bench.host_case("huang4", GPU).options == {"max_lag": 128} and bench.host_case("alibi", GPU).options == {}


def test_numbers_are_milliseconds_and_ratios_within_a_turn():
    training = {"sdpa": Measured([0.001, 0.002]), "ours": Measured([0.004, 0.008]), "broken": Measured([], error="no")}
    forward = {"sdpa": Measured([0.001]), "ours": Measured([0.002]), "broken": Measured([], error="no")}
    numbers = bench.numbers_of(training, forward)
    assert numbers["ours"] == {
        "training_ms": pytest.approx(6.0), "forward_ms": 2.0, "training_ratio": 4.0, "forward_ratio": 2.0, "turns": 2,
    }  # fmt: skip
    assert numbers["broken"] == {"error": "no"}


def test_a_call_that_fails_is_a_line_that_says_why(tmp_path, monkeypatch):
    def fails(*tensors):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(lagwise, "attention", fails)
    result = invoke(tmp_path, "--repeats", "1", "--encoding", "t5")
    assert result.exit_code == 0 and "lagwise, t5: RuntimeError: no such kernel" in result.output
    assert [("error" in line) for line in read_lines(tmp_path, "host")] == [False, True]


def test_training_gives_gradients_and_a_forward_pass_has_none():
    x, made = torch.ones(3, requires_grad=True), []

    def call():
        made.append(2 * x)
        return made[-1]

    bench.infer(call)
    bench.train(call, torch.ones(3))
    assert [each.requires_grad for each in made] == [False, True] and x.grad.tolist() == [2.0] * 3


def test_kernels_copies_and_fills_are_counted_and_gradients_are_not_added_up(monkeypatch):
    kinds = ["kernel", "gpu_memcpy", "kernel", "cuda_runtime", "gpu_user_annotation", "gpu_memset", None]
    leaf, grads = torch.ones(2, requires_grad=True), []
    leaf.grad = torch.ones(2)

    class Profiler:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def export_chrome_trace(self, path):
            events = [{"cat": kind} if kind else {} for kind in kinds]
            with open(path, "w") as file:
                json.dump({"traceEvents": events}, file)

    monkeypatch.setattr(bench, "profile", lambda activities: Profiler())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert bench.count_kernels(lambda: grads.append(leaf.grad), [leaf]) == 4 and grads == [None]


def test_a_first_call_is_one_of_a_new_program(tmp_path):
    result = invoke(tmp_path, "--first-call", "--encoding", "t5")
    assert result.exit_code == 0, result.output
    (line,) = read_lines(tmp_path, "first-call")
    assert line["bench"] == "first call" and line["contender"] == "lagwise, t5" and line["first_goal_s"] is None
    assert line["first_s"] > 0 and line["second_s"] > 0 and line["first_kernels"] is line["second_kernels"] is None


def test_two_programs_share_one_empty_cache(monkeypatch):
    told = []

    def run(command, *, env, **options):
        told.append((env["TRITON_CACHE_DIR"], json.loads(command[-1])))
        assert command[:3] == [sys.executable, "-m", "lagwise.lab.bench.host"]
        return SimpleNamespace(stdout=f'a warning\n{{"seconds": {len(told)}.5, "kernels": {9 - len(told)}}}\n')

    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench, "make_records", lambda bench, cases, numbers, *machine: [numbers])
    (numbers,) = bench.measure_first_call("t5", device=GPU, dtype=torch.float32)
    expected = {"first_goal_s": 10.0, "first_s": 1.5, "first_kernels": 8, "second_s": 2.5, "second_kernels": 7}
    assert numbers == {"lagwise, t5": expected}
    assert told[0] == told[1] and told[0][1]["device"] == "cuda" and told[0][1]["dtype"] == "float32"


def test_a_program_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "host_case", lambda encoding, device: Case("t6", 1, 2, 8, 8))
    result = invoke(tmp_path, "--first-call", "--encoding", "t5")
    assert result.exit_code == 0 and "lagwise, t5: ValueError: unknown encoding 't6'" in result.output
    (line,) = read_lines(tmp_path, "first-call")
    assert "first_s" not in line


def test_the_program_prints_seconds_and_compiles_nothing_on_a_cpu(capsys):
    told = {"case": vars(bench.host_case("t5", CPU)), "device": "cpu", "dtype": "float32"}
    bench.main(json.dumps(told))
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0 and found["kernels"] is None
