"""What the terms of each encoding cost: how many operations that a GPU would launch a kernel for, forward and backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lagwise
from lagwise.kept import positions

HEADS, WIDTH, TIME = 4, 8, 40

# Operations that compute nothing.
FREE = {
    "aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::promote_types",
}  # fmt: skip

MOST: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "sinusoidal": (0, 0),
    "learned": (0, 0),
    "t5": (1, 1),
    "t5-free": (0, 0),
    # By torch's functions; the operator that a GPU has is one kernel forward, and one and a sum backward.
    "at5": (10, 17),
    "at5-free": (6, 12),
    "alibi": (1, 0),
    "kerple": (6, 14),
    "sandwich": (1, 0),
    "shaw": (0, 0),
    "huang1": (1, 1),
    "huang2": (0, 0),
    "huang3": (0, 0),
    # The two gradients of the one table.
    "huang4": (0, 1),
    "xl": (3, 5),
    # The operator that turns q and k is two kernels.
    "rotary": (1, 2),
    "xpos": (46, 3),
    "sine-spe": (18, 20),
    "conv-spe": (6, 12),
    "permute": (0, 0),
}
"""The most operations of `terms`, with its transform if it has one, and of their gradients."""


class Counted(TorchDispatchMode):
    """Notes which operations compute something."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func._schema.name not in FREE:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def results(encoding, q, k, at):
    """Returns all tensors that attention takes from the terms of an encoding."""
    terms = encoding.terms(1 - TIME, TIME - 1, scale=0.5, seed=torch.tensor(0))
    found = [x for table in terms.tables().values() for x in (table.values, *(table.slopes or ()))]
    return found + ([] if terms.transform is None else [*terms.transform(q, k, at, at)])


def test_terms_cost_no_more_than_they_have_to(encoding_name):
    encoding = lagwise.make(encoding_name, heads=HEADS, head_dim=WIDTH, dim=HEADS * WIDTH, max_lag=16)
    q, k = torch.randn(2, 1, HEADS, TIME, WIDTH).requires_grad_().unbind()
    seen = []
    # What is kept is made by the first call.
    for _ in range(2):
        with Counted() as forward:
            found = [x for x in results(encoding, q, k, positions(0, TIME - 1, q.device)) if x.requires_grad]
        wanted = [q, k, *encoding.parameters()]
        gradients = [torch.ones_like(x) for x in found]
        with Counted() as backward:
            if found:
                torch.autograd.grad(found, wanted, gradients, allow_unused=True)
        seen = [forward.names, backward.names]
    assert len(seen[0]) <= MOST[encoding_name][0], seen[0]
    assert len(seen[1]) <= MOST[encoding_name][1], seen[1]


def test_every_encoding_has_a_limit():
    assert MOST.keys() == lagwise.ENCODINGS.keys()


@pytest.mark.parametrize("name", ["kerple", "sandwich", "xl", "at5"])
def test_another_length_costs_no_more(name):
    """What is kept is found by calls of other lengths too, as those of batches that are padded to their longest row."""
    encoding = lagwise.make(name, heads=HEADS, head_dim=WIDTH, max_lag=200)
    encoding.terms(-200, 200, scale=0.5)
    with Counted() as counted:
        encoding.terms(-97, 101, scale=0.5)
    assert len(counted.names) <= MOST[name][0], counted.names
