"""The plot of a sweep: time and memory of a training step against the length, beside attention without positions."""

import json
from pathlib import Path
from typing import Any

from lagwise.extras import install_command
from lagwise.pages import COLOURS

TITLES = {
    "sweep": "Attention with and without relative positions: forward, backward and the gradients of the tables",
    "linear sweep": "Linear attention with and without positions: forward, backward and the gradients of the encodings",
}
"""The benches that are swept."""

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"label": "no positions", "color": "0.4", "linestyle": "--", "marker": "s"},
    "plain cuDNN": {"label": "no positions, cuDNN", "color": "0.25", "linestyle": "--", "marker": "s"},
    "plain flash": {"label": "no positions, flash", "color": "0.6", "linestyle": "--", "marker": "D"},
    "dense bias": {"label": "t5 as a dense bias", "color": "black", "linestyle": ":", "marker": "x"},
    "softmax": {"label": "softmax attention, no positions", "color": "0.7", "linestyle": "-.", "marker": "D"},
    "published, sine": {"label": "sine-spe as published", "color": "black", "linestyle": ":", "marker": "x"},
    "published, conv": {"label": "conv-spe as published", "color": "0.3", "linestyle": ":", "marker": "+"},
}

RATIOS = (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Where the axis of ratios has ticks."""


def read_sweep(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a sweep from a file of JSON lines; of two for the same point, the later one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    points = {(line["contender"], line["time"]): line for line in lines if line["bench"] in TITLES}
    if not any("error" not in line for line in points.values()):
        raise ValueError(f"{path} has no lines of a sweep: make some with --sweep of `lagwise bench`")
    return list(points.values())


def draw_sweep(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws time, time by that without positions, and memory of a training step against the length, a curve for each contender.

    Time and memory are per token, because the number of tokens is not the same at all lengths.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: {install_command('lens')}") from error

    measured = sorted((line for line in lines if "error" not in line), key=lambda line: line["time"])
    times = sorted({line["time"] for line in measured})
    curves: dict[str, list[dict[str, Any]]] = {}
    for line in measured:
        curves.setdefault(line["contender"], []).append(line)
    colours = iter(COLOURS * len(curves))
    styles = {name: STYLES.get(name) or {"label": name, "color": next(colours), "marker": "o"} for name in curves}
    # The legend's order is that of the curves at their right end.
    order = sorted(curves, key=lambda name: (curves[name][-1]["time"] < times[-1], curves[name][-1]["training_ms"]), reverse=True)

    figure = Figure(figsize=(11, 8.6), layout="constrained")
    (time, ratio), (memory, beside) = figure.subplots(2, 2)
    for panel, title, unit, number in (
        (time, "Time of a training step", "nanoseconds per token", nanoseconds),
        (ratio, "The same, by the time without positions", "times", times_plain),
        (memory, "Peak memory of a training step, inputs not counted", "KiB per token", kibibytes),
    ):
        for name in order:
            points = [(line["time"], found) for line in curves[name] if (found := number(line)) is not None]
            panel.plot([x for x, _ in points], [y for _, y in points], linewidth=1.6, markersize=4.5, **styles[name])
        panel.set(title=title, xlabel="length T of the sequence, in tokens", ylabel=unit, xscale="log", yscale="log")
        panel.set_xticks(times, [f"{each:,}" for each in times], rotation=40, ha="right")
        panel.yaxis.set_major_formatter("{x:,.9g}")
        panel.minorticks_off()
        panel.grid(which="major", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    lowest, highest = ratio.get_ylim()
    shown = [tick for tick in RATIOS if lowest <= tick <= highest]
    ratio.set_yticks(shown, [f"{tick:g}" for tick in shown])
    ends = {name: "" if (last := curves[name][-1]["time"]) == times[-1] else f", up to T = {last:,}" for name in order}
    beside.axis("off")
    beside.legend(time.get_lines(), [styles[name]["label"] + ends[name] for name in order], loc="center", frameon=False)
    last = measured[-1]
    graphs = [line["time"] for line in measured if line.get("graph")]
    how = f"; CUDA graphs up to T = {max(graphs):,}" if graphs else ""
    figure.suptitle(
        f"{TITLES[last['bench']]}{how}\n"
        f"{last['device']}, torch {last['torch']}, {last['dtype']}, {last['heads']} heads of {last['head_dim']}, "
        f"lagwise {last['lagwise']} ({last['commit'] or 'commit unknown'}), {last['date']}",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def nanoseconds(line: dict[str, Any]) -> float:
    """Returns the training time of a token."""
    return 1e6 * line["training_ms"] / (line["batch"] * line["time"])


def times_plain(line: dict[str, Any]) -> float | None:
    """Returns the training time by that of attention without positions, if that was measured too."""
    return line.get("training_ratio")


def kibibytes(line: dict[str, Any]) -> float:
    """Returns the memory of a token."""
    return line["peak_bytes"] / 1024 / (line["batch"] * line["time"])
