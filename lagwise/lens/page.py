"""A page about what a model learned about position: one file of HTML that needs nothing else, with charts to point at."""

import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lagwise.bench.plot import COLOURS
from lagwise.lens.ablation import Ablation, PriorHead
from lagwise.lens.capture import Call
from lagwise.lens.metrics import SHARES, effective_range, entropy
from lagwise.lens.parts import Parts, expected_logits, mean_by_lag
from lagwise.lens.priors import Prior
from lagwise.train.report import cell, embedded, html_table

MAP_BYTES, CURVE_BYTES = 2_600_000, 1_700_000
"""What maps and curves of all heads may take of a page: with the rest it stays below 5 MB."""

MOST_TOKENS = 256
"""Tokens of the largest map: more cannot be told apart on a screen."""

HIDDEN = 65535
"""Stands in a map for a key that the query may not see."""

BORROWED = ("element", "sortable", "ticks", "chart")
"""The functions of the report's script that this page uses too."""


def page(
    calls: Sequence[Call],
    tokens: Sequence[str],
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
    ranges: Mapping[str, Float[Tensor, "directions heads"]] | None = None,
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
        layers.append(layer_facts(call, parts, curve, shown=min(shown, reach + 1), reach=reach))
        rows += head_rows(call, parts, curve, number)
    data = {
        "tokens": list(tokens),
        "layers": layers,
        "hidden": HIDDEN,
        "ablation": ablation
        and {"metric": metric, "values": ablation.values, "heads": [ablation_name(h) for h in ablation.order]},
    }
    said = [*notes, *page_notes(calls, kept, layers, tokens, reach)]
    values = {
        "title": escape(title),
        "style": report_part(r"<style>(.*?)</style>").replace("{{colours}}", f"--c0:{COLOURS[0]};--c1:{COLOURS[4]};"),
        "borrowed": "\n".join(report_part(rf"^(function {name}\(.*?^}}\n)") for name in BORROWED),
        "number": report_part(r"^(const number = .*?;)$"),
        "notes": "".join(f'<p class="note" role="note">{escape(each)}</p>' for each in said),
        "heads": html_table(HEADERS, "".join(rows), "data-heads"),
        "ranges": ranges_section(ranges or {}),
        "ablation": ABLATION if ablation else "",
        "command": escape(command),
        "data": embedded(data),
    }
    template = files("lagwise.lens").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass: what is filled in is never read as a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


HEADERS = (
    "layer and head", "peak", "its lag", "entropy, nats", "KL(posterior || prior)",
    *(f"{100 * share:g} % within" for share in SHARES),
)  # fmt: skip

ABLATION = (
    '<h2 id="ablation">Priors switched on one by one</h2><p>The metric with the priors of no head, of the one with the lowest '
    "peak, and so on up to all. Point at the chart, or focus it and use the arrow keys.</p>"
    "<div data-ablation></div><output data-ablation-value></output>"
)


def report_part(pattern: str) -> str:
    """Returns a part of the report's template, so that both pages look and work alike."""
    template = files("lagwise.train").joinpath("report.html").read_text(encoding="utf-8")
    found = re.search(pattern, template, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"the report's template must have {pattern!r}, which the lens borrows, but does not")
    return found[1]


def kept_calls(calls: Sequence[Call]) -> list[Call]:
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


def curve_of(call: Call, parts: Parts) -> Prior:
    """Returns the bias of each head by lag; where there is none, the mean logit of the text by lag stands in for it."""
    if call.terms.bias is not None:
        found = call.prior()
        return replace(found, bias=found.bias.expand(call.q.shape[1], -1))
    logit = expected_logits([parts])["logit"]
    return Prior(logit.lags, logit.mean.nan_to_num(nan=-torch.inf))


def layer_facts(call: Call, parts: Parts, curve: Prior, *, shown: int, reach: int) -> dict[str, Any]:
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
        "causal": call.causal,
        "bias": call.terms.bias is not None,
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


def head_rows(call: Call, parts: Parts, curve: Prior, layer: int) -> list[str]:
    """Returns the rows of the table of heads for one layer."""
    probability = curve.probability
    columns = zip(
        curve.peak.tolist(), curve.peak_lag.tolist(), entropy(probability).tolist(), parts.divergence()[0].mean(-1).tolist(),
        *effective_range(probability, curve.lags).tolist(), strict=True,
    )  # fmt: skip
    found = []
    for head, (peak, lag, nats, moved, *reached) in enumerate(columns):
        name = f"{layer}.{head} {call.layer}"
        button = f'<button type="button" data-choose="{layer},{head}">{escape(name)}</button>'
        cells = [cell(peak, f"{peak:.4f}"), cell(lag, f"{lag:+d}"), cell(nats, f"{nats:.3f}"), cell(moved, f"{moved:.3f}")]
        cells += [cell(distance, f"±{distance}") for distance in reached]
        found.append(f'<tr><th scope="row" data-value="{layer:04d}{head:04d}">{button}</th>{"".join(cells)}</tr>')
    return found


def page_notes(
    calls: Sequence[Call], kept: Sequence[Call], layers: Sequence[Mapping[str, Any]], tokens: Sequence[str], reach: int
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


def ablation_name(head: PriorHead) -> str:
    """Returns what the page calls a head that was switched on."""
    layers = head.layers[0] if len(head.layers) == 1 else f"{len(head.layers)} layers"
    return f"head {head.head} of {layers}, peak {head.peak:.3f} at lag {head.peak_lag:+d}"


def ranges_section(ranges: Mapping[str, Float[Tensor, "directions heads"]]) -> str:
    """Returns AT5's ranges as a table; nothing if there are none."""
    if not ranges:
        return ""
    directions = ("past", "future")[: max(len(found) for found in ranges.values())]
    body = ""
    for name, found in ranges.items():
        for head, own in enumerate(found.T.tolist()):
            cells = "".join(cell(each, f"{each:.1f}" if math.isfinite(each) else "no end") for each in own)
            body += f'<tr><th scope="row">{escape(name)}, head {head}</th>{cells}</tr>'
    return (
        '<h2 id="ranges">Learned dependency ranges of AT5</h2><p>In tokens. Distances much beyond the range are all the same to '
        f"a head.</p>{html_table(('encoding and head', *directions), body, 'data-ranges')}"
    )
