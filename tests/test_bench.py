"""The measurements: they run, and what they say is what they measured."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import lagwise
from lagwise.extras import install_command
from lagwise.lab.bench import baselines, model_steps, sweep_plot, timing
from lagwise.lab.bench import linear as bench_linear
from lagwise.lab.bench import softmax as bench
from lagwise.lab.bench.cases import Case
from lagwise.lab.bench.contenders import Contender
from lagwise.lab.bench.timing import Measured, measure, ratios
from lagwise.lab.cli import app
from lagwise.lab.memory import peak_memory

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


NARROW = [
    ["t5", "alibi", "huang1, max_lag=128", "huang2, max_lag=128"],
    ["at5, max_lag=128"],
    ["shaw, max_lag=128, values=False"],
    ["huang4, max_lag=128"],
    ["shaw, max_lag=128"],
    ["huang3, max_lag=128"],
]
WIDE = [["t5-free, max_lag={}", "at5, max_lag=None", "kerple"], ["shaw, max_lag={}, values=False"], ["huang4, max_lag={}"]]
GOALS = {
    "B64 H12 T128 D64 graph": ([1.8, 2.2, 2.6, 3.6, 4.0, 6.0], []),
    "B16 H12 T512 D64 graph": ([1.6, 1.9, 2.3, 3.2, 3.5, 6.0], [2.5, None, 3.0]),
    "B4 H16 T2048 D64 graph": ([1.4, 1.5, 1.7, 2.2, 2.4, 3.0], [2.5, None, None]),
    "B4 H16 T2048 D128 causal graph": ([1.6, 1.7, 1.8, 2.3, 2.5, 3.0], []),
    "B2 H16 T8192 D64 graph": ([1.35, 1.4, 1.5, 1.6, 1.9, 2.2], [2.5]),
    "B2 H16 T8192 D128": ([1.35, 1.35, 1.5, 1.5, 2.0, 2.0], [2.5]),
    "B1 H16 T32768 D64": ([1.15, 1.15, 1.2, 1.2, 1.4, 1.4], [2.5]),
    "B32 H12 T384 D64 eager": ([1.8, 2.4, 2.6, 3.5, 4.0, 6.0], []),
}
RAGGED_SHAPES = [
    "B16 H12 T512 D64 graph lengths",
    "B16 H12 T512 D64 graph cu_seqlens",
    "B4 H16 T8192 D64 lengths",
    "B4 H16 T8192 D64 cu_seqlens",
]


def test_the_cases_on_a_gpu_are_those_of_the_table_of_goals():
    found: dict[str, dict[str, float | None]] = {}
    for case in bench.CUDA_CASES:
        assert case.words not in found.setdefault(case.shape, {})
        found[case.shape][case.words] = case.goal
    expected = {
        shape: {
            name.format(shape.split()[2][1:]): goal
            for groups, goals in ((NARROW, narrow), (WIDE, wide))
            for group, goal in zip(groups, goals, strict=False)
            for name in group
        }
        for shape, (narrow, wide) in GOALS.items()
    }
    assert found == expected | {shape: {"t5": 1.6, "huang4, max_lag=128": None} for shape in RAGGED_SHAPES}


def test_a_causal_case_has_a_causal_encoding_where_there_is_one():
    causal = {case.encoding for case in bench.CUDA_CASES if case.causal}
    assert {"t5", "at5", "alibi", "shaw"} < causal
    for case in (*bench.CPU_CASES, *bench.CUDA_CASES):
        assert case.options.get("causal", False) == (case.causal and case.encoding in ("t5", "at5")), case


def test_every_case_names_an_encoding_that_can_be_made():
    for case in (*bench.CPU_CASES, *bench.CUDA_CASES):
        lagwise.make(case.encoding, heads=case.heads, head_dim=case.head_dim, **case.options)


def test_an_eager_case_has_goals_of_its_own_alone():
    case = Case("t5", 1, 2, 32, 8, goal=2.0, graph=True)
    assert case.called_eagerly() == replace(case, graph=False, eager=True, goal=None)
    assert replace(case, eager=True).called_eagerly() == replace(case, eager=True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 32, 8, device="cuda")
    assert list(baselines.plain_contenders(q, q, q, causal=False, eager=True)) == ["plain"]


def test_a_sweep_begins_at_128_tokens_in_graphs():
    gpu = torch.device("cuda")
    graphs = {time: {case.graph for case in bench.sweep_cases(time, gpu).values()} for time in bench.SWEEP_TIMES["cuda"]}
    assert graphs == {2**power: {power <= 11} for power in range(7, 18)}
    assert {case.batch for case in bench.sweep_cases(128, gpu).values()} == {512}
    assert not any(case.graph for case in bench.sweep_cases(128, CPU).values())


@pytest.fixture
def unweighed(monkeypatch):
    """Spares a test the profiler, which takes most of its time."""
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)


def run_tiny(**options):
    records = bench.measure_attention(Case("t5", 1, 2, 32, 8), device=CPU, dtype=torch.float32, repeats=1, **options)
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
    assert "error" not in records["plain"] and records["plain"]["training_ratio"] == records["plain"]["memory_ratio"] == 1.0


@pytest.mark.usefixtures("unweighed")
def test_without_its_anchor_a_line_has_no_ratio(monkeypatch):
    monkeypatch.setattr(bench, "plain_contenders", lambda q, k, v, **options: {"plain": [Contender(fails)]})
    records = run_tiny(quick=True)
    assert records["plain"]["error"] and records["lagwise"]["training_ms"] > 0
    assert records["lagwise"]["training_ratio"] is None and records["lagwise"]["memory_ratio"] is None


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
        patch.setattr(bench, "make_encoding", lambda case, device: Watched(heads=case.heads))
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


def test_a_plot_is_drawn_again_from_lines(tmp_path, monkeypatch):
    lines = [sweep_line("plain", time, training_ms=1.0 * time, peak_bytes=time) for time in (512, 512, 1024)]
    lines += [sweep_line("mine", 512, training_ms=2.0, peak_bytes=3), sweep_line("mine", 1024, error="left out: too long")]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"bench": "attention"}]))
    assert len(sweep_plot.read_sweep(path)) == 4
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, text, **style: titles.append(text))
    sweep_plot.draw_sweep([{**line, "graph": line["time"] == 512} for line in lines], tmp_path / "graphs.png")
    assert "; CUDA graphs up to T = 512\n" in titles[0]
    for options, picture in (([], "lines.png"), (["--out", str(tmp_path / "new" / "picture.png")], "new/picture.png")):
        result = CliRunner().invoke(app, ["bench", "plot", str(path), *options])
        assert result.exit_code == 0, result.output
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_plot_shows_ratios_where_there_are_some(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda panel, x, y, **style: drawn.append((style["label"], x, y)) or [])
    lines = [sweep_line("plain", time, training_ms=1.0, training_ratio=1.0, peak_bytes=1024 * time) for time in (128, 256)]
    lines += [sweep_line("mine", 128, training_ms=2.0, training_ratio=None, peak_bytes=1024 * 128)]
    lines += [sweep_line("mine", 256, training_ms=2.56, training_ratio=2.5, peak_bytes=1024 * 512)]
    sweep_plot.draw_sweep(lines, tmp_path / "plot.png")
    mine = [points for label, *points in drawn if label == "mine"]
    assert mine == [[[128, 256], [15625.0, 10000.0]], [[256], [2.5]], [[128, 256], [1.0, 2.0]]]


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
    assert result.exit_code == 0 and install_command("lens") in result.output and "lagwise bench plot" in result.output
    assert len(read_lines(tmp_path, "sweep")) == 5
    (path,) = tmp_path.glob("*.jsonl")
    result = CliRunner().invoke(app, ["bench", "plot", str(path)])
    assert result.exit_code == 1 and install_command("lens") in result.output


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
        "--shape",
        "B1",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, ["bench", "attention", *options])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output and "eager M4" in result.output and "saved to" in result.output
    # No terminal: a line for each case that is done.
    assert "1 of 3: t5, B1 H8 T64 D64; about" in result.output and "2 of 3: huang4" in result.output
    assert "about 0 s left" in result.output
    records = read_lines(tmp_path, "attention")
    assert {record["contender"] for record in records} == {"plain", "lagwise", "dense bias", "eager M4"}
    for record in records:
        assert record["training_ms"] > 0 and record["peak_bytes"] > 0 and record["torch"] == torch.__version__
        assert record["commit"] and record["date"] and record["device"]


def test_bench_attention_refuses_an_encoding_without_a_case():
    result = CliRunner().invoke(app, ["bench", "attention", "--encoding", "t6"])
    assert result.exit_code == 2 and "there are" in result.output


def test_bench_attention_refuses_a_shape_that_no_case_has():
    result = CliRunner().invoke(app, ["bench", "attention", "--device", "cpu", "--shape", "T4096 graph"])
    assert result.exit_code == 2 and "B1 H8 T4096 D64 causal" in " ".join(result.output.replace("│", "").split())


@pytest.mark.usefixtures("unweighed")
def test_bench_attention_measures_shapes_that_are_named_and_eager_ones(tmp_path, monkeypatch):
    cases = [Case("t5", 1, 2, 16, 8, goal=1.5, graph=True), Case("t5", 1, 2, 16, 8, {"causal": True}, causal=True, goal=1.5)]
    monkeypatch.setattr(bench, "CPU_CASES", cases)
    options = ["--device", "cpu", "--repeats", "1", "--quick", "--shape", "graph T16", "--eager", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "attention", *options])
    assert result.exit_code == 0, result.output
    for record in read_lines(tmp_path, "attention"):
        assert record["eager"] and not record["graph"] and record["goal"] is None and not record["causal"]


@pytest.mark.parametrize("option", [["--encoding", "t5"], ["--shape", "T512"], ["--eager"], ["--deterministic"]])
def test_a_sweep_has_encodings_and_shapes_of_its_own(option):
    result = CliRunner().invoke(app, ["bench", "attention", "--sweep", *option])
    assert result.exit_code == 2 and "--sweep" in result.output


@pytest.mark.parametrize("causal", [False, True])
def test_plain_linear_attention_is_ours_without_positions(causal):
    q, k, v = (torch.randn(2, 3, 50, 8) for _ in range(3))
    expected = lagwise.linear_attention(q, k, v, feature_map="relu", causal=causal, impl="dense")
    torch.testing.assert_close(baselines.plain_linear(q, k, v, causal=causal), expected)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("name, options", [("sine-spe", {"sines": 3}), ("conv-spe", {"kernel_size": 4})], ids=str)
def test_published_codes_average_to_the_exact_kernel(name, options, gated):
    torch.manual_seed(0)
    time, draws = 7, 20_000
    encoding = lagwise.make(name, heads=2, head_dim=3, realizations=draws, gated=gated, **options)
    with torch.no_grad():
        codes_q, codes_k = baselines.published_codes(encoding, time)
        products = codes_q[:, :, :, None] * codes_k[:, :, None]
        gain = encoding.exact_terms(1 - time, time - 1, scale=1.0).gain
        lags = torch.arange(time) - torch.arange(time)[:, None]
        expected = gain.at(lags).permute(0, 3, 1, 2)
    error = (products.mean(-1) - expected) / (products.std(-1) / draws**0.5)
    # Of some 300 errors, which are standard normal but for neighbours that depend on each other.
    assert error.abs().max() < 5.0 and abs(float(error.square().mean().sqrt()) - 1.0) < 0.4


@pytest.mark.parametrize("name, options", [("sine-spe", {"sines": 3}), ("conv-spe", {"kernel_size": 4})], ids=str)
def test_published_spe_estimates_what_ours_does(name, options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    encoding = lagwise.make(name, heads=2, head_dim=4, realizations=16, **options)
    with torch.no_grad():
        theirs = torch.stack([baselines.published_spe(q, k, v, encoding, causal=False) for _ in range(1000)])
        ours = torch.stack([lagwise.linear_attention(q, k, v, encoding, feature_map="relu") for _ in range(1000)])
    error = (theirs.mean(0) - ours.mean(0)) / ((theirs.var(0) + ours.var(0)) / 1000).sqrt()
    # The features see the noise before its mean is taken, so that our noise, which is not quite normal, gives nearly the same.
    assert error.abs().max() < 5.0


def run_linear(**options):
    shape = Case("none", 2, 2, 32, 8, causal=options.pop("causal", False))
    records = bench_linear.measure_linear(shape, device=CPU, dtype=torch.float32, repeats=1, **options)
    return {record["contender"]: record for record in records}


OURS = ["lagwise, none", "lagwise, sine-spe", "lagwise, conv-spe", "lagwise, rotary", "lagwise, permute"]


@pytest.mark.usefixtures("unweighed")
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_has_a_line_for_each_contender(causal):
    records = run_linear(causal=causal)
    assert list(records) == ["plain", *OURS, "softmax", "published, sine", "published, conv"]
    for name, record in records.items():
        assert record["bench"] == "linear" and record["causal"] == causal and record["goal"] is None
        assert record["training_ms"] > 0 and record["forward_ms"] > 0 and record["memory_ratio"] > 0, name
    assert records["plain"]["training_ratio"] == 1.0
    assert records["lagwise, conv-spe"]["options"] == records["published, conv"]["options"]


@pytest.mark.usefixtures("unweighed")
def test_linear_attention_quickly_or_with_some_encodings():
    assert list(run_linear(quick=True)) == ["plain", *OURS[:3]]
    assert list(run_linear(encodings=["rotary"])) == ["plain", "lagwise, none", "lagwise, rotary", "softmax"]


def test_goals_of_linear_attention_are_those_of_their_shapes():
    gpu = torch.device("cuda")
    assert [(shape.batch, shape.time) for shape in bench_linear.SHAPES["cuda"]] == [(8, 4096), (4, 16384)]
    for shape in bench_linear.SHAPES["cuda"]:
        cases = {name: bench_linear.our_case(shape, name, gpu) for name in bench_linear.OPTIONS}
        goals = {name: (case.goal, case.memory_goal) for name, case in cases.items() if case.goal}
        assert goals == {"sine-spe": (2.0, 1.5), "conv-spe": (4.0, 1.5)}
        assert bench_linear.our_case(replace(shape, causal=True), "sine-spe", gpu).goal is None
        assert bench_linear.our_case(shape.at(64), "sine-spe", gpu).goal is None
    (shape,) = bench_linear.SHAPES["cpu"]
    assert [bench_linear.our_case(shape, name, CPU).goal for name in ("none", "sine-spe", "conv-spe")] == [None, 3.0, 12.0]


def test_a_sweep_of_linear_attention_reaches_a_million_tokens():
    shapes = bench_linear.sweep_shapes(torch.device("cuda"))
    tokens = [(shape.batch, shape.time) for shape in shapes]
    assert tokens == [(64, 1024), (16, 4096), (4, 16384), (1, 65536), (1, 262144), (1, 1048576)]
    assert [(shape.batch, shape.time) for shape in bench_linear.sweep_shapes(CPU, 4096)] == [(1, 1024), (1, 4096)]


@pytest.mark.usefixtures("unweighed")
def test_what_is_too_long_or_too_large_is_left_out(monkeypatch):
    monkeypatch.setitem(baselines.SOFTMAX_UP_TO, "cpu", 31)
    monkeypatch.setattr(baselines, "CODES_BYTES", 10**6)
    records = run_linear()
    assert (
        records["softmax"]["error"].startswith("left out: the time") and "here 32; it ends at 31" in records["softmax"]["error"]
    )
    for name in ("published, sine", "published, conv"):
        assert records[name]["error"].startswith("left out: codes for 32 positions") and "training_ms" not in records[name]


@pytest.fixture
def tiny_linear(monkeypatch):
    """Lets the measurements of linear attention be quick."""
    monkeypatch.setitem(bench_linear.SHAPES, "cpu", [Case("none", 1, 2, 32, 8)])
    monkeypatch.setitem(bench_linear.SWEEP_TIMES, "cpu", [16, 32, 64])
    monkeypatch.setattr(bench_linear, "DECODE", Case("none", 1, 2, 1, 8, causal=True))
    small = {"none": {}, "sine-spe": {"sines": 2}, "conv-spe": {"kernel_size": 4}, "rotary": {}}
    monkeypatch.setattr(bench_linear, "OPTIONS", small)


def invoke_linear(folder: Path, *options: str):
    result = CliRunner().invoke(app, ["bench", "linear", "--device", "cpu", "--repeats", "1", "--out", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("tiny_linear")
def test_bench_linear_prints_a_table_and_saves_its_numbers(tmp_path):
    output = invoke_linear(tmp_path)
    assert "published, conv" in output and "3.00" in output and "12.00" in output and "saved to" in output
    records = read_lines(tmp_path, "linear")
    assert [record["goal"] for record in records] == [None, None, 3.0, 12.0, None, None, None, None]
    for record in records:
        assert record["training_ms"] > 0 and record["peak_bytes"] > 0 and record["dtype"] == "float32" and record["commit"]


@pytest.mark.usefixtures("tiny_linear", "unweighed")
def test_bench_linear_takes_a_length_and_a_mask(tmp_path):
    assert "B1 H2 T48 D8 causal" in invoke_linear(tmp_path, "--time", "48", "--causal", "--quick", "--encoding", "sine-spe")
    records = read_lines(tmp_path, "linear")
    assert [record["contender"] for record in records] == ["plain", "lagwise, none", "lagwise, sine-spe"]
    assert all(record["time"] == 48 and record["causal"] and record["goal"] is None for record in records)


@pytest.mark.usefixtures("tiny_linear", "unweighed")
def test_a_sweep_of_linear_attention_saves_its_lines_and_a_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(baselines.SOFTMAX_UP_TO, "cpu", 16)
    assert "here 32; it ends at 16" in invoke_linear(tmp_path, "--sweep", "--time", "32")
    lines = read_lines(tmp_path, "linear-sweep")
    assert {(line["bench"], line["batch"], line["time"]) for line in lines} == {("linear sweep", 1, 16), ("linear sweep", 1, 32)}
    assert [line["contender"] for line in lines if "error" in line] == ["softmax"]
    (picture,) = tmp_path.glob("linear-sweep-cpu-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny_linear", "unweighed")
def test_decoding_is_timed_near_and_far(tmp_path):
    assert "1,000,000" in invoke_linear(tmp_path, "--decode")
    lines = read_lines(tmp_path, "linear-decode")
    assert [(line["contender"], line["position"]) for line in lines] == [
        (f"lagwise, {name}", position) for name in bench_linear.DECODED for position in (100, 1_000_000)
    ]
    assert all(line["step_ms"] > 0 and line["peak_bytes"] > 0 for line in lines)
    assert all(line["step_ratio"] == 1.0 for line in lines if line["position"] == 100)


@pytest.mark.usefixtures("tiny_linear", "unweighed")
def test_a_decoding_step_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_linear, "decoding_steps", lambda *arguments: {"100": fails, "1000000": lambda: None})
    assert "out of resource" in invoke_linear(tmp_path, "--decode", "--encoding", "none")
    near, far = read_lines(tmp_path, "linear-decode")
    assert near["error"] and far["step_ms"] > 0 and far["step_ratio"] is None


def test_decoding_steps_differ_in_their_position_alone(monkeypatch):
    monkeypatch.setattr(bench_linear, "DECODE", Case("none", 1, 2, 1, 8, causal=True))
    for name, same in (("none", True), ("rotary", False)):
        encoding = lagwise.make(name, heads=2, head_dim=8)
        near, far = (step() for step in bench_linear.decoding_steps(encoding, CPU, torch.float32).values())
        assert torch.equal(near, far) == same


@pytest.mark.parametrize(
    "options, hint",
    [
        (["--encoding", "t5"], "there are none"),
        (["--decode", "--encoding", "permute"], "there are none"),
        (["--decode", "--sweep"], "--decode"),
    ],
)
def test_bench_linear_refuses_what_it_does_not_measure(options, hint):
    result = CliRunner().invoke(app, ["bench", "linear", *options])
    assert result.exit_code == 2 and hint in result.output


TINY_MODEL = model_steps.Shape("softmax", 2, 16, dim=16, layers=1, heads=2, symbols=20)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_whole_models_have_a_line_for_each_encoding(attention):
    shape = replace(TINY_MODEL, attention=attention)
    found = model_steps.measure_encoders(shape, device=CPU, dtype=torch.float32, repeats=1)
    lines = {line["contender"]: line for line in found}
    assert list(lines) == list(lagwise.ENCODINGS)
    refused = {name for name, line in lines.items() if "error" in line}
    softmax_only = {"shaw", "huang1", "huang2", "huang3", "huang4", "xl", "xpos"}
    assert refused == ({"permute"} if attention == "softmax" else softmax_only), {name: lines[name] for name in refused}
    for name in lines.keys() - refused:
        line = lines[name]
        assert (
            line["tokens_per_s"] == pytest.approx(32 / (line["step_ms"] / 1e3)) and line["held_bytes"] > 12 * line["parameters"]
        )
    assert lines["none"]["speed_ratio"] == lines["none"]["memory_ratio"] == 1.0
    assert lines["t5"]["encoding_parameters"] == 2 * 32 and lines["none"]["encoding_parameters"] == 0


@pytest.mark.usefixtures("unweighed")
def test_a_training_step_of_a_whole_model_moves_its_weights():
    torch.manual_seed(0)
    model, tokens = model_steps.TimedEncoder(TINY_MODEL, "t5"), torch.randint(20, (2, 16))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model_steps.training_step(model, tokens, torch.float32)()
    # The keys' bias cancels in the softmax.
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still <= {"encoder.layers.0.attention.k.bias"} and all(weight.grad is None for weight in model.parameters())


@pytest.mark.usefixtures("unweighed")
def test_bench_models_prints_a_table_and_saves_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setitem(model_steps.SIZES, "cpu", {"dim": 16, "layers": 1, "heads": 2, "symbols": 20})
    options = ["bench", "models", "--device", "cpu", "--time", "16", "--repeats", "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, [*options, "--encoding", "t5", "--encoding", "shaw"])
    assert found.exit_code == 0, found.output
    lines = read_lines(tmp_path, "models")
    assert [(line["attention"], line["contender"]) for line in lines] == [
        (attention, name) for attention in ("softmax", "linear") for name in ("none", "t5", "shaw")
    ]
    assert "linear, B64 T16, shaw: ValueError: the encoding has a query table" in found.output.replace("\n", " ")
    assert CliRunner().invoke(app, [*options, "--attention", "hard"]).exit_code == 2
    assert CliRunner().invoke(app, [*options, "--encoding", "t6"]).exit_code == 2
