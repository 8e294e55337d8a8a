"""A pass over one kind of call, recorded the first time and replayed from then on.

What a pass does depends on the kind of the call alone: which tensors it makes, which kernels it launches, in which order. Only
where tensors are differs from call to call. So a replay makes the results, one piece of memory for all that lies between, and
launches the kernels with the addresses filled in: the Python that decided all this does not run again.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lagwise.ops.kernels.launches import Runner, listen, somebody_watches
from lagwise.ops.kernels.tiles import DIRECT

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_strided.default, aten.empty_like.default}
# Pieces of memory begin at multiples of this, as those of torch do.
APART = 512


class Unknown(Exception):
    """Says that a pass uses a tensor of which nobody knows where it comes from."""


class Where(NamedTuple):
    """Where a tensor lies: in which of the tensors of a replay, how many bytes from its beginning, and how."""

    slot: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the tensor there."""
        base = tensors[self.slot]
        start = base.storage_offset() * base.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


class Launch(NamedTuple):
    """The launch of a kernel; `fields` are which of its packed arguments are addresses, and where these are."""

    runner: Runner
    places: list[Where]
    fields: list[tuple[int, int, int]]

    @classmethod
    def at(cls, runner: Runner, places: list[Where]) -> "Launch":
        packed = () if runner.packed is None else runner.packed.places
        return cls(runner, places, [(field, where.slot, where.offset) for field, where in zip(packed, places, strict=False)])

    def replay(self, tensors: list[Tensor], addresses: list[int], stream: int) -> None:
        """Launches it."""
        packed = self.runner.packed
        if packed is None or somebody_watches():
            found = [where.tensor(tensors) for where in self.places]
            self.runner.launch([x.data_ptr() for x in found] if DIRECT.value else found)
            return
        fields = packed.fields.copy()
        for field, slot, offset in self.fields:
            fields[field] = addresses[slot] + offset
        packed.send(fields, stream)


class Operation(NamedTuple):
    """An operation of torch; `made` are those of its results that are new."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[int]

    def replay(self, tensors: list[Tensor], addresses: list[int], stream: int) -> None:
        """Computes it."""
        arguments, options = tree_map_only(Where, lambda x: x.tensor(tensors), (self.arguments, self.options), is_where)
        leaves = tree_leaves(self.function(*arguments, **options))
        for place in self.made:
            tensors.append(leaves[place])
            addresses.append(leaves[place].data_ptr())


def is_where(x: Any) -> bool:
    """Says whether something is no tuple to look into."""
    return isinstance(x, Where)


class Tape(NamedTuple):
    """What a pass does: `results` are made first, then `memory` bytes for what lies between, then come the steps."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    memory: int
    steps: list[Launch | Operation]
    returned: list[tuple[int, Where | None]]  # a tensor as it is, or one that lies in it

    def replay(self, inputs: Sequence[Tensor], addresses: list[int]) -> list[Tensor]:
        """Returns the results of the pass for other tensors of the same kind, which are at some addresses."""
        device = inputs[0].device
        tensors = [*inputs]
        for shape, stride, dtype in self.results:
            x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tensors.append(x)
            addresses.append(x.data_ptr())
        x = torch.empty(self.memory, dtype=torch.uint8, device=device) if self.memory else inputs[0]
        tensors.append(x)
        addresses.append(x.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        for step in self.steps:
            step.replay(tensors, addresses, stream)
        return [tensors[slot] if where is None else where.tensor(tensors) for slot, where in self.returned]


class Recorder(TorchDispatchMode):
    """Writes down what a pass makes, launches and computes."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.inputs = list(inputs)
        self.owned: list[Tensor] = []  # held, so that none of them takes the place of another
        self.computed: set[int] = set()  # the numbers of those that an operation made
        self.steps: list[tuple[Any, ...]] = []

    def __enter__(self):
        listen(self.launched)
        return super().__enter__()

    def __exit__(self, *failure: Any):
        listen(None)
        return super().__exit__(*failure)

    def launched(self, runner: Runner, tensors: list[Tensor]) -> None:
        """Writes down a launch."""
        self.steps.append((runner, [self.spot(x) for x in tensors]))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None):
        options = kwargs or {}
        if func in EMPTY or func.is_view:
            found = func(*args, **options)
            if func in EMPTY:
                self.owned.append(found)
            return found
        spots = tree_map_only(Tensor, self.spot, (args, options))
        found = func(*args, **options)
        made = []
        for place, x in enumerate(tree_leaves(found)):
            if not isinstance(x, Tensor):
                raise Unknown
            if not self.knows(x):
                made.append(place)
                self.computed.add(len(self.owned))
                self.owned.append(x)
        self.steps.append((func, *spots, made))
        return found

    def knows(self, x: Tensor) -> bool:
        """Says whether a tensor lies in one that was given or made."""
        return any(x.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in (*self.inputs, *self.owned))

    def spot(self, x: Tensor) -> "Spot":
        """Returns where a tensor lies, with its own number in place of a slot, which is not known before the end."""
        address, count = x.data_ptr(), len(self.inputs)
        for number, each in enumerate(self.inputs):
            if each.data_ptr() == address:
                return Spot(number, 0, x)
        for number, each in enumerate(self.owned):
            if 0 <= address - each.data_ptr() < each.nbytes:
                return Spot(count + number, address - each.data_ptr(), x)
        around = [number for number, each in enumerate(self.inputs) if 0 < address - each.data_ptr() < reach_of(each)]
        if len(around) != 1:
            raise Unknown
        return Spot(around[0], address - self.inputs[around[0]].data_ptr(), x)

    def tape(self, results: Sequence[Tensor]) -> Tape:
        """Returns the tape of a pass that has ended with some results."""
        count, spots = len(self.inputs), [self.spot(x) for x in results]
        returned = [spot.number - count for spot in spots]
        if min(returned) < 0:
            raise Unknown
        layouts, slots, memory = [], {}, 0
        whole = {number: self.owned[number] for number in returned}
        for spot, number in zip(spots, returned, strict=True):
            if returned.count(number) == 1 and spot.x.nbytes == whole[number].nbytes and number not in self.computed:
                whole[number] = spot.x
        for number, x in whole.items():
            if number not in self.computed:
                slots[number] = (count + len(layouts), 0)
                layouts.append((x.shape, x.stride(), x.dtype))
        between = count + len(layouts)
        for number, x in enumerate(self.owned):
            if number not in slots and number not in self.computed:
                slots[number] = (between, memory)
                memory += -(-x.nbytes // APART) * APART
        slots |= {number: (between + 1 + place, 0) for place, number in enumerate(sorted(self.computed))}

        def where(spot: Spot) -> Where:
            slot, start = (spot.number, 0) if spot.number < count else slots[spot.number - count]
            return Where(slot, start + spot.offset, spot.x.shape, spot.x.stride(), spot.x.dtype)

        steps: list[Launch | Operation] = []
        for step in self.steps:
            if isinstance(step[0], Runner):
                steps.append(Launch.at(step[0], [where(spot) for spot in step[1]]))
            else:
                arguments, options = tree_map_only(Spot, where, step[1:3], is_spot)
                steps.append(Operation(step[0], arguments, options, step[3]))
        found: list[tuple[int, Where | None]] = []
        for spot, number in zip(spots, returned, strict=True):
            all_of_it = spot.offset == 0 and same_layout(spot.x, whole[number])
            found.append((where(spot).slot, None if all_of_it else where(spot)))
        return Tape(layouts, memory, steps, found)


class Spot(NamedTuple):
    """Where a tensor lies while a pass is recorded: in the tensor with a number, some bytes from its beginning."""

    number: int
    offset: int
    x: Tensor


def is_spot(x: Any) -> bool:
    """Says whether something is no tuple to look into."""
    return isinstance(x, Spot)


def same_layout(x: Tensor, y: Tensor) -> bool:
    """Says whether two tensors that begin together are the same."""
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def reach_of(x: Tensor) -> int:
    """Returns how many bytes lie between the first number of a tensor and the end of its last."""
    return (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.itemsize


class Tapes:
    """The tapes of passes over one kind of call."""

    def __init__(self):
        self.kept: dict[Any, Tape | None] = {}

    def run(self, key: Any, inputs: Sequence[Tensor], compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns what `compute` does: by itself the first time, then from its tape.

        `compute` must depend on nothing but the key and on where the inputs are. Tensors without data are nowhere.
        """
        addresses = [x.data_ptr() for x in inputs]
        if len(set(addresses)) < len(addresses):
            # Who is who among equal addresses is part of the kind.
            key = (key, tuple(map(addresses.index, addresses)))
        tape = self.kept.get(key)
        if tape is not None:
            return tape.replay(inputs, addresses)
        if key in self.kept or inputs[0].is_meta or torch._C._len_torch_dispatch_stack():
            return compute()
        if len(self.kept) >= MOST_TAPES:
            self.kept.clear()
        recorder = Recorder(inputs)
        try:
            with recorder:
                results = compute()
            self.kept[key] = recorder.tape(results)
        except Unknown:
            self.kept[key] = None
            return compute()
        return results


MOST_TAPES = 32
"""Passes over one kind of call differ in how a gradient lies that comes in."""


def taped(name: str, tensors: Sequence[Tensor], facts: tuple[Any, ...], compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Returns what `compute` does, from its tape if it has one; it must depend on nothing but facts and how tensors lie."""
    layouts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
    return kept_tapes(name, tensors[0].device, tuple(layouts), facts).run("pass", tensors, compute)


@lru_cache(maxsize=512)
def kept_tapes(*kind: Any) -> Tapes:
    """Returns the tapes of a kind of call; those that nobody has asked for longest are let go of."""
    return Tapes()
