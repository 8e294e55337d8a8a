"""Plain attention on the vendor's kernels, with the log-sum-exp that they return: the far field of a clipped encoding."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.ops import support
from lagwise.ops.grouped import per_key_head, per_query_head
from lagwise.ops.register import Refused

aten = torch.ops.aten

# The fewest rows and keys of a piece that cuDNN is given.
CUDNN_LEAST = 64


class Segments(NamedTuple):
    """Which of a batch's tokens attend to which, all rows of the batch one after the other.

    Queries and keys are cut into as many runs, and the queries of a run see the keys of the run with the same number. A run may
    be empty. Both arrays have where runs begin, int32 [runs + 1], and end with the number of all tokens.
    """

    queries: Tensor
    keys: Tensor
    longest: int  # no run is longer


def backend(q: Tensor, k: Tensor) -> str:
    """Names the kernel for a piece: "cpu-flash", and on a GPU "cudnn" or "flash".

    cuDNN is the faster one from Hopper on. It repeats its gradients only up to rounding, and the program ends in it
    where a piece has very few rows or keys, so that these and deterministic runs go to flash.
    """
    if q.device.type == "cpu":
        return "cpu-flash"
    if q.is_meta or torch.are_deterministic_algorithms_enabled() or not torch.backends.cudnn.is_available():
        return "flash"
    large = min(q.shape[2], k.shape[2]) >= CUDNN_LEAST
    return "cudnn" if large and hopper(q.device) else "flash"


@cache
def hopper(device: torch.device) -> bool:
    """Says whether a GPU is of the Hopper generation or later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def positively_scaled(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Returns queries and a positive scale whose product is that of those given, and the factor that the queries took over.

    The vendor's kernels take the largest product of a row for its largest logit, and minus infinity times the scale for what is
    masked: with a scale of zero, or one that float32 rounds to it, that is not a number, and with a negative one plus infinity.
    """
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return q * scale, 1.0, scale
    return (q, scale, 1.0) if scale > 0.0 else (-q, -scale, -1.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp, [batch, heads, queries], of plain attention; a causal mask starts at the top left.

    Channels are padded with zeros to what the kernel takes, and grouped heads are repeated. With segments, those that a causal
    mask is for are squares, and queries that see nothing have zeros and minus infinity.
    """
    width = v.shape[3]
    q, scale, _ = positively_scaled(q, scale)
    q, k, v = padded(q, k, v)
    match segments or backend(q, k):
        case Segments() as known:
            out, lse = flash_segments(q, k, v, known, causal=causal, scale=scale)
        case "cpu-flash":
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        case "cudnn":
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        case _:
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    out = refusing_second_derivative(out)
    return out if out.shape[3] == width else out[..., :width], lse.reshape(q.shape[:3])


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Returns the output of plain attention, with torch's own derivative; a causal mask starts at the top left."""
    # A compiler, and the meta device, know torch's function better than the kernels behind it. On a GPU a call of these from
    # Python takes longer, but only they take care of few rows and of widths that differ.
    known = torch.compiler.is_compiling() or q.device.type == "meta"
    if known or (q.is_cuda and min(q.shape[2], k.shape[2]) >= CUDNN_LEAST and q.shape[3] == v.shape[3]):
        q, scale, _ = positively_scaled(q, scale)
        # Not as a comparison, which is no bool where sizes are symbolic.
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **grouped)
        return out if known else refusing_second_derivative(out)
    return attend(q, k, v, causal=causal, scale=scale)[0]


def refusing_second_derivative(out: Tensor) -> Tensor:
    """Returns a result of a vendor's kernel, of which gradients of gradients are refused in the library's words."""
    if out.grad_fn is not None:
        out.grad_fn.register_hook(refuse_second_derivative)
    return out


def refuse_second_derivative(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
    """As a hook of a vendor's kernel, lets the derivative of its gradients be refused in the library's words, not in torch's."""
    if not torch.is_grad_enabled():
        return None
    refusal = support.no_second_derivative("split")
    return tuple(None if x is None else Refused.apply(x, refusal) for x in gradients)


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    *, causal: bool, scale: float, segments: Segments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v for weights `exp(scale q . k - lse)`.

    The kernel takes `delta = dout . out` itself, so a gradient of the log-sum-exp comes in through one more channel: there `v` is
    0, `dout` is 1 and `out` is `-dlse`, and the product is what has to be subtracted from delta.
    """
    heads, widths = (k.shape[1], v.shape[1]), (q.shape[3], v.shape[3])
    q, scale, factor = positively_scaled(q, scale)
    if dlse is not None:
        v = torch.nn.functional.pad(v, (0, 1))
        dout = torch.nn.functional.pad(dout, (0, 1), value=1.0)
        out = torch.cat([out, -dlse[..., None].to(out.dtype)], dim=-1)
    q, k, v = padded(q, k, v)
    out, dout = (widened(x, v.shape[3]) for x in (out, dout))
    lse = lse.contiguous()
    # Where a dropout mask would start, if there were one.
    none = torch.empty((), dtype=torch.int64, device=q.device)
    shape = (None, None, q.shape[2], k.shape[2])
    match segments or backend(q, k):
        case Segments() as known:
            dq, dk, dv = flash_segments_backward(dout, q, k, v, out, lse, known, causal=causal, scale=scale)
        case "cpu-flash":
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, scale=scale
            )
        case "cudnn":
            dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse[..., None], none, none, None, *shape, 0.0, causal, scale=scale
            )
        case _:
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse, *shape, 0.0, causal, none, none, scale=scale
            )
    dk, dv = per_key_head(dk, heads[0]), per_key_head(dv, heads[1])
    dq = dq if factor == 1.0 else dq * factor
    return dq[..., : widths[0]], dk[..., : widths[0]], dv[..., : widths[1]]


def flash_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of segments on a GPU; nothing of them is read on the host.

    Of the vendor's kernels flash takes them: cuDNN's form for them is built anew at each call. Its causal mask ends at the
    bottom right, which in a square is the same.
    """
    longest = segments.longest
    out, lse, *_ = aten._flash_attention_forward(
        tokens(q), tokens(k), tokens(v), segments.queries, segments.keys, longest, longest, 0.0, causal, False, scale=scale
    )
    lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
    # A query without keys reports plus infinity.
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), torch.where(lse == torch.inf, -torch.inf, lse)


def flash_segments_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v for weights `exp(scale q . k - lse)`, zeros for keys that nobody sees."""
    longest, none = segments.longest, torch.empty((), dtype=torch.int64, device=q.device)
    found = aten._flash_attention_backward(
        *(tokens(x) for x in (dout, q, k, v, out)), lse.transpose(0, 1).flatten(1).contiguous(), segments.queries, segments.keys,
        longest, longest, 0.0, causal, none, none, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for x in found)
    return dq, dk, dv


def tokens(x: Tensor) -> Tensor:
    """Returns a tensor [batch, heads, time, dim] as [batch times time, heads, dim], a view where its layout allows."""
    return x.transpose(1, 2).flatten(0, 1)


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives q, k and v one width, a multiple of eight on a GPU, channels that lie side by side, and the heads of q."""
    width = max(q.shape[3], v.shape[3])
    if q.device.type != "cpu":
        width = (width + 7) // 8 * 8
    k, v = per_query_head(k, q.shape[1]), per_query_head(v, q.shape[1])
    return widened(q, width), widened(k, width), widened(v, width)


def widened(x: Tensor, width: int) -> Tensor:
    """Pads channels with zeros; they must lie side by side in memory."""
    if x.shape[3] < width:
        return torch.nn.functional.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()
