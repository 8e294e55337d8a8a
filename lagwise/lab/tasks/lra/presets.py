"""The six models that the paper on stochastic encodings trained on the Long-Range Arena, as presets of its tasks.

They are {Performer, linear attention with ReLU features} x {absolute positions, sines, convolutions}. The paper gives sines to
each layer, and convolutions to all layers in common; layers that are one and the same have one encoding in any case. The
published code drops attention weights too, which linear attention never makes: here only units are dropped. It means to draw
the codes of SPE and the features of the Performer afresh at each step, but its seed overflows, so that most likely its draws
stayed. They do here; `encoding.fixed=false redraw=1` draws afresh.
"""

from collections.abc import Mapping
from typing import Any

SINES = 10
KERNEL_SIZE = 128


def lra_presets(
    *, realizations: int, absolute: str = "sinusoidal", absolute_options: dict[str, Any] | None = None, **sizes: Any
) -> dict[str, dict[str, Any]]:
    """Returns the presets of a task, by name: "performer-ape", "performer-sine", "performer-conv", "relu-ape" and so on.

    Args:
        realizations: Of both stochastic encodings.
        absolute: The encoding of the two models with absolute positions: sinusoidal, or "learned" for images.
        absolute_options: Options of that encoding.
        sizes: Fields of the config that all six have: the row of the task in the paper's table.

    >>> sorted(lra_presets(realizations=64, layers=4))
    ['performer-ape', 'performer-conv', 'performer-sine', 'relu-ape', 'relu-conv', 'relu-sine']
    """
    encodings = {
        "ape": {"encoding": absolute, "encoding_options": absolute_options or {}},
        "sine": {
            "encoding": "sine-spe",
            "encoding_options": {"sines": SINES, "realizations": realizations, "fixed": True},
            "per_layer": not sizes.get("tied", False),
        },
        "conv": {
            "encoding": "conv-spe",
            "encoding_options": {"kernel_size": KERNEL_SIZE, "realizations": realizations, "fixed": True},
        },
    }
    maps = {"performer": {"feature_map": "favor", "redraw": 0}, "relu": {"feature_map": "relu"}}
    common = {"attention": "linear", "norm": "pre", "activation": "gelu", "beta2": 0.98, "clip": 0.0, **sizes}
    return {
        f"{map_name}-{encoding_name}": {**common, **own_map, **encoding}
        for map_name, own_map in maps.items()
        for encoding_name, encoding in encodings.items()
    }


def suited_options(encoding: str, published: Mapping[str, Mapping[str, Any]], length: int) -> dict[str, Any]:
    """Returns the sizes of an encoding in a task's presets, and of a learned table for all tokens and the vector before them.

    Whether random numbers stay is no matter of the task: a preset says it, or whoever trains.
    """
    known = {preset["encoding"]: preset["encoding_options"] for preset in published.values()}
    options = known.get(encoding, {"length": length + 1} if encoding == "learned" else {})
    return {name: value for name, value in options.items() if name != "fixed"}


def largest_rate(base: float, warmup: int) -> float:
    """Returns the largest rate of a schedule that divides its base by the root of the step, from the end of the warm-up on.

    >>> round(largest_rate(0.0125, 1000), 6)
    0.000395
    """
    return base / warmup**0.5
