"""A page about what a model learned about position: one file of HTML that needs nothing else, with charts to point at."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lagwise import pages
from lagwise.lens.ablation import Ablation, PriorHead
from lagwise.lens.calls import Captured
from lagwise.lens.labels import head_label, head_labels
from lagwise.lens.learned import Kernels
from lagwise.lens.measured import Extrapolation
from lagwise.lens.metrics import SHARES, effective_range, entropy
from lagwise.lens.parts import Parts, expected_logits, mean_by_lag
from lagwise.lens.priors import Prior
from lagwise.pages import cell, html_table, scroll_box

MAP_BYTES, CURVE_BYTES = 2_600_000, 1_700_000
"""What maps and curves of all heads may take of a page: with the rest it stays below 5 MB."""

MOST_TOKENS = 256
"""Tokens of the largest map: more cannot be told apart on a screen."""

KERNEL_BYTES = 250_000
"""What kernels may take of a page."""

HIDDEN = 65535
"""Stands in a map for a key that the query may not see."""

Edges: TypeAlias = Float[Tensor, "directions heads edges"]


class Lengths(NamedTuple):
    """How a run does at other lengths than that of its training."""

    metric: str
    found: Extrapolation
    length: int | None = None
    """The length of the training, if it is one."""


def page(
    calls: Sequence[Captured],
    tokens: Sequence[str],
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
    ranges: Mapping[str, Float[Tensor, "directions heads"]] | None = None,
    edges: Mapping[str, Edges] | None = None,
    edges_before: Mapping[str, Edges] | None = None,
    kernels: Mapping[str, Kernels] | None = None,
    lengths: Lengths | None = None,
    ablation: Ablation | None = None,
    metric: str = "",
) -> str:
    """Returns one page of HTML that needs nothing else: no network, no fonts, no other files.

    Args:
        calls: What `capture` found while the model read one text.
        tokens: The tokens of the text. Layers over another number of tokens have numbers instead.
        title: What was looked at.
        command: The command line that asked for it.
        notes: What a reader must know before the numbers.
        ranges: What `dependency_ranges` found, by the name of the encoding.
        edges: What `bucket_edges` found, by the name of the encoding.
        edges_before: The same before the training, of those that the training moved.
        kernels: What `spe_kernels` found, by the name of the encoding.
        lengths: The metric at other lengths, see `Lengths`.
        ablation: What `ablate` found.
        metric: The name of the metric of the ablation.
    """
    kept = kept_calls(calls)
    heads = sum(call.q.shape[1] for call in kept)
    shown, reach = map_size(heads), curve_reach(heads)
    layers, rows = [], []
    for number, call in enumerate(kept):
        parts = call.parts()
        curve = curve_of(call, parts)
        layers.append(layer_facts(call, parts, curve, number, shown=min(shown, reach + 1), reach=reach))
        rows += head_rows(call, parts, curve, number)
    names = [call.layer for call in kept]
    data = {
        "tokens": list(tokens),
        "layers": layers,
        "hidden": HIDDEN,
        "at5": ranges_facts(ranges or {}, names),
        "edges": edges_facts(edges or {}, edges_before or {}, names),
        "kernels": kernels_facts(kernels or {}, names, past_only=all(call.causal for call in kept)),
        "lengths": lengths and lengths_facts(lengths),
        "ablation": ablation
        and {"metric": metric, "values": ablation.values, "heads": [ablation_name(h, names) for h in ablation.order]},
    }
    said = [*notes, *page_notes(calls, kept, layers, tokens, reach)]
    values = {
        "title": escape(title),
        "notes": pages.notes(said),
        "heads": html_table(HEADERS, "".join(rows), "data-heads", label="Table of heads"),
        "at5": at5_section(ranges, names) if ranges else "",
        "edges": edges_section(edges_before or {}) if edges else "",
        "kernels": KERNELS if kernels else "",
        "lengths": lengths_section(lengths) if lengths else "",
        "ablation": ABLATION if ablation else "",
        "command": escape(command),
        "data": pages.embedded(data),
    }
    return pages.fill(pages.text_of("lagwise.lens", "page.html"), values)


HEADERS = (
    "layer and head", "peak", "its lag", "entropy, nats", "KL(posterior || prior)",
    *(f"{100 * share:g} % within" for share in SHARES),
)  # fmt: skip

READ = "Point at the chart, or focus it and use the arrow keys, to read values."


def drawn(mark: str, title: str, words: str) -> str:
    """Returns a section with a chart that the page's script draws, and a choice of encodings where it has several."""
    return (
        f'<h2 id="{mark}">{title}</h2><p><label>Of <select data-{mark}-of></select></label> {words} {READ}</p>'
        f'<div data-{mark}></div><output class="small" data-{mark}-value aria-live="polite"></output>'
    )


ABLATION = drawn(
    "ablation",
    "Priors switched on one by one",
    "The metric with the priors of no head, of the one with the lowest peak, and so on up to all.",
)

KERNELS = drawn(
    "kernels",
    "Kernels of SPE",
    "The factor by which the lag multiplies the content product of each channel, the gate included: 1 is position-free. Lines "
    "are means over the channels of a head, bands hold the middle half of the channels.",
)


def kept_calls(calls: Sequence[Captured]) -> list[Captured]:
    """Returns the calls in which a text attends to itself; raises where there is none, or more than one text."""
    kept = [call for call in calls if not call.cross and call.q.shape[2] == call.k.shape[2]]
    if not kept:
        raise ValueError("calls must have one of self-attention over a whole text, but have none: run the model without a cache")
    for call in kept:
        if len(call.q) != 1:
            raise ValueError(f"calls must be of one text, but {call.layer} has a batch of {len(call.q)}: run the model on one")
    return kept


def map_size(heads: int) -> int:
    """Returns for how many tokens the maps of some heads are in the page: two bytes for each pair, in base 64.

    >>> map_size(144), map_size(4)
    (82, 256)
    """
    return min(MOST_TOKENS, math.isqrt(MAP_BYTES * 3 // (2 * 4 * heads)))


def curve_reach(heads: int) -> int:
    """Returns up to which distance the curves of some heads are in the page: two of four bytes for each lag, in base 64.

    >>> curve_reach(144)
    552
    """
    return (CURVE_BYTES * 3 // (2 * 4 * 4 * heads) - 1) // 2


def curve_of(call: Captured, parts: Parts) -> Prior:
    """Returns the bias of each head by lag; where there is none, the mean logit of the text by lag stands in for it."""
    if call.terms.bias is not None:
        found = call.prior()
        return replace(found, bias=found.bias.expand(call.q.shape[1], -1))
    logit = expected_logits([parts])["logit"]
    return Prior(logit.lags, logit.mean.nan_to_num(nan=-torch.inf))


def layer_facts(call: Captured, parts: Parts, curve: Prior, number: int, *, shown: int, reach: int) -> dict[str, Any]:
    """Returns what the page's script draws of a layer.

    Of the maps there is the context score alone, in 65,535 steps, with the logarithms of the sums over all keys: the script adds
    the bias and finds prior, likelihood and posterior from that.
    """
    size = min(shown, call.q.shape[2])
    near = curve.lags.abs() <= reach
    attention = mean_by_lag(parts.posterior, parts.lags, parts.visible)
    seen = attention.lags.abs() <= reach
    context, visible = parts.context_score[0, :, :size, :size], parts.visible[0, :size, :size]
    low, step = steps_of(context, visible)
    return {
        "name": call.layer,
        "heads": call.q.shape[1],
        "labels": [head_label(head, [number]) for head in range(call.q.shape[1])],
        "causal": call.causal,
        "bias": call.terms.bias is not None,
        "ranges": effective_range(curve.probability, curve.lags).tolist(),
        "tokens": call.q.shape[2],
        "shown": size,
        "first": int(curve.lags[near][0]),
        "curve": packed(curve.bias[:, near], "<f4"),
        "logSum": curve.bias.double().logsumexp(-1).tolist(),
        "attentionFirst": int(attention.lags[seen][0]),
        "attention": packed(attention.mean[:, seen], "<f4"),
        "low": low.tolist(),
        "step": step.tolist(),
        "context": packed(codes_of(context, visible, low, step), "<u2"),
        "sums": packed(log_sums(parts, size), "<f4"),
    }


def steps_of(
    context: Float[Tensor, "heads queries keys"], visible: Bool[Tensor, "queries keys"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Returns the lowest visible score of each head, and the size of the steps up to the highest."""
    low = context.masked_fill(~visible, torch.inf).amin((1, 2)).double()
    high = context.masked_fill(~visible, -torch.inf).amax((1, 2)).double()
    # A head without a pair has no bounds.
    low, high = (x.masked_fill(~x.isfinite(), 0.0) for x in (low, high))
    return low, (high - low) / (HIDDEN - 1)


def codes_of(context: Tensor, visible: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Returns scores as numbers of steps, and `HIDDEN` where a query may not see the key."""
    steps = (context - low[:, None, None]) / step.clamp(min=1e-30)[:, None, None]
    return steps.round().masked_fill(~visible, HIDDEN)


def log_sums(parts: Parts, size: int) -> Float[Tensor, "kinds heads queries"]:
    """Returns the logarithms of the sums over all keys that turn the prior, context and final score into probabilities."""
    scores = torch.stack([score[0, :, :size] for score in (parts.prior_score, parts.context_score, parts.final_score)])
    return scores.masked_fill(~parts.visible[0, :size], -torch.inf).logsumexp(-1)


def packed(values: Tensor, form: str) -> str:
    """Returns numbers as bytes in base 64."""
    return b64encode(values.cpu().numpy().astype(form).tobytes()).decode()


def head_rows(call: Captured, parts: Parts, curve: Prior, layer: int) -> list[str]:
    """Returns the rows of the table of heads for one layer."""
    probability = curve.probability
    columns = zip(
        curve.peak.tolist(), curve.peak_lag.tolist(), entropy(probability).tolist(), parts.divergence()[0].mean(-1).tolist(),
        *effective_range(probability, curve.lags).tolist(), strict=True,
    )  # fmt: skip
    found = []
    for head, (peak, lag, nats, moved, *reached) in enumerate(columns):
        label = head_label(head, [layer])
        button = f'<button type="button" data-choose="{layer},{head}" title="{escape(call.layer)}">{label}</button>'
        cells = [cell(peak, f"{peak:.4f}"), cell(lag, f"{lag:+d}"), cell(nats, f"{nats:.3f}"), cell(moved, f"{moved:.3f}")]
        cells += [cell(distance, f"±{distance}") for distance in reached]
        found.append(f'<tr><th scope="row" data-value="{layer:04d}{head:04d}">{button}</th>{"".join(cells)}</tr>')
    return found


def page_notes(
    calls: Sequence[Captured], kept: Sequence[Captured], layers: Sequence[Mapping[str, Any]], tokens: Sequence[str], reach: int
) -> list[str]:
    """Returns what the page leaves out or shows in another way."""
    said = []
    if len(kept) < len(calls):
        said.append(f"Cross-attention, and calls with a cache, are left out: {len(calls) - len(kept)} of {len(calls)} calls.")
    bare = sum(not layer["bias"] for layer in layers)
    if bare:
        said.append(
            f"{bare} of {len(layers)} layers have no bias, so that they have no exact prior: the curves by lag and the table of "
            "heads show the mean logit of this text at each lag instead, and the prior over tokens is uniform."
        )
    terms = sorted({name for call in kept for name in call.terms.tables() if name in ("query", "key", "gain")})
    if terms and bare < len(layers):
        said.append(f"Beside the bias there are terms that meet the content ({', '.join(terms)}); they count as context.")
    if any(layer["shown"] < layer["tokens"] for layer in layers):
        most = max(layer["tokens"] for layer in layers)
        said.append(
            f"Maps show the first {min(layer['shown'] for layer in layers)} of {most} tokens, so that the page stays small. "
            "Their values, all curves by lag and the table of heads are those of the whole text."
        )
    if any(layer["tokens"] - 1 > reach for layer in layers):
        said.append(
            f"Curves by lag show the lags from -{reach} to {reach}; their values and the table of heads are those of all."
        )
    if any(layer["tokens"] != len(tokens) for layer in layers):
        said.append(f"Some layers do not read the {len(tokens)} tokens of the text; their tokens have numbers.")
    return said


def ablation_name(head: PriorHead, names: Sequence[str]) -> str:
    """Returns what the page says of a head that was switched on, in a model whose layers have some names."""
    layers = [number for number, name in enumerate(names) if name in head.layers]
    return f"{head_label(head.head, layers)}, peak {head.peak:.3f} at lag {head.peak_lag:+d}"


def labels_of(encoding: str, heads: int, names: Sequence[str]) -> list[str]:
    """Returns what the heads of an encoding are called: it acts on the layers inside the module that holds it.

    >>> labels_of("layers.1.attention.encoding", 2, ["layers.0.attention", "layers.1.attention"])
    ['layer 1 · head 0', 'layer 1 · head 1']
    >>> labels_of("encoding", 2, ["layers.0.attention", "layers.1.attention"])
    ['layers 0, 1 · head 0', 'layers 0, 1 · head 1']
    """
    owner = encoding.rpartition(".")[0]
    return head_labels(heads, [number for number, name in enumerate(names) if not owner or f"{name}.".startswith(f"{owner}.")])


def ranges_facts(ranges: Mapping[str, Float[Tensor, "directions heads"]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the page's script draws of AT5's ranges."""
    return [
        {"name": name, "labels": labels_of(name, found.shape[1], names), "ranges": found.tolist()}
        for name, found in ranges.items()
    ]


def at5_section(ranges: Mapping[str, Float[Tensor, "directions heads"]], names: Sequence[str]) -> str:
    """Returns AT5's ranges as a chart of an encoding, and as a table of all."""
    directions = ("past", "future")[: max(len(found) for found in ranges.values())]
    body = ""
    for name, found in ranges.items():
        for label, own in zip(labels_of(name, found.shape[1], names), found.T.tolist(), strict=True):
            cells = "".join(cell(each, f"{each:.1f}" if math.isfinite(each) else "no end") for each in own)
            cells += cell(None, "-") * (len(directions) - len(own))
            body += f'<tr><th scope="row">{escape(name)}, {label}</th>{cells}</tr>'
    words = "In tokens. Distances much beyond the range are all the same to a head."
    table = html_table(("encoding and head", *directions), body, "data-at5-table", label="Learned ranges")
    return drawn("at5", "Learned ranges of AT5", words) + table


def edges_section(before: Mapping[str, Edges]) -> str:
    """Returns where the edges of buckets are drawn."""
    moved = " Thin marks above are those before the training, strong ones below those after it." if before else ""
    words = (
        "Marks are distances at which another bucket begins. AT5's soft bucket has no steps: its marks cut it into sixteen equal "
        f"slices.{moved}"
    )
    table = scroll_box("<table data-edges-table></table>", "Edges of buckets")
    numbers = f"<details><summary>These edges as numbers</summary>{table}</details>"
    return drawn("edges", "Edges of buckets", words) + numbers


def edges_facts(edges: Mapping[str, Edges], before: Mapping[str, Edges], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the page's script draws of buckets."""
    return [
        {
            "name": name,
            "labels": labels_of(name, found.shape[1], names),
            "now": found.tolist(),
            "before": before[name].tolist() if name in before else None,
        }
        for name, found in edges.items()
    ]


def kernels_facts(kernels: Mapping[str, Kernels], names: Sequence[str], *, past_only: bool) -> list[dict[str, Any]]:
    """Returns what the page's script draws of kernels: of each head the mean and the middle half of the channels."""
    if not kernels:
        return []
    reach = KERNEL_BYTES * 3 // (3 * 4 * 4 * 2 * sum(len(found.values) for found in kernels.values()))
    facts = []
    for name, (lags, values) in kernels.items():
        near = (lags.abs() <= reach) & ((lags <= 0) if past_only else True)
        values = values[:, near].float()
        band = torch.stack([values.mean(-1), values.quantile(0.25, dim=-1), values.quantile(0.75, dim=-1)])
        labels = labels_of(name, len(values), names)
        facts.append({"name": name, "first": int(lags[near][0]), "labels": labels, "band": packed(band, "<f4")})
    return facts


def lengths_facts(lengths: Lengths) -> dict[str, Any]:
    """Returns what the page's script draws of other lengths; the run's own is one of the points where it is known."""
    found = lengths.found
    points = dict(zip(found.lengths.tolist(), found.values.tolist(), strict=True))
    if lengths.length is not None:
        points[lengths.length] = found.trained
    return {"metric": lengths.metric, "points": sorted(points.items()), "length": lengths.length, "trained": found.trained}


def lengths_section(lengths: Lengths) -> str:
    """Returns where the metric at other lengths is drawn, with the reasons of those that were refused."""
    own = "The dashed line is the metric at the length of the training"
    words = f"{own}, which is marked too." if lengths.length is not None else f"{own}."
    refused = "".join(f"<li>{length:,} was refused: {escape(reason)}</li>" for length, reason in lengths.found.refused.items())
    return drawn("lengths", "Other lengths than that of the training", words) + (f"<ul>{refused}</ul>" if refused else "")
