"""The tensors of one call, as its kernels take them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lagwise.ops.kernels.arguments import Scores, Seen, Tables
from lagwise.ops.kernels.channel_gain import channel_scores, gain_words, takes_words, word_scores
from lagwise.ops.kernels.plan import Plan
from lagwise.ops.kernels.scores import empty_scores, make_scores
from lagwise.ops.kernels.tables import is_copied, scalar_tables, spans_of, vector_tables
from lagwise.ops.lowering import Lowered, tables_of


def prepare(plan: Plan, lowered: Lowered) -> list[Tensor]:
    """Returns what is made of a call's tables and masks for its kernels, in both passes, as far as there is any.

    Padded tables of scalars, then tables of vectors in the type of products, then spans.
    """
    return [*scalar_tables(plan, lowered), *vector_tables(plan, lowered), *spans_of(plan, lowered)]


def band_tables(plan: Plan, lowered: Lowered) -> dict[str, Tensor]:
    """Returns by name what of `Tables` is a gain per channel in the band, and its ends, a copy for each head."""
    gain = tables_of(lowered).gain if plan.channels else None
    if gain is None:
        return {}
    if takes_words(plan, lowered.q, lowered.k):
        words, ends = gain_words(plan, gain.values)
        return {"channel_gain": words, "ends": ends}
    window = gain.window(plan.band_first, plan.band_last)
    ends = torch.stack([window[:, 0], window[:, -1]], dim=1)
    return {"channel_gain": per_head(plan, window), "ends": per_head(plan, ends)}


def per_head(plan: Plan, window: Tensor) -> Tensor:
    """Gives each head its own copy of a table, in float32."""
    return window.float().expand(plan.heads, *window.shape[1:]).contiguous()


class Inputs:
    """The tensors of a call, with what was prepared of them, and `band_tables` where they are there.

    Any tensor stands for one that the call has not.
    """

    def __init__(self, plan: Plan, lowered: Lowered, prepared: Sequence[Tensor], bands: dict[str, Tensor] | None = None):
        self.plan, self.lowered = plan, lowered
        self.q, self.k, self.v = (x if x.stride(3) == 1 else x.contiguous() for x in (lowered.q, lowered.k, lowered.v))
        self.hidden = False
        # Whether a gain per channel meets words of two numbers.
        self.words = plan.channels and takes_words(plan, self.q, self.k)
        if plan.flags["MASK"] and plan.scored:
            # Where there are scores, loads that depend on a mask slow the forward kernel down by more than this costs.
            self.v = self.shown(self.v)
        if self.words:
            # The matrix units multiply words of one lag by the zeros of others.
            self.hide_keys()
        none, rest, call = self.q, list(prepared), lowered.call
        bias = gain = spans = none
        if plan.scalars:
            tables = rest.pop(0)
            bias, gain = tables[0], tables[-1]
        self.vectors: dict[str, Tensor] = {}
        for name in plan.vectors:
            table = getattr(lowered, name)
            self.vectors[name] = rest.pop(0) if is_copied(table, plan.dtype) else table
        if rest:
            (spans,) = rest
        key_mask = none if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8)
        starts, seed = (none if x is None else x for x in (lowered.starts, call.seed))
        self.seen = Seen(key_mask, spans, starts, seed)
        # What a kernel does not read keeps its type, so that it is not compiled anew.
        self.places, self.visible = Seen(none, none, starts, none), Seen(key_mask, spans, starts, none)
        bands = band_tables(plan, lowered) if bands is None else bands
        self.tables = Tables(bias, gain, bands.get("ends", none), bands.get("channel_gain", none), none)

    def shown(self, x: Tensor) -> Tensor:
        """Returns k or v with zeros where a mask hides them: a gradient of zero times NaN is NaN."""
        mask = self.lowered.call.key_mask
        # One pass over the memory, where `masked_fill` takes two.
        return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)

    def hide_keys(self) -> None:
        """Leaves zeros of hidden keys, for gradients alone: logits are masked."""
        if self.plan.scored and not self.hidden:
            self.k, self.hidden = self.shown(self.k), True

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
            tables.append(("query", self.raw_q, self.vectors["query"]))
        if lowered.key is not None:
            tables.append(("key", self.raw_k, self.vectors["key"]))
        if lowered.value is not None and dout is not None:
            tables.append(("value", dout, self.vectors["value"]))
        found = make_scores(plan, tables, self.places) if tables else {}
        if plan.channels and lowered.query is None:
            # Kernels on words write all that whole tiles look at.
            zeros = not self.words or any(plan.keys % keys > 0 for _, keys, _, _ in plan.tiles.values())
            found["query"] = empty_scores(plan, "query", plan.dtype, zeros=zeros), none
        named = [found.get(name, (none, none)) for name in ("query", "key", "value")]
        scores = Scores(*(scores for scores, _ in named), *(ends for _, ends in named))
        if plan.channels:
            (word_scores if self.words else channel_scores)(plan, self.q, self.k, self.tables, scores, self.places)
        return scores


def beside(x: Tensor) -> Tensor:
    """Returns a tensor whose channels lie side by side."""
    return x if x.stride(3) == 1 else x.contiguous()
