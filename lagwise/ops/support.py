"""Which implementation does what. `attention` refuses by this table, the suite checks every row, docs/support.md prints it."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None

IMPLEMENTATIONS = ("dense", "blockwise", "split", "triton")

REQUESTS: dict[str, str] = {
    "bias": "a `bias` table with constant tails",
    "slopes": "a `bias` table with sloped tails",
    "gain": "a `gain` table with one channel",
    "channel gain": "a `gain` table per channel",
    "query": "a `query` table",
    "key": "a `key` table",
    "value": "a `value` table",
    "transform": "a transform of q and k",
    "causal": "`causal`",
    "window": "`window`",
    "lengths": "`lengths`",
    "key_mask": "`key_mask` on a CPU that hides the last keys of a row, as `lengths` do",
    "key_mask with holes": "`key_mask` that hides others, or that is on a GPU",
    "cu_seqlens": "`cu_seqlens`",
    "query_start": "`query_start`, one number",
    "query_start per row": "`query_start`, one per row",
    "unequal lengths": "more or fewer queries than keys",
    "grouped heads": "fewer key and value heads than query heads",
    "value width": "values of another width than queries",
    "dropout": "`dropout`",
    "return_lse": "`return_lse`, with its gradient",
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "second derivative": "gradients of gradients",
    "forward mode": "forward-mode derivatives (`torch.func.jvp`)",
    "vmap": "`torch.func.vmap`",
}
"""What a call can ask for."""

# Of the operators that the fast implementations are.
NOT_DERIVED = [
    (frozenset({"second derivative"}), "its backward pass is an operator without a derivative of its own"),
    (frozenset({"forward mode"}), "its operator has a derivative for backward passes alone"),
    (frozenset({"vmap"}), "its operator takes one batch, which has an axis of its own"),
]

REFUSALS: dict[str, list[tuple[frozenset[str], str]]] = {
    "dense": [],
    "blockwise": NOT_DERIVED,
    "split": [
        (frozenset({"slopes"}), "sloped tails are not plain attention"),
        (frozenset({"key", "transform"}), "a `key` table reads the raw k, which the far field does not see beside a transform"),
        (frozenset({"dropout"}), "the far field's kernel draws another dropout mask than the library's"),
        (
            frozenset({"key_mask with holes"}),
            "the far field's kernels take a row's first keys, and key_mask hides others, or cannot be looked at where it is: "
            "give lengths instead if all padding is on the right",
        ),
        (
            frozenset({"cuda", "lengths", "unequal lengths"}),
            "with lengths, the far field on a GPU has as many queries as keys",
        ),
        (
            frozenset({"cuda", "lengths", "query_start"}),
            "with lengths, the far field on a GPU has queries from position 0 on",
        ),
        *(
            (frozenset({"cuda", option, "off centre"}), f"with {option}, the far field on a GPU lies around a band with lag 0")
            for option in ("lengths", "cu_seqlens")
        ),
        (frozenset({"query_start per row"}), "the far field is cut for one query_start"),
        (frozenset({"cuda", "float32"}), "the far field's kernels on a GPU take float16 and bfloat16 only"),
        (frozenset({"cuda", "float64"}), "the far field's kernels on a GPU take float16 and bfloat16 only"),
        (frozenset({"cuda", "wide head"}), "the far field's kernels on a GPU take heads up to 256 wide"),
        (frozenset({"cuda", "wide vectors"}), "the scores of a band of vectors with more than 1,024 lags would fill the memory"),
        *NOT_DERIVED,
    ],
    "triton": [
        (frozenset({"no kernels"}), "its kernels need Triton and a CUDA device; TRITON_INTERPRET=1 runs them slowly on a CPU"),
        (frozenset({"float64"}), "its kernels sum in float32"),
        (frozenset({"wide head"}), "its kernels hold heads up to 256 wide"),
        *NOT_DERIVED,
    ],
}
"""What an implementation cannot do: a call that asks for all of a set is refused, for the reason given."""


def refusal(impl: str, asked: set[str]) -> str | None:
    """Returns why an implementation cannot do what is asked, or None."""
    return next((reason for requests, reason in REFUSALS[impl] if requests <= asked), None)


def no_second_derivative(impl: str) -> str:
    """Returns what to say where a gradient is differentiated: only then is it known."""
    return f"impl={impl!r} has no second derivative: use impl='dense' for gradients of gradients"


def table() -> str:
    """Returns docs/support.md."""
    lines = [
        "# What runs where",
        "",
        "Made from `lagwise/ops/support.py`; the test suite runs every row and says how to make this page anew.",
        '`impl="auto"` takes an implementation that can do the job; a named one that cannot raises a `ValueError` and says why.',
        "",
        "| a call with | " + " | ".join(f"`{impl}`" for impl in IMPLEMENTATIONS) + " |",
        "| --- |" + " --- |" * len(IMPLEMENTATIONS),
    ]
    for request, words in REQUESTS.items():
        cells = ["no" if refusal(impl, {request}) else "yes" for impl in IMPLEMENTATIONS]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    lines += ["", "## Why not", ""]
    for impl in IMPLEMENTATIONS:
        lines += [f"- `{impl}`, {' with '.join(sorted(requests))}: {reason}." for requests, reason in REFUSALS[impl]]
    return "\n".join(lines)
