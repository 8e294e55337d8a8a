"""Kernels are made before a program needs them: Triton keeps them on disk, and the next start finds them there."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from copy import deepcopy
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagwise.encodings import Encoding, canonical_name, make, options_of
from lagwise.errors import require_probability, require_sizes, require_switches
from lagwise.extras import install_command
from lagwise.ops.support import HAS_TRITON
from lagwise.softmax import attention, relative_only

TIMES = (512, 509)
"""Lengths unless others are given: one that tiles divide, and one that they do not."""

JOBS = 8
"""Calls at the same time unless another number is given; each compiles its kernels on all cores."""


Watch = Callable[[str, int, int], object]


class Warmed(NamedTuple):
    """What `warmup` did: how many kernels it made, how many had been made before, and its seconds."""

    made: int
    found: int
    seconds: float


class Step(NamedTuple):
    """Calls whose kernels are to be made, in words and as a function that makes them on a device."""

    words: str
    run: Callable[[torch.device], object]


def warmup(
    encoding: str | Encoding,
    *,
    heads: int,
    head_dim: int,
    key_heads: int | None = None,
    times: Sequence[int] = TIMES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    batch: int = 2,
    causal: bool = False,
    padded: bool = False,
    packed: bool = False,
    dropout: float = 0.0,
    training: bool = True,
    autocast: bool | None = None,
    jobs: int | None = None,
    watch: Watch = lambda words, done, of: None,
    **options: Any,
) -> Warmed:
    """Makes the kernels that calls of `attention` with an encoding need on the current GPU, by calling it once for each kind.

    Args:
        encoding: The name of an encoding, or an encoding.
        heads: Number of query heads.
        head_dim: Width of a head.
        key_heads: Number of key heads; that of the query heads unless given.
        times: Lengths. Others need other kernels only where docs/kernels.md says so.
        dtypes: Types of q, k and v.
        batch: Sequences of a call. It matters where many sequences make another implementation the faster one.
        causal: Let queries see no later key.
        padded: Make those for `lengths` too.
        packed: Make those for `cu_seqlens` too.
        dropout: Probability of dropping an attention weight.
        training: Make those of gradients. Otherwise, if causal, those of single queries with cached keys.
        autocast: Leave the encoding's parameters float32, as autocast does; unless given, in training.
        jobs: Calls at the same time.
        watch: Is told what was done, how many calls are done, and of how many.
        options: Options of an encoding that is given by its name.
    """
    require_sizes(heads=heads, head_dim=head_dim)
    require_switches(causal=causal, packed=packed)
    require_probability("dropout", dropout)
    check_calls(times, batch, padded, training)
    made = made_encoding(encoding, heads, head_dim, causal, options)
    check_gpu()
    sizes = (batch, heads, heads if key_heads is None else key_heads, head_dim)
    kinds = [None, *(["lengths"] if padded else []), *(["cu_seqlens"] if packed else [])]
    steps = [
        Step(words, partial(call, deepcopy(made), sizes, dtype, dropout, training, autocast, given))
        for dtype, time, kind in product(dtypes, times, kinds)
        for words, given in calls_of(time, kind, causal, training, dtype)
    ]
    return take_steps(steps, jobs, watch)


def check_calls(times: Sequence[int], batch: int, padded: bool, training: bool) -> None:
    """Raises for what calls cannot be made with."""
    require_sizes(batch=batch, **{f"times[{number}]": each for number, each in enumerate(times)})
    require_switches(padded=padded, training=training)


def check_gpu() -> None:
    """Raises where no kernels can be made, and says what is missing."""
    if not HAS_TRITON:
        raise ValueError(f"kernels are made by Triton, which is not installed: {install_command('triton')}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET must not be 1 where kernels are made: the interpreter has none")
    if not torch.cuda.is_available():
        raise ValueError("kernels are made for the GPU that they will run on, but torch finds no CUDA device here")


def made_encoding(encoding: str | Encoding, heads: int, head_dim: int, causal: bool, options: dict[str, Any]) -> Encoding:
    """Returns an encoding by its name, causal where calls are and it can be; or the one that is given, without options."""
    if isinstance(encoding, str):
        name = canonical_name(encoding)
        known = {"causal": causal} if "causal" in options_of(name) else {}
        encoding = make(name, heads=heads, head_dim=head_dim, **{**known, **options})
    elif options:
        raise ValueError(f"options must be left out with an encoding that is made, but {', '.join(options)} are given")
    relative_only(encoding)
    return encoding


class Given(NamedTuple):
    """The sizes and the options of a call that kernels may depend on."""

    queries: int
    keys: int
    kind: str | None
    causal: bool


def calls_of(time: int, kind: str | None, causal: bool, training: bool, dtype: torch.dtype) -> Iterator[tuple[str, Given]]:
    """Yields the calls of a length, in words and as what is given: all queries, and in decoding one at a time."""
    words = [str(dtype).removeprefix("torch."), f"T{time}", *(["causal"] if causal else []), *([kind] if kind else [])]
    yield " ".join(words), Given(time, time, kind, causal)
    if causal and not training and kind != "cu_seqlens":
        yield " ".join([*words, "decoding"]), Given(1, time, kind, causal)


def call(
    encoding: Encoding, sizes: tuple[int, int, int, int], dtype: torch.dtype, dropout: float, training: bool,
    autocast: bool | None, given: Given, device: torch.device,
) -> None:  # fmt: skip
    """Calls attention once, and asks for its gradients in training; tensors lie in memory as projections leave them."""
    batch, heads, key_heads, head_dim = sizes
    ragged: dict[str, Any] = {}
    if given.kind == "cu_seqlens":
        ends = torch.tensor([0, given.keys // 2, given.keys], dtype=torch.int32, device=device)
        batch, ragged = 1, {"cu_seqlens": ends, "max_seqlen": given.keys - given.keys // 2}
    elif given.kind == "lengths":
        ragged = {"lengths": torch.full((batch,), max(1, given.keys - 1), device=device)}

    def tokens(time: int, heads: int) -> Tensor:
        made = torch.zeros(batch, time, heads, head_dim, dtype=dtype, device=device, requires_grad=training)
        return made.transpose(1, 2)

    encoding = encoding.to(device) if in_float32(autocast, training) else encoding.to(device, dtype)
    encoding.train(training)
    q, k, v = tokens(given.queries, heads), tokens(given.keys, key_heads), tokens(given.keys, key_heads)
    start = given.keys - given.queries
    with torch.set_grad_enabled(training):
        out = attention(q, k, v, encoding, causal=given.causal, dropout=dropout if training else 0.0, query_start=start, **ragged)
        if training:
            out.backward(torch.zeros_like(out))


def in_float32(autocast: bool | None, training: bool) -> bool:
    """Says whether weights are float32: as it is said, or else in training."""
    return training if autocast is None else autocast


def take_steps(steps: Sequence[Step], jobs: int | None, watch: Watch) -> Warmed:
    """Takes steps on some threads, on the current GPU; the first that fails raises, and no other is begun."""
    from lagwise.ops.kernels.ahead import counted_kernels

    began, device = perf_counter(), torch.device("cuda", torch.cuda.current_device())
    with counted_kernels() as kernels, ThreadPoolExecutor(jobs or JOBS) as pool:
        waiting = {pool.submit(take, step, device): step for step in steps}
        try:
            watch("", 0, len(steps))
            for count, done in enumerate(as_completed(waiting), 1):
                done.result()
                watch(waiting[done].words, count, len(steps))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return Warmed(len(kernels.made), len(kernels.found - kernels.made), perf_counter() - began)


def take(step: Step, device: torch.device) -> None:
    """Takes a step, and waits for the GPU: a new thread is on the first one."""
    with torch.cuda.device(device):
        step.run(device)
        torch.cuda.synchronize()
