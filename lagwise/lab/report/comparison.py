"""The report of a comparison: a page that needs nothing else, a figure and a table."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch

from lagwise import pages
from lagwise.extras import install_command
from lagwise.lab.config import Config
from lagwise.lab.estimates import Estimate
from lagwise.lab.experiment import make_task
from lagwise.lab.grouping import Group, as_argument, groups
from lagwise.lab.json_files import make_folder, replace_text, writing
from lagwise.lab.report.verdict import verdict_on
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import Difference, Row, default_baseline, differences_of, rows_of
from lagwise.lens.labels import head_labels
from lagwise.pages import COLOURS, cell, definitions, html_table, scroll_box

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beside their colours, curves differ in dashes and marks, so that they can be told apart in black and white.
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")

SAMPLE_NOTE = "The data is the small built-in sample: these numbers mean nothing. Pass --data for the real one."

Point = tuple[int, float, float, float]
"""A step, and of the seeds at it the mean, the lowest and the highest value."""


def write_report(
    runs: Sequence[Run], out: Path, command: str, tune: Sequence[str] = (), left_out: Sequence[str] = ()
) -> list[Path]:
    """Writes report.html, league.csv and report.png to a folder, and returns their paths.

    Args:
        runs: The runs to compare; the page says which of them are not complete.
        out: The folder.
        command: The command line that asked for it.
        tune: Fields that are tuned for each encoding.
        left_out: In words, what takes no part, which the page says too.
    """
    make_folder(out)
    paths = [out / "report.html", out / "league.csv", out / "report.png"]
    replace_text(paths[0], page(runs, command, tune, left_out))
    replace_text(paths[1], table(runs, tune))
    with writing(paths[2]):
        plot(runs, tune).savefig(paths[2], dpi=150)
    return paths


def comparable(runs: Iterable[Run], tune: Sequence[str]) -> list[Group]:
    """Returns the groups of some runs, of which there must be one."""
    found = groups(runs, tune)
    if not found:
        raise ValueError("runs must have at least one that is complete, but have none: train one to its end")
    return found


def table(runs: Iterable[Run], tune: Sequence[str] = ()) -> str:
    """Returns all leagues as one table of comma-separated values; the column `table` tells them apart."""
    lines = [csv_line(group, row) for group in comparable(runs, tune) for row in rows_of(group)]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def csv_line(group: Group, row: Row) -> dict[str, Any]:
    """Returns a row of a league by its columns."""
    line = {
        "table": group.title,
        "encoding": row.encoding,
        "encoding_options": json.dumps(row.options),
        "metric": group.metric,
        "seeds": " ".join(map(str, row.seeds)),
        "test": row.test.mean,
        "test_half_width_95": row.test.half_width,
        "validation": row.validation.mean,
        "validation_half_width_95": row.validation.half_width,
        "encoding_parameters": row.parameters,
        "seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "peak_memory_bytes": row.peak_memory,
    }
    for length, found in row.lengths.items():
        line[f"test_at_{length}"] = found.mean if isinstance(found, Estimate) else f"refused: {found}"
        line[f"test_at_{length}_half_width_95"] = found.half_width if isinstance(found, Estimate) else None
    return line


def curves(group: Group) -> dict[str, dict[str, list[Point]]]:
    """Returns the learning curves of each encoding, by what they show; there are those with two points and more."""
    shows = {
        f"validation {group.metric}": ("validation", group.metric),
        "training loss": (None, "loss"),
        "validation loss": ("validation", "loss"),
    }
    found: dict[str, dict[str, list[Point]]] = {title: {} for title in shows}
    for name, seeds in group.runs.items():
        lines = [run.lines for run in seeds.values()]
        for title, (split, quantity) in shows.items():
            found[title][name] = curve([values_of(each, split, quantity) for each in lines])
    return {title: own for title, own in found.items() if max(map(len, own.values())) > 1}


def values_of(lines: Iterable[dict[str, Any]], split: str | None, quantity: str) -> dict[int, float]:
    """Returns a quantity of a split, or of training, by the step."""
    return {line["step"]: line[quantity] for line in lines if line.get("split") == split and "length" not in line}


def curve(seeds: Sequence[dict[int, float]]) -> list[Point]:
    """Returns the mean, the lowest and the highest value at the steps that all seeds have.

    >>> curve([{1: 2.0, 2: 1.0}, {1: 4.0, 2: 2.0, 3: 0.5}])
    [(1, 3.0, 2.0, 4.0), (2, 1.5, 1.0, 2.0)]
    """
    steps = sorted(set.intersection(*(set(values) for values in seeds)))
    return [(step, fmean(found), min(found), max(found)) for step in steps if (found := [values[step] for values in seeds])]


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


LETTERS = 13
"""Letters of a title for each inch of a figure."""


def plot(runs: Iterable[Run], tune: Sequence[str] = ()) -> "Figure":
    """Returns a figure of each group of runs, one below the other: the learning curves, the league, and other lengths, if any."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a figure needs matplotlib: {install_command('plot')}") from error

    found = comparable(runs, tune)
    tallest = max(len(group.runs) for group in found)
    lengths = any(row.lengths for group in found for row in rows_of(group))
    ratios = [1.25, 1, 1] if lengths else [1.25, 1]
    longest = max(len(name) for group in found for name in group.runs)
    # Names stand beside the curves and beside the league.
    width = (16 if lengths else 11) + 0.15 * max(0, longest - 12)
    figure = Figure(figsize=(width, len(found) * max(4.2, 1.4 + 0.3 * tallest)), layout="constrained")
    for own, group in zip(figure.subfigures(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        rows = rows_of(group)
        styles = {row.encoding: style(number) for number, row in enumerate(rows)}
        panels = own.subplots(1, len(ratios), width_ratios=ratios)
        draw_curves(panels[0], group, styles)
        draw_league(panels[1], group, rows, styles)
        if lengths:
            draw_lengths(panels[2], group, rows, styles)
        for panel in panels:
            panel.grid(color="0.92")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        note = f"\n{SAMPLE_NOTE}" if is_sample([group]) else ""
        own.suptitle(fill(sentence(group), int(width * LETTERS)) + note, fontsize=10)
    return figure


def style(number: int) -> dict[str, Any]:
    """Returns how an encoding is drawn."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKS[number % len(MARKS)],
    }


def draw_curves(panel: "Axes", group: Group, styles: dict[str, dict[str, Any]]) -> None:
    """Draws the first of the learning curves: means, bands from the lowest to the highest seed, and names at their ends."""
    found = curves(group)
    if not found:
        panel.set_axis_off()
        panel.text(0.5, 0.5, "no learning curves: the runs have one report each", ha="center", transform=panel.transAxes)
        return
    title, own = next(iter(found.items()))
    for name, points in own.items():
        if not points:
            continue
        steps, means, lows, highs = zip(*points, strict=True)
        every = max(1, len(steps) // 8)
        panel.plot(steps, means, linewidth=1.5, markersize=4.5, markevery=every, **styles[name])
        panel.fill_between(steps, lows, highs, color=styles[name]["color"], alpha=0.13, linewidth=0)
    panel.set_title("Learning curves: mean over the seeds; bands from the lowest to the highest", fontsize=10, loc="left")
    panel.set(xlabel="training step", ylabel=title)
    name_ends(panel, {name: points[-1] for name, points in own.items() if points}, styles)


def name_ends(panel: "Axes", ends: dict[str, Point], styles: dict[str, dict[str, Any]]) -> None:
    """Writes names beside the ends of curves, as far apart as they have to be; an end that is no number has no place."""
    ends = {name: end for name, end in ends.items() if math.isfinite(end[1])}
    low, high = panel.get_ylim()
    right = panel.get_xlim()[1]
    names = sorted(ends, key=lambda name: ends[name][1])
    gap = (high - low) * 0.055
    heights = spread([ends[name][1] for name in names], gap)
    panel.set_ylim(min([low, *(height - gap / 2 for height in heights)]), max([high, *(height + gap / 2 for height in heights)]))
    for name, height in zip(names, heights, strict=True):
        step, mean, *_ = ends[name]
        panel.annotate(
            name, (step, mean), (right, height), va="center", fontsize=9, color=styles[name]["color"], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": styles[name]["color"], "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Returns rising places, moved as little as makes them at least a gap apart.

    Places that are too near make a block, which stands where its middle was.

    >>> spread([0.0, 5.0, 5.5], 1.0)
    [0.0, 4.75, 5.75]
    """
    blocks: list[list[float]] = []
    for number, place in enumerate(places):
        blocks.append([place - number * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    starts = [fmean(block) for block in blocks for _ in block]
    return [start + number * gap for number, start in enumerate(starts)]


def draw_league(panel: "Axes", group: Group, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the league, the best on top: means with their intervals, and the single seeds as small rings."""
    for place, row in enumerate(rows):
        look = styles[row.encoding]
        seeds = [value for value in scores(group, row.encoding).values() if math.isfinite(value)]
        panel.plot(seeds, [place + 0.25] * len(seeds), "o", color="0.4", markersize=4, markerfacecolor="none")
        panel.errorbar(
            row.test.mean, place, xerr=row.test.half_width, color=look["color"], marker=look["marker"], markersize=7,
            linewidth=1.8, capsize=4,
        )  # fmt: skip
    panel.set_yticks(range(len(rows)), [row.encoding for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    better = "right" if group.higher_is_better else "left"
    counts = sorted({len(row.seeds) for row in rows})
    spans = "Mean, 95 % interval" if counts[-1] > 1 else "One seed, no interval"
    panel.set_title(f"{spans}; rings: seeds", fontsize=10, loc="left")
    panel.set(xlabel=f"test {group.metric} (better to the {better})")


def draw_lengths(panel: "Axes", group: Group, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the metric against the length, from that of the training on; an encoding that a length is too long for ends there."""
    trained = make_task(group.members[0].config, None).length
    ends: dict[str, Point] = {}
    for row in rows:
        points = {length: found for length, found in row.lengths.items() if isinstance(found, Estimate)}
        points |= {} if trained is None else {trained: row.test}
        if points:
            own = sorted(points)
            spans = [points[length].half_width or 0.0 for length in own]
            means = [points[length].mean for length in own]
            panel.errorbar(own, means, yerr=spans if any(spans) else None, linewidth=1.5, markersize=4.5, **styles[row.encoding])
            ends[row.encoding] = (own[-1], means[-1], means[-1], means[-1])
    if not ends:
        panel.set_axis_off()
        panel.text(0.5, 0.5, "no encoding takes other lengths", ha="center", transform=panel.transAxes)
        return
    ticks = sorted({length for row in rows for length in row.lengths} | (set() if trained is None else {trained}))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{length:,}" for length in ticks])
    panel.minorticks_off()
    if trained is not None:
        panel.axvline(trained, color="0.6", linewidth=0.8, linestyle=":")
    panel.set_title("Other lengths; dotted: that of the training", fontsize=10, loc="left")
    panel.set(xlabel="length, in tokens", ylabel=f"test {group.metric}")
    name_ends(panel, ends, styles)


def scores(group: Group, encoding: str) -> dict[int, float]:
    """Returns the metric on the test split, by the seed."""
    return {seed: result["test"][group.metric] for seed, run in group.runs[encoding].items() if (result := run.result)}


def sentence(group: Group) -> str:
    """Returns in one sentence what was compared."""
    seeds = sorted({seed for own in group.runs.values() for seed in own})
    encodings = f"{len(group.runs)} position encoding{'s' if len(group.runs) > 1 else ''}"
    better = "higher" if group.higher_is_better else "lower"
    return (
        f"{group.title}: {encodings} in the same model, trained for {group.fields['steps']:,} steps "
        f"with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; test {group.metric}, {better} is better"
    )


def is_sample(found: Iterable[Group]) -> bool:
    """Says whether any data was a built-in sample."""
    return any(result["sample"] for group in found for run in group.members if (result := run.result))


def page(runs: Sequence[Run], command: str, tune: Sequence[str] = (), left_out: Sequence[str] = ()) -> str:
    """Returns one page of HTML that needs nothing else: no network, no fonts, no other files.

    Args:
        runs: The runs to compare; those that are not complete are named with the reason.
        command: The command line that asked for it.
        tune: Fields that are tuned for each encoding.
        left_out: In words, what takes no part.
    """
    found = comparable(runs, tune)
    tasks = ", ".join(dict.fromkeys(group.fields["task"] for group in found))
    values = {
        "title": escape(f"Position encodings on {tasks}"),
        "notes": notes(runs, found, left_out),
        "sections": "".join(section(group, number) for number, group in enumerate(found)),
        "command": escape(command),
        "environment": environments(runs),
        "data": pages.embedded({"groups": [facts(group) for group in found]}),
    }
    return pages.fill(pages.text_of("lagwise.lab.report", "comparison.html"), values)


def facts(group: Group) -> dict[str, Any]:
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
    return "".join(definitions(in_words(json.loads(each))) for each in found)


def in_words(fields: dict[str, Any]) -> dict[str, str]:
    """Returns values as a reader wants to see them."""
    return {name: as_argument(value) for name, value in fields.items()}


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
<h3>League</h3>
{league_table(group, rows)}
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
<details><summary>All fields of these runs</summary>{definitions(in_words(group.fields))}
<p>Options of the encodings:</p>{definitions(in_words(options))}</details>
</section>"""


def league_table(group: Group, rows: Sequence[Row]) -> str:
    """Returns the league as a table whose headers sort it."""
    headers = [
        "encoding", "runs", f"test {group.metric}", "interval", f"validation {group.metric}", "parameters", "training s",
        "tokens/s", "peak MiB",
    ]  # fmt: skip
    ends = [each for row in rows for each in bounds(row.test) if math.isfinite(each)] or [0.0, 1.0]
    body = "".join(league_row(row, min(ends), max(ends)) for row in rows)
    return html_table(headers, body, "data-league", label="League", plain=("interval",))


def bounds(found: Estimate) -> tuple[float, float]:
    """Returns the ends of an interval, or twice the mean where there is none."""
    return found.mean - (found.half_width or 0.0), found.mean + (found.half_width or 0.0)


def league_row(row: Row, low: float, high: float) -> str:
    """Returns a row of the league; intervals are drawn between two bounds."""
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
