"""A pass over one kind of call, recorded the first time and replayed from then on.

What a pass does depends on the kind of the call alone: which tensors it makes, which kernels it launches, in which order. Only
where tensors are differs from call to call. So a replay makes the results, one piece of memory for all that lies between, and
launches the kernels with the addresses filled in: the Python that decided all this does not run again. Tensors that were not
there at the same time share places in this memory.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lagwise.ops.kernels.launches import Packed, Runner, Sheet, launch_stream, listen
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
        if base.dtype == self.dtype:
            return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset // base.itemsize)
        start = base.storage_offset() * base.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


class Launches:
    """Launches of kernels one after the other, with where their tensors lie."""

    def __init__(self):
        self.steps: list[tuple[Runner, list[Where]]] = []
        # Each thread has memory of its own for their arguments, made when it first launches them.
        self.own = threading.local()

    @cached_property
    def addresses(self) -> tuple[tuple[int, int], ...]:
        """The addresses that any of them takes, each once: in which tensor, and how many bytes from its beginning."""
        return tuple({(where.slot, where.offset): None for _, places in self.steps for where in places})

    @cached_property
    def packed(self) -> list[Packed]:
        """Their arguments as they lie in memory; empty where not all kernels have such a form."""
        found = [runner.packed for runner, _ in self.steps if runner.packed is not None]
        return found if len(found) == len(self.steps) else []

    def sheet(self) -> Sheet:
        """Returns the arguments of this thread."""
        try:
            return self.own.sheet
        except AttributeError:
            number = {each: place for place, each in enumerate(self.addresses)}
            places = [[number[where.slot, where.offset] for where in own] for _, own in self.steps]
            self.own.sheet = Sheet(self.packed, places, len(number))
            return self.own.sheet

    def replay(self, tensors: list[Tensor], addresses: list[int], stream: int | None) -> None:
        """Launches them, on a stream unless somebody else decides that."""
        if stream is not None and self.packed:
            self.sheet().send([addresses[slot] + offset for slot, offset in self.addresses], stream)
            return
        for runner, places in self.steps:
            found = [where.tensor(tensors) for where in places]
            runner.launch([x.data_ptr() for x in found] if DIRECT.value else found)


class Operation(NamedTuple):
    """An operation of torch; `made` are those of its results that are new."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[int]

    def replay(self, tensors: list[Tensor], addresses: list[int], stream: int | None) -> None:
        """Computes it."""
        arguments = [filled(x, tensors) for x in self.arguments]
        options = {name: filled(x, tensors) for name, x in self.options.items()}
        found = self.function(*arguments, **options)
        if self.made:
            leaves = [found] if isinstance(found, Tensor) else tree_leaves(found)
            for place in self.made:
                tensors.append(leaves[place])
                addresses.append(leaves[place].data_ptr())


def filled(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns an argument of an operation with its tensors, which may be in a list; torch's trees take longer."""
    kind = type(x)
    if kind is Where:
        return x.tensor(tensors)
    return [filled(each, tensors) for each in x] if kind is list else x


class Tape(NamedTuple):
    """What a pass does: `results` are made first, then `memory` bytes for what lies between, then come the steps."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    memory: int
    steps: list[Launches | Operation]
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
        stream = launch_stream(device)
        for step in self.steps:
            step.replay(tensors, addresses, stream)
        return [tensors[slot] if where is None else where.tensor(tensors) for slot, where in self.returned]


class Recorder(TorchDispatchMode):
    """Writes down what a pass makes, launches and computes."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.inputs = list(inputs)
        self.owned: list[Owned] = []
        self.computed: dict[int, Tensor] = {}  # those that an operation made, by their numbers: a replay holds them too
        self.steps: list[tuple[Any, ...]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import its compiler, which takes seconds, to keep it out of a mode. It keeps out of modes by itself.
        return False

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
                self.own(found)
            return found
        spots = tree_map_only(Tensor, self.spot, (args, options))
        found = func(*args, **options)
        made = []
        for place, x in enumerate(tree_leaves(found)):
            if not isinstance(x, Tensor):
                raise Unknown
            if not self.knows(x):
                made.append(place)
                self.computed[len(self.owned)] = x
                self.own(x)
        self.steps.append((func, *spots, made))
        return found

    def own(self, x: Tensor) -> None:
        """Writes down a new tensor, and which of those before it are no longer there."""
        for each in self.owned:
            if each.end is None and not each.is_there:
                each.end = len(self.owned)
        self.owned.append(Owned(x))

    def knows(self, x: Tensor) -> bool:
        """Says whether a tensor lies in one that was given or made."""
        given, made = (each.untyped_storage() for each in self.inputs), (each.storage for each in self.owned if each.is_there)
        return StorageWeakRef(x.untyped_storage()) in {*map(StorageWeakRef, given), *made}

    def spot(self, x: Tensor) -> "Spot":
        """Returns where a tensor lies, with its own number in place of a slot, which is not known before the end."""
        address, count = x.data_ptr(), len(self.inputs)
        for number, each in enumerate(self.inputs):
            if each.data_ptr() == address:
                return spot_of(number, 0, x)
        for number, each in enumerate(self.owned):
            if 0 <= address - each.address < each.nbytes and each.is_there:
                return spot_of(count + number, address - each.address, x)
        # Inputs at the same address are one, see `Tapes.run`.
        around = {each.data_ptr(): number for number, each in enumerate(self.inputs) if holds(each, address)}
        if len(around) != 1:
            raise Unknown
        ((start, number),) = around.items()
        return spot_of(number, address - start, x)

    def tape(self, results: Sequence[Tensor]) -> Tape:
        """Returns the tape of a pass that has ended with some results."""
        count, spots = len(self.inputs), [self.spot(x) for x in results]
        returned = [spot.number - count for spot in spots]
        if min(returned) < 0:
            raise Unknown
        layouts, slots = [], {}
        whole: dict[int, Tensor | Owned] = {number: self.owned[number] for number in returned}
        for x, number in zip(results, returned, strict=True):
            if returned.count(number) == 1 and x.nbytes == whole[number].nbytes and number not in self.computed:
                whole[number] = x
        for number, x in whole.items():
            if number not in self.computed:
                slots[number] = (count + len(layouts), 0)
                layouts.append((x.shape, x.stride(), x.dtype))
        between = count + len(layouts)
        others = {number: x for number, x in enumerate(self.owned) if number not in slots and number not in self.computed}
        places, memory = packed(others)
        slots |= {number: (between, place) for number, place in places.items()}
        slots |= {number: (between + 1 + place, 0) for place, number in enumerate(sorted(self.computed))}

        def where(spot: Spot) -> Where:
            slot, start = (spot.number, 0) if spot.number < count else slots[spot.number - count]
            return Where(slot, start + spot.offset, *spot[2:])

        steps: list[Launches | Operation] = []
        for step in self.steps:
            if isinstance(step[0], Runner):
                launches = steps[-1] if steps and isinstance(steps[-1], Launches) else Launches()
                if not launches.steps:
                    steps.append(launches)
                launches.steps.append((step[0], [where(spot) for spot in step[1]]))
            else:
                arguments, options = tree_map_only(Spot, where, step[1:3], is_spot)
                steps.append(Operation(step[0], arguments, options, step[3]))
        found: list[tuple[int, Where | None]] = []
        for spot, number, x in zip(spots, returned, results, strict=True):
            all_of_it = spot.offset == 0 and same_layout(x, whole[number])
            found.append((where(spot).slot, None if all_of_it else where(spot)))
        return Tape(layouts, memory, steps, found)


class Owned:
    """A tensor that a pass made, which is not held: when the pass lets go of it, others may have its place."""

    def __init__(self, x: Tensor):
        self.shape, self.dtype, self.nbytes, self.address = x.shape, x.dtype, x.nbytes, x.data_ptr()
        self.strides, self.storage = x.stride(), StorageWeakRef(x.untyped_storage())
        self.end: int | None = None  # the number of the first one that was made after it was let go of

    @property
    def is_there(self) -> bool:
        """Whether its memory is still its own."""
        return not self.storage.expired()

    def stride(self) -> tuple[int, ...]:
        """Returns how far apart its axes are."""
        return self.strides


def packed(owned: dict[int, Owned]) -> tuple[dict[int, int], int]:
    """Returns for tensors, by their numbers, places in one piece of memory, and its size.

    Each gets the first place that has room beside those that are there when it is made.
    """
    places: dict[int, int] = {}
    size = 0
    for number, x in owned.items():
        room = -(-x.nbytes // APART) * APART
        beside = [(places[each], owned[each].nbytes) for each in places if (owned[each].end or number + 1) > number]
        place = 0
        for start, nbytes in sorted(beside):
            if start - place >= room:
                break
            place = max(place, -(-(start + nbytes) // APART) * APART)
        places[number] = place
        size = max(size, place + room)
    return places, size


class Spot(NamedTuple):
    """Where a tensor lies while a pass is recorded: in the tensor with a number, some bytes from its beginning, and how."""

    number: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def spot_of(number: int, offset: int, x: Tensor) -> Spot:
    """Returns where a tensor lies, without holding it."""
    return Spot(number, offset, x.shape, x.stride(), x.dtype)


def is_spot(x: Any) -> bool:
    """Says whether something is no tuple to look into."""
    return isinstance(x, Spot)


def same_layout(x: Tensor, y: Tensor | Owned) -> bool:
    """Says whether two tensors that begin together are the same."""
    return x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def holds(x: Tensor, address: int) -> bool:
    """Says whether a number of a tensor is at an address: tensors that lie in each other do not share numbers."""
    rest, beside = divmod(address - x.data_ptr(), x.itemsize)
    if rest < 0 or beside:
        return False
    for step, size in sorted(zip(x.stride(), x.shape, strict=True), reverse=True):
        if step:
            rest -= min(rest // step, size - 1) * step
    return rest == 0


class Tapes:
    """The tapes of passes over one kind of call."""

    def __init__(self):
        self.kept: dict[Any, Tape | None] = {}

    def replayed(self, key: Any, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Returns what the tape of a pass gives, if there is one."""
        key, addresses = placed(key, inputs)
        tape = self.kept.get(key)
        return None if tape is None else tape.replay(inputs, addresses)

    def run(self, key: Any, inputs: Sequence[Tensor], compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Returns what `compute` does: by itself the first time, then from its tape.

        `compute` must depend on nothing but the key and on where the inputs are. Tensors without data are nowhere.
        """
        key, addresses = placed(key, inputs)
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


def placed(key: Any, inputs: Sequence[Tensor]) -> tuple[Any, list[int]]:
    """Returns the addresses of tensors, and a key that knows who is who among equal ones: that is part of the kind."""
    addresses = [x.data_ptr() for x in inputs]
    if len(set(addresses)) < len(addresses):
        key = (key, tuple(map(addresses.index, addresses)))
    return key, addresses


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
