"""What goes through the attention layers of a model while it runs: ours, and those of Hugging Face on "lagwise".

>>> import torch, lagwise
>>> model = lagwise.nn.Encoder(16, layers=2, heads=2, encoding="t5").eval()
>>> with capture(model) as calls:
...     y = model(torch.randn(1, 5, 16))
>>> [call.layer for call in calls]
['layers.0.attention', 'layers.1.attention']
>>> calls[0].parts().posterior.shape
torch.Size([1, 2, 5, 5])
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lagwise.call import LINEAR_OPTIONS, WEIGHT_OPTIONS, Call
from lagwise.feature_maps import FeatureMap
from lagwise.lags import LagTable
from lagwise.lens.parts import Parts, attention_parts
from lagwise.lens.priors import Prior, prior
from lagwise.softmax import WATCHER
from lagwise.terms import Terms

CONTEXTS = ("context", "key_value_states", "encoder_hidden_states")
"""What layers call the sequence that they attend to instead of their own."""


@dataclass(frozen=True)
class Captured:
    """One call of softmax or linear attention: what it was given, without gradients.

    Args:
        layer: The name of the module that called, as `model.named_modules()` has it.
        cross: Whether it attends to another sequence than its own, whose positions mean nothing to it.
        q: Queries.
        k: Keys, as the call got them: those of a cache may be transformed already.
        v: Values.
        terms: The position terms.
        call: Its options, lengths as a mask of keys.
        feature_map: That of linear attention, None for softmax attention.
    """

    layer: str
    cross: bool
    q: Float[Tensor, "batch heads queries dim"]
    k: Float[Tensor, "batch kv_heads keys dim"]
    v: Float[Tensor, "batch kv_heads keys value_dim"]
    terms: Terms
    call: Call
    feature_map: FeatureMap | str | None = None

    @property
    def causal(self) -> bool:
        """Whether queries see no later key."""
        return self.call.causal

    @property
    def options(self) -> dict[str, Any]:
        """What `attention`, or `linear_attention`, and `attention_parts` take beside the tensors and the terms."""
        if self.feature_map is None:
            return {name: getattr(self.call, name) for name in WEIGHT_OPTIONS}
        return {"feature_map": self.feature_map, **{name: getattr(self.call, name) for name in LINEAR_OPTIONS}}

    def first_row(self) -> "Captured":
        """Returns the call with the first row of its batch alone."""
        start = self.call.query_start
        call = replace(
            self.call, key_mask=None if self.call.key_mask is None else self.call.key_mask[:1],
            query_start=start[:1] if isinstance(start, Tensor) and start.ndim else start,
        )  # fmt: skip
        return replace(self, q=self.q[:1], k=self.k[:1], v=self.v[:1], call=call)

    def parts(self) -> Parts:
        """Returns the logits by what they come from; dropout of weights is left out."""
        return attention_parts(self.q, self.k, self.terms, **self.options)

    def prior(self) -> Prior:
        """Returns the prior over the lags that a sequence of the call's keys has; of packed ones that is the longest."""
        ends = self.call.cu_seqlens
        length = self.k.shape[2] if ends is None else int(ends.diff().max())
        return prior(self.terms, length, causal=self.call.causal)


Watch = Callable[[Captured], Terms]
"""Is told of each call, and returns the terms to compute with."""


@contextmanager
def capture(model: nn.Module) -> Iterator[list[Captured]]:
    """Collects the calls of attention that a model makes while the context lasts, in their order.

    Any model whose attention is `lagwise.attention` or `lagwise.linear_attention`: stacks of `lagwise.nn`, models of trained
    runs, and Hugging Face models with `attn_implementation="lagwise"`. A layer that runs more than once, for each token that is
    generated or because it is tied, is there each time. A model that goes on from a state of linear attention, which holds sums
    and no keys, is refused. In training mode dropout and random encodings are as in training; call `model.eval()` before.

    Args:
        model: The model, not compiled. Calls of other models pass by.
    """
    calls: list[Captured] = []

    def collect(found: Captured) -> Terms:
        calls.append(
            replace(
                found, q=found.q.detach(), k=found.k.detach(), v=found.v.detach(), terms=_detached(found.terms),
                # A cache may go on to write into these.
                call=replace(found.call, **{name: x.clone() for name, x in found.call.tensors()}),
                # Another projection may be drawn.
                feature_map=deepcopy(found.feature_map),
            )
        )  # fmt: skip
        return found.terms

    with watching(model, collect):
        yield calls


@contextmanager
def watching(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Tells `watch` of each call of attention that a model makes, and lets it change the terms.

    Softmax and linear attention ask one context variable, `WATCHER`, at each call that is not compiled; nobody pays while it is
    not set. Hooks on the model's modules, there for as long as the context, tell which of them is calling. A context inside
    another gets the terms that the outer one returns.
    """
    running: list[tuple[str, nn.Module, tuple, dict[str, Any]]] = []
    seen = False

    def begin(name: str) -> Callable[..., None]:
        return lambda module, inputs, options: running.append((name, module, inputs, options))

    def end(module: nn.Module, *_: Any) -> None:
        # Another hook may have raised before ours began.
        if running and running[-1][1] is module:
            running.pop()

    def tell(
        q: Tensor, k: Tensor, v: Tensor, terms: Terms, call: Call,
        feature_map: FeatureMap | str | None = None, from_state: bool = False,
    ) -> Terms:  # fmt: skip
        nonlocal seen
        terms = terms if outer is None else outer(q, k, v, terms, call, feature_map=feature_map, from_state=from_state)
        if not running:
            return terms
        seen = True
        if from_state:
            raise ValueError(
                "model must not go on from a state of linear attention while it is watched, which holds sums and no keys, but "
                f"{running[-1][0]} does: run it without a cache, on the whole sequence"
            )
        name, module, inputs, given = running[-1]
        cross, call = _is_cross(module, inputs, given), call.with_key_mask(k.shape[2])
        return watch(Captured(name, cross, q, k, v, terms, call, feature_map))

    hooks = [
        hook
        for name, module in model.named_modules()
        # Copies of feature maps are kept, and would keep the hooks; they are not called like layers.
        if not isinstance(module, FeatureMap)
        for hook in (
            module.register_forward_pre_hook(begin(name), with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        )
    ]
    outer = WATCHER.get()
    token = WATCHER.set(tell)
    try:
        yield
    finally:
        WATCHER.reset(token)
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ValueError(
            "model must call lagwise.attention or lagwise.linear_attention while it is watched, but did not: run it inside the "
            "context, not compiled, and a Hugging Face model with attn_implementation='lagwise'"
        )


def _is_cross(module: nn.Module, inputs: tuple, options: dict[str, Any]) -> bool:
    """Says whether a layer was called with another sequence to attend to."""
    given = inspect.signature(module.forward).bind(*inputs, **options).arguments
    named = "CrossAttention" in type(module).__name__
    return named or any({**given, **options}.get(name) is not None for name in CONTEXTS)


def _detached(terms: Terms) -> Terms:
    """Returns the terms with tables that hold no graph."""
    tables = {}
    for name, table in terms.tables().items():
        slopes = table.slopes and (table.slopes[0].detach(), table.slopes[1].detach())
        tables[name] = LagTable(table.values.detach(), table.first, slopes)
    return replace(terms, **tables)
