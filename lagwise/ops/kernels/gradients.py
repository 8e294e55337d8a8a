"""The gradients of a call: two passes over its pairs, then those of the tables behind them.

Gradients of scores are written over the scores, by the pass over queries, which is then the second one. Without scores it is the
first, and computes delta for the other.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lagwise.ops.kernels.arguments import FarKeys, FarQueries, KeyGradients, QueryGradients, Scores, view
from lagwise.ops.kernels.backward import key_gradient_kernel, query_gradient_kernel
from lagwise.ops.kernels.bias_gradient import row_sums, scalar_gradients
from lagwise.ops.kernels.channel_gain import channel_gradients
from lagwise.ops.kernels.inputs import Inputs
from lagwise.ops.kernels.plan import PATCH, blocks
from lagwise.ops.kernels.results import delta_of
from lagwise.ops.kernels.scores import Given, add_row_gradients, empty_ends, table_gradients
from lagwise.ops.lowering import empty_laid_out, is_by_token


class Far(NamedTuple):
    """What `split` knows of the far fields: their gradients, what they add to the ends of tables, and delta of all rows.

    Ends are [batch, heads, past or future, queries].
    """

    queries: FarQueries
    keys: FarKeys
    sides: int
    query_counts: tuple[int, int]
    key_counts: tuple[int, int]
    delta: Tensor
    changes: Tensor  # sums of dlogit
    masses: Tensor  # sums of weights


class Incoming(NamedTuple):
    """What a gradient starts from: the results of the call and their gradients, and delta where it is known."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    delta: Tensor | None = None


def places_of(given: Incoming, far: Far | None) -> list[tuple[tuple[int, ...], int]]:
    """Returns how tensors lie that a plan does not know: a gradient that comes in may lie anywhere, and so do others' results."""
    others = [given.out, given.dout, *([] if given.dlse is None else [given.dlse])]
    if far is not None:
        others += [x.data for x in (far.queries.past, far.queries.future, *far.keys)]
    return [(x.stride(), x.data_ptr() % 16) for x in others]


def differentiate(
    inputs: Inputs,
    given: Incoming,
    *,
    learned: bool,
    far: Far | None = None,
    dtype: torch.dtype | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Returns the gradients of q, k, v and of the raw q and k by name, those of k and v per query head, and those of the tables.

    The ends come from the kernels, or from the far fields where the plan has only the band.

    Args:
        inputs: The call.
        given: Its results and their gradients.
        learned: Whether tables get gradients.
        far: What is known of far fields.
        dtype: The type of all gradients; that of what they belong to unless given.
        into: By name where to write those of q, k, v and of the raw q and k; to new tensors unless given.
    """
    plan, lowered = inputs.plan, inputs.lowered
    inputs.hide_keys()
    passes = Passes(inputs, given, learned, far, dtype, into or {})
    if plan.scored:
        passes.over_keys()
        passes.over_queries()
    else:
        passes.over_queries()
        passes.over_keys()
    found = passes.found
    if plan.vectors:
        passes.table_gradients(learned)
    if plan.channels:
        assert lowered.gain is not None
        kind = dtype or lowered.gain.dtype
        channel_gradients(inputs, passes.scores, passes.gain_ends, found, learned=learned, dtype=kind)
    if passes.sums is not None:
        found |= scalar_gradients(plan, lowered, passes.sums, None if far is None else far.changes, dtype)
    return found


def empty_gradient(x: Tensor, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an empty gradient of q, k or v, which lies as they do, with some number of heads."""
    return empty_laid_out(is_by_token(x) and x.shape[1] == heads, x, x.shape[0], heads, *x.shape[2:], dtype=dtype)


class Passes:
    """The two passes over the pairs, and what they find."""

    def __init__(
        self,
        inputs: Inputs,
        given: Incoming,
        learned: bool,
        far: Far | None,
        dtype: torch.dtype | None,
        into: Mapping[str, Tensor],
    ):
        plan, none = inputs.plan, inputs.q
        self.inputs, self.plan, self.given, self.far, self.dtype, self.into = inputs, plan, given, far, dtype, into
        self.scores = inputs.scores(given.dout) if plan.scored else Scores(none, none, none, none, none, none)
        self.learned = learned and bool(plan.scalars)
        self.sums = row_sums(plan) if self.learned else None
        self.own_delta = far is None and not plan.scored
        if far is not None:
            self.delta = far.delta
        elif plan.scored:
            self.delta = delta_of(given.dout, given.out, given.dlse) if given.delta is None else given.delta
        else:
            self.delta = given.lse.new_empty(given.lse.shape)
        self.site = (learned, given.dlse is not None, dtype, *places_of(given, far))
        self.found: dict[str, Tensor] = {}
        whole = plan.only is None
        self.query_ends = empty_ends(plan, plan.queries) if whole and "query" in plan.tables else none
        self.masses = empty_ends(plan, plan.queries) if whole and "value" in plan.tables else none
        self.key_ends = empty_ends(plan, plan.keys) if whole and "key" in plan.tables else none
        self.gain_ends = none

    def place_for(self, name: str) -> Tensor:
        """Returns where the gradient of q, k, v or of the raw q or k is to be written."""
        if name in self.into:
            return self.into[name]
        return empty_gradient(getattr(self.inputs.lowered, name), self.plan.heads, self.dtype)

    def over_queries(self) -> None:
        """Computes dq, and what the same kernel finds for the tables; scores turn into their gradients."""
        plan, inputs, given, far, none = self.plan, self.inputs, self.given, self.far, self.inputs.q
        self.found["q"] = dq = self.place_for("q")
        if plan.channels:
            count = blocks(plan.queries, plan.tiles["query"][0])
            shape = (plan.batch, plan.heads, count, 2, plan.flags["WIDTH"])
            self.gain_ends = torch.empty(shape, dtype=torch.float32, device=none.device)
        sums, ends, patches = (none, none, none) if self.sums is None else self.sums
        gain_sums = sums[-1] if self.sums is not None else none
        bias_sums = sums[0] if self.sums is not None else none
        found = QueryGradients(view(dq), self.query_ends, self.masses, patches, bias_sums, gain_sums, ends, self.gain_ends)
        more = {
            "LEARNED": self.learned,
            "DELTA": self.own_delta,
            "DLSE": given.dlse is not None,
            "SIDES": far.sides if far else 0,
        }
        values = (
            view(inputs.q), view(inputs.k), view(inputs.v), view(given.out), view(given.dout),
            given.lse if given.dlse is None else given.dlse, given.lse, self.delta, found, far.queries if far else None,
            inputs.tables, self.scores, inputs.seen, *plan.numbers,
            *(far.query_counts if far else (0, 0)), PATCH, plan.flags_at("query", **more),
        )  # fmt: skip
        plan.launch_tiles("query", ("query", self.site), query_gradient_kernel, values)

    def over_keys(self) -> None:
        """Computes dk and dv per query head, and the gradients of the keys' ends, which a band has not."""
        plan, inputs, given, far = self.plan, self.inputs, self.given, self.far
        dk, dv = self.place_for("k"), self.place_for("v")
        values = (
            view(inputs.q), view(inputs.k), view(inputs.v), view(given.dout), given.lse, self.delta,
            KeyGradients(view(dk), view(dv), self.key_ends), far.keys if far else None,
            inputs.tables, self.scores, inputs.seen, *plan.numbers,
            *(far.key_counts if far else (0, 0)), plan.flags_at("key", SIDES=far.sides if far else 0),
        )  # fmt: skip
        plan.launch_tiles("key", ("key", self.site), key_gradient_kernel, values)
        self.found |= {"k": dk, "v": dv}

    def ends_of(self, name: str) -> Tensor | None:
        """Returns the gradients of the ends of scores; those of keys' scores in far fields are gradients of their queries."""
        if self.far is not None:
            return {"query": self.far.changes, "value": self.far.masses, "key": None}[name]
        return {"query": self.query_ends, "value": self.masses, "key": self.key_ends}[name]

    def table_gradients(self, learned: bool) -> None:
        """Finds the gradients of tables of vectors, and adds scores' share of the gradients of the raw q and k.

        It goes to that of the transformed one where they are the same tensor.
        """
        plan, inputs, found = self.plan, self.inputs, self.found
        rows: dict[str, Tensor] = {"query": inputs.raw_q, "key": inputs.raw_k, "value": self.given.dout}
        given = [
            Given(name, rows[name], inputs.vectors[name], getattr(self.scores, name), self.ends_of(name)) for name in plan.vectors
        ]
        if learned:
            dtypes = [self.dtype or getattr(inputs.lowered, of.name).dtype for of in given]
            found |= table_gradients(plan, given, inputs.visible, dtypes)
        changed = []
        for of in given:
            if of.name != "value":
                letter = "k" if of.name == "key" else "q"
                raw = getattr(inputs.lowered, f"raw_{letter}")
                if raw is not None:
                    found[f"raw_{letter}"] = self.place_for(f"raw_{letter}")
                changed.append(of._replace(x=found[letter if raw is None else f"raw_{letter}"], added=raw is None))
        if changed:
            add_row_gradients(plan, changed, inputs.visible)
