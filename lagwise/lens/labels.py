"""What pages and plots call a head."""

from collections.abc import Sequence


def head_label(head: int, layers: Sequence[int] = ()) -> str:
    """Returns what a head is called: by its layers, where they are known, and its number.

    Args:
        head: The number of the head.
        layers: The layers that it is of; several share what a model has once for all of them.

    >>> head_label(3, [0]), head_label(3, range(12)), head_label(3, [1, 4]), head_label(3)
    ('layer 0 · head 3', 'layers 0 to 11 · head 3', 'layers 1, 4 · head 3', 'head 3')
    """
    if not layers:
        return f"head {head}"
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return f"layer {first} · head {head}"
    together = len(layers) > 2 and list(layers) == list(range(first, last + 1))
    numbers = f"{first} to {last}" if together else ", ".join(map(str, layers))
    return f"layers {numbers} · head {head}"


def head_labels(heads: int, layers: Sequence[int] = ()) -> list[str]:
    """Returns what heads of some layers are called; one that stands for all is not counted.

    >>> head_labels(2, [0]), head_labels(1)
    (['layer 0 · head 0', 'layer 0 · head 1'], ['all heads'])
    """
    return [head_label(head, layers) for head in range(heads)] if heads > 1 else ["all heads"]
