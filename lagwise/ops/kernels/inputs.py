"""The tensors of one call, as its kernels take them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lagwise.ops.kernels.arguments import Scores, Seen, Tables
from lagwise.ops.kernels.channel_gain import channel_scores
from lagwise.ops.kernels.plan import Plan
from lagwise.ops.kernels.scores import empty_scores, make_scores
from lagwise.ops.kernels.tables import scalar_tables, spans_of
from lagwise.ops.lowering import Lowered, tables_of


def prepare(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns what is made of a call's tables and masks for its kernels, in both passes: padded tables and spans, if any."""
    return [*scalar_tables(plan, lowered), *spans_of(plan, lowered)]


class Inputs:
    """The tensors of a call, with what was prepared of them. Any tensor stands for one that the call has not."""

    def __init__(self, plan: Plan, lowered: Lowered, prepared: Sequence[Tensor]):
        self.plan, self.lowered = plan, lowered
        self.q, self.k, self.v = (x if x.stride(3) == 1 else x.contiguous() for x in (lowered.q, lowered.k, lowered.v))
        if plan.flags["MASK"] and plan.scored:
            # Where there are scores, loads that depend on a mask slow the forward kernel down by more than this costs.
            self.v = self.shown(self.v)
        none, rest, call = self.q, list(prepared), lowered.call
        bias = gain = spans = none
        if plan.scalars:
            tables = rest.pop(0)
            bias, gain = tables[0], tables[-1]
        if rest:
            (spans,) = rest
        key_mask = none if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8)
        starts, seed = (none if x is None else x for x in (lowered.starts, call.seed))
        self.seen = Seen(key_mask, spans, starts, seed)
        # What a kernel does not read keeps its type, so that it is not compiled anew.
        self.places, self.visible = Seen(none, none, starts, none), Seen(key_mask, spans, starts, none)
        ends = channel_gain = value = none
        if plan.channels or "value" in plan.tables:
            tables = tables_of(lowered)
            band = (plan.band_first, plan.band_first + plan.band_lags - 1)
            if plan.channels and tables.gain is not None:
                window = tables.gain.window(*band)
                channel_gain = self.per_head(window, torch.float32)
                ends = self.per_head(torch.stack([window[:, 0], window[:, -1]], dim=1), torch.float32)
            if tables.value is not None:
                value = self.per_head(tables.value.window(*band), none.dtype)
        self.tables = Tables(bias, gain, ends, channel_gain, value)

    def per_head(self, window: Tensor, dtype: torch.dtype) -> Tensor:
        """Gives each head its own copy of a table."""
        return window.to(dtype).expand(self.plan.heads, *window.shape[1:]).contiguous()

    def shown(self, x: Tensor) -> Tensor:
        """Returns k or v with zeros where a mask hides them: a gradient of zero times NaN is NaN."""
        mask = self.lowered.call.key_mask
        # One pass over the memory, where `masked_fill` takes two.
        return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)

    def hide_keys(self) -> None:
        """Leaves zeros of hidden keys, for gradients alone: logits are masked."""
        if self.plan.scored:
            self.k = self.shown(self.k)

    @cached_property
    def raw_q(self) -> Tensor:
        """What `query` reads."""
        return beside(self.q if self.lowered.raw_q is None else self.lowered.raw_q)

    @property
    def raw_k(self) -> Tensor:
        """What `key` reads."""
        return self.k if self.lowered.raw_k is None else beside(self.shown(self.lowered.raw_k))

    def scores(self, dout: Tensor | None = None) -> Scores:
        """Returns the scores of a call's band and their ends, with `dout` those of values too."""
        plan, lowered, none = self.plan, self.lowered, self.q
        tables: list[tuple[str, Tensor, Tensor]] = []
        if lowered.query is not None:
            tables.append(("query", self.raw_q, lowered.query))
        if lowered.key is not None:
            tables.append(("key", self.raw_k, lowered.key))
        if lowered.value is not None and dout is not None:
            tables.append(("value", dout, lowered.value))
        found = make_scores(plan, tables, self.places) if tables else {}
        if plan.channels and lowered.query is None:
            found["query"] = empty_scores(plan, plan.queries, plan.dtype, zeros=True), none
        named = [found.get(name, (none, none)) for name in ("query", "key", "value")]
        scores = Scores(*(scores for scores, _ in named), *(ends for _, ends in named))
        if plan.channels:
            channel_scores(plan, self.q, self.k, self.tables, scores, self.places)
        return scores


def beside(x: Tensor) -> Tensor:
    """Returns a tensor whose channels lie side by side."""
    return x if x.stride(3) == 1 else x.contiguous()
