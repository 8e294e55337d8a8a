"""The measurements, the command line and the example: they run, and what they say is what they measured."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lagwise
from lagwise.bench import attention as bench
from lagwise.bench import baselines
from lagwise.bench.timing import Measured, measure, peak_memory, ratios
from lagwise.cli import app

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")

# The profiler, which counts memory, warns of its own changes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_peak_memory_counts_what_is_held_at_once():
    def holds_three():
        kept = [torch.ones(1_000_000) for _ in range(3)]
        del kept
        torch.ones(1_000_000)

    assert 12_000_000 <= peak_memory(holds_three, CPU) < 12_500_000


def test_ratios_are_taken_within_a_turn():
    measured = {"plain": Measured([1.0, 2.0, 4.0], 0), "ours": Measured([2.0, 4.0, 8.0], 0)}
    assert ratios(measured, "plain") == {"plain": 1.0, "ours": 2.0}


def test_functions_run_in_turns():
    calls = []
    measure({name: lambda name=name: calls.append(name) for name in "ab"}, CPU, repeats=3)
    assert "".join(calls) == "aabb" + "ababab"


@pytest.mark.parametrize("causal", [False, True])
def test_baselines_compute_the_same_as_the_encodings(causal):
    q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    t5 = lagwise.T5(heads=4, causal=causal)
    torch.nn.init.normal_(t5.weight)
    expected = lagwise.attention(q, k, v, t5, causal=causal, impl="dense")
    torch.testing.assert_close(baselines.dense_bias(q, k, v, t5, causal=causal), expected)
    m4 = lagwise.HuangM4(heads=4, head_dim=8, max_lag=9)
    torch.nn.init.normal_(m4.weight)
    expected = lagwise.attention(q, k, v, m4, causal=causal, impl="dense")
    torch.testing.assert_close(baselines.eager_m4(q, k, v, m4, causal=causal), expected)


def test_every_case_names_an_encoding_that_can_be_made():
    for case in (*bench.CPU_CASES, *bench.CUDA_CASES):
        lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options)


def test_bench_attention_prints_a_table_and_saves_its_numbers(tmp_path):
    options = [
        "--device",
        "cpu",
        "--time",
        "64",
        "--repeats",
        "1",
        "--encoding",
        "t5",
        "--encoding",
        "huang4",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, ["bench", "attention", *options])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output and "eager M4" in result.output and "saved to" in result.output
    (path,) = tmp_path.glob("attention-cpu-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["contender"] for record in records} == {"plain", "lagwise", "dense bias", "eager M4"}
    for record in records:
        assert record["training_ms"] > 0 and record["peak_bytes"] > 0 and record["torch"] == torch.__version__
        assert record["commit"] and record["date"] and record["device"]


def test_bench_attention_refuses_an_encoding_without_a_case():
    result = CliRunner().invoke(app, ["bench", "attention", "--encoding", "t6"])
    assert result.exit_code == 2 and "there are" in result.output


def test_encodings_lists_all_of_them():
    result = CliRunner().invoke(app, ["encodings"])
    assert result.exit_code == 0 and all(name in result.output for name in lagwise.ENCODINGS)


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "attention"], ["encodings"]], ids=" ".join)
def test_help_teaches(arguments):
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0 and len(result.output) > 200


def test_the_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "lagwise", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "encodings" in result.stdout


def test_the_demonstration_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["process50.py", "--steps", "3", "--encodings", "none,at5"])
    runpy.run_path(str(ROOT / "examples" / "process50.py"), run_name="__main__")
    assert "at5" in capsys.readouterr().out


def test_the_demonstrations_strings_have_the_chains_statistics():
    example = runpy.run_path(str(ROOT / "examples" / "process50.py"))
    symbols, label = example["strings"](20_000, torch.Generator().manual_seed(0))
    for kind, (zero_to_one, one_to_zero) in enumerate(example["CHAINS"].tolist()):
        now, after = symbols[label == kind, :-1], symbols[label == kind, 1:]
        assert abs(float(after[now == 0].float().mean()) - zero_to_one) < 0.01
        assert abs(float((1 - after[now == 1]).float().mean()) - one_to_zero) < 0.01
        assert abs(float(now.float().mean()) - 1 / 3) < 0.01
