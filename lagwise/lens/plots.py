"""One function for each figure: arrays in, a matplotlib figure out, readable in black and white.

>>> import lagwise
>>> from lagwise.lens import prior
>>> found = prior(lagwise.ALiBi(heads=4), 20)
>>> prior_by_lag(found.lags, found.probability).savefig("prior.png")                                        # doctest: +SKIP
"""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lagwise.extras import install_command
from lagwise.lens.labels import head_label
from lagwise.pages import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Curves of one panel differ in dashes and marks too, and maps have one hue, so that nothing depends on colour.
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
DARK, LIGHT, MAP = "0.1", "0.6", "Greys"
COLUMNS = 4
"""The most panels beside each other."""

TITLE_LETTERS = 36
"""Letters of a line of a panel's title."""

DIRECTIONS = ("past", "future")


def prior_by_lag(
    lags: Int[Tensor, " lags"],
    probability: Float[Tensor, "heads lags"],
    names: Sequence[str] | None = None,
    *,
    layers: Sequence[int] = (),
) -> "Figure":
    """Draws the prior probability of each head by lag, a panel for each, with its maximum.

    Args:
        lags: The lags of a `Prior`.
        probability: Its probability.
        names: What the heads are called; "layer 0 · head 0" and so on unless given.
        layers: The layers that they are of, where that is known.
    """
    names = _names(len(probability), names, layers)
    figure, panels = _by_lag(lags, probability, names, "prior probability", "Prior by lag: what the bias says before content")
    for panel, row in zip(panels, torch.as_tensor(probability), strict=True):
        place = int(row.argmax())
        lag, peak = int(lags[place]), float(row[place])
        panel.plot([lag], [peak], marker="o", color=DARK, markersize=5, fillstyle="none", linestyle="none")
        panel.set_title(fill(f"{panel.get_title()}: {peak:.3g} at lag {lag}", TITLE_LETTERS), fontsize=9)
    return figure


def attention_by_lag(
    lags: Int[Tensor, " lags"],
    mean: Float[Tensor, "heads lags"],
    names: Sequence[str] | None = None,
    *,
    layers: Sequence[int] = (),
) -> "Figure":
    """Draws the mean attention weight of each head by lag, a panel for each: `average_attention`'s lags and mean.

    Names and layers are those of `prior_by_lag`.
    """
    names = _names(len(mean), names, layers)
    return _by_lag(lags, mean, names, "mean attention weight", "Averaged attention by lag, over all pairs of the data")[0]


def logits_by_lag(
    lags: Int[Tensor, " lags"],
    parts: Mapping[str, Float[Tensor, "heads lags"]],
    head: int = 0,
    *,
    layers: Sequence[int] = (),
) -> "Figure":
    """Draws the expected logit of a head by lag and the parts that it is the sum of: the means of `expected_logits`."""
    figure, panel = _single((7, 4))
    for number, (name, means) in enumerate(parts.items()):
        panel.plot(_list(lags), _list(means[head]), label=name, **_style(number, len(lags)))
    panel.set(xlabel="lag: key minus query, in tokens", ylabel="mean over the data, in nats")
    panel.legend(frameon=False)
    return _titled(figure, f"Expected logit by lag, {head_label(head, layers)}")


def score_maps(
    prior: Float[Tensor, "queries keys"],
    context: Float[Tensor, "queries keys"],
    final: Float[Tensor, "queries keys"],
    *,
    tokens: Sequence[str] | None = None,
    visible: Tensor | None = None,
) -> "Figure":
    """Draws the prior, context and final scores of one head side by side; each has its own scale, in nats.

    Args:
        prior: The bias of each pair.
        context: What the content adds.
        final: Their sum, the logit.
        tokens: What stands at the positions, where there are not too many to be read.
        visible: Which pairs the query may see; the others are hatched.
    """
    figure = _figure((11, 3.9))
    for panel, title, scores in zip(
        figure.subplots(1, 3), ("Prior score", "Context score", "Final score"), (prior, context, final), strict=True
    ):
        shown = torch.as_tensor(scores).double()
        shown = shown if visible is None else shown.masked_fill(~visible, torch.nan)
        _heat_map(figure, panel, shown, "score, in nats")
        panel.patch.set(hatch="////", edgecolor="0.85")
        panel.set(title=title, xlabel="key position", ylabel="query position")
        if tokens is not None and len(tokens) <= 40:
            panel.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7)
            panel.set_yticks(range(len(tokens)), tokens, fontsize=7)
    return figure


def learned_tables(
    lags: Int[Tensor, " lags"], values: Float[Tensor, "rows lags"], *, row: str = "head", first: int = -50, last: int = 50
) -> "Figure":
    """Draws learned tables as a map, a row for each head or channel, from lag -50 to 50 unless asked for others.

    Args:
        lags: The lags of the columns.
        values: The table of scalars, or of one head's vectors with channels as rows.
        row: What a row is.
        first: The first lag to show.
        last: The last one.
    """
    lags = torch.as_tensor(lags)
    inside = (lags >= first) & (lags <= last)
    shown = lags[inside]
    figure, panel = _single((9, min(1.6 + 0.22 * len(values), 7)))
    image = _heat_map(figure, panel, torch.as_tensor(values)[:, inside], "value")
    image.set_extent((int(shown[0]) - 0.5, int(shown[-1]) + 0.5, len(values) - 0.5, -0.5))
    panel.set_aspect("auto")
    panel.set(xlabel="lag: key minus query, in tokens", ylabel=row)
    return _titled(figure, f"Learned table by {row} and lag")


def kernels(lags: Int[Tensor, " lags"], values: Float[Tensor, "heads lags channels"], *, layers: Sequence[int] = ()) -> "Figure":
    """Draws SPE's kernels P_d, a panel for each head: every channel as a thin line, their mean as a thick one."""
    values = torch.as_tensor(values)
    names = _names(len(values), None, layers)
    figure, panels = _by_lag(
        lags, values.mean(-1), names, "P_d(lag)", "Kernels of SPE: thin lines are channels, the thick one is their mean"
    )
    for panel, head in zip(panels, values, strict=True):
        panel.plot(_list(lags), head.tolist(), color=LIGHT, linewidth=0.5, zorder=1)
    return figure


def loss_by_position(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, trained_length: int | None = None
) -> "Figure":
    """Draws the loss against the position, a curve for each name.

    Args:
        curves: Positions and nats of each, the first two fields of `Losses`.
        trained_length: Where the training ended, to be marked.
    """
    figure = _curves(curves, "position in the sequence, in tokens", "negative log-likelihood, nats per token", trained_length)
    return _titled(figure, "Loss against position")


def extrapolation(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, metric: str, trained_length: int | None = None
) -> "Figure":
    """Draws a metric against the length, a curve for each name.

    Args:
        curves: Lengths and values of each, the first two fields of `Extrapolation`.
        metric: What the values are.
        trained_length: The length of the training, to be marked.
    """
    figure = _curves(curves, "length of the sequence, in tokens", metric, trained_length)
    lengths = sorted({int(length) for points in curves.values() for length in points[0]})
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].set_xticks(lengths, [f"{length:,}" for length in lengths])
    figure.axes[0].minorticks_off()
    return _titled(figure, "Lengths other than the training's")


def quarter_boxes(values: Mapping[str, Float[Tensor, "pieces 4"]], *, measure: str = "style similarity (cosine)") -> "Figure":
    """Draws box plots of each quarter of a continuation, a hatched box for each name.

    Args:
        values: What was measured on each piece, by name.
        measure: What that is.
    """
    figure, panel = _single((8, 4))
    width = 0.8 / len(values)
    handles = []
    for number, rows in enumerate(values.values()):
        places = [quarter + (number - (len(values) - 1) / 2) * width for quarter in range(4)]
        drawn = panel.boxplot(
            torch.as_tensor(rows).T.tolist(), positions=places, widths=0.85 * width, patch_artist=True,
            medianprops={"color": "black", "linewidth": 2}, flierprops={"markersize": 3},
        )  # fmt: skip
        for box in drawn["boxes"]:
            box.set(facecolor=str(0.95 - 0.45 * number / max(1, len(values) - 1)), hatch=("", "//", "..", "xx", "--")[number % 5])
        handles.append(drawn["boxes"][0])
    panel.set_xticks(range(4), ["0-25 %", "25-50 %", "50-75 %", "75-100 %"])
    panel.set(xlabel="part of the continuation", ylabel=measure)
    _add_names(figure, handles, list(values))
    return _titled(figure, "By quarter of the continuation")


def ablation_curve(curves: Mapping[str, Sequence[float]], *, metric: str) -> "Figure":
    """Draws a metric against the number of heads whose prior is on, a curve for each name: the values of `ablate`."""
    points = {name: (range(len(values)), values) for name, values in curves.items()}
    figure = _curves(points, "heads with their prior, from the lowest to the highest peak", metric, None)
    figure.axes[0].locator_params(axis="x", integer=True)
    return _titled(figure, "Priors switched on one by one")


def dependency_ranges(ranges: Float[Tensor, "directions heads"], *, before: Tensor | None = None) -> "Figure":
    """Draws AT5's dependency ranges, of each head and direction, on a logarithmic axis.

    Args:
        ranges: What `lagwise.lens.dependency_ranges` found. Infinite ones are marked at the upper edge.
        before: The same before the training, drawn as open marks.
    """
    figure, panel = _single((7, 4))
    ranges = torch.as_tensor(ranges)
    finite = [x[x.isfinite()] for x in (ranges, before) if x is not None]
    top = 2.0 * float(torch.cat([torch.ones(1), *finite]).max())
    for number, name in enumerate(DIRECTIONS[: len(ranges)]):
        places = [head + 0.18 * (2 * number - len(ranges) + 1) for head in range(ranges.shape[1])]
        style: dict[str, Any] = {"marker": MARKS[number], "linestyle": "none", "color": DARK, "markersize": 7}
        panel.vlines(places, 1.0, ranges[number].clamp(max=top).tolist(), color=LIGHT, linestyle=DASHES[number], linewidth=1)
        panel.plot(places, ranges[number].clamp(max=top).tolist(), label=name, **style)
        if before is not None:
            panel.plot(places, before[number].clamp(max=top).tolist(), label=f"{name}, before", fillstyle="none", **style)
    if not bool(ranges.isfinite().all()):
        panel.axhline(top, color=LIGHT, linewidth=0.8, linestyle=":")
        panel.annotate("no end", (1, top), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    panel.set(yscale="log", xlabel="head", ylabel="dependency range, in tokens")
    panel.set_xticks(range(ranges.shape[1]))
    panel.yaxis.set_major_formatter("{x:g}")
    _add_names(figure, *panel.get_legend_handles_labels())
    return _titled(figure, "Learned dependency ranges of AT5")


def bucket_edges(edges: Mapping[str, Float[Tensor, "heads edges"]]) -> "Figure":
    """Draws where buckets begin in one direction, a line of ticks for each head: T5's, and AT5's before and after training.

    Args:
        edges: One direction of `lagwise.lens.bucket_edges`, by what it is of.
    """
    rows = [
        (name if len(heads) == 1 else f"{name}, {head_label(head)}", row)
        for name, heads in edges.items()
        for head, row in enumerate(heads)
    ]
    figure, panel = _single((8, 1.2 + 0.3 * len(rows)))
    for height, (_, row) in enumerate(rows):
        found = torch.as_tensor(row)
        found = found[found.isfinite()]
        panel.plot(found.tolist(), [height] * len(found), marker="|", color=DARK, markersize=11, linewidth=0.5)
        if not len(found):
            panel.annotate(
                "none: all distances are in one", (0.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
    panel.set(xscale="log", xlabel="distance at which a bucket begins, in tokens")
    panel.set_yticks(range(len(rows)), [name for name, _ in rows])
    panel.xaxis.set_major_formatter("{x:g}")
    panel.invert_yaxis()
    return _titled(figure, "Edges of buckets")


def _names(heads: int, names: Sequence[str] | None, layers: Sequence[int]) -> Sequence[str]:
    """Returns names of heads as they are given, or by their numbers."""
    names = [head_label(head, layers) for head in range(heads)] if names is None else names
    if len(names) != heads:
        raise ValueError(f"names must be one for each of {heads} heads, but are {len(names)}: leave them out for numbers")
    return names


def _by_lag(lags: Tensor, values: Tensor, names: Sequence[str], label: str, title: str) -> tuple["Figure", "list[Axes]"]:
    """Draws a curve of each head in a panel of its own, all on the same axes."""
    heads = len(values)
    columns = min(heads, COLUMNS)
    rows = math.ceil(heads / columns)
    figure = _figure((2.6 * columns + 0.8, 1.9 * rows + 0.9))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for panel, name, row in zip(grid, names, torch.as_tensor(values).tolist(), strict=False):
        panel.plot(_list(lags), row, color=DARK, linewidth=1.3)
        panel.axvline(0, color=LIGHT, linewidth=0.8, linestyle=":")
        panel.set_title(name, fontsize=9)
        _plain(panel)
    for panel in grid[heads:]:
        panel.set_axis_off()
    figure.supxlabel("lag: key minus query, in tokens (negative is the past)", fontsize=9)
    figure.supylabel(label, fontsize=9)
    return _titled(figure, title), grid[:heads]


def _curves(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], x: str, y: str, trained_length: int | None) -> "Figure":
    """Draws some curves in one panel, with a line where the training ended."""
    if not curves:
        raise ValueError("curves must hold at least one curve, but are empty")
    figure, panel = _single((7, 4))
    for number, (name, (places, values)) in enumerate(curves.items()):
        panel.plot(_list(places), _list(values), label=name, **_style(number, len(places)))
    if trained_length is not None:
        panel.axvline(trained_length, color=LIGHT, linewidth=1, linestyle=":", label="length of the training")
    panel.set(xlabel=x, ylabel=y)
    _add_names(figure, *panel.get_legend_handles_labels())
    return figure


def _add_names(figure: "Figure", handles: Sequence[Any], names: Sequence[str]) -> None:
    """Writes names below the panels, whose curves may be anywhere, as many in a line as have room."""
    columns = max(1, int(11 * figure.get_figwidth() / (max(map(len, names)) + 9)))
    figure.legend(handles, names, loc="outside lower center", frameon=False, ncols=columns)


def _style(number: int, points: int) -> dict[str, Any]:
    """Returns how a curve among others is drawn."""
    return {
        "color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)], "marker": MARKS[number % len(MARKS)],
        "linewidth": 1.4, "markersize": 4.5, "markevery": max(1, points // 10),
    }  # fmt: skip


def _heat_map(figure: "Figure", panel: "Axes", values: Tensor, label: str) -> Any:
    """Draws a map in one hue with its scale beside it."""
    image = panel.imshow(values.tolist(), cmap=MAP, interpolation="nearest")
    figure.colorbar(image, ax=panel, label=label, shrink=0.85)
    return image


def _figure(size: tuple[float, float]) -> "Figure":
    """Returns an empty figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: {install_command('lens')}") from error
    return Figure(figsize=size, layout="constrained", dpi=120)


def _single(size: tuple[float, float]) -> tuple["Figure", "Axes"]:
    """Returns a figure with one panel."""
    figure = _figure(size)
    panel = figure.subplots()
    _plain(panel)
    return figure, panel


def _plain(panel: "Axes") -> None:
    """Leaves out the lines that say nothing."""
    panel.spines[["top", "right"]].set_visible(False)


def _titled(figure: "Figure", title: str) -> "Figure":
    figure.suptitle(title, fontsize=10)
    return figure


def _list(values: Any) -> list[float]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
