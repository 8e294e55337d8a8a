"""All encodings by name."""

import difflib
import inspect
from typing import Any

from lagwise.encodings.absolute import Learned, NoEncoding, Sinusoidal
from lagwise.encodings.base import Absolute, Encoding, Sum
from lagwise.encodings.permute import PermuteFormer
from lagwise.encodings.rotary import Rotary, XPos
from lagwise.encodings.scalar import AT5, T5, ALiBi, AT5Free, Kerple, Sandwich, T5Free
from lagwise.encodings.stochastic import ConvSPE, SineSPE, StochasticEncoding
from lagwise.encodings.vectors import XL, HuangM1, HuangM2, HuangM3, HuangM4, Shaw

ENCODINGS: dict[str, type[Encoding]] = {
    "none": NoEncoding,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "t5": T5,
    "t5-free": T5Free,
    "at5": AT5,
    "at5-free": AT5Free,
    "alibi": ALiBi,
    "kerple": Kerple,
    "sandwich": Sandwich,
    "shaw": Shaw,
    "huang1": HuangM1,
    "huang2": HuangM2,
    "huang3": HuangM3,
    "huang4": HuangM4,
    "xl": XL,
    "rotary": Rotary,
    "xpos": XPos,
    "sine-spe": SineSPE,
    "conv-spe": ConvSPE,
    "permute": PermuteFormer,
}

SHARED_OPTIONS = ("heads", "head_dim", "dim", "max_lag")
"""What `make` accepts for every encoding, whether it uses it or not."""


def make(name: str, **options: Any) -> Encoding:
    """Makes an encoding by name.

    `heads`, `head_dim`, `dim` and `max_lag` are accepted for every encoding, so that one loop can make them all; an
    encoding takes those that it knows. Any other option must be one of the encoding's own.

    >>> make("at5", heads=12, head_dim=64, max_lag=512).slope.shape
    torch.Size([2, 12])
    """
    if name not in ENCODINGS:
        raise ValueError(f"unknown encoding {name!r}{nearest(name, ENCODINGS)} There are: {', '.join(ENCODINGS)}")
    known = options_of(name)
    for option in options:
        if option not in known and option not in SHARED_OPTIONS:
            raise ValueError(
                f"unknown option {option!r} for encoding {name!r}{nearest(option, known)} "
                f"It has: {', '.join(known) or 'no options'}"
            )
    for option, default in known.items():
        if isinstance(default, bool) and not isinstance(options.get(option, default), bool):
            raise ValueError(
                f"{option} of encoding {name!r} must be True or False (true or false on the command line), "
                f"but is {options[option]!r}"
            )
    missing = [option for option, default in known.items() if default is inspect.Parameter.empty and option not in options]
    if missing:
        raise ValueError(f"encoding {name!r} needs {', '.join(missing)}")
    return ENCODINGS[name](**{option: value for option, value in options.items() if option in known})


def options_of(name: str) -> dict[str, Any]:
    """Returns the options of an encoding with their defaults; `inspect.Parameter.empty` marks those that must be given.

    >>> options_of("t5-free")["max_lag"]
    128
    """
    parameters = inspect.signature(ENCODINGS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def nearest(word: str, known: Any) -> str:
    """Returns a question that offers the known word nearest to an unknown one, or nothing."""
    found = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.4)
    return f": did you mean {found[0]!r}?" if found else "."


__all__ = [
    "AT5",
    "ENCODINGS",
    "SHARED_OPTIONS",
    "T5",
    "XL",
    "ALiBi",
    "AT5Free",
    "Absolute",
    "ConvSPE",
    "Encoding",
    "HuangM1",
    "HuangM2",
    "HuangM3",
    "HuangM4",
    "Kerple",
    "Learned",
    "NoEncoding",
    "PermuteFormer",
    "Rotary",
    "Sandwich",
    "Shaw",
    "SineSPE",
    "Sinusoidal",
    "StochasticEncoding",
    "Sum",
    "T5Free",
    "XPos",
    "make",
    "nearest",
    "options_of",
]
