"""Figures of the findings, as SVG. Each file carries its numbers in its description, so that a check needs no picture."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from findings_numbers import (
    RATES,
    Scores,
    Source,
    at_length,
    difference,
    glue_scores,
    group_of,
    music_scores,
    paired,
    percent,
    scores,
)

from lagwise.lab.estimates import Estimate
from lagwise.lab.report.tables import position_losses, trained_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "none": "no positions",
    "sinusoidal": "sinusoidal (absolute)",
    "learned": "learned (absolute)",
    "rotary": "rotary",
    "t5": "T5",
    "t5-free": "T5, free table",
    "at5": "AT5",
    "at5-free": "AT5, free table",
    "shaw": "Shaw",
    "xl": "Transformer-XL",
    "huang1": "Huang, method 1",
    "huang2": "Huang, method 2",
    "huang3": "Huang, method 3",
    "huang4": "Huang, method 4",
    "fixed sine-spe": "SPE sines, fixed codes",
    "new sine-spe": "SPE sines, new codes",
    "fixed conv-spe": "SPE filters, fixed codes",
    "new conv-spe": "SPE filters, new codes",
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000")
"""Those of Okabe and Ito, which colour-blind readers can tell apart, and a grey."""

MARKS = "os^Dv<>P"

FROM_SCRATCH = ("cola", "mrpc", "rte", "stsb")
CONVERTED = ("cola", "mrpc", "rte", "sst2", "stsb")
FULL = 10.0
"""The difference from which a cell of the heat map has its full colour."""


@dataclass(frozen=True)
class Column:
    """A task of the heat map.

    Args:
        title: What stands above it.
        scores: The numbers of an encoding by the seed, empty where it was not run.
        baseline: What the others are compared to.
        relative: The numbers are losses: show by how many per cent they are lower.
    """

    title: str
    scores: Callable[[str], Scores]
    baseline: str
    relative: bool = False


def column(title: str, source: Source, baseline: str, *, relative: bool = False) -> Column:
    """Returns a column from the runs of one source."""
    return Column(title, lambda name: scores(source, name), baseline, relative)


def glue_column(title: str, file: str, tasks: Sequence[str], baseline: str) -> Column:
    """Returns a column of the mean over tasks of GLUE."""
    return Column(title, lambda name: glue_scores(file, name, tasks), baseline)


def music_column(title: str, file: str, *, beyond: bool) -> Column:
    """Returns a column of music."""
    return Column(title, lambda name: music_scores(file, name.removeprefix("new "), beyond=beyond), "sinusoidal", relative=True)


RELU = ("feature_map=relu",)
PANELS = {
    "Softmax attention, trained from scratch\n(difference from T5)": [
        column("Reber", percent("reber", RATES), "t5"),
        column("Process-50", percent("process-50", RATES), "t5"),
        column("SST-2", percent("sst2-words"), "t5"),
        column("IMDb", percent("imdb-words"), "t5"),
        column("masked LM, bits", Source("pretrain", RATES[1:]), "t5", relative=True),
        column("LM, 8 x the length", Source("pretrain", RATES[1:], score=at_length(2048)), "t5", relative=True),
        column("SQuAD, F1", Source("squad"), "t5"),
        glue_column("GLUE, mean of 4", "glue", FROM_SCRATCH, "t5"),
    ],
    "Converted MiniLM\n(from the unchanged model)": [
        column("SQuAD, at once", Source("squad-minilm", RATES[:1], ("absolute=remove",)), "learned"),
        column("SQuAD, 2,000 steps on", Source("squad-went-on", RATES[:1]), "learned"),
        column("SQuAD, 6,000 steps on", Source("squad-went-on-long", RATES[:1], ("seed0",)), "learned"),
        glue_column("GLUE, mean of 5", "glue-minilm", CONVERTED, "learned"),
    ],
    "Linear attention\n(from absolute positions)": [
        column("bytes of text", percent("lra-text", RATES[:1], RELU), "sinusoidal"),
        column("ListOps", percent("lra-listops", RATES[:1], RELU), "sinusoidal"),
        column("images", percent("lra-image", RATES[:1], RELU), "learned"),
        music_column("piano, nats", "piano", beyond=False),
        music_column("piano beyond length", "piano", beyond=True),
        music_column("drums beyond length", "groove", beyond=True),
    ],
}


def columns() -> list[Column]:
    """Returns all columns, from left to right."""
    return [column for own in PANELS.values() for column in own]


def cell(column: Column, name: str) -> Estimate | None:
    """Returns by how much an encoding is better than the baseline of a column: in points, or for losses in per cent."""
    own, others = column.scores(name), column.scores(column.baseline)
    if column.relative:
        own = {seed: 100.0 * (1.0 - loss / others[seed]) for seed, loss in own.items() if seed in others}
        others = dict.fromkeys(own, 0.0)
    found = paired(own, others)
    return None if found is None or math.isnan(found.mean) else found


def heat_numbers() -> dict[str, dict[str, str]]:
    """Returns the words of each cell by the column and the row."""
    return {
        column.title: {name: cell_words(found) for name in LABELS if (found := own_cell(column, name)) is not None}
        for column in columns()
    }


def own_cell(column: Column, name: str) -> Estimate | None:
    """Returns a cell, with the baseline itself at zero."""
    return Estimate(0.0, None, 0) if name == column.baseline else cell(column, name)


def cell_words(found: Estimate) -> str:
    """Returns what a cell says: the difference, and a star where it is one run.

    >>> cell_words(Estimate(6.62, 0.6, 10)), cell_words(Estimate(-38.4, None, 1)), cell_words(Estimate(0.0, None, 0))
    ('+6.6', '-38*', 'base')
    """
    if not found.count:
        return "base"
    words = (
        f"{found.mean:+.0f}" if abs(found.mean) >= FULL else f"{found.mean:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
    )
    return words + ("*" if found.count == 1 else "")


def is_significant(found: Estimate) -> bool:
    """Says whether zero is outside the 95 % interval."""
    return found.half_width is not None and abs(found.mean) > found.half_width


def heat_map() -> "Figure":
    """Draws encodings by tasks: how much better or worse than the baseline."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names, across = list(LABELS), columns()
    figure = Figure(figsize=(11.4, 8.4))
    panel = figure.add_axes((0.16, 0.08, 0.745, 0.685))
    colours, scale = colormaps["RdBu"], Normalize(-FULL, FULL)
    gap, edges, x = 0.35, [], 0.0
    for own in PANELS.values():
        edges.append((x, x + len(own)))
        x += len(own) + gap
    places = [left + number for left, right in edges for number in range(int(right - left))]
    for place, column in zip(places, across, strict=True):
        for row, name in enumerate(names):
            found = own_cell(column, name)
            if found is None:
                panel.add_patch(Rectangle((place, row), 1, 1, facecolor="0.965", edgecolor="white", linewidth=1.2))
                continue
            shade = "0.82" if not found.count else colours(scale(found.mean))
            panel.add_patch(Rectangle((place, row), 1, 1, facecolor=shade, edgecolor="white", linewidth=1.2))
            dark = found.count and abs(found.mean) > 0.72 * FULL
            panel.text(
                place + 0.5, row + 0.52, cell_words(found), ha="center", va="center", fontsize=9.5,
                color="white" if dark else "0.1", fontweight="bold" if is_significant(found) else "normal",
            )  # fmt: skip
        panel.text(place + 0.42, -0.25, column.title, rotation=42, ha="left", va="bottom", fontsize=10)
    for (left, right), title in zip(edges, PANELS, strict=True):
        panel.plot([left, right], [len(names) + 0.12] * 2, color="0.2", linewidth=1.2, clip_on=False)
        panel.text(
            (left + right) / 2, len(names) + 0.3, title, ha="center", va="top", fontsize=10.5, fontweight="bold", linespacing=1.3
        )
    panel.set_xlim(0, places[-1] + 1)
    panel.set_ylim(len(names), 0)
    panel.set_yticks([row + 0.5 for row in range(len(names))], [LABELS[name] for name in names], fontsize=10.5)
    panel.set_xticks([])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    figure.text(0.012, 0.965, "Which encoding does better, and where", fontsize=15, fontweight="bold", va="top")
    figure.text(
        0.012, 0.925,
        "Points more (blue) or fewer (red) than the baseline;\nfor bits and nats, per cent lower or higher.\n"
        "Bold: zero is outside the 95 % interval.\n* one run.   Pale: not run.",
        fontsize=10, va="top", linespacing=1.4,
    )  # fmt: skip
    bar = figure.add_axes((0.55, 0.962, 0.26, 0.015))
    figure.colorbar(ScalarMappable(scale, colours), cax=bar, orientation="horizontal", ticks=[-10, -5, 0, 5, 10])
    bar.set_xticklabels(["≤ -10", "-5", "0", "+5", "≥ +10"], fontsize=9)
    bar.tick_params(length=2)
    return figure


ARTIFICIAL = {
    "Reber, 1,000 strings": (percent("reber", RATES), ("sinusoidal", "at5", "t5-free", "at5-free")),
    "Process-50, 5,000 strings": (percent("process-50", RATES), ("sinusoidal", "at5", "t5-free", "at5-free")),
    "Process-50, 500 strings": (percent("process-50-few"), ("at5", "t5-free", "at5-free")),
}


def artificial_numbers() -> dict[str, dict[str, str]]:
    """Returns differences from T5 on artificial tasks."""
    return {title: {name: str(difference(source, name, "t5")) for name in names} for title, (source, names) in ARTIFICIAL.items()}


def artificial_figure() -> "Figure":
    """Draws differences from T5 on artificial tasks, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.5), layout="constrained")
    rows = ["at5", "t5-free", "at5-free", "sinusoidal"]
    panels = figure.subplots(1, len(ARTIFICIAL), sharey=True, squeeze=False)[0]
    for panel, (title, (source, names)) in zip(panels, ARTIFICIAL.items(), strict=True):
        panel.axvline(0, color="0.3", linewidth=1)
        for name in names:
            found = difference(source, name, "t5")
            colour = COLOURS[0] if name == "at5" else "0.35"
            panel.errorbar(found.mean, rows.index(name), xerr=found.half_width, fmt="o", color=colour, capsize=3, markersize=6)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("points of accuracy above T5", fontsize=9)
        panel.set_yticks(range(len(rows)), [LABELS[name] for name in rows], fontsize=9)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
        bare(panel)
    return figure


def bare(panel: Any) -> None:
    """Takes the frame of a panel away, but for its axes."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=9)


LENGTHS = (256, 512, 1024, 2048)
WINDOWS = {
    "All windows": ("sinusoidal", "xl", "rotary", "t5", "huang4", "at5"),
    "Near the best, enlarged": ("t5-free", "t5", "shaw", "huang4", "at5"),
}


def window_numbers() -> dict[str, dict[str, float]]:
    """Returns bits per byte by the length of the windows, of models that were trained with 256 tokens."""
    names = dict.fromkeys(name for own in WINDOWS.values() for name in own)
    return {name: {str(length): round(window_bits(name, length), 4) for length in LENGTHS} for name in names}


def window_bits(name: str, length: int) -> float:
    """Returns bits per byte in windows of one length."""
    score = None if length == LENGTHS[0] else at_length(length)
    return fmean(scores(Source("pretrain", RATES[1:], score=score), name).values())


def window_figure() -> "Figure":
    """Draws bits per byte against the length of the windows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    numbers = window_numbers()
    colours = dict(zip(numbers, COLOURS, strict=False))
    ticks = [f"{length:,}\n(training)" if length == LENGTHS[0] else f"{length:,}" for length in LENGTHS]
    for panel, (title, names) in zip(figure.subplots(1, 2), WINDOWS.items(), strict=True):
        drawn = {LABELS[name]: (list(numbers[name].values()), colours[name]) for name in names}
        draw_lines(panel, drawn, ticks, share=0.055)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("tokens in a window")
        panel.set_ylabel("bits per byte (lower is better)")
    return figure


def draw_lines(
    panel: Any, lines: Mapping[str, tuple[Sequence[float | None], str]], ticks: Sequence[str], *, share: float
) -> None:
    """Draws lines over a few places, each with its name at its end; names are a share of the height apart at least."""
    ends: dict[int, list[tuple[float, str, str]]] = {}
    for name, (values, colour) in lines.items():
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        panel.plot(*zip(*known, strict=True), marker=MARKS[COLOURS.index(colour)], color=colour, linewidth=1.8)
        ends.setdefault(known[-1][0], []).append((known[-1][1], name, colour))
    low, high = panel.get_ylim()
    for place, own in ends.items():
        own.sort()
        for (_, name, colour), at in zip(own, apart([value for value, *_ in own], share * (high - low)), strict=True):
            panel.text(place + 0.1, at, name, va="center", fontsize=9.5, color=colour)
    panel.set_xticks(range(len(ticks)), ticks)
    panel.set_xlim(-0.15, len(ticks) - 1 + 0.42 * (len(ticks) - 1))
    panel.grid(axis="y", alpha=0.3)
    bare(panel)


def apart(values: Sequence[float], distance: float) -> list[float]:
    """Returns sorted values moved apart to a least distance, each crowd around its middle.

    >>> apart([0.0, 0.1, 5.0], 1.0)
    [-0.45, 0.55, 5.0]
    """
    crowds: list[list[float]] = []
    for value in values:
        crowds.append([value])
        while len(crowds) > 1 and middle_gap(crowds[-2], crowds[-1], distance) < 0:
            last = crowds.pop()
            crowds[-1] += last
    return [fmean(crowd) + (place - (len(crowd) - 1) / 2) * distance for crowd in crowds for place in range(len(crowd))]


def middle_gap(below: Sequence[float], above: Sequence[float], distance: float) -> float:
    """Returns the room that is left between two crowds."""
    return fmean(above) - fmean(below) - (len(below) + len(above)) / 2 * distance


STAGES = {
    "0": Source("squad-minilm", RATES[:1], ("absolute=remove",)),
    "2,000": Source("squad-went-on", RATES[:1]),
    "6,000": Source("squad-went-on-long", RATES[:1], ("seed0",)),
}


def conversion_numbers() -> dict[str, dict[str, float | None]]:
    """Returns F1 on SQuAD by the steps of further pre-training, of a converted MiniLM."""
    names = ("learned", "at5", "huang4", "t5", "rotary")
    return {
        name: {
            steps: round(fmean(own.values()), 2) if (own := scores(source, name)) else None for steps, source in STAGES.items()
        }
        for name in names
    }


def conversion_figure() -> "Figure":
    """Draws F1 on SQuAD against the steps of further pre-training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    panel = figure.subplots()
    drawn = {
        "unchanged model" if name == "learned" else LABELS[name]: (list(own.values()), colour)
        for (name, own), colour in zip(conversion_numbers().items(), COLOURS[-1:] + COLOURS, strict=False)
    }
    draw_lines(panel, drawn, ["none", "2,000", "6,000"], share=0.055)
    panel.set_xlabel("steps of further pre-training between conversion and fine-tuning")
    panel.set_ylabel("F1 on SQuAD (mean over seeds)")
    return figure


CODES = {
    "short ListOps": (percent("listops-short", (), ("encoding_rate=1.0",)), "sinusoidal"),
    "ListOps": (percent("lra-listops", RATES[:1], RELU), "sinusoidal"),
    "text": (percent("lra-text", RATES[:1], RELU), "sinusoidal"),
    "images, first token": (percent("lra-image-first", RATES[:1], (*RELU, "steps=3600")), "learned"),
    "images, mean of pixels": (percent("lra-image", RATES[:1], RELU), "learned"),
}
"""Tasks that were run with fixed and with new codes, with ReLU features."""


def code_differences(kind: str) -> dict[str, dict[str, Estimate]]:
    """Returns differences from absolute positions with new and with fixed codes, by the task."""
    return {
        title: {word: difference(source, f"{word} {kind}", baseline) for word in ("new", "fixed")}
        for title, (source, baseline) in CODES.items()
        if scores(source, f"fixed {kind}")
    }


def code_numbers() -> dict[str, dict[str, dict[str, str]]]:
    """Returns the differences of both kinds of SPE."""
    return {
        kind: {title: {word: str(found) for word, found in own.items()} for title, own in code_differences(kind).items()}
        for kind in ("sine-spe", "conv-spe")
    }


def code_figure() -> "Figure":
    """Draws how far SPE is from absolute positions, with new codes in each step and with fixed codes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    rows = list(CODES)
    for panel, (kind, title) in zip(panels, {"sine-spe": "SPE with sines", "conv-spe": "SPE with filters"}.items(), strict=True):
        panel.axvline(0, color="0.3", linewidth=1)
        for task, found in code_differences(kind).items():
            row = rows.index(task)
            panel.plot([found["new"].mean, found["fixed"].mean], [row, row], color="0.8", linewidth=5, zorder=1)
            for word, colour, mark, shift in (("new", COLOURS[1], "s", 0.13), ("fixed", COLOURS[0], "o", -0.13)):
                panel.errorbar(
                    found[word].mean, row + shift, xerr=found[word].half_width, fmt=mark, color=colour, capsize=3,
                    label=f"{word} codes" + (" in each step" if word == "new" else "") if task == "ListOps" else None,
                )  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.set_yticks(range(len(rows)), rows, fontsize=9)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_xlabel("points of accuracy above absolute positions", fontsize=9)
        panel.grid(axis="x", alpha=0.3)
        bare(panel)
    panels[1].legend(fontsize=9, loc="upper left", frameon=False)
    return figure


MUSIC = {"t5-free": "T5, free table", "conv-spe": "SPE filters", "sine-spe": "SPE sines", "rotary": "rotary"}
MUSIC |= {"none": "no positions", "sinusoidal": "sinusoidal (absolute)"}


def music_numbers() -> dict[str, list[float]]:
    """Returns nats per token by position, the mean over seeds."""
    group = group_of(Source("piano"))
    found = {}
    for name in MUSIC:
        seeds = list(position_losses(group, name).values())
        found[name] = [round(fmean(own[start][0] for own in seeds), 4) for start in sorted(seeds[0])]
    return found


def music_figure() -> "Figure":
    """Draws nats per token of piano against the position."""
    from matplotlib.figure import Figure

    group = group_of(Source("piano"))
    length, starts = trained_length(group), sorted(next(iter(position_losses(group, "none").values())))
    width = starts[1] - starts[0]
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    panel = figure.subplots()
    at = -math.inf
    drawn = dict(zip(MUSIC, COLOURS, strict=False))
    for number, (name, values) in enumerate(music_numbers().items()):
        panel.plot(
            [start + width / 2 for start in starts],
            values,
            color=drawn[name],
            linewidth=1.8,
            marker=MARKS[number],
            markersize=4,
        )
    for name, values in sorted(music_numbers().items(), key=lambda each: each[1][-1]):
        at = max(values[-1], at + 0.055)
        panel.text(starts[-1] + width * 0.9, at, MUSIC[name], color=drawn[name], va="center", fontsize=10)
    panel.axvspan(length, starts[-1] + width, color="0.95", zorder=0)
    panel.text(length + 12, panel.get_ylim()[1], "beyond the training length", va="top", fontsize=9, color="0.35")
    panel.axvline(length, color="0.4", linewidth=1, linestyle="--")
    panel.set_xlim(0, starts[-1] + width * 4.6)
    panel.set_xticks([0, 512, 1024, 1536, 2048], ["0", "512", "1,024", "1,536", "2,048"])
    panel.set_xlabel("position in the piece (tokens)")
    panel.set_ylabel("nats per token (lower is better)")
    panel.grid(axis="y", alpha=0.3)
    bare(panel)
    return figure


FIGURES: dict[str, tuple[Callable[[], Any], Callable[[], "Figure"]]] = {
    "findings-heat-map": (heat_numbers, heat_map),
    "findings-artificial": (artificial_numbers, artificial_figure),
    "findings-windows": (window_numbers, window_figure),
    "findings-conversion": (conversion_numbers, conversion_figure),
    "findings-codes": (code_numbers, code_figure),
    "findings-piano": (music_numbers, music_figure),
}
"""The numbers and the drawing of each figure, by the name of its file."""


def described(name: str) -> str:
    """Returns the numbers of a figure as its file carries them."""
    return json.dumps(FIGURES[name][0]())
