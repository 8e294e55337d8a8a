"""All encodings by name."""

import inspect
from typing import Any

from lagwise.encodings.absolute import Learned, NoEncoding, Sinusoidal
from lagwise.encodings.at5 import AT5, AT5Free
from lagwise.encodings.base import Absolute, Encoding, Sum
from lagwise.encodings.permute import PermuteFormer
from lagwise.encodings.rotary import Rotary, XPos
from lagwise.encodings.scalar import T5, ALiBi, Kerple, Sandwich, T5Free
from lagwise.encodings.stochastic import ConvSPE, SineSPE, StochasticEncoding
from lagwise.encodings.vectors import XL, HuangM1, HuangM2, HuangM3, HuangM4, Shaw
from lagwise.errors import nearest, refuse, require_switches, require_whole

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

ALIASES: dict[str, str] = {
    "nope": "none",
    "absolute": "learned",
    "t5-bias": "t5",
    "relative-key": "shaw",
    "relative-key-query": "huang4",
    "transformer-xl": "xl",
    "transfo-xl": "xl",
    "rope": "rotary",
    "roformer": "rotary",
    "sinespe": "sine-spe",
    "convspe": "conv-spe",
    "permuteformer": "permute",
}
"""Other names that the field has for encodings. `make` takes them; what is stored is the name in `ENCODINGS`."""

SHARED_OPTIONS = ("heads", "head_dim", "dim", "max_lag")
"""What `make` accepts for every encoding, whether it uses it or not."""


def make(name: str, *, strict: bool = False, **options: Any) -> Encoding:
    """Makes an encoding by name.

    `heads`, `head_dim`, `dim` and `max_lag` are accepted for every encoding, so that one loop can make them all; an
    encoding takes those that it knows. Any other option must be one of the encoding's own.

    Args:
        name: A name in `ENCODINGS`, or another one that the field has for it, such as "rope". Capitals and underscores are
            as good as small letters and hyphens.
        strict: Refuse those of the four shared options, too, that the encoding does not use.
        options: The options of the encoding.

    >>> make("at5", heads=12, head_dim=64, max_lag=512).slope.shape
    torch.Size([2, 12])
    >>> make("RoPE", heads=12, head_dim=64).head_dim
    64
    """
    require_switches(strict=strict)
    name = canonical_name(name)
    known = options_of(name)
    for option, value in options.items():
        if option in known:
            continue
        if strict or option not in SHARED_OPTIONS:
            raise ValueError(
                f"unknown option {option!r} for encoding {name!r}{nearest(option, known)} "
                f"It has: {', '.join(known) or 'no options'}"
            )
        # It is not used, but it is no licence for any value.
        if value is not None:
            require_whole(option, value, least=0 if option == "max_lag" else 1)
    missing = [option for option, default in known.items() if default is inspect.Parameter.empty and option not in options]
    if missing:
        raise ValueError(f"encoding {name!r} needs {', '.join(missing)}")
    return ENCODINGS[name](**{option: value for option, value in options.items() if option in known})


def canonical_name(name: str) -> str:
    """Returns the name that an encoding has in `ENCODINGS`; an unknown one raises and offers the nearest.

    >>> canonical_name("RoPE"), canonical_name("sine_spe")
    ('rotary', 'sine-spe')
    """
    if not isinstance(name, str):
        refuse("name", "the name of an encoding", name)
    if name in ENCODINGS:
        return name
    plain = name.lower().replace("_", "-")
    plain = ALIASES.get(plain, plain)
    if plain not in ENCODINGS:
        words = nearest(plain, [*ENCODINGS, *ALIASES])
        raise ValueError(f"unknown encoding {name!r}{words} There are: {', '.join(ENCODINGS)}")
    return plain


def options_of(name: str) -> dict[str, Any]:
    """Returns the options of an encoding with their defaults; `inspect.Parameter.empty` marks those that must be given.

    >>> options_of("t5-free")["max_lag"]
    128
    """
    parameters = inspect.signature(ENCODINGS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


__all__ = [
    "ALIASES",
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
    "canonical_name",
    "make",
    "options_of",
]
