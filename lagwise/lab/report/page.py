"""The page of a comparison: one file of HTML that needs nothing else."""

import json
import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from lagwise import pages
from lagwise.lab.config import Config
from lagwise.lab.estimates import Estimate
from lagwise.lab.grouping import Group, as_argument, compared_groups
from lagwise.lab.report.learning import curves
from lagwise.lab.report.subject import SAMPLE_NOTE, is_sample, sentence
from lagwise.lab.report.verdict import verdict_on
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import Difference, Row, default_baseline, differences_of, rows_of
from lagwise.lens.labels import head_labels
from lagwise.pages import cell, definitions, html_table, scroll_box


def make_page(runs: Sequence[Run], command: str, tune: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """Returns one page of HTML that needs nothing else: no network, no fonts, no other files.

    Args:
        runs: The runs to compare; those that are not complete are named with the reason.
        command: The command line that asked for it.
        tune: Fields that are tuned for each encoding.
        left_out: In words, what takes no part.
    """
    found = compared_groups(runs, tune)
    tasks = ", ".join(dict.fromkeys(group.fields["task"] for group in found))
    values = {
        "title": escape(f"Position encodings on {tasks}"),
        "notes": notes(runs, found, left_out),
        "sections": "".join(section(group, number) for number, group in enumerate(found)),
        "command": escape(command),
        "environment": environments(runs),
        "data": pages.embedded({"groups": [group_facts(group) for group in found]}),
    }
    return pages.fill(pages.text_of("lagwise.lab.report", "page.html"), values)


def group_facts(group: Group) -> dict[str, Any]:
    """Returns what the scripts of the page draw."""
    rows = rows_of(group)
    return {
        "metric": group.metric,
        "higher": group.higher_is_better,
        "rows": [
            {
                "encoding": row.encoding,
                "mean": row.test.mean,
                "half": row.test.half_width,
                "training seconds": row.seconds,
                "tokens per second": row.tokens_per_second,
                "parameters of the encoding": row.parameters,
                "peak memory in MiB": None if row.peak_memory is None else row.peak_memory / 2**20,
            }
            for row in rows
        ],
        "baseline": default_baseline(group),
        "differences": {row.encoding: [difference_facts(each) for each in differences_of(group, row.encoding)] for row in rows},
        "curves": curves(group),
        "priors": priors(group),
    }


def difference_facts(found: Difference) -> dict[str, Any]:
    """Returns what the page shows of a difference."""
    mean, half = (found.estimate.mean, found.estimate.half_width) if found.estimate else (None, None)
    return {"encoding": found.encoding, "seeds": found.seeds, "mean": mean, "half": half, "better": found.better}


def notes(runs: Sequence[Run], found: Sequence[Group], left_out: Sequence[str]) -> str:
    """Returns what a reader must know before the numbers, as paragraphs."""
    said = [SAMPLE_NOTE] if is_sample(found) else []
    said += left_out
    said += [f"{run.config.encoding}, seed {run.config.seed}, takes no part: {run.failure}" for run in runs if run.result is None]
    if len(found) > 1:
        said.append("The runs differ in more than the encoding and the seed: each setting has a table of its own.")
    if len({run.environment["device"] for run in runs}) > 1:
        said.append("The runs are from different devices: their times, speeds and memory cannot be compared.")
    return pages.notes(said)


def environments(runs: Sequence[Run]) -> str:
    """Returns what the runs ran on: each different environment once."""
    found = dict.fromkeys(json.dumps(run.environment, sort_keys=True) for run in runs)
    return "".join(definitions(as_words(json.loads(each))) for each in found)


def as_words(fields: dict[str, Any]) -> dict[str, str]:
    """Returns values as a reader wants to see them."""
    return {name: as_argument(value) for name, value in fields.items()}


def first_seed(group: Group, encoding: str) -> tuple[int, Run]:
    """Returns the first seed of an encoding, and its run: what one model learned is shown, because heads have no order."""
    return min(group.runs[encoding].items())


def priors(group: Group) -> dict[str, dict[str, Any]]:
    """Returns by lag what the encodings learned that have a prior, or a kernel, with the seed."""
    found: dict[str, dict[str, Any]] = {}
    for name in group.runs:
        seed, run = first_seed(group, name)
        learned = [prior_facts(each, run.config) for each in run.priors or () if "reason" not in each]
        if learned:
            found[name] = {"seed": seed, "learned": learned}
    return found


def prior_facts(stored: dict[str, Any], config: Config) -> dict[str, Any]:
    """Returns what the page draws of an encoding of a model: a row for each head."""
    names = head_labels(len(stored["kernel"] if "kernel" in stored else stored["bias"]), layers_of(stored["name"], config))
    facts = {"name": stored["name"], "first": stored["first"], "names": names}
    if "kernel" in stored:
        return {**facts, "what": "kernel: the factor of the content, mean over channels", "rows": stored["kernel"]}
    bias = torch.tensor([[-math.inf if each is None else each for each in row] for row in stored["bias"]], dtype=torch.float64)
    return {**facts, "what": "prior probability", "rows": bias.softmax(-1).tolist()}


def layers_of(encoding: str, config: Config) -> Sequence[int]:
    """Returns the layers of a stack that an encoding acts on: that which holds it, or all.

    >>> [list(layers_of(name, Config("adding"))) for name in ("encoder.layers.1.attention.encoding", "encoder.encoding")]
    [[1], [0, 1]]
    """
    own = re.search(r"\blayers\.(\d+)\.", encoding)
    return range(config.layers) if own is None or config.tied else [int(own[1])]


def without_prior(group: Group) -> str:
    """Returns in one sentence which encodings show no prior, and why; nothing if all do."""
    reasons: dict[str, list[str]] = {}
    for name in group.runs:
        stored = first_seed(group, name)[1].priors
        told = [each["reason"] for each in stored or () if "reason" in each]
        if stored is None:
            told = ["its run did not store what it learned: run it with --again"]
        elif not stored:
            told = ["its model has no positions"]
        for reason in dict.fromkeys(told):
            reasons.setdefault(reason, []).append(name)
    told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
    return f"Without an exact prior: {told}." if told else ""


DIFFERENCES = """<table data-differences><thead><tr><th scope="col">encoding</th><th scope="col">difference</th>
<th scope="col">95 % interval</th><th scope="col">seeds</th><th scope="col" data-words>in words</th></tr></thead>
<tbody></tbody></table>"""


def section(group: Group, number: int) -> str:
    """Returns the part of the page for one group of runs; the page's scripts fill what has `data-` marks."""
    rows = rows_of(group)
    options = {row.encoding: row.options for row in rows if row.options}
    names = pages.options([row.encoding for row in rows])
    drawn = pages.options(list(curves(group)))
    curves_part = (
        f"<h3>Learning curves</h3><p><label>Show <select data-what>{drawn}</select></label> Lines are means over the seeds, "
        "bands go from the lowest to the highest. Point at the chart, or focus it and use the arrow keys, to read values.</p>"
        f"<div data-curves></div><output data-values></output>"
        if drawn
        else "<h3>Learning curves</h3><p>There are none: the runs have one report each.</p>"
    )
    chosen = pages.options([row.encoding for row in rows if row.encoding in priors(group)])
    priors_part = (
        f"<p><label>Show <select data-prior>{chosen}</select></label> "
        "<label data-part-label>of <select data-part></select></label> "
        "<span data-prior-words></span> Point at the chart, or focus it and use the arrow keys, to read values.</p>"
        "<div data-priors></div><output data-prior-values></output>"
        if chosen
        else ""
    )
    return f"""
<section data-group="{number}">
<h2>{escape(group.title)}</h2>
<p>{escape(sentence(group))}. ± is the half-width of the 95 % confidence interval of the mean over seeds, by Student's t.</p>
<h3>Verdict</h3>
<p data-verdict>{escape(verdict_on(group))}</p>
<h3>Standings</h3>
{standings_table(group, rows)}
{lengths_table(group, rows)}
<h3>Differences within seeds</h3>
<p><label>Test {escape(group.metric)} minus that of <select data-baseline>{names}</select></label> with the same seed, so with the
same data in the same order. Each interval is for one pair by itself: of twenty without a cause, one leaves zero out. The verdict
counts how many there are, and claims less.</p>
{scroll_box(DIFFERENCES, "Differences")}
{curves_part}
<h3>Priors</h3>
<p>Where each head looks before it reads: the attention of its position bias alone, by lag.</p>
{priors_part}<p>{escape(without_prior(group))}</p>
<h3>Cost and quality</h3>
<p><label>Test {escape(group.metric)} against <select data-cost></select></label></p>
<div data-scatter></div>
<details><summary>All fields of these runs</summary>{definitions(as_words(group.fields))}
<p>Options of the encodings:</p>{definitions(as_words(options))}</details>
</section>"""


def standings_table(group: Group, rows: Sequence[Row]) -> str:
    """Returns the standings as a table whose headers sort it."""
    headers = [
        "encoding", "runs", f"test {group.metric}", "interval", f"validation {group.metric}", "parameters", "training s",
        "tokens/s", "peak MiB",
    ]  # fmt: skip
    ends = [each for row in rows for each in bounds(row.test) if math.isfinite(each)] or [0.0, 1.0]
    body = "".join(standings_row(row, min(ends), max(ends)) for row in rows)
    return html_table(headers, body, "data-standings", label="Standings", plain=("interval",))


def bounds(found: Estimate) -> tuple[float, float]:
    """Returns the ends of an interval, or twice the mean where there is none."""
    return found.mean - (found.half_width or 0.0), found.mean + (found.half_width or 0.0)


def standings_row(row: Row, low: float, high: float) -> str:
    """Returns a row of the standings; intervals are drawn between two bounds."""
    peak = None if row.peak_memory is None else row.peak_memory / 2**20
    cells = [
        cell(len(row.seeds), str(len(row.seeds))),
        cell(row.test.mean, str(row.test)),
        f"<td>{interval(row.test, low, high)}</td>",
        cell(row.validation.mean, str(row.validation)),
        cell(row.parameters, f"{row.parameters:,}"),
        cell(row.seconds, f"{row.seconds:,.1f}"),
        cell(row.tokens_per_second, "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"),
        cell(peak, "-" if peak is None else f"{peak:,.1f}"),
    ]
    return f'<tr><th scope="row">{escape(row.encoding)}</th>{"".join(cells)}</tr>'


def interval(found: Estimate, low: float, high: float) -> str:
    """Returns a picture of an interval between two bounds."""
    if not math.isfinite(found.mean):
        return "-"
    scale = 80 / (high - low) if high > low else 0.0
    first, middle, last = (5 + (each - low) * scale for each in (bounds(found)[0], found.mean, bounds(found)[1]))
    return (
        f'<svg class="interval" width="90" height="14" viewBox="0 0 90 14" aria-hidden="true">'
        f'<path d="M{first:.1f} 7H{last:.1f}M{first:.1f} 3V11M{last:.1f} 3V11"/><circle cx="{middle:.1f}" cy="7" r="3.5"/></svg>'
    )


def lengths_table(group: Group, rows: Sequence[Row]) -> str:
    """Returns the metric at other lengths as a table, with reasons where an encoding refused; nothing if none were asked for."""
    lengths = sorted({length for row in rows for length in row.lengths})
    if not lengths:
        return ""
    headers = ["encoding", "its own length", *(f"{length:,}" for length in lengths)]
    body, reasons = "", []
    for row in rows:
        cells = cell(row.test.mean, str(row.test))
        for length in lengths:
            found = row.lengths.get(length, "it was not asked for")
            cells += cell(found.mean, str(found)) if isinstance(found, Estimate) else cell(None, "refused")
            reasons += [] if isinstance(found, Estimate) else [f"{row.encoding} at {length:,}: {found}"]
        body += f'<tr><th scope="row">{escape(row.encoding)}</th>{cells}</tr>'
    told = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    table = html_table(headers, body, "data-lengths", label="Other lengths")
    return f"<h3>Test {escape(group.metric)} at other lengths</h3>{table}" + (f"<ul>{told}</ul>" if told else "")
