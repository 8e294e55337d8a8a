"""The first call: a rehearsal notes what the call launches, all of it is compiled at once, and variants are few."""

import gc
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from triton import FutureKernel

import lagwise
from lagwise.call import Call
from lagwise.ops import triton
from lagwise.ops.kernels import ahead, launches, pieces, plan
from lagwise.ops.lowering import lower
from lagwise.ops.split import fused

TIME, HEADS, DIM = 33, 2, 16
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"key_mask": torch.arange(TIME).expand(2, TIME) < 20},
    "dropout": {"dropout": 0.1, "seed": torch.tensor(3)},
    "started": {"query_start": torch.tensor([0, 2])},
    "windowed": {"window": (12, 3)},
}
PACKED = {"cu_seqlens": torch.tensor([0, 13, TIME], dtype=torch.int32), "max_seqlen": 20}


def lowered_call(name, options, *, training=True, batch=2, skipped=0):
    encoding = lagwise.make(name, heads=HEADS, head_dim=DIM, max_lag=9)
    numbers = [torch.randn(batch * TIME * HEADS * DIM + skipped)[skipped:] for _ in range(3)]
    q, k, v = (x.view(batch, TIME, HEADS, DIM).transpose(1, 2).requires_grad_(training) for x in numbers)
    call = Call(scale=0.25, **options)
    terms = encoding.terms(*call.reachable_lags(TIME, TIME), scale=call.scale, seed=torch.tensor(1))
    return lower(q, k, v, terms, call)


def kinds_of(values):
    """Returns what arguments are, but for where they are."""
    if isinstance(values, torch.Tensor):
        return values.dtype, values.shape, values.stride(), values.data_ptr() % 16
    return tuple(map(kinds_of, values)) if isinstance(values, (tuple, list)) else values


@pytest.fixture
def noted(monkeypatch):
    """Notes the launches of calls, too, and makes none: what kernels compute is tested elsewhere."""
    made = []

    def note(kernel, values, warps, stages):
        if not ahead.note(kernel, values, warps, stages):
            made.append(ahead.Launch(kernel, values, warps, stages))
        return True

    monkeypatch.setattr(launches, "note", note)
    # Passes are recorded: those of calls before launch themselves, and those of this test launch nothing.
    plan.kept_plan.cache_clear()
    yield made
    plan.kept_plan.cache_clear()


def by_kind(launched):
    return [(each.kernel.fn.__name__, kinds_of(each.values), each.warps, each.stages) for each in launched]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["none", "t5", "alibi", "shaw", "huang2", "huang3", "huang4", "xl", "rotary"])
def test_a_rehearsal_notes_what_a_call_and_its_gradient_launch(name, options, noted):
    assert_rehearsed(lowered_call(name, OPTIONS[options]), noted)


@pytest.mark.parametrize("name", ["t5", "huang4"])
def test_a_rehearsal_knows_how_tensors_are_aligned(name, noted):
    assert_rehearsed(lowered_call(name, {}, skipped=1), noted)


@pytest.mark.parametrize("name", ["t5", "huang4"])
def test_a_rehearsal_goes_through_packed_sequences(name, noted):
    assert_rehearsed(lowered_call(name, PACKED, batch=1), noted)


def assert_rehearsed(lowered, noted):
    """Checks that a rehearsal notes the launches of a call and of its gradient, as they are on tensors with data."""
    rehearsed = ahead.launches_of(partial(ahead.rehearse, triton.forward, lambda: triton.backward, [lowered]))
    assert not noted and rehearsed
    learned = any(getattr(lowered, each) is not None and getattr(lowered, each).requires_grad for each in lagwise.terms.TABLES)
    with torch.no_grad():
        saved = triton.forward(lowered)
        triton.backward(lowered, saved, torch.zeros_like(saved[0]), None, learned)
    assert by_kind(rehearsed) == by_kind(noted)


def test_a_rehearsal_goes_through_all_ranges_of_wide_tables(noted, monkeypatch):
    for name, value in {"WIDEST": 8, "LARGEST": 0, "LEAST": 0, "SHARE": 0}.items():
        monkeypatch.setattr(pieces, name, value)
    assert_rehearsed(lowered_call("huang4", {}), noted)
    assert len([each for each in by_kind(noted) if each[0] == "forward_kernel"]) > 1


def test_a_rehearsal_goes_through_all_pieces_of_wide_tables(noted, monkeypatch):
    plan.kept_plan.cache_clear()
    monkeypatch.setattr(pieces, "SPARED", 0)
    monkeypatch.setattr(pieces, "room_of", lambda plan, lags: pieces.pair_bytes(plan, lags))
    assert_rehearsed(lowered_call("huang4", {"dropout": 0.1, "seed": torch.tensor(3)}), noted)
    plan.kept_plan.cache_clear()


def test_without_gradients_a_rehearsal_ends_with_the_output(noted):
    lowered = lowered_call("huang4", {}, training=False)
    rehearsed = ahead.launches_of(partial(ahead.rehearse, triton.forward, lambda: triton.backward, [lowered]))
    with torch.no_grad():
        triton.forward(lowered)
    assert by_kind(rehearsed) == by_kind(noted)


@pytest.mark.parametrize("options", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ["t5", "shaw", "huang2", "huang4"])
def test_a_rehearsal_goes_through_far_fields(name, options):
    """Of which the vendor's kernels are on a GPU alone."""
    lowered = lowered_call(name, PACKED, batch=1) if options == "packed" else lowered_call(name, OPTIONS[options])
    kernels = [
        each.kernel.fn.__name__
        for each in ahead.launches_of(partial(ahead.rehearse, fused.forward, lambda: fused.backward, [lowered]))
    ]
    assert {"forward_kernel", "merge_kernel", "far_ends_kernel", "query_gradient_kernel", "key_gradient_kernel"} <= {*kernels}


def test_a_rehearsal_computes_nothing_and_is_seen_by_nobody(noted):
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(function)
            return function(*arguments, **(options or {}))

    lowered = lowered_call("shaw", {})
    with Mode():
        ahead.launches_of(partial(ahead.rehearse, triton.forward, lambda: triton.backward, [lowered]))
    assert not seen and not noted and torch.is_grad_enabled()


class Kernel:
    """A kernel that Triton has compiled, or that another thread compiles."""

    def __init__(self, compiled):
        self.compiled = compiled

    def warmup(self, **options):
        return self.compiled


def pass_of(events, *, fails=False):
    """Returns the passes of an implementation that launches two kernels in its forward pass and one in its backward pass."""

    def launch(name):
        if not ahead.note(name, (), 4, 1):
            events.append(ahead.compiled_kernel(Kernel(name), (), 4, 1))

    @ahead.rehearsed(lambda: backward)
    def forward(lowered):
        launch("first")
        launch("second")
        if fails and ahead._present.noted is None:
            raise RuntimeError("out of memory")
        return [lowered.q]

    @ahead.rehearsed()
    def backward(lowered, saved, dout, dlse, learned):
        assert (dlse, learned) == (None, True)
        launch("third")

    return forward, backward


def test_the_first_kernel_that_is_missing_has_all_of_them_compiled(monkeypatch):
    compiled, events = [], []
    monkeypatch.setattr(ahead, "compile_all", lambda noted: compiled.append([each.kernel for each in noted]))
    forward, backward = pass_of(events)
    lowered = lowered_call("t5", {})
    saved = forward(lowered)
    assert compiled == [["first", "second", "third"]] and events == ["first", "second"]
    backward(lowered, saved, saved[0], None, True)
    assert compiled[1:] == [["third"]] and events == ["first", "second", "third"]


def test_a_call_that_is_over_is_forgotten_also_where_it_failed(monkeypatch):
    compiled = []
    monkeypatch.setattr(ahead, "compile_all", compiled.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        pass_of([], fails=True)[0](lowered_call("t5", {}))
    assert len(compiled) == 1 and ahead._present.rehearsal is None
    # A kernel outside of calls is compiled where it is launched.
    assert ahead.compiled_kernel(Kernel("alone"), (), 4, 1) == "alone" and len(compiled) == 1


def test_a_kernel_that_another_thread_compiles_is_waited_for():
    promised = Future()
    kernel = Kernel(FutureKernel(lambda compiled: None, promised))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ahead.compiled_kernel, kernel, (), 4, 1)
        promised.set_result("made")
        assert waiting.result() == "made"
    failed = Future()
    failed.set_exception(RuntimeError("out of registers"))
    with pytest.raises(RuntimeError, match="out of registers"):
        ahead.compiled_kernel(Kernel(FutureKernel(lambda compiled: None, failed)), (), 4, 1)


@pytest.mark.parametrize("collects", [True, False])
def test_kernels_with_more_arguments_come_first_and_python_is_left_as_it_was(collects):
    class Told:
        def warmup(self, *values, **options):
            seen.append((len(values), gc.isenabled(), sys.getswitchinterval()))
            if len(values) == 1:
                raise RuntimeError("no")

    seen, before = [], (gc.isenabled(), sys.getswitchinterval())
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(RuntimeError, match="no"):
            ahead.compile_all([ahead.Launch(Told(), tuple(range(count)), 4, 1) for count in (2, 5, 1, 3)])
        assert seen == [(count, False, 1.0) for count in (5, 3, 2, 1)]
        assert (gc.isenabled(), sys.getswitchinterval()) == (collects, before[1])
    finally:
        (gc.enable if before[0] else gc.disable)()


def test_a_rehearsal_that_fails_leaves_nothing_behind():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ahead.launches_of(fails)
    assert ahead._present.noted is None and not ahead.note(None, (), 4, 1)


def test_a_rehearsal_that_fails_warns_and_the_call_goes_on():
    @ahead.rehearsed()
    def forward(lowered):
        if lowered.q.is_meta:
            raise NotImplementedError("nothing without data")
        return ahead.compiled_kernel(Kernel("made"), (), 4, 1)

    with pytest.warns(RuntimeWarning, match="compiled one after the other.*nothing without data.*results are not affected"):
        assert forward(lowered_call("t5", {})) == "made"


def program(*arguments, **more):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    path = Path(__file__).parent / "kernel_variants.py"
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SCALARS = {"scalars_kernel": 1, "fold_kernel": 1}
PASSES = {"forward_kernel": 2, "query_gradient_kernel": 2, "key_gradient_kernel": 2}
ALL = dict.fromkeys(PASSES, 6)
ONCE = {"delta_kernel": 1, "vectors_kernel": 1, "fold_vectors_kernel": 1}
HUANG4 = ONCE | {"scores_kernel": 1, "score_table_kernel": 1, "score_rows_kernel": 1}
# The backward pass has scores of values, too, in the same launch as those of queries.
SHAW = HUANG4 | {"scores_kernel": 2}
HUANG3 = {
    "delta_kernel": 1, "gain_words_kernel": 1, "word_scores_kernel": 1, "word_rows_kernel": 2, "word_gain_kernel": 1,
    "fold_gain_kernel": 1,
}  # fmt: skip


def twice(kernels, *once):
    """Returns variants where there are two of each kernel, but for some."""
    return {name: count if name in once else 2 * count for name, count in kernels.items()}


def with_masks(kernels, *unmasked):
    """Returns variants where each kernel is there with and without a mask, but for some."""
    return twice(kernels, *unmasked) | {"mask_spans_kernel": 1}


def test_variants_do_not_grow_unnoticed():
    """A new number here makes the first step of a model longer: docs/kernels.md says which facts may."""
    found = program("count")
    # Of all lengths: those that tiles divide, and others; for products of vectors those of which a tile holds several heads.
    assert found["t5, lengths"] == SCALARS | PASSES
    assert found["shaw, lengths"] == twice(SHAW, *ONCE) | PASSES
    assert found["huang3, lengths"] == HUANG3 | PASSES
    assert found["huang4, lengths"] == twice(HUANG4, *ONCE) | PASSES
    # Causal or not, with dropout, with padding: the passes over pairs alone are compiled for each.
    assert found["t5, options"] == SCALARS | ALL | {"mask_spans_kernel": 1}
    assert found["shaw, options"] == with_masks(SHAW, *ONCE, "scores_kernel") | ALL
    assert found["huang3, options"] == with_masks(HUANG3, "delta_kernel", "gain_words_kernel", "fold_gain_kernel") | ALL
    assert found["huang4, options"] == with_masks(HUANG4, *ONCE, "scores_kernel") | ALL
    assert found["t5, split"] == SCALARS | PASSES | {"merge_kernel": 1, "far_ends_kernel": 1}


def test_kernels_are_compiled_once_and_found_on_disk_later(tmp_path):
    first, second = program("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert first == {"made": 2, "found": 0}
    assert second == {"made": 0, "found": 2}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What the first, the second and the third step of a program did, and what they launched by name, each in both passes."""
    told = program("call", "t5", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    return told, [[name for name, *_ in each["launched"]] for each in told]


def test_a_first_call_has_all_its_kernels_compiled_on_threads_and_loads_what_it_launches(steps):
    (forward, backward, again, again_backward, uneven, uneven_backward), launched = steps
    passes = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]
    assert sorted(forward["compiled"]) == sorted([name, "other"] for name in [*SCALARS, *passes])
    assert launched[:2] == [["scalars_kernel", "forward_kernel"], [*passes[1:], "fold_kernel"]]
    for each, names in zip((forward, backward), launched, strict=False):
        assert each["loaded"] == [[name, "first"] for name in names]
    for each in (again, again_backward):
        assert not each["compiled"] and not each["loaded"]
    # What is there already is launched, and in the rehearsal it is not.
    assert sorted(uneven["compiled"]) == sorted([name, "other"] for name in passes)
    assert launched == 3 * launched[:2]
    assert not backward["compiled"] and not uneven_backward["compiled"]


def test_a_replay_launches_what_the_first_pass_did(steps):
    """It tells the driver where each argument is, the first pass gives it a block: the same numbers, and the same alignment."""
    (forward, backward, again, again_backward, *_), _ = steps
    for first, second in ((forward, again), (backward, again_backward)):
        assert {how for _, how, *_ in first["launched"]} == {"block"}
        assert {how for _, how, *_ in second["launched"]} == {"pointers"}
        assert [[name, *rest] for name, _, *rest in first["launched"]] == [[name, *rest] for name, _, *rest in second["launched"]]


def test_a_first_call_imports_nothing_of_the_compiler(tmp_path):
    assert program("imports", "huang4", TRITON_CACHE_DIR=str(tmp_path)) == ["torch"]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [("forward_kernel", ["no forward_kernel"]), ("key_gradient_kernel", ["forward passed", "no key_gradient_kernel"])],
)
def test_a_kernel_that_cannot_be_compiled_raises_in_each_pass_that_launches_it(kernel, said, tmp_path):
    assert program("fail", kernel, TRITON_CACHE_DIR=str(tmp_path)) == 2 * said
