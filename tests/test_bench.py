"""The measurements, the command line and the example: they run, and what they say is what they measured."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import lagwise
from lagwise.bench import attention as bench
from lagwise.bench import baselines, plot, timing
from lagwise.bench.baselines import Contender
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


def test_a_slow_function_is_compared_with_the_turns_that_it_had():
    measured = {"plain": Measured([1.0, 1.0, 1.0, 9.0, 9.0]), "slow": Measured([5.0, 5.0, 5.0])}
    assert ratios(measured, "plain")["slow"] == 5.0


def fails():
    raise RuntimeError("out of\n  resource")


def test_what_fails_says_why_and_the_others_go_on():
    measured = measure({"plain": lambda: None, "broken": fails}, CPU, repeats=2)
    assert measured["broken"] == Measured([], error="RuntimeError: out of resource")
    assert len(measured["plain"].seconds) == 2 and ratios(measured, "plain").keys() == {"plain"}
    assert ratios(measured, "broken") == {}


def test_with_graphs_the_replay_is_timed_and_the_call_is_weighed(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "graphed", lambda function, device: lambda: calls.append("replay"))
    measured = measure({"call": lambda: calls.append("call")}, CPU, repeats=3, graph=True)
    assert calls == ["call"] * 2 + ["replay"] * 3 and len(measured["call"].seconds) == 3


def test_what_cannot_be_captured_has_an_error(monkeypatch):
    monkeypatch.setattr(timing, "graphed", lambda function, device: fails())
    assert measure({"call": lambda: None}, CPU, repeats=3, graph=True)["call"].error


@pytest.mark.parametrize("causal", [False, True])
def test_baselines_compute_the_same_as_the_encodings(causal):
    q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    t5 = lagwise.T5(heads=4, causal=causal)
    torch.nn.init.normal_(t5.weight)
    expected = lagwise.attention(q, k, v, t5, causal=causal, impl="dense")
    torch.testing.assert_close(baselines.dense_bias(q, k, v, t5, causal=causal), expected)
    torch.testing.assert_close(baselines.dense_bias_by_bucket(q, k, v, t5, causal=causal), expected)
    m4 = lagwise.HuangM4(heads=4, head_dim=8, max_lag=9)
    torch.nn.init.normal_(m4.weight)
    expected = lagwise.attention(q, k, v, m4, causal=causal, impl="dense")
    torch.testing.assert_close(baselines.eager_m4(q, k, v, m4, causal=causal), expected)


@pytest.mark.parametrize(
    "name, options", [("t5", {}), ("shaw", {"max_lag": 9, "values": False}), ("huang4", {"max_lag": 9})], ids=str
)
def test_flex_attention_computes_the_same_as_the_encodings(name, options):
    q, k, v = (torch.randn(2, 4, 120, 8) for _ in range(3))
    encoding = lagwise.make(name, heads=4, head_dim=8, **options).requires_grad_(False)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    torch.testing.assert_close(baselines.flex(q, k, v, encoding), lagwise.attention(q, k, v, encoding, impl="dense"))


@pytest.mark.parametrize("time", [512, 8192, 32768])
def test_baselines_on_a_gpu(time):
    """All of them are offered or have a reason; they are not run here."""
    with FakeTensorMode():
        q = torch.empty(1, 2, time, 64, device="cuda", dtype=torch.bfloat16)

    def offered(name, **options):
        found = baselines.baselines_of(q, q, q, lagwise.make(name, heads=2, head_dim=64, **options), causal=False)
        assert all(isinstance(entry, list) or entry.startswith("left out: ") for entry in found.values())
        return {name: isinstance(entry, list) for name, entry in found.items()}

    assert list(baselines.plain_contenders(q, q, q, causal=False)) == ["plain cuDNN", "plain flash"]
    dense, short = time <= 16384, time <= 2048
    assert offered("t5") == {"dense bias": dense, "dense bias, by bucket": short, "FlexAttention": True}
    assert offered("huang4") == {"eager M4": short, "FlexAttention": True}
    assert offered("shaw", values=False) == {"FlexAttention": True}
    assert offered("shaw") == offered("huang3") == offered("kerple") == {}


GOALS = {
    (16, 12, 512, 64): [2.0, 2.5, 4.0, 2.5, 3.0],
    (2, 16, 8192, 64): [1.35, 1.5, 2.0, 2.5],
    (2, 16, 8192, 128): [1.35, 1.5, 2.0, 2.5],
    (1, 16, 32768, 64): [1.15, 1.2, 1.4, 2.5],
}


def test_the_cases_on_a_gpu_are_those_of_the_table_of_goals():
    found: dict[tuple, dict[str, float | None]] = {}
    for case in bench.CUDA_CASES:
        shape = (case.batch, case.heads, case.time, case.head_dim)
        assert case.graph == (case.time == 512)
        assert case.words not in found.setdefault(shape, {})
        found[shape][case.words] = case.goal
    groups = [
        ["t5", "at5, max_lag=128", "huang1, max_lag=128", "huang2, max_lag=128"],
        ["shaw, max_lag=128, values=False", "huang4, max_lag=128"],
        ["huang3, max_lag=128", "shaw, max_lag=128"],
        ["t5-free, max_lag={}", "at5, max_lag=None", "kerple"],
        ["huang4, max_lag={}"],
    ]
    assert found == {
        shape: {name.format(shape[2]): goal for goal, group in zip(goals, groups, strict=False) for name in group}
        for shape, goals in GOALS.items()
    }


def test_every_case_names_an_encoding_that_can_be_made():
    for case in (*bench.CPU_CASES, *bench.CUDA_CASES):
        lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options)


@pytest.fixture
def unweighed(monkeypatch):
    """Spares a test the profiler, which takes most of its time."""
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)


def run_tiny(**options):
    records = bench.run(bench.Case("t5", 1, 2, 32, 8), device=CPU, dtype=torch.float32, repeats=1, **options)
    return {record["contender"]: record for record in records}


@pytest.mark.usefixtures("unweighed")
def test_a_line_has_numbers_or_an_error(monkeypatch):
    def entries(q, k, v, encoding, *, causal):
        def works():
            return q + k + v

        return {
            "broken": [Contender(fails)],
            "cut": [Contender(fails, facts={"tiles": 64}), Contender(works, facts={"tiles": 32}), Contender(fails)],
            "too large": "left out: it does not fit",
        }

    monkeypatch.setattr(bench, "baselines_of", entries)
    records = run_tiny()
    assert list(records) == ["plain", "lagwise", "broken", "cut", "too large"]
    assert records["broken"]["error"] == "RuntimeError: out of resource" and "training_ms" not in records["broken"]
    assert records["cut"]["tiles"] == 32 and records["cut"]["training_ms"] > 0
    assert records["too large"]["error"] == "left out: it does not fit"
    assert "error" not in records["plain"] and records["plain"]["training_ratio"] == 1.0


@pytest.mark.usefixtures("unweighed")
def test_without_its_anchor_a_line_has_no_ratio(monkeypatch):
    monkeypatch.setattr(bench, "plain_contenders", lambda q, k, v, *, causal: {"plain": [Contender(fails)]})
    records = run_tiny(quick=True)
    assert records["plain"]["error"] and records["lagwise"]["training_ratio"] is None and records["lagwise"]["training_ms"] > 0


@pytest.mark.usefixtures("unweighed")
def test_an_implementation_that_refuses_is_a_line_too():
    assert "unknown" in run_tiny(impl="unknown", quick=True)["lagwise"]["error"]


@pytest.mark.usefixtures("unweighed")
def test_quick_leaves_out_the_baselines_and_deterministic_adds_ours():
    assert run_tiny(quick=True).keys() == {"plain", "lagwise"}
    seen = []

    class Watched(lagwise.T5):
        def terms(self, *args, **options):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().terms(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "make", lambda case, device: Watched(heads=case.heads))
        assert run_tiny(quick=True, deterministic=True).keys() == {"plain", "lagwise", "lagwise, deterministic"}
    assert set(seen) == {False, True} and not torch.are_deterministic_algorithms_enabled()


def read_lines(folder: Path, name: str) -> list[dict]:
    (path,) = folder.glob(f"{name}-cpu-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("unweighed")
def test_a_sweep_saves_its_lines_and_a_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.SWEEP_TIMES, "cpu", [16, 32, 64])
    monkeypatch.setattr(baselines, "DENSE_BIAS_UP_TO", 16)
    result = CliRunner().invoke(app, ["bench", "attention", "--device", "cpu", "--sweep", "--time", "32", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "left out: a bias for each of 32 x 32 pairs" in result.output
    lines = read_lines(tmp_path, "sweep")
    names = ["plain", *bench.sweep_cases(16, CPU), "dense bias"]
    assert [(line["time"], line["contender"]) for line in lines] == [(time, name) for time in (16, 32) for name in names]
    assert [line["contender"] for line in lines if "error" in line] == ["dense bias"]
    assert all(line["encoding"] in line["contender"] for line in lines if line["contender"].startswith("lagwise"))
    (picture,) = tmp_path.glob("sweep-cpu-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def sweep_line(contender: str, time: int, **numbers) -> dict:
    return {
        "bench": "sweep", "contender": contender, "batch": 1, "heads": 4, "time": time, "head_dim": 64, "device": "a machine",
        "torch": "2", "lagwise": "0", "dtype": "float32", "commit": None, "date": "2026-11-15", **numbers,
    }  # fmt: skip


def test_a_plot_is_drawn_again_from_lines(tmp_path):
    lines = [sweep_line("plain", time, training_ms=1.0 * time, peak_bytes=time) for time in (512, 512, 1024)]
    lines += [sweep_line("mine", 512, training_ms=2.0, peak_bytes=3), sweep_line("mine", 1024, error="left out: too long")]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"bench": "attention"}]))
    assert len(plot.read(path)) == 4
    for options, picture in (([], "lines.png"), (["--out", str(tmp_path / "new" / "picture.png")], "new/picture.png")):
        result = CliRunner().invoke(app, ["bench", "plot", str(path), *options])
        assert result.exit_code == 0, result.output
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_lines_of_a_sweep(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"bench": "attention"}))
    result = CliRunner().invoke(app, ["bench", "plot", str(path)])
    assert result.exit_code == 2 and "no lines of a sweep" in result.output


@pytest.mark.usefixtures("unweighed")
def test_without_matplotlib_the_numbers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.SWEEP_TIMES, "cpu", [16])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ["--device", "cpu", "--sweep", "--quick", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "attention", *options])
    assert result.exit_code == 0 and "lagwise[plot]" in result.output and "lagwise bench plot" in result.output
    assert len(read_lines(tmp_path, "sweep")) == 5
    (path,) = tmp_path.glob("*.jsonl")
    result = CliRunner().invoke(app, ["bench", "plot", str(path)])
    assert result.exit_code == 1 and "lagwise[plot]" in result.output


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
    records = read_lines(tmp_path, "attention")
    assert {record["contender"] for record in records} == {"plain", "lagwise", "dense bias", "eager M4"}
    for record in records:
        assert record["training_ms"] > 0 and record["peak_bytes"] > 0 and record["torch"] == torch.__version__
        assert record["commit"] and record["date"] and record["device"]


def test_bench_attention_refuses_an_encoding_without_a_case():
    result = CliRunner().invoke(app, ["bench", "attention", "--encoding", "t6"])
    assert result.exit_code == 2 and "there are" in result.output


def test_a_sweep_has_encodings_of_its_own():
    result = CliRunner().invoke(app, ["bench", "attention", "--sweep", "--encoding", "t5"])
    assert result.exit_code == 2 and "--sweep" in result.output


def test_encodings_lists_all_of_them():
    result = CliRunner().invoke(app, ["encodings"])
    assert result.exit_code == 0 and all(name in result.output for name in lagwise.ENCODINGS)


@pytest.mark.parametrize("arguments", [[], ["bench"], ["bench", "attention"], ["bench", "plot"], ["encodings"]], ids=" ".join)
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
