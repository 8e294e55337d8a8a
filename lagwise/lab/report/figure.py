"""The figure of a comparison: learning curves, standings, and other lengths."""

import math
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lagwise.extras import install_command
from lagwise.lab.estimates import Estimate
from lagwise.lab.experiment import make_task
from lagwise.lab.grouping import Group, compared_groups
from lagwise.lab.report.learning import curves
from lagwise.lab.report.subject import SAMPLE_NOTE, is_sample, sentence
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import Row, rows_of, scores_of
from lagwise.lens.plots import DASHES, MARKS
from lagwise.pages import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = 13
"""Letters of a title for each inch of a figure."""


def plot(runs: Iterable[Run], tune: Sequence[str] = ()) -> "Figure":
    """Returns a figure of each group of runs, one below the other: learning curves, standings, and other lengths, if any."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a figure needs matplotlib: {install_command('lens')}") from error

    found = compared_groups(runs, tune)
    tallest = max(len(group.runs) for group in found)
    lengths = any(row.lengths for group in found for row in rows_of(group))
    ratios = [1.25, 1, 1] if lengths else [1.25, 1]
    longest = max(len(name) for group in found for name in group.runs)
    # Names stand beside the standings, whose colours and marks are those of the curves.
    width = (16 if lengths else 11) + 0.15 * max(0, longest - 12)
    figure = Figure(figsize=(width, len(found) * max(4.2, 1.4 + 0.3 * tallest)), layout="constrained")
    for own, group in zip(figure.subfigures(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        rows = rows_of(group)
        styles = {row.encoding: style(number) for number, row in enumerate(rows)}
        panels = own.subplots(1, len(ratios), width_ratios=ratios)
        draw_curves(panels[0], group, styles)
        draw_standings(panels[1], group, rows, styles)
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
    """Draws the first of the learning curves: means, and bands from the lowest to the highest seed."""
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


def draw_standings(panel: "Axes", group: Group, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the standings, the best on top: means with their intervals, and the single seeds as small rings."""
    for place, row in enumerate(rows):
        look = styles[row.encoding]
        seeds = [value for value in scores_of(group.runs[row.encoding].values(), group.metric).values() if math.isfinite(value)]
        panel.plot(seeds, [place + 0.25] * len(seeds), "o", color="0.4", markersize=4, markerfacecolor="none")
        panel.errorbar(
            row.test.mean, place, xerr=row.test.half_width, color=look["color"], marker=look["marker"], markersize=7,
            linewidth=1.8, capsize=4,
        )  # fmt: skip
    panel.set_yticks(range(len(rows)), [row.encoding for row in rows])
    for label, row in zip(panel.get_yticklabels(), rows, strict=True):
        label.set_color(styles[row.encoding]["color"])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    better = "right" if group.higher_is_better else "left"
    counts = sorted({len(row.seeds) for row in rows})
    spans = "Mean, 95 % interval" if counts[-1] > 1 else "One seed, no interval"
    panel.set_title(f"{spans}; rings: seeds", fontsize=10, loc="left")
    panel.set(xlabel=f"test {group.metric} (better to the {better})")


def draw_lengths(panel: "Axes", group: Group, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the metric against the length, from that of the training on; an encoding that a length is too long for ends there."""
    trained = make_task(group.members[0].config, None).length
    for row in rows:
        points = {length: found for length, found in row.lengths.items() if isinstance(found, Estimate)}
        points |= {} if trained is None else {trained: row.test}
        if points:
            own = sorted(points)
            spans = [points[length].half_width or 0.0 for length in own]
            means = [points[length].mean for length in own]
            panel.errorbar(own, means, yerr=spans if any(spans) else None, linewidth=1.5, markersize=4.5, **styles[row.encoding])
    if not panel.containers:
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
