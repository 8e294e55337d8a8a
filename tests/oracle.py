"""The one comparison of the suite: an implementation against the dense specification in float64.

The budget comes from the specification itself, run in the dtype of the test: twice its error, plus one rounding unit
of the terms that are summed in each step. Where torch's own attention kernel is part of an implementation, twice the
error that this kernel makes on the same tensors without any positions comes on top: its exponential is good to about
2^-20 in float32. Nothing here can be loosened by a test.
"""

import os
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import lagwise
from lagwise import LagTable, Terms
from lagwise.call import Call
from lagwise.ops import dense
from lagwise.ops.lowering import token_positions
from lagwise.softmax import terms_of

INTERPRETED = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="no Triton, or a GPU, on which tests/test_gpu.py runs the kernels",
)

# A result goes through one sum after the other: the logit, the normalisation, the product with v or dout, and its own.
ROUNDINGS = 4

Given = lagwise.Encoding | Terms | None


def make_encoding(name: str, *, heads: int = 4, head_dim: int = 8, max_lag: int = 5, **options) -> lagwise.Encoding:
    """Makes an encoding with small tables and with parameters that are far from neutral."""
    if name == "t5":
        options = {"buckets": 8, **options}
    if name == "conv-spe":
        options = {"kernel_size": 4, "realizations": 16, **options}
    if name == "sine-spe":
        options = {"sines": 3, "realizations": 16, **options}
    encoding = lagwise.make(name, heads=heads, head_dim=head_dim, dim=heads * head_dim, max_lag=max_lag, **options)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
            if name == "kerple":
                # Within its range, outside of which its gradient is no derivative on purpose.
                parameter.clamp_(0.1, 1.9)
    return encoding.eval()


def make_terms(*names: str, heads: int = 4, head_dim: int = 8, value_dim: int = 8, max_lag: int = 5) -> Terms:
    """Makes random tables by the names of the support table's features."""
    lags = 2 * max_lag + 1
    widths = {"bias": (), "slopes": (), "gain": (1,), "channel gain": (head_dim,), "value": (value_dim,)}
    tables = {}
    for name in names:
        if name == "transform":
            continue
        values = torch.randn(heads, lags, *widths.get(name, (head_dim,)))
        slopes = (torch.rand(heads) / 4, -torch.rand(heads) / 4) if name == "slopes" else None
        field = {"slopes": "bias", "channel gain": "gain"}.get(name, name)
        tables[field] = LagTable(values, -max_lag, slopes)
    transform = lagwise.Rotary(head_dim=head_dim).terms(0, 0, scale=1.0).transform if "transform" in names else None
    return Terms(**tables, transform=transform)


@dataclass
class Results:
    """Outputs and gradients by name; those of tables apart."""

    tensors: dict[str, Tensor]
    tables: dict[str, Tensor]


def assert_within_budget(
    impl: str, q: Tensor, k: Tensor, v: Tensor, given: Given = None, *, return_lse: bool = True, **options
) -> None:
    """Compares output, log-sum-exp and all gradients of `attention(..., impl=impl, **options)` with the specification.

    Without `return_lse` the output is that of a call that does not ask for the log-sum-exp, and nothing flows back through it.
    """
    options.setdefault("seed", torch.tensor(7, device=q.device))
    settings = Call(**{"scale": q.shape[-1] ** -0.5, **options})
    dout, dlse = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype), torch.randn(q.shape[:3])
    dout, dlse = dout.to(q.device), return_lse * dlse.to(q.device)

    def call(dtype: torch.dtype, implementation: str) -> Results:
        encoding = in_float64(given) if dtype == torch.float64 else given
        tensors = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        terms = terms_of(encoding, *tensors[:2], settings)
        leaves = leaf_tables(terms)
        asked = {**vars(settings), "impl": implementation}
        out, lse = lagwise.attention(*tensors, leaves, **asked, return_lse=True)
        if not return_lse:
            out = lagwise.attention(*tensors, leaves, **asked)
        return gradients_of(out, lse, tensors, terms, leaves, encoding, dout, dlse)

    reference, low = call(torch.float64, "dense"), call(q.dtype, "dense")
    actual = call(q.dtype, impl)
    sizes = term_sizes(q, k, v, given, settings.with_key_mask(k.shape[2]), dout, dlse)
    assert actual.tensors["out"].dtype == q.dtype and actual.tensors["out"].shape == dout.shape
    kernel, precision = kernel_errors(q, k, v, dout) if impl == "split" else ({}, 0.0)
    rounding = ROUNDINGS * sizes.logit * torch.finfo(q.dtype).eps
    if q.dtype == torch.float64:
        # The reference is then rounded as often as what is tested, and the low-precision run is the reference.
        rounding *= 4
    for name, exact in reference.tensors.items():
        finite = exact[exact != -torch.inf]
        unit = sizes.units.get(name, float(finite.abs().max()) if finite.numel() else 0.0) * rounding
        compare(name, actual.tensors[name], exact, low.tensors[name], unit, kernel.get(name))
    for name, exact in reference.tables.items():
        compare_columns(name, actual.tables[name], exact, low.tables[name], sizes.summed[name], rounding + 2 * precision)
    # What nobody sees has no gradient, exactly.
    seen = sizes.visible.any(1).expand(q.shape[0], -1)
    for name in ("k", "v"):
        assert not actual.tensors[name].transpose(1, 2)[~seen].any(), f"{name} has a gradient where no query sees it"
    asks = sizes.visible.any(2).expand(q.shape[0], -1)
    assert not actual.tensors["q"].transpose(1, 2)[~asks].any(), "q has a gradient where it sees nothing"
    assert not actual.tensors["out"].transpose(1, 2)[~asks].any(), "a row that sees nothing must be zero"
    assert (actual.tensors["lse"].transpose(1, 2)[~asks] == -torch.inf).all(), "a row that sees nothing has lse -inf"


def assert_hidden_keys_do_not_matter(impl: str, tensors: list[Tensor], terms: Terms, **options) -> None:
    """Requires the same bits, outputs and gradients, whatever is in keys and values that a mask hides: numbers, or NaN."""
    q, k, v = tensors
    mask = torch.rand(k.shape[0], k.shape[2], device=k.device) < 0.7
    mask[0, : k.shape[2] // 3] = False
    leaves = leaf_tables(terms)

    def run(k: Tensor, v: Tensor) -> list[Tensor]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out, lse = lagwise.attention(*inputs, leaves, key_mask=mask, impl=impl, return_lse=True, **options)
        wanted = [*inputs, *pieces_of(leaves).values()]
        return [out, lse, *torch.autograd.grad([out, lse], wanted, [torch.ones_like(out), (lse > -torch.inf).to(lse.dtype)])]

    hidden = ~mask[:, None, :, None]
    for number, (a, b) in enumerate(zip(run(k, v), run(*(x.masked_fill(hidden, torch.nan) for x in (k, v))), strict=True)):
        assert torch.equal(a, b), f"what is hidden reaches result {number}"


def in_float64(given: Given) -> Given:
    return None if given is None else deepcopy(given).to(torch.float64)


def leaf_tables(terms: Terms) -> Terms:
    """Cuts all tables and slopes off from what they were made of and lets them require gradients."""

    def leaf(table: LagTable) -> LagTable:
        slopes = table.slopes and tuple(slope.detach().requires_grad_() for slope in table.slopes)
        return LagTable(table.values.detach().requires_grad_(), table.first, slopes)

    return replace(terms, **{name: leaf(table) for name, table in terms.tables().items()})


def pieces_of(terms: Terms) -> dict[str, Tensor]:
    """Returns all tables and slopes by name."""
    pieces = {name: table.values for name, table in terms.tables().items()}
    for name, table in terms.tables().items():
        if table.slopes is not None:
            pieces |= {f"{name} past slope": table.slopes[0], f"{name} future slope": table.slopes[1]}
    return pieces


def gradients_of(out, lse, tensors, terms: Terms, leaves: Terms, encoding: Given, dout: Tensor, dlse: Tensor) -> Results:
    """Returns outputs and gradients: those of q, k, v and of the tables, then those of the parameters behind the tables."""
    module = isinstance(encoding, torch.nn.Module)
    parameters = {f"parameter {name}": x for name, x in encoding.named_parameters()} if module else {}
    pieces = pieces_of(leaves)
    named = {**dict(zip("qkv", tensors, strict=True)), **pieces, **parameters}
    # A row without keys has a log-sum-exp that nothing depends on.
    finite = torch.where(lse == -torch.inf, torch.zeros_like(dlse), dlse)

    def gradients(outputs, wanted: dict[str, Tensor], incoming) -> dict[str, Tensor]:
        found = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True, retain_graph=True)
        return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), found, strict=True)}

    found = gradients([out, lse], named, [dout.to(out.dtype), finite.to(lse.dtype)])
    behind = {name: x for name, x in pieces_of(terms).items() if x.requires_grad}
    if behind and parameters:
        through = gradients(list(behind.values()), parameters, [found[name] for name in behind])
        found |= {name: found[name] + through[name] for name in parameters}
    assert all(torch.isfinite(g).all() for g in found.values()), "a gradient is not finite"
    tables = {name: found.pop(name) for name in leaves.tables()}
    return Results({"out": out.detach(), "lse": lse.detach(), **found}, tables)


@dataclass
class Sizes:
    """How large the terms are that a result sums up: the largest one, or for tables the root of the sum of their squares.

    `logit` is the largest logit, at least one: rounding it changes a weight, and all that is summed with it, by that many units.
    """

    logit: float
    units: dict[str, float]
    summed: dict[str, Tensor]
    visible: Tensor


def term_sizes(q, k, v, given: Given, settings: Call, dout: Tensor, dlse: Tensor) -> Sizes:
    """Computes the sizes in float64 from the logits' gradients.

    The sum of squares of a table's gradient is itself a gradient: that of the logits of squared operands, with the squares of the
    logits' gradients coming in.
    """
    q, k, v, dout, dlse = (x.detach().double() for x in (q, k, v, dout, dlse))
    terms = leaf_tables(terms_of(in_float64(given), q, k, settings))
    lags, visible = dense.geometry(q, k, settings)
    position = token_positions(q, k, settings)
    logit = dense.logits(q, k, terms, lags, settings.scale, position).detach().masked_fill(~visible[:, None], -torch.inf)
    finite = logit[logit != -torch.inf].abs()
    largest = max(1.0, float(finite.max()) if finite.numel() else 0.0)
    units = {"out": float(v.abs().max()), "lse": 1.0}
    weights = torch.softmax(logit, -1).nan_to_num() / (1 - settings.dropout)
    dweights = dout @ dense.per_query_head(v, q.shape[1]).mT
    if terms.value is not None:
        value = terms.value.at(lags).transpose(0, 1)
        units["out"] += float(terms.value.values.detach().abs().max())
        dweights = dweights + (dout[:, :, :, None] * value.detach()).sum(-1)
    # The gradient of a logit is a difference, whose parts are rounded: their sizes count, not its own.
    delta = (weights * dweights).sum(-1, keepdim=True)
    dlogit = weights * (dweights.abs() + delta.abs() + dlse[..., None].abs())
    if terms.bias is not None and terms.bias.slopes is not None:
        # A slope's gradient sums dlogit times the distance beyond the end, and mostly cancels.
        for side, beyond in zip(("past", "future"), terms.bias._beyond(lags), strict=True):
            units[f"bias {side} slope"] = float((dlogit * beyond[:, None]).square().sum((0, 2, 3)).sqrt().max())
    summed = {}
    content = (q, k) if terms.transform is None else terms.transform(q, k, *position)
    ready = (content[0].detach() ** 2, content[1].detach() ** 2)
    tables = {name: replace(table, slopes=None) for name, table in terms.tables().items()}
    without = replace(Terms(**tables), transform=None if terms.transform is None else lambda *_: ready)
    leaves = {name: table.values for name, table in tables.items() if name != "value"}
    if leaves:
        scores = dense.logits(q**2, k**2, without, lags, settings.scale**2, position)
        squares = torch.autograd.grad(scores, list(leaves.values()), dlogit**2)
        summed = {name: square.sqrt() for name, square in zip(leaves, squares, strict=True)}
    if terms.value is not None:
        out = ((weights**2)[..., None] * value).sum(-2)
        (square,) = torch.autograd.grad(out, [terms.value.values], dout**2)
        summed["value"] = square.sqrt()
    return Sizes(largest, units, summed, visible)


def kernel_errors(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[dict[str, Tensor], float]:
    """Returns the errors that torch's attention kernel makes on these tensors without positions, and the largest relative one."""
    width, heads = max(q.shape[3], v.shape[3]), q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (q, k, v, dout)]
    scale = q.shape[3] ** -0.5

    def run(dtype: torch.dtype) -> list[Tensor]:
        tensors = [x.detach().to(dtype).requires_grad_() for x in padded[:3]]
        if dtype == torch.float64:
            out = torch.softmax(scale * tensors[0] @ tensors[1].mT, dim=-1) @ tensors[2]
        else:
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, scale=scale)
        return [out, *torch.autograd.grad(out, tensors, padded[3].to(dtype))]

    exact, found = run(torch.float64), run(q.dtype)
    errors = {name: (b.double() - a).detach().abs() for name, a, b in zip(("out", "q", "k", "v"), exact, found, strict=True)}
    return errors, max(float(error.max() / a.detach().abs().max()) for error, a in zip(errors.values(), exact, strict=True))


def compare(name: str, actual: Tensor, exact: Tensor, low: Tensor, unit: float, kernel: Tensor | None) -> None:
    """Requires the largest and the mean error to be at most twice those of the low-precision run, plus a rounding unit."""
    infinite = exact == -torch.inf
    assert (actual[infinite] == -torch.inf).all() and torch.isfinite(actual[~infinite]).all(), f"{name} is not finite"
    error, allowed = ((x.double() - exact)[~infinite].abs() for x in (actual, low))
    if not error.numel():
        return
    for kind, reduce in (("largest", torch.max), ("mean", torch.mean)):
        most = 2 * float(reduce(allowed)) + unit + (0.0 if kernel is None else 2 * float(reduce(kernel)))
        assert float(reduce(error)) <= most, f"{kind} error of {name} is {float(reduce(error)):.3g}, allowed {most:.3g}"


def compare_columns(name: str, actual: Tensor, exact: Tensor, low: Tensor, summed: Tensor, unit: float) -> None:
    """Compares a table's gradient, each number by the size of the terms in it, so that tails do not hide near columns."""
    empty = summed == 0
    assert not actual[empty].any(), f"{name} has a gradient at a lag that is never reached"
    if empty.all():
        return
    error, allowed = (((x.double() - exact).abs() / summed)[~empty].max() for x in (actual, low))
    most = 2 * float(allowed) + unit
    assert float(error) <= most, f"error of the {name} table, relative to its terms, is {float(error):.3g}, allowed {most:.3g}"
