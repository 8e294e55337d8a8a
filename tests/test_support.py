"""The support table says the truth: every row runs within the budget or is refused with its reason."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from oracle import assert_within_budget, make_terms

import lagwise
from lagwise.call import Call
from lagwise.ops import support
from lagwise.ops.dispatch import kernels_run_on, requests
from lagwise.ops.lowering import flat, lower, unflattened

TABLES = ("bias", "slopes", "gain", "channel gain", "query", "key", "value", "transform")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def ask(request: str) -> tuple[dict, dict, tuple[str, ...]]:
    """Returns the shape, the options and the tables of a call that asks for one request."""
    options = {
        "causal": {"causal": True},
        "window": {"window": (9, 4)},
        "lengths": {"lengths": torch.tensor([20, 33])},
        "key_mask": {"key_mask": torch.arange(33) < torch.tensor([[20], [33]])},
        "key_mask with holes": {"key_mask": torch.arange(33).expand(2, 33) % 3 > 0},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 10, 33])},
        "query_start": {"query_start": 5},
        "query_start per row": {"query_start": torch.tensor([5, 9])},
        "dropout": {"dropout": 0.3},
    }
    shapes = {
        "cu_seqlens": {"batch": 1},
        "unequal lengths": {"queries": 20},
        "grouped heads": {"kv_heads": 1},
        "value width": {"value_dim": 12},
        "wide head": {"head_dim": 257},
    }
    tables = (request,) if request in TABLES else ("bias",)
    return shapes.get(request, {}), options.get(request, {}), tables


# torch.func.jvp itself uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@pytest.mark.parametrize("asked", list(support.REQUESTS))
@pytest.mark.parametrize("impl", support.IMPLEMENTATIONS)
def test_every_row(impl, asked):
    shape, options, tables = ask(asked)
    check(impl, {asked}, shape, options, tables)


@pytest.mark.parametrize(
    ("impl", "requests"),
    [(impl, requests) for impl in support.IMPLEMENTATIONS for requests, _ in support.REFUSALS[impl] if "cuda" not in requests],
    ids=lambda x: x if isinstance(x, str) else "+".join(sorted(x)),
)
def test_every_refusal(impl, requests, monkeypatch):
    if "no kernels" in requests:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    shape, options, tables = {}, {}, ()
    for request in sorted(requests):
        more_shape, more_options, more_tables = ask(request)
        shape, options, tables = {**shape, **more_shape}, {**options, **more_options}, (*tables, *more_tables)
    check(impl, set(requests), shape, options, tuple(dict.fromkeys(tables)))


def check(impl, requests, shape, options, tables):
    sizes = {"batch": 2, "queries": 33, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "max_lag": 5, **shape}
    dtype = next((getattr(torch, name) for name in DTYPES if name in requests), torch.float32)
    q = torch.randn(sizes["batch"], 2, sizes["queries"], sizes["head_dim"]).to(dtype)
    k = torch.randn(sizes["batch"], sizes["kv_heads"], 33, sizes["head_dim"]).to(dtype)
    v = torch.randn(sizes["batch"], sizes["kv_heads"], 33, sizes["value_dim"]).to(dtype)
    terms = make_terms(*tables, heads=2, **{name: sizes[name] for name in ("head_dim", "value_dim", "max_lag")})
    asked = requests | {"cpu"} | (set() if kernels_run_on(q.device) else {"no kernels"})
    reason = support.refusal(impl, asked)
    if requests & {"forward mode", "vmap"} and "no kernels" not in asked:
        check_transform(impl, *requests, reason)
    elif "second derivative" in requests and "no kernels" not in asked:
        check_second_derivative(impl, reason)
    elif impl == "triton" and reason is None and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16: tests/test_gpu.py")
    elif reason is None:
        assert_within_budget(impl, q, k, v, terms, **options)
    else:
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot do this: {reason[:20]}"):
            lagwise.attention(q, k, v, terms, impl=impl, **options)


def check_transform(impl, transform, reason):
    """By `torch.func`; what is refused, "auto" leaves to the specification."""
    q, k, v = (torch.randn(3, 1, 1, 150, 4) for _ in range(3))
    terms = make_terms("bias", heads=1, head_dim=4)

    def attend(impl):
        if transform == "vmap":
            return torch.func.vmap(lambda q, k, v: lagwise.attention(q, k, v, terms, impl=impl))(q, k, v)
        return torch.func.jvp(lambda q: lagwise.attention(q, k[0], v[0], terms, impl=impl), (q[0],), (q[1],))[1]

    if reason is None:
        by_hand = [lagwise.attention(*each, terms, impl="dense") for each in zip(q, k, v, strict=True)]
        step = 1e-3 * q[1]
        change = [lagwise.attention(q[0] + side * step, k[0], v[0], terms, impl="dense") for side in (1, -1)]
        expected = torch.stack(by_hand) if transform == "vmap" else (change[0] - change[1]) / 2e-3
        torch.testing.assert_close(attend(impl), expected, rtol=1e-2, atol=1e-3)
    else:
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot do this: {reason[:20]}"):
            attend(impl)
        assert torch.equal(attend("auto"), attend("dense"))


def check_second_derivative(impl, reason):
    dtype = torch.float32 if impl == "triton" else torch.float64
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))

    def twice():
        out = lagwise.attention(q, k, v, impl=impl)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), k)

    if reason is None:
        torch.autograd.gradgradcheck(lambda q, k, v: lagwise.attention(q, k, v, impl=impl), (q, k, v))
    else:
        with pytest.raises(RuntimeError, match=f"impl='{impl}' has no second derivative: use impl='dense'"):
            twice()


OPTIONS = {
    "causal": True, "lengths": torch.tensor([3]), "key_mask": torch.ones(1, 5, dtype=torch.bool), "window": (1, 1),
    "cu_seqlens": torch.tensor([0, 5]), "query_start": 1, "dropout": 0.5, "scale": 2.0, "seed": torch.tensor(1), "max_seqlen": 5,
}  # fmt: skip


@pytest.mark.parametrize("field", fields(Call), ids=lambda field: field.name)
def test_no_option_is_dropped_on_the_way(field):
    """A new option of a call is asked for, so that it can be refused, and reaches the operators, or is exempt by name."""
    q = torch.zeros(1, 1, 5, 4)
    # Without dropout nobody reads a seed any more.
    call = Call(**{field.name: OPTIONS[field.name]}, **({"dropout": 0.5} if field.name == "seed" else {}))
    if field.name not in ("scale", "seed", "max_seqlen"):
        assert field.name in support.REQUESTS and field.name in requests(q, q, q, lagwise.Terms(), call)
    if field.name != "lengths":
        back = unflattened(flat(lower(q, q, q, lagwise.Terms(), call))).call
        assert getattr(back, field.name) is call.__dict__[field.name] or getattr(back, field.name) == call.__dict__[field.name]
    else:
        assert lower(q, q, q, lagwise.Terms(), call).call.key_mask is not None


def test_the_page_is_made_from_the_table():
    page = Path(__file__).parent.parent / "docs" / "support.md"
    made = 'python -c "from lagwise.ops import support; print(support.table())" > docs/support.md'
    assert page.read_text() == support.table() + "\n", f"run: {made}"
