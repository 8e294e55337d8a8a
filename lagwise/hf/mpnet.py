"""MPNet, whose T5-style bias is not on the attention interface: its classes learn the name "lagwise" alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetPreTrainedModel, MPNetSelfAttention

from lagwise.hf import t5
from lagwise.hf.interface import attention_forward
from lagwise.hf.masks import NAME, Mask

# What MPNet uses, whatever its config says.
BUCKETS, MAX_LAG = 32, 128


def install() -> None:
    """Lets the classes compute with this library where their model asks for "lagwise", and as ever where it does not."""
    if not hasattr(MPNetSelfAttention.forward, "__wrapped__"):
        MPNetSelfAttention.forward = through_the_interface(MPNetSelfAttention.forward)
        MPNetEncoder.compute_position_bias = table_instead(MPNetEncoder.compute_position_bias)
        MPNetPreTrainedModel.set_attn_implementation = with_our_name(MPNetPreTrainedModel.set_attn_implementation)


def with_our_name(set_attn_implementation: Callable) -> Callable:
    """Wraps the method that refuses every name, because it finds no call of the interface in MPNet's source."""

    @wraps(set_attn_implementation)
    def wrapped(self: MPNetPreTrainedModel, attn_implementation: str | dict, *args: Any, **options: Any) -> None:
        if attn_implementation in (NAME, "eager"):
            self.config._attn_implementation = attn_implementation
        else:
            set_attn_implementation(self, attn_implementation, *args, **options)

    return wrapped


def table_instead(compute_position_bias: Callable) -> Callable:
    """Wraps the method that makes the bias."""

    @wraps(compute_position_bias)
    def wrapped(self: MPNetEncoder, *args: Any, **options: Any) -> Tensor:
        if t5.is_ours(self):
            return t5.table_of(self.relative_attention_bias, BUCKETS, MAX_LAG, causal=False)
        return compute_position_bias(self, *args, **options)

    return wrapped


def through_the_interface(forward: Callable) -> Callable:
    """Wraps the layer, which has no config: the kind of its mask tells what the model asks for."""

    @wraps(forward)
    def wrapped(
        self: MPNetSelfAttention,
        hidden_states: Tensor,
        attention_mask: Tensor | Mask | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        if not isinstance(attention_mask, Mask):
            return forward(self, hidden_states, attention_mask, position_bias, output_attentions, **options)
        q, k, v = (
            project(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        out, _ = attention_forward(
            self, q, k, v, attention_mask, dropout=self.dropout.p if self.training else 0.0, position_bias=position_bias,
            output_attentions=output_attentions,
        )  # fmt: skip
        return (self.o(out.flatten(2)),)

    return wrapped
