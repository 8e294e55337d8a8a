"""The figures of the lens show the arrays that they are given, on labelled axes, without colours that matter."""

import io
import itertools
import math

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import lagwise
from lagwise import lens
from lagwise.lens import plots

LAGS = torch.arange(-3, 4)


def line(panel, number: int = 0) -> tuple[list[float], list[float]]:
    """Returns the places and values of a line of a panel."""
    x, y = panel.lines[number].get_data()
    return list(x), list(y)


def assert_drawn(figure: Figure) -> None:
    """Every panel has labels, or the figure has them for all, no map has more than one hue, and all names are on the picture."""
    shared = bool(figure.get_supxlabel() and figure.get_supylabel())
    for panel in figure.axes:
        assert shared or panel.get_ylabel() or panel.get_yticklabels(), panel
        for image in panel.images:
            colours = image.get_cmap()([0.0, 0.3, 0.6, 1.0])[:, :3]
            brightness = colours.mean(1)
            assert (brightness[:-1] > brightness[1:]).all()
    figure.savefig(io.BytesIO(), format="png", dpi=30)
    FigureCanvasAgg(figure).draw()
    for legend in figure.legends:
        place = legend.get_window_extent()
        assert figure.bbox.x0 <= place.x0 and place.x1 <= figure.bbox.x1, place


@pytest.mark.parametrize("names", [[f"{n}" for n in range(21)], [f"sine-spe (realizations={n})" for n in range(5)], ["a" * 40]])
def test_names_of_curves_have_room(names):
    assert_drawn(plots.loss_by_position({name: ([0, 128, 256], [2.0, 1.9, 1.8]) for name in names}, trained_length=128))
    assert_drawn(plots.quarter_boxes({name: torch.rand(5, 4) for name in names}))


def test_priors_have_a_panel_for_each_head_with_its_peak():
    found = lens.prior(lagwise.ALiBi(heads=6), 9)
    figure = plots.prior_by_lag(found.lags, found.probability)
    panels = [panel for panel in figure.axes if panel.axison]
    assert len(panels) == 6
    for panel, row in zip(panels, found.probability, strict=True):
        x, y = line(panel)
        assert x == found.lags.tolist() and y == pytest.approx(row.tolist())
    # Slope 1/4 comes first for six heads: 1 / (1 + 2 sum of exp(-n / 4)).
    peak = 1 / (1 + 2 * sum(math.exp(-n / 4) for n in range(1, 9)))
    assert panels[0].get_title() == f"head 0: {peak:.3g} at lag 0"
    assert_drawn(figure)
    named = plots.prior_by_lag(found.lags, found.probability, layers=[2])
    assert named.axes[5].get_title().startswith("layer 2 · head 5: ")
    shared = plots.prior_by_lag(found.lags, found.probability, layers=range(12))
    assert_drawn(shared)
    titles = [panel.title.get_window_extent() for panel in shared.axes[:4]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(titles))
    with pytest.raises(ValueError, match="names must be one for each of 6 heads, but are 1"):
        plots.prior_by_lag(found.lags, found.probability, ["first"])


def test_averaged_attention_and_kernels_are_curves_by_lag():
    mean = torch.rand(2, 7)
    figure = plots.attention_by_lag(LAGS, mean, ["a", "b"])
    assert [panel.get_title() for panel in figure.axes] == ["a", "b"]
    assert line(figure.axes[1])[1] == pytest.approx(mean[1].tolist())
    assert_drawn(figure)
    values = torch.rand(2, 7, 3)
    figure = plots.kernels(LAGS, values, layers=range(3))
    assert [panel.get_title() for panel in figure.axes] == ["layers 0 to 2 · head 0", "layers 0 to 2 · head 1"]
    assert line(figure.axes[0])[1] == pytest.approx(values[0].mean(-1).tolist())
    # The mean, the mark at lag 0, then the channels.
    assert line(figure.axes[0], 3)[1] == pytest.approx(values[0, :, 1].tolist())
    assert_drawn(figure)


def test_logits_show_all_parts_of_a_head():
    parts = {"content": torch.rand(2, 7), "bias": torch.rand(2, 7)}
    figure = plots.logits_by_lag(LAGS, parts, head=1, layers=[4])
    assert figure.get_suptitle() == "Expected logit by lag, layer 4 · head 1"
    assert [drawn.get_label() for drawn in figure.axes[0].lines] == ["content", "bias"]
    assert line(figure.axes[0], 1)[1] == pytest.approx(parts["bias"][1].tolist())
    assert figure.axes[0].get_xlabel() and figure.axes[0].get_ylabel()
    assert_drawn(figure)


def test_score_maps_show_three_scores_and_hide_what_is_not_seen():
    prior, context = torch.rand(4, 4), torch.rand(4, 4)
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    figure = plots.score_maps(prior, context, prior + context, tokens=["a", "b", "c", "d"], visible=visible)
    maps = [panel for panel in figure.axes if panel.get_title()]
    assert [panel.get_title() for panel in maps] == ["Prior score", "Context score", "Final score"]
    for panel, scores in zip(maps, (prior, context, prior + context), strict=True):
        shown = panel.images[0].get_array()
        assert shown.mask.tolist() == (~visible).tolist()
        assert shown.compressed().tolist() == pytest.approx(scores[visible].tolist())
        assert [label.get_text() for label in panel.get_xticklabels()] == ["a", "b", "c", "d"]
    assert_drawn(figure)


def test_tables_show_the_lags_that_are_asked_for():
    lags = torch.arange(-80, 81)
    values = torch.rand(3, 161)
    figure = plots.learned_tables(lags, values, row="channel")
    (image,) = figure.axes[0].images
    assert image.get_array().shape == (3, 101)
    assert image.get_array()[1].tolist() == pytest.approx(values[1, 30:131].tolist())
    assert tuple(image.get_extent()) == (-50.5, 50.5, 2.5, -0.5)
    assert figure.axes[0].get_ylabel() == "channel"
    assert_drawn(figure)


def test_curves_of_runs_mark_the_length_of_the_training():
    curves = {"t5": ([100, 200], [0.9, 0.8]), "at5": (torch.tensor([100, 400]), torch.tensor([0.9, 0.7]))}
    for figure in (
        plots.extrapolation(curves, metric="accuracy", trained_length=150),
        plots.loss_by_position(curves, trained_length=150),
    ):
        (panel,) = figure.axes
        assert line(panel, 1) == ([100, 400], pytest.approx([0.9, 0.7]))
        assert line(panel, 2)[0] == [150, 150]
        assert panel.get_xlabel().endswith("in tokens")
        styles = {(drawn.get_linestyle(), drawn.get_marker()) for drawn in panel.lines[:2]}
        assert len(styles) == 2
        assert_drawn(figure)
    assert plots.extrapolation(curves, metric="accuracy").axes[0].get_ylabel() == "accuracy"
    with pytest.raises(ValueError, match="at least one curve"):
        plots.loss_by_position({})


def test_boxes_have_the_medians_of_the_quarters():
    values = {"first": torch.rand(9, 4), "second": torch.rand(5, 4)}
    figure = plots.quarter_boxes(values)
    (panel,) = figure.axes
    medians = [drawn.get_ydata()[0] for drawn in panel.lines if drawn.get_linewidth() == 2]
    wanted = [float(rows[:, quarter].median()) for rows in values.values() for quarter in range(4)]
    assert medians == pytest.approx(wanted)
    assert [label.get_text() for label in figure.legends[0].get_texts()] == ["first", "second"]
    assert len({box.get_hatch() for box in panel.patches}) == 2
    assert_drawn(figure)


def test_an_ablation_starts_with_no_head():
    figure = plots.ablation_curve({"t5": [13.93, 16.06, 15.5], "at5": [13.53, 13.68, 13.76]}, metric="exact match, %")
    assert line(figure.axes[0]) == ([0, 1, 2], [13.93, 16.06, 15.5])
    assert figure.axes[0].get_ylabel() == "exact match, %"
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks())
    many = plots.ablation_curve({"t5": [float(heads) for heads in range(145)]}, metric="exact match, %")
    assert len(many.axes[0].get_xticks()) < 15
    assert_drawn(figure)


def test_ranges_without_end_are_marked_at_the_edge():
    ranges = torch.tensor([[10.0, 40.0], [math.inf, 20.0]])
    figure = plots.dependency_ranges(ranges, before=torch.full((2, 2), 30.0))
    (panel,) = figure.axes
    assert line(panel, 0)[1] == [10.0, 40.0]
    assert line(panel, 1)[1] == [30.0, 30.0]
    assert line(panel, 2)[1] == [80.0, 20.0]
    assert [text.get_text() for text in panel.texts] == ["no end"]
    assert_drawn(figure)


def test_edges_have_a_line_for_each_head():
    encoding = lagwise.AT5(heads=2)
    with torch.no_grad():
        encoding.slope[0, 1] = -1.0
    edges = lens.bucket_edges(encoding)[0]
    figure = plots.bucket_edges({"T5": lens.bucket_edges(lagwise.T5(heads=2))[0], "AT5": edges})
    (panel,) = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["T5", "AT5, head 0", "AT5, head 1"]
    assert line(panel, 1) == (pytest.approx(edges[0].tolist()), [1] * 15)
    assert line(panel, 2) == ([], []) and len(panel.texts) == 1
    assert_drawn(figure)
