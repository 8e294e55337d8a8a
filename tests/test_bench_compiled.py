"""Training of a deep encoder in each mode: what is compiled is counted, and what is compiled again for another length."""

import json

import pytest
import torch
from typer.testing import CliRunner

import lagwise
from lagwise.lab.bench import compiled as bench
from lagwise.lab.bench import timing
from lagwise.lab.bench.changes import labels_of, read_lines
from lagwise.lab.cli import app

CPU, GPU = torch.device("cpu"), torch.device("cuda")

pytestmark = [
    # Inductor's own imports warn on some Python versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "cpu", {"batch": 1, "heads": 2, "time": 20, "head_dim": 4, "layers": 2})
    monkeypatch.setitem(bench.MODES, "compile", {"backend": "eager"})
    monkeypatch.setitem(bench.MODES, "dynamic", {"backend": "eager", "dynamic": True})
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)


def invoke(folder, *options):
    return CliRunner().invoke(app, ["bench", "compiled", "--device", "cpu", "--repeats", "1", "--out", str(folder), *options])


def lines_of(folder):
    (path,) = folder.glob("compiled-cpu-*.jsonl")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_mode_has_a_line_for_each_encoding(tmp_path):
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    path, lines = lines_of(tmp_path)
    names = ["lagwise, none", "lagwise, t5", "lagwise, huang4"]
    expected = [(mode, name) for mode in ("eager", "compile", "dynamic") for name in names]
    assert [(line["mode"], line["contender"]) for line in lines] == expected
    for line in lines:
        assert line["layer_ms"] == pytest.approx(line["step_ms"] / 2) and line["step_ms"] > 0 and line["first_step_s"] > 0, line
        assert line["graph_breaks"] == 0 and line["kernels"] is line["cudagraph_skips"] is None and line["step_ratio"] > 0
        assert line["graphs"] == (line["mode"] != "eager")
        # torch takes the first length for the only one, unless it is told otherwise.
        assert line.get("recompiles") == {"eager": None, "compile": 1, "dynamic": 0}[line["mode"]]
    assert len(read_lines(path)) == len(lines), "modes are lines of their own in a comparison"
    assert labels_of(lines[-1])[0] == "compiled: huang4, max_lag=128, mode dynamic"


def test_modes_and_encodings_are_chosen_by_name(tmp_path):
    assert invoke(tmp_path, "--mode", "dynamic", "--encoding", "alibi", "--no-lengths").exit_code == 0
    _, lines = lines_of(tmp_path)
    assert [(line["mode"], line["encoding"]) for line in lines] == [("dynamic", "none"), ("dynamic", "alibi")]
    assert all("recompiles" not in line for line in lines)
    refusals = {"--mode": ("reduce-overhead", "no mode 'reduce-overhead' here"), "--encoding": ("no", "no case of 'no'")}
    for option, (value, words) in refusals.items():
        refused = invoke(tmp_path, option, value)
        assert refused.exit_code == 2 and words in refused.output


def test_a_gpu_has_cuda_graphs_and_the_encoder_of_the_goals():
    assert bench.modes_on(GPU) == ["eager", "compile", "dynamic", "reduce-overhead"]
    case = bench.depth_of("huang4", "compile", GPU)
    assert (case.batch, case.heads, case.time, case.head_dim, case.layers) == (16, 12, 512, 64, 12)
    assert case.options == {"max_lag": 128} and case.other_lengths == (448, 384)


def test_breaks_are_counted_and_encoders_that_fail_say_why(tmp_path, monkeypatch):
    class Breaking(lagwise.nn.Encoder):
        def forward(self, x):
            torch._dynamo.graph_break()
            if isinstance(self.encoding, lagwise.ENCODINGS["alibi"]):
                raise RuntimeError("no such kernel")
            return super().forward(x)

    monkeypatch.setattr(lagwise.nn, "Encoder", Breaking)
    result = invoke(tmp_path, "--mode", "compile", "--encoding", "alibi", "--no-lengths")
    assert result.exit_code == 0 and "compile, lagwise, alibi: RuntimeError: no such kernel" in result.output
    _, (none, alibi) = lines_of(tmp_path)
    assert none["graph_breaks"] > 0 and "step_ms" not in alibi
