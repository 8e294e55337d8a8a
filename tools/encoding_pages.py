"""Facts of the encodings for the site, taken from the classes and from what `auto` answers when the site is built.

MkDocs calls `on_page_markdown` for each page. `<!-- facts -->` on the page of an encoding becomes its facts, and
`<!-- encodings -->` the table of all encodings.
"""

import inspect
from dataclasses import replace
from typing import Any

import griffe
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lagwise
from lagwise.encodings import ALIASES, options_of
from lagwise.lags import LagTable, reachable_lags
from lagwise.ops import support

HEADS, HEAD_DIM = 8, 64
SIZES = ((8, 64), (12, 64))
LENGTHS = (128, 512, 2_048, 8_192)

PLACES = {
    "CPU, float32": ("cpu", torch.float32),
    "CPU, bfloat16": ("cpu", torch.bfloat16),
    "GPU, float32": ("cuda", torch.float32),
    "GPU, bfloat16": ("cuda", torch.bfloat16),
}


def made(name: str, heads: int = HEADS, head_dim: int = HEAD_DIM, **options: Any) -> lagwise.Encoding:
    """Returns an encoding with its defaults, for heads of some width."""
    return lagwise.make(name, heads=heads, head_dim=head_dim, dim=heads * head_dim, **options).eval()


def terms_of(encoding: lagwise.Encoding, length: int, *, causal: bool) -> lagwise.Terms:
    """Returns the terms of a sequence's self-attention; on the meta device, where only shapes are made."""
    first, last = reachable_lags(length, length, query_start=0, causal=causal, window=None)
    seed = torch.tensor(0) if encoding.random else None
    return encoding.to("meta").terms(first, last, scale=HEAD_DIM**-0.5, seed=seed)


def which(terms: lagwise.Terms, length: int, *, device: str, dtype: torch.dtype, causal: bool) -> str:
    """Returns the implementation that `auto` takes on a device, which need not be there: its tensors are fake."""
    with FakeTensorMode():
        q = torch.empty(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype)
        tables = {name: moved(table, device) for name, table in terms.tables().items()}
        return lagwise.which_impl(q, q, q, replace(terms, **tables), causal=causal).impl


def moved(table: LagTable, device: str) -> LagTable:
    """Returns a table of the same shape on a device."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, device=device)

    return LagTable(like(table.values), table.first, table.slopes and (like(table.slopes[0]), like(table.slopes[1])))


def own_causal(name: str, causal: bool) -> dict[str, bool]:
    """Returns the option by which an encoding has no values for the future, if it has such an option."""
    return {"causal": True} if causal and "causal" in options_of(name) else {}


def fields(name: str) -> list[str]:
    """Returns what an encoding sets: the fields of its terms."""
    encoding = made(name)
    if encoding.absolute:
        return []
    terms = terms_of(encoding, 1_000, causal=encoding.linear_only)
    return [*terms.tables(), *(field for field in ("transform", "features") if getattr(terms, field) is not None)]


def extent(name: str, *, causal: bool) -> str:
    """Returns the lags of an encoding's tables in words, or what there is instead of a table."""
    encoding = made(name, **own_causal(name, causal))
    ends = set()
    for length in (4_096, 8_192):
        tables = terms_of(encoding, length, causal=causal).tables().values()
        wide = [table for table in tables if table.values.shape[1] > 1 or table.slopes is not None]
        ends.add((min(table.first for table in wide), max(table.last for table in wide)) if wide else None)
    if len(ends) > 1:
        return "all lags of the sequence"
    (found,) = ends
    return "no table" if found is None else f"{found[0]} to {found[1]}" if found[0] < found[1] else f"{found[0]}, then slopes"


def parameters(name: str, heads: int, head_dim: int) -> str:
    """Returns the number of an encoding's parameters."""
    return f"{sum(weight.numel() for weight in made(name, heads, head_dim).parameters()):,}"


def has_linear_form(name: str) -> bool:
    """Says whether linear attention takes the encoding, by asking it to."""
    q = torch.randn(1, HEADS, 4, HEAD_DIM)
    encoding = made(name)
    try:
        lagwise.linear_attention(q, q, q, None if encoding.absolute else encoding)
    except ValueError:
        return False
    return True


def kind(name: str) -> str:
    """Returns where the encoding acts."""
    encoding = lagwise.ENCODINGS[name]
    return "the model's input" if encoding.absolute else "linear attention alone" if encoding.linear_only else "attention"


def yes(found: bool) -> str:
    return "yes" if found else "no"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def facts(name: str) -> str:
    """Returns the generated sections of an encoding's page."""
    return "\n\n".join(section for section in (fact_section(name), choice_section(name), option_section(name)) if section)


def fact_section(name: str) -> str:
    """Returns the table of an encoding's facts."""
    own = lagwise.ENCODINGS[name]
    others = [f"`{alias}`" for alias, full in ALIASES.items() if full == name]
    lines = [
        row("class", f"[`{own.__name__}`](../reference/encodings.md#lagwise.{own.__name__})"),
        row("acts on", kind(name)),
        row("sets", ", ".join(f"`{field}`" for field in fields(name)) or "nothing"),
    ]
    if others:
        lines.append(row("also called", ", ".join(others)))
    if not own.absolute:
        if not own.linear_only:
            lines.append(row("lags of its tables", extent(name, causal=False)))
        lines.append(row("lags of its tables, causal", extent(name, causal=True)))
    lines += [row(f"parameters, {heads} heads of {width}", parameters(name, heads, width)) for heads, width in SIZES]
    lines += [
        row("linear attention", yes(has_linear_form(name))),
        row("can start without effect", yes(made(name).make_neutral())),
    ]
    return "\n".join(["## Facts", "", row("fact", "value"), row("---", "---"), *lines])


def choice_section(name: str) -> str:
    """Returns the table of what `auto` takes; an encoding that softmax attention does not see has none."""
    if lagwise.ENCODINGS[name].absolute or lagwise.ENCODINGS[name].linear_only:
        return ""
    lines = ["## What `auto` takes", "", f"Self-attention with {HEADS} heads of {HEAD_DIM}, by the number of tokens."]
    for causal in (False, True):
        encoding = made(name, **own_causal(name, causal))
        terms = {length: terms_of(encoding, length, causal=causal) for length in LENGTHS}
        head = row("causal" if causal else "not causal", *(f"{length:,}" for length in LENGTHS))
        lines += ["", head, row("---", *["---"] * len(LENGTHS))]
        for place, (device, dtype) in PLACES.items():
            found = (which(terms[length], length, device=device, dtype=dtype, causal=causal) for length in LENGTHS)
            lines.append(row(place, *(f"`{impl}`" for impl in found)))
    refusals = [f"`{impl}`: {reason}." for impl in support.IMPLEMENTATIONS if (reason := refused(name, impl))]
    return "\n".join([*lines, "", *(f"- Not by {reason}" for reason in refusals)]).rstrip()


def refused(name: str, impl: str) -> str | None:
    """Returns why an implementation cannot do what an encoding sets, whatever the call."""
    terms = terms_of(made(name), 1_000, causal=False)
    slopes = {"slopes"} if terms.bias is not None and terms.bias.slopes is not None else set()
    return support.refusal(impl, {*fields(name), *slopes})


def option_section(name: str) -> str:
    """Returns the table of an encoding's options, with the words of its docstring."""
    meanings, options = argument_words(lagwise.ENCODINGS[name]), options_of(name)
    if not options:
        return "## Options\n\nNone."
    lines = []
    for option, default in options.items():
        shown = "required" if default is inspect.Parameter.empty else f"`{default!r}`"
        lines.append(row(f"`{option}`", shown, meanings[option]))
    return "\n".join(["## Options", "", row("option", "default", "meaning"), row("---", "---", "---"), *lines])


def argument_words(own: type) -> dict[str, str]:
    """Returns what a docstring says of each argument."""
    sections = griffe.Docstring(inspect.getdoc(own) or "").parse("google", warn_unknown_params=False, warnings=False)
    found = [section.value for section in sections if section.kind is griffe.DocstringSectionKind.parameters]
    return {argument.name: " ".join(argument.description.split()) for arguments in found for argument in arguments}


def overview() -> str:
    """Returns the table of all encodings."""
    head = row("encoding", "sets", "lags of its tables", "parameters", "linear attention")
    lines = [head, row("---", "---", "---", "---:", "---")]
    for name, own in lagwise.ENCODINGS.items():
        lags = "" if own.absolute else extent(name, causal=own.linear_only)
        sets = ", ".join(f"`{field}`" for field in fields(name)) or ("the model's input" if own.absolute else "nothing")
        lines.append(row(f"[`{name}`]({name}.md)", sets, lags, parameters(name, HEADS, HEAD_DIM), yes(has_linear_form(name))))
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what is generated, when MkDocs reads a page."""
    folder, _, file = page.file.src_uri.rpartition("/")
    if folder != "encodings":
        return markdown
    name = file.removesuffix(".md")
    if name == "index":
        return markdown.replace("<!-- encodings -->", overview())
    return markdown.replace("<!-- facts -->", facts(name))
