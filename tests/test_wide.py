"""Tables of vectors as wide as the sequence, under Triton's interpreter: rows of scores have no room for lags out of sight."""

import gc
import os
from importlib.util import find_spec

import pytest
import torch
from oracle import assert_within_budget, make_terms

import lagwise

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/test_gpu.py runs the kernels on it"
    ),
    # Kernels must write all that they promise.
    pytest.mark.usefixtures("poisoned"),
]

VECTORS = ("query", "key", "value")
CASES = {
    "query": (("query",), {}, {}),
    "key": (("key",), {"queries": 37}, {}),
    "all, whole tiles": (VECTORS, {"queries": 48}, {}),
    "scalars too": (("bias", "gain", *VECTORS), {}, {}),
    "channels": (("channel gain",), {"queries": 19}, {}),
    "channels and vectors": (("channel gain", "query", "key"), {"queries": 20, "keys": 27}, {"query_start": 5}),
    "causal": (VECTORS, {"queries": 41}, {"causal": True}),
    "window": (("query", "key"), {"queries": 40}, {"window": (14, 9)}),
    "few queries": (VECTORS, {"queries": 3, "keys": 41}, {"query_start": 38, "causal": True}),
    "few keys": (VECTORS, {"queries": 41, "keys": 3}, {}),
    "before the keys": (VECTORS, {"queries": 21, "keys": 33}, {"query_start": -11}),
    "beyond the keys": (VECTORS, {"queries": 21, "keys": 33}, {"query_start": 23}),
    "starts": (VECTORS, {"batch": 2, "queries": 21, "keys": 33}, {"query_start": torch.tensor([3, 20])}),
    "lengths": (("key", "value"), {"batch": 2}, {"lengths": torch.tensor([33, 12])}),
    "mask": (("query", "key"), {"batch": 2}, {"key_mask": torch.arange(66).view(2, 33) % 5 > 1}),
    "packed": (VECTORS, {}, {"cu_seqlens": torch.tensor([0, 5, 26, 33])}),
    "grouped heads": (("query", "key"), {"heads": 4, "kv_heads": 2, "queries": 19}, {}),
    "dropout": (VECTORS, {}, {"dropout": 0.3}),
    "transform": (("query", "key", "transform"), {"queries": 35}, {}),
    "no gradient of the log-sum-exp": (("query", "value"), {}, {"return_lse": False}),
}


def tensors(batch=1, heads=1, queries=33, keys=None, head_dim=8, value_dim=None, kv_heads=None, dtype=torch.float32):
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = (heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim or head_dim)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def check(tables, shape, max_lag=64, shared=False, **options):
    """Compares a call with random tables with the specification."""
    q, k, v = tensors(**shape)
    heads = 1 if shared else q.shape[1]
    sizes = {"heads": heads, "head_dim": q.shape[3], "value_dim": v.shape[3], "max_lag": max_lag}
    assert_within_budget("triton", q, k, v, make_terms(*tables, **sizes), **options)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_scores_as_wide_as_the_sequence(case):
    tables, shape, options = CASES[case]
    check(tables, shape, **options)


@pytest.mark.parametrize("queries", [16, 24, 31, 39])
def test_tables_that_end_before_the_sequence_does_but_fill_its_rows(queries):
    """Each row has lags beyond the columns, whose place its neighbours have not."""
    check(VECTORS, {"queries": queries, "keys": queries + 1}, max_lag=13, dropout=0.2)


def test_scores_take_no_more_than_all_pairs():
    from lagwise.call import Call
    from lagwise.ops.kernels.plan import plan_for
    from lagwise.ops.lowering import lower

    q, k, v = tensors(queries=33, keys=41)
    plan = plan_for(lower(q, k, v, make_terms("query", "key", heads=1, max_lag=64), Call()))
    assert plan.score_numbers("query", plan.band_lags) == 33 * 48
    assert plan.score_numbers("key", plan.band_lags) == 41 * 40


@pytest.fixture
def room_for(monkeypatch):
    """Returns what gives scores room for so many heads at a time."""
    from lagwise.ops.kernels import pieces
    from lagwise.ops.kernels.plan import kept_plan

    def limit(heads: int) -> None:
        kept_plan.cache_clear()
        monkeypatch.setattr(pieces, "SPARED", 0)
        monkeypatch.setattr(pieces, "room_of", lambda plan, lags: heads * pieces.pair_bytes(plan, lags))

    yield limit
    kept_plan.cache_clear()


def counted_pieces(*arguments, **options) -> int:
    """Returns in how many pieces a call is computed."""
    from lagwise.call import Call
    from lagwise.ops.kernels.pieces import pieces_of
    from lagwise.ops.kernels.plan import plan_for
    from lagwise.ops.lowering import lower

    return len(pieces_of(plan_for(lower(*arguments, Call(**options)))))


# Tables, sizes, options, whether heads share tables, for how many heads there is room, and how many pieces that makes.
PIECES = {
    "rows": (VECTORS, {"batch": 3, "heads": 2, "queries": 19}, {"causal": True}, True, 5, 2),
    "rows, own tables": (("bias", *VECTORS), {"batch": 2, "heads": 2, "queries": 18}, {"dropout": 0.3}, False, 3, 2),
    "rows, lengths": (("query", "key"), {"batch": 3, "queries": 21}, {"lengths": torch.tensor([21, 4, 9])}, True, 2, 2),
    "rows, mask": (("gain", "key"), {"batch": 2, "queries": 17}, {"key_mask": torch.arange(34).view(2, 17) % 3 > 0}, True, 1, 2),
    "rows, starts": (VECTORS, {"batch": 2, "queries": 9, "keys": 20}, {"query_start": torch.tensor([3, 11])}, False, 1, 2),
    "heads": (VECTORS, {"batch": 2, "heads": 4, "queries": 17}, {"dropout": 0.3}, True, 3, 4),
    "heads, own tables": (("slopes", "gain", "query", "key"), {"heads": 4, "queries": 18}, {"window": (9, 4)}, False, 2, 2),
    "heads, grouped": (VECTORS, {"heads": 4, "kv_heads": 2, "queries": 17}, {}, True, 3, 2),
    "heads of a group": (("query", "key"), {"heads": 4, "kv_heads": 2, "queries": 17}, {}, False, 1, 4),
    "heads, starts": (VECTORS, {"batch": 2, "heads": 2, "queries": 17}, {"query_start": torch.tensor([0, 6])}, True, 1, 4),
    "heads, packed": (VECTORS, {"heads": 2, "queries": 21}, {"cu_seqlens": torch.tensor([0, 5, 21])}, True, 1, 2),
    "heads, channels": (("channel gain", "query"), {"heads": 2, "queries": 17}, {}, False, 1, 2),
    "heads, transform": (("query", "key", "transform"), {"heads": 2, "queries": 17}, {}, True, 1, 2),
    "half precision": (VECTORS, {"heads": 2, "queries": 33, "dtype": torch.float16}, {"return_lse": False}, True, 1, 2),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_of_a_call(case, room_for):
    tables, shape, options, shared, heads, expected = PIECES[case]
    room_for(heads)
    q, k, v = tensors(**shape)
    terms = make_terms(*tables, heads=1 if shared else q.shape[1], max_lag=40)
    assert (
        counted_pieces(q, k, v, terms, scale=1.0, **{name: x for name, x in options.items() if name != "return_lse"}) == expected
    )
    assert_within_budget("triton", q, k, v, terms, **options)


@pytest.mark.parametrize(
    ("tables", "shape", "options"),
    [
        (("query", "key"), {"queries": 141}, {}),
        (("query", "value"), {"queries": 130, "keys": 150, "batch": 2}, {"query_start": torch.tensor([0, 18])}),
    ],
    ids=["query and key", "starts"],
)
def test_columns_that_some_blocks_of_rows_do_not_see(tables, shape, options):
    check(tables, shape, max_lag=160, **options)


def step(q, k, v, dout, terms, learned, **options):
    """Returns the output and all gradients of a call."""
    out = lagwise.attention(q, k, v, terms, impl="triton", **options)
    return [out, *torch.autograd.grad(out, [q, k, v, *learned], dout)]


def leaves(*shape):
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


def kept_tapes():
    from lagwise.ops.kernels.plan import Plan

    return [tape for plan in gc.get_objects() if type(plan) is Plan for tape in plan.tapes.kept.values()]


@pytest.mark.parametrize("room", [1, 2, 4])
def test_pieces_repeat_bit_for_bit_and_are_what_one_piece_is(room, room_for):
    terms = make_terms("query", "key", "value", heads=2, max_lag=20)
    learned = [table.values.requires_grad_() for table in terms.tables().values()]
    q, k, v = leaves(2, 2, 18, 8)
    dout, options = torch.randn_like(q), {"dropout": 0.2, "seed": torch.tensor(5)}
    whole = step(q, k, v, dout, terms, learned, **options)
    room_for(room)
    first = step(q, k, v, dout, terms, learned, **options)
    again = step(q, k, v, dout, terms, learned, **options)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(whole[:4], first[:4], strict=True))
    assert kept_tapes() and all(tape is not None for tape in kept_tapes())


def test_pieces_of_tensors_that_lie_in_each_other_have_tapes(room_for):
    """As a projection leaves them: token by token, q, k and v side by side."""
    room_for(1)
    terms = make_terms("query", "key", heads=1, max_lag=20)

    def call(seed):
        torch.manual_seed(seed)
        q, k, v = (x.transpose(1, 2) for x in torch.randn(2, 18, 3, 2, 8).unbind(2))
        return lagwise.attention(q, k, v, terms, impl="triton")

    call(0)
    replayed = call(1)
    assert all(tape is not None for tape in kept_tapes())
    room_for(1)
    assert torch.equal(replayed, call(1))


def test_pieces_share_the_memory_of_a_replay(room_for, monkeypatch):
    from lagwise.call import Call
    from lagwise.ops import triton
    from lagwise.ops.kernels.plan import plan_for
    from lagwise.ops.kernels.tape import Recorder
    from lagwise.ops.lowering import lower

    own = Recorder.own
    # The interpreter's own functions hold tensors until their cycles are found.
    monkeypatch.setattr(Recorder, "own", lambda self, x: (gc.collect(), own(self, x)))
    q, k, v = tensors(batch=2, heads=4, queries=24)
    terms = make_terms("query", "key", heads=1, max_lag=40)
    memory = []
    for room in (8, 2):
        room_for(room)
        lowered = lower(q, k, v, terms, Call(scale=1.0))
        triton.forward(lowered)
        (tape,) = plan_for(lowered).tapes.kept.values()
        memory.append(tape.memory)
    assert memory[1] < 0.3 * memory[0]


@pytest.mark.parametrize("room", [1, 8])
def test_tables_that_are_not_learned_change_nothing_else(room, room_for):
    room_for(room)
    terms = make_terms("query", "value", heads=2, max_lag=20)
    q, k, v = leaves(1, 2, 18, 8)
    dout = torch.randn_like(q)
    fixed = step(q, k, v, dout, terms, [])
    learned = [table.values.requires_grad_() for table in terms.tables().values()]
    assert all(torch.equal(x, y) for x, y in zip(fixed, step(q, k, v, dout, terms, learned)[:4], strict=True))


def test_ranges_of_lags_of_pieces(room_for, monkeypatch):
    room_for(0)
    monkeypatch.setattr("lagwise.ops.kernels.pieces.LARGEST", 0)
    monkeypatch.setattr("lagwise.ops.kernels.pieces.WIDEST", 16)
    check(VECTORS, {"batch": 2, "heads": 2, "queries": 18}, max_lag=20, shared=True, dropout=0.2)


def planned(batch, heads, time, dim, kv_heads=None, **options):
    """Returns the plan of a call in half precision, of which there is no data."""
    from lagwise.call import Call
    from lagwise.ops.kernels.plan import plan_for
    from lagwise.ops.lowering import lower

    encoding = lagwise.make(options.pop("name"), heads=heads, head_dim=dim, **options).to("meta")
    counts = (heads, kv_heads or heads, kv_heads or heads)
    q, k, v = (torch.empty(batch, count, time, dim, dtype=torch.bfloat16, device="meta") for count in counts)
    call = Call(scale=0.125)
    return plan_for(lower(q, k, v, encoding.terms(*call.reachable_lags(time, time), scale=0.125), call))


@pytest.mark.parametrize("sizes", [(64, 12, 128, 64), (16, 12, 512, 64), (4, 16, 2048, 64), (1, 32, 32768, 128)])
@pytest.mark.parametrize("name", ["shaw", "huang4"])
def test_tables_that_end_at_lag_128_are_not_cut(name, sizes):
    from lagwise.ops.kernels.pieces import EVERYTHING, pieces_of

    assert pieces_of(planned(*sizes, name=name, max_lag=128)) == [EVERYTHING]


@pytest.mark.parametrize(("sizes", "rows"), [((4, 16, 2048, 64), 1), ((64, 16, 2048, 64), 22), ((2, 13, 4096, 64), 1)])
def test_wide_tables_take_at_most_their_share(sizes, rows):
    from lagwise.ops.kernels.pieces import pair_bytes, pieces_of, room_of

    plan = planned(*sizes, name="shaw", max_lag=sizes[2], values=False)
    pieces = pieces_of(plan)
    heads = len(range(*pieces[0].heads.indices(plan.heads)))
    assert len(range(*pieces[0].rows.indices(plan.batch))) == rows
    assert rows * heads * pair_bytes(plan, plan.band_lags) <= room_of(plan, plan.band_lags)
    # A step of plain attention takes q, k, v and their gradients, the output and its gradient, and dq in float32.
    assert room_of(plan, plan.band_lags) + 8 * sum_of_q(plan) <= 2 * 10 * sum_of_q(plan)
    covered = torch.zeros(plan.batch, plan.heads)
    for piece in pieces:
        covered[piece.rows, piece.heads] += 1
    assert (covered == 1).all()


def sum_of_q(plan) -> int:
    return plan.pairs * plan.queries * plan.head_dim * plan.dtype.itemsize


def test_lags_go_range_by_range_only_where_a_head_has_no_room():
    from lagwise.ops.kernels.pieces import lag_ranges

    assert not lag_ranges(planned(1, 16, 8192, 64, name="huang4", max_lag=8192))
    assert lag_ranges(planned(1, 1, 32768, 64, name="huang4", max_lag=32768))
    # Kernels count a head's scores in 32 bits.
    assert lag_ranges(planned(64, 32, 65536, 64, name="shaw", max_lag=65536, values=False))


def test_launches_find_tensors_aligned_as_the_first_of_their_kind(room_for, monkeypatch):
    """Kernels are compiled for it, and shares of a tensor may begin anywhere."""
    from lagwise.ops.kernels.launches import Runner, flattened

    room_for(1)
    begun, launch = {}, Runner.__call__

    def checked(self, values):
        places = [x.data_ptr() % 16 for x in flattened(tuple(values)) if isinstance(x, torch.Tensor)]
        assert begun.setdefault(self, places) == places
        launch(self, values)

    monkeypatch.setattr(Runner, "__call__", checked)
    terms = make_terms("bias", "query", "value", heads=1, max_lag=20)
    learned = [table.values.requires_grad_() for table in terms.tables().values()]
    q, k, v = leaves(2, 2, 17, 8)
    step(q, k, v, torch.randn_like(q), terms, learned)
    assert begun
