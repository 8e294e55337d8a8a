"""A look through the lens: a model that has read a text, and what its encodings learned."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from lagwise.encodings import AT5, T5, StochasticEncoding
from lagwise.lens import Ablation, Captured, Kernels, bucket_edges, dependency_ranges, spe_kernels
from lagwise.lens.model_page import Lengths

TEXT = (
    "The clockmaker who mended the old lamp on the long bridge forgot his blue umbrella there, and when the rain came, "
    "the baker carried it home for him."
)
"""What a Hugging Face model reads unless a text is given."""


class Look(NamedTuple):
    """A model that has read a text."""

    name: str
    model: nn.Module
    calls: list[Captured]
    tokens: list[str]
    notes: list[str]
    ablation: Ablation | None = None
    metric: str = ""
    edges_before: dict[str, Tensor] | None = None
    lengths: Lengths | None = None


def check_text(text: str) -> None:
    """Raises for a text without words."""
    if not text.strip():
        raise ValueError("--text must have words to read, but is empty")


def linear_notes(calls: list[Captured]) -> list[str]:
    """Returns what a reader must know of linear attention; raises for scores that the page cannot draw."""
    linear = [call for call in calls if call.feature_map is not None]
    for call in linear:
        parts = call.parts()
        if bool((parts.context_score.isinf() & parts.visible[:, None]).any()):
            raise ValueError(
                f"weights must be above 0 to have a logarithm, but {call.layer} has some that are 0: read another text, or take "
                "call.parts() of lens.capture"
            )
    if not linear:
        return []
    return [
        "Attention is linear: the context score is the logarithm of the product of the features of query and key, up to a "
        "constant of each query, which cancels. Prior, likelihood and posterior are exact."
    ]


def ranges_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the dependency ranges of each AT5 of a model, by its name."""
    return {name: dependency_ranges(module).cpu() for name, module in model.named_modules() if isinstance(module, AT5)}


def edges_of(model: nn.Module | None) -> dict[str, Tensor]:
    """Returns where the buckets of each T5 and AT5 of a model begin, by its name; those of Hugging Face count too."""
    found = {}
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, AT5 | T5):
            found[name] = bucket_edges(module).cpu()
        elif hasattr(module, "relative_attention_bias"):
            found[name] = bucket_edges(with_buckets_of(module))
    return found


def with_buckets_of(module: Any) -> T5:
    """Returns an encoding with the buckets of a layer of Hugging Face's T5, or of its MPNet, which has always the same."""
    from lagwise.hf.mpnet import BUCKETS, MAX_LAG

    buckets = getattr(module, "relative_attention_num_buckets", BUCKETS)
    max_lag = getattr(module, "relative_attention_max_distance", MAX_LAG)
    return T5(heads=1, buckets=buckets, max_lag=max_lag, causal=bool(getattr(module, "is_decoder", False)))


def kernels_of(model: nn.Module, length: int) -> tuple[dict[str, Kernels], list[str]]:
    """Returns the kernels of each stochastic encoding of a model by its name, and in words which have none."""
    found, without = {}, []
    for name, module in model.named_modules():
        if isinstance(module, StochasticEncoding):
            try:
                found[name] = Kernels(*(values.cpu() for values in spe_kernels(module, length)))
            except ValueError as error:
                without.append(f"{name} shows no kernels: {error}")
    return found, without
