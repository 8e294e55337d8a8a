"""The report: the page, the figure and the table say what the runs say, and nothing in them can break out of its place."""

import csv
import json
import math
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import lagwise
from lagwise import lens, pages
from lagwise.encodings.base import Encoding
from lagwise.lab.compare import folder_of
from lagwise.lab.config import Config
from lagwise.lab.experiment import make_config
from lagwise.lab.grouping import groups
from lagwise.lab.json_files import write_json
from lagwise.lab.loop import Settings
from lagwise.lab.report.comparison import write_report
from lagwise.lab.report.figure import plot
from lagwise.lab.report.learning import curves
from lagwise.lab.report.page import make_page
from lagwise.lab.report.verdict import verdict_on
from lagwise.lab.run import train
from lagwise.lab.run_folder import FAILURE, Run
from lagwise.lab.standings import rows_of
from lagwise.lens.learned import learned_priors

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&{{data}}"
VOID = {"meta", "img", "br", "input", "link", "hr"}


class Reader(HTMLParser):
    """Reads a page: elements that are not closed in order raise; scripts, text of cells and outside addresses are kept."""

    def __init__(self):
        super().__init__()
        self.open, self.scripts, self.rows, self.addresses, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif {"td", "th"} & set(self.open[-3:]):
            self.rows[-1][-1] += data


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@contextmanager
def chromium():
    """Starts a browser; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("LAGWISE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(names)} on PATH, or its path in LAGWISE_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@contextmanager
def watched_tab(browser, folder):
    """Gives a function that shows a page in a tab; errors of its script, and what it asks of a network, fail at the end."""
    tab = browser.new_page(viewport={"width": 1100, "height": 3000})
    wrong = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))

    def show(text):
        (folder / "page.html").write_text(text, encoding="utf-8")
        tab.goto(f"file://{folder}/page.html")
        return tab

    yield show
    tab.close()
    assert wrong == []


def told(tab, mark):
    """Returns what is read at a place of a chart: where that is, and values by their names."""
    read = "output => [...output.children].map(each => [each.firstChild.textContent, each.lastChild.textContent])"
    (title, _), *values = tab.locator(f"[data-{mark}]").evaluate(read)
    return title, {name.strip(): value for name, value in values}


def assert_readable(tab, marks):
    """Charts have text of 11 pixels and more that stays inside of them, and the page does not scroll sideways."""
    measure = """places => places.map(place => [...document.querySelectorAll(`[data-${place}] svg text`)].map(text => {
        const { a, b } = text.getScreenCTM(), [box, all] = [text, text.ownerSVGElement].map(each => each.getBoundingClientRect());
        const outside = Math.max(all.left - box.left, box.right - all.right, all.top - box.top, box.bottom - all.bottom);
        return { words: text.textContent, height: parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b), outside };
    }))"""
    for mark, texts in zip(marks, tab.evaluate(measure, marks), strict=True):
        assert texts, mark
        for text in texts:
            assert text["height"] >= 11 and text["outside"] < 2, (mark, text)
    sideways = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert sideways[0] <= sideways[1]


def resize(tab, width, mark):
    """Gives a tab a width, and waits until a chart is drawn for it."""
    tab.set_viewport_size({"width": width, "height": 900})
    drawn = (
        "mark => (place => +place.querySelector('svg').getAttribute('width') === place.clientWidth)(document.querySelector(mark))"
    )
    tab.wait_for_function(drawn, arg=f"[data-{mark}]")


def contrasts(tab, selector):
    """Returns how much brighter or darker texts are than the page, by the rule of WCAG."""
    colours = """selector => [getComputedStyle(document.body).backgroundColor,
        ...[...document.querySelectorAll(selector)].map(text => getComputedStyle(text).fill)]"""
    found = []
    for colour in tab.evaluate(colours, selector):
        parts = [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]
        channels = [part if colour.startswith("color(") else part / 255 for part in parts]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
        found.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    paper, *texts = found
    return [max(paper, text) / min(paper, text) for text in texts]


def approximately(number):
    """Returns a number to compare with one that a page shows, in four digits."""
    return pytest.approx(float(number), rel=2e-3, abs=1e-5)


def numbers_in(text):
    """Returns all numbers of a text, in its order."""
    return [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", text)]


def make_run(
    out, encoding, seed, test, *, finish=True, sample=False, lengths=None, device="a CPU", priors=None, **fields
):  # fmt: skip
    config = replace(Config("process-50", steps=30), encoding=encoding, seed=seed, **fields)
    run = Run.create(folder_of(out, config), config, {"device": device, "data": "generated or built-in sample", "commit": None})
    for step in (10, 20, 30):
        run.log({"step": step, "loss": 1.0 / step + seed, "seconds": 0.1, "tokens": 10})
        run.log({"step": step, "split": "validation", "loss": 0.5, "accuracy": test - 1 / step})
    run.log({"step": 30, "split": "test", "loss": 0.5, "accuracy": test})
    run.log({"step": 30, "split": "test", "length": 64, "loss": 0.5, "accuracy": 0.0})
    scores = {"loss": 0.5, "accuracy": test}
    if finish:
        run.finish({
            "parameters": 1000, "encoding_parameters": 12, "steps": 30, "seconds": 3.0, "tokens_per_second": 1234.0,
            "peak_memory": 3 * 2**20, "sample": sample, "validation": scores, "test": scores, "lengths": lengths or {},
        }, priors)  # fmt: skip
    return run


@pytest.fixture
def runs(tmp_path):
    lengths = {"64": {"loss": 0.1, "accuracy": 0.7}, "4096": {"refused": "the table <ends> at 512"}}
    scores = {"t5": [0.80, 0.84], "none": [0.50, 0.51], "at5": [0.86, 0.87]}
    return [
        make_run(tmp_path / "runs", name, seed, value, lengths=lengths)
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]


def data_in(text):
    return json.loads(read(text).scripts[0])


def test_the_page_is_whole_and_needs_nothing_else(runs):
    text = make_page(runs, "lagwise compare")
    found = read(text)
    assert found.addresses == [] and "@import" not in text and "url(" not in text and "{{" not in text
    assert len(found.scripts) == 2 and "prefers-color-scheme: dark" in text
    assert "process-50: 3 position encodings in the same model, trained for 30 steps with seeds 0, 1; test accuracy" in text
    assert "lagwise compare" in text and "mean nothing" not in text


def test_the_page_begins_with_the_verdict_and_counts_runs_where_it_names_seeds(runs):
    text = make_page(runs, "")
    (group,) = groups(runs)
    assert text.index(escape(verdict_on(group))) < text.index("<h3>Standings</h3>")
    standings_head, *_, differences_head = (row for row in read(text).rows if row[0].startswith("encoding"))
    assert standings_head[1].startswith("runs") and "seeds" in differences_head
    assert "no significant difference" in text and "told apart" not in text


def test_the_tables_of_the_page_have_the_numbers_of_the_standings(runs):
    rows = {row[0]: row for row in reversed(read(make_page(runs, "")).rows) if row[0] in ("t5", "none", "at5") and len(row) == 9}
    for row in rows_of(groups(runs)[0]):
        cells = rows[row.encoding]
        assert cells[1:3] == ["2", str(row.test)] and cells[4:] == [str(row.validation), "12", "3.0", "1,234", "3.0"]
    order = [row[0] for row in read(make_page(runs, "")).rows if len(row) == 9][1:]
    assert order == ["at5", "t5", "none"]


def test_headers_sort_by_buttons_that_say_so(runs):
    text = make_page(runs, "")
    assert text.count('aria-sort="none"><button type="button">') == 8 + 4
    assert re.search(r'<td data-value="0\.82\d*">0\.82 ± 0\.25</td>', text)


def test_the_data_of_the_page_is_that_of_the_runs(runs):
    (group,) = data_in(make_page(runs, ""))["groups"]
    assert [row["encoding"] for row in group["rows"]] == ["at5", "t5", "none"]
    assert group["rows"][1]["mean"] == pytest.approx(0.82) and group["rows"][1]["peak memory in MiB"] == 3.0
    assert (group["metric"], group["higher"], group["baseline"]) == ("accuracy", True, "t5")
    first, second = group["differences"]["t5"]
    # 0.06 and 0.03; 0.30 and 0.33 less: means 0.045 and -0.315, and 12.7062 x 0.015 = 0.190593 for both.
    assert (first["encoding"], second["encoding"]) == ("at5", "none")
    assert (
        first["mean"] == pytest.approx(0.045) and first["half"] == pytest.approx(0.190593, abs=1e-5) and first["better"] is None
    )
    assert second["mean"] == pytest.approx(-0.315) and second["better"] is False
    assert set(group["curves"]) == {"validation accuracy", "training loss", "validation loss"}
    assert group["curves"]["validation accuracy"]["t5"][0] == pytest.approx([10, 0.72, 0.70, 0.74])
    assert group["curves"]["training loss"]["none"][2] == pytest.approx([30, 0.533333, 0.0333333, 1.03333])


def test_other_lengths_have_a_table_and_refusals_their_reasons(runs):
    text = make_page(runs, "")
    assert "Test accuracy at other lengths" in text
    assert ["t5", "0.82 ± 0.25", "0.7", "refused"] in read(text).rows
    assert "t5 at 4,096: the table &lt;ends&gt; at 512" in text


def test_a_sample_is_called_one(tmp_path):
    text = make_page([make_run(tmp_path, "t5", 0, 0.5, sample=True)], "")
    assert "mean nothing" in text and "at other lengths" not in text


def test_what_is_not_complete_is_named_with_its_reason(runs, tmp_path):
    failed = make_run(tmp_path, "rotary", 3, 0.0, finish=False)
    write_json(failed.folder / FAILURE, {"error": "the loss is nan"})
    stopped = make_run(tmp_path, "rotary", 4, 0.0, finish=False)
    text = make_page([*runs, failed, stopped], "")
    assert "rotary, seed 3, takes no part: the loss is nan" in text
    assert "rotary, seed 4, takes no part: it was stopped before its end" in text
    assert [row["encoding"] for row in data_in(text)["groups"][0]["rows"]] == ["at5", "t5", "none"]


def test_settings_have_sections_of_their_own_and_devices_are_not_mixed_in_silence(runs, tmp_path):
    text = make_page([*runs, make_run(tmp_path, "t5", 0, 0.9, dim=256, device="a GPU")], "")
    assert len(data_in(text)["groups"]) == 2 and text.count("<section") == 2
    assert "<h2>process-50, dim=256</h2>" in text and "different devices" in text


def drawn(figure):
    """Draws a figure, which also lays it out, and returns it."""
    FigureCanvasAgg(figure).draw()
    return figure


def test_nothing_breaks_out_of_its_place(tmp_path):
    run = make_run(tmp_path / "a", "t5", 0, 0.5, encoding_options={EVIL: EVIL}, lengths={"64": {"refused": EVIL}})
    other = make_run(tmp_path / "a", "t5", 0, 0.6, encoding_options={EVIL: "x"})
    failed = make_run(tmp_path / "a", "t5", 1, 0.5, finish=False, device=EVIL)
    write_json(failed.folder / FAILURE, {"error": EVIL})
    text = make_page([run, other, failed], EVIL)
    found = read(text)
    assert len(found.scripts) == 2 and "img" not in found.tags
    assert {row["encoding"] for row in data_in(text)["groups"][0]["rows"]} == {f"t5 ({EVIL}={EVIL})", f"t5 ({EVIL}=x)"}
    assert "innerHTML" not in text


def test_what_is_no_number_leaves_json_whole(tmp_path):
    runs = [make_run(tmp_path, "t5", 0, math.nan), make_run(tmp_path, "none", 0, 0.5)]
    text = make_page(runs, "")
    assert data_in(text)["groups"][0]["rows"][1]["mean"] is None and "NaN" not in read(text).scripts[0]
    drawn(plot(runs))


def test_the_figure_shows_the_curves_and_the_standings(runs):
    left, right, _ = plot(runs).axes
    assert left.get_ylabel() == "validation accuracy"
    drawn = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in left.lines}
    assert list(drawn) == [(10, 20, 30)]
    means = sorted(round(line.get_ydata()[-1], 4) for line in left.lines)
    assert means == [0.4717, 0.7867, 0.8317]
    assert [label.get_text() for label in right.get_yticklabels()] == ["at5", "t5", "none"]
    assert [round(bar[0].get_xdata()[0], 3) for bar in right.containers] == [0.865, 0.82, 0.505]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in left.lines}) == 3
    # The names beside the standings are those of the curves with the same colour and mark.
    looks = {line.get_ydata()[-1]: (line.get_color(), line.get_marker()) for line in left.lines}
    colours = [label.get_color() for label in right.get_yticklabels()]
    assert [looks[mean] for mean in sorted(looks, reverse=True)] == [
        (colour, bar[0].get_marker()) for colour, bar in zip(colours, right.containers, strict=True)
    ]


def test_the_figure_shows_other_lengths(runs):
    panel = plot(runs).axes[2]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["50", "64", "4,096"]
    # Means over the seeds at the length of the training, and 0.7 at 64; all encodings refuse 4,096.
    lines = [bar[0] for bar in panel.containers]
    assert [list(line.get_xdata()) for line in lines] == [[50, 64]] * 3
    assert [[round(float(value), 3) for value in line.get_ydata()] for line in lines] == [[0.865, 0.7], [0.82, 0.7], [0.505, 0.7]]


def test_a_figure_without_other_lengths_has_no_panel_for_them(tmp_path):
    assert len(plot([make_run(tmp_path, "t5", 0, 0.5)]).axes) == 2
    refused = make_run(tmp_path, "t5", 1, 0.5, lengths={"64": {"refused": "too long"}})
    assert len(plot([refused]).axes) == 3


def test_each_group_has_its_own_title_above_it_which_fits(tmp_path):
    linear = {"attention": "linear", "clip": 0.25, "weight_decay": 0.125, "rate": 0.0625}
    maps = {"favor": {"features": 64, "redraw": 1}, "relu": {}}
    runs = [
        make_run(tmp_path, "t5", seed, 0.5, feature_map=name, **linear, **fields)
        for name, fields in maps.items()
        for seed in range(9)
    ]
    runs.append(make_run(tmp_path, "t5", 0, 0.5))
    # Long names leave less room for the panels.
    runs += [make_run(tmp_path, "sine-spe", 0, 0.5, encoding_options={"realizations": number}) for number in (32, 128)]
    figure = drawn(plot(runs))
    assert all(panel._left_title.get_window_extent().x1 <= figure.bbox.x1 for panel in figure.axes)
    assert len(figure.subfigs) == 3
    for own, group in zip(figure.subfigs, groups(runs), strict=True):
        title = own._suptitle
        assert " ".join(title.get_text().split()).startswith(f"{group.title}: ")
        box = title.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and own.bbox.y0 <= box.y0 and box.y1 <= own.bbox.y1
    assert any("features=none" in group.title for group in groups(runs))


def test_without_evaluations_on_the_way_the_loss_of_training_is_drawn(tmp_path):
    run = make_run(tmp_path, "t5", 0, 0.5)
    lines = [line for line in run.lines if "split" not in line]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(curves(groups([run])[0])) == ["training loss"]
    assert plot([run]).axes[0].get_ylabel() == "training loss"


def test_a_report_is_a_page_and_a_table(runs, tmp_path):
    paths = write_report(runs, tmp_path / "new", "lagwise compare")
    assert [path.name for path in paths] == ["report.html", "standings.csv"]
    lines = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert [line["encoding"] for line in lines] == ["at5", "t5", "none"]
    t5 = lines[1]
    assert float(t5["test"]) == pytest.approx(0.82) and float(t5["test_half_width_95"]) == pytest.approx(0.254124, abs=1e-6)
    assert (t5["seeds"], t5["test_at_64"], t5["test_at_4096"]) == ("0 1", "0.7", "refused: the table <ends> at 512")


def test_there_must_be_something_to_report(tmp_path):
    with pytest.raises(ValueError, match="at least one that is complete"):
        make_page([make_run(tmp_path, "t5", 0, 0.5, finish=False)], "")


# What the encodings learned


@pytest.mark.parametrize("causal", [False, True])
def test_priors_are_those_of_the_lens(causal):
    kind = lagwise.nn.Decoder if causal else lagwise.nn.Encoder
    for name in ("t5", "at5", "alibi", "xl"):
        model = kind(16, layers=2, heads=2, encoding=name).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        (found,) = learned_priors(model, 10)
        wanted = lens.prior(model.encoding, 10, causal=causal, scale=8**-0.5)
        assert (found["name"], found["encoding"], found["first"]) == ("encoding", type(model.encoding).__name__, wanted.lags[0])
        torch.testing.assert_close(torch.tensor(found["bias"]), wanted.bias, atol=0.0, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_stochastic_encodings_have_kernels_of_each_layer(causal):
    kind = lagwise.nn.Decoder if causal else lagwise.nn.Encoder
    model = kind(16, layers=2, heads=2, encoding="sine-spe", per_layer="gate").eval()
    found = learned_priors(model, None)
    assert [each["name"] for each in found] == ["layers.0.attention.encoding", "layers.1.attention.encoding"]
    wanted = lens.spe_kernels(model.layers[1].attention.encoding, 129).values.mean(-1)
    torch.testing.assert_close(torch.tensor(found[1]["kernel"]), wanted[:, :129] if causal else wanted, atol=0.0, rtol=1e-5)
    assert found[0]["kernel"] != found[1]["kernel"] and found[1]["first"] == -128


def test_both_stacks_of_a_model_are_told_and_what_has_no_prior_has_a_reason():
    class Broken(Encoding):
        def terms(self, first, last, *, scale, seed=None):
            raise RuntimeError("out of order")

    stacks = {
        "encoder": lagwise.nn.Encoder(16, layers=1, heads=2, encoding="t5"),
        "decoder": lagwise.nn.Decoder(16, layers=1, heads=2, encoding="t5"),
        "rotary": lagwise.nn.Encoder(16, layers=1, heads=2, encoding="rotary"),
        "sinusoidal": lagwise.nn.Encoder(16, layers=1, heads=2, encoding="sinusoidal"),
        "broken": lagwise.nn.Encoder(16, layers=1, heads=2, encoding=Broken()),
        "none": lagwise.nn.Encoder(16, layers=1, heads=2),
    }
    found = {each["name"]: each for each in learned_priors(torch.nn.ModuleDict(stacks).eval(), 6)}
    assert list(found) == [f"{name}.encoding" for name in stacks if name != "none"]
    assert (len(found["encoder.encoding"]["bias"][0]), len(found["decoder.encoding"]["bias"][0])) == (11, 6)
    assert "no bias" in found["rotary.encoding"]["reason"] and "absolute" in found["sinusoidal.encoding"]["reason"]
    assert found["broken.encoding"]["reason"] == "RuntimeError: out of order"


def test_a_run_stores_its_priors_until_it_goes_on(tmp_path):
    small = {"length": 8, "train": 8, "validation": 4, "test": 4}
    config = make_config("process-50", "alibi", steps=1, dim=8, layers=1, heads=2, batch=4, task_options=small)
    train(config, tmp_path, Settings(device="cpu"))
    run = Run(tmp_path)
    assert run.priors is not None
    wanted = lens.prior(lagwise.ALiBi(heads=2), 8).bias.tolist()
    assert run.priors == [{"name": "encoder.encoding", "encoding": "ALiBi", "first": -7, "bias": pages.finite(wanted)}]
    run.forget_after(0)
    assert run.priors is None and run.result is None


def stored(name, *rows, first=-1, kind="bias"):
    return {"name": name, "encoding": "T5", "first": first, kind: [list(row) for row in rows]}


@pytest.fixture
def with_priors(tmp_path):
    """Runs with priors of two parts, with a kernel, with a reason, without positions, and from before priors were stored."""
    told = {
        "t5": [stored("encoder.encoding", (0.0, 1.0, 2.0), (3.0, 0.0, None)), stored("decoder.encoding", (0.0, 1.0), (2.0, 0.0))],
        "sine-spe": [stored("encoder.encoding", (0.5, 1.0, -0.25), (0.25, 0.75, 0.5), kind="kernel")],
        "rotary": [{"name": "encoder.encoding", "encoding": "Rotary", "reason": "it has <no> bias"}],
        "xpos": [{"name": "encoder.encoding", "encoding": "XPos", "reason": "it has <no> bias"}],
        "none": [],
        "at5": None,
    }
    found = [make_run(tmp_path, name, 3, 0.5, priors=priors) for name, priors in told.items()]
    return [*found, make_run(tmp_path, "t5", 7, 0.5, priors=[stored("encoder.encoding", (9.0, 0.0, 0.0))])]


def test_the_page_has_the_priors_of_the_first_seed_and_says_what_has_none(with_priors):
    text = make_page(with_priors, "")
    (group,) = data_in(text)["groups"]
    assert list(group["priors"]) == ["t5", "sine-spe"] and group["priors"]["t5"]["seed"] == 3
    first, second = group["priors"]["t5"]["learned"]
    assert (first["name"], second["name"], first["what"]) == ("encoder.encoding", "decoder.encoding", "prior probability")
    assert first["rows"][0] == pytest.approx(torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist(), rel=1e-5)
    assert first["rows"][1] == pytest.approx([math.exp(3) / (math.exp(3) + 1), 1 / (math.exp(3) + 1), 0.0], rel=1e-5)
    assert group["priors"]["sine-spe"]["learned"][0]["rows"][1] == [0.25, 0.75, 0.5]
    wanted = (
        "Without an exact prior: rotary, xpos (it has &lt;no&gt; bias); none (its model has no positions); "
        "at5 (its run did not store what it learned: run it with --again)."
    )
    assert wanted in text


def test_without_any_prior_there_is_no_chart(runs):
    text = make_page(runs, "")
    assert "data-prior>" not in text and "its run did not store what it learned" in text


# In a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    with watched_tab(browser, tmp_path) as show:
        yield show


def test_a_browser_shows_priors_and_kernels(opened, with_priors):
    tab = opened(make_page(with_priors, ""))
    tab.select_option("[data-prior]", "t5")
    assert "From seed 3" in tab.inner_text("[data-prior-words]")
    wanted = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, -torch.inf]]).softmax(-1)
    assert tab.locator("[data-priors] path[data-name]").count() == 2
    tab.focus("[data-priors] svg")
    for key, lag in (("ArrowLeft", -1), ("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 1)):
        tab.keyboard.press(key)
        title, values = told(tab, "prior-values")
        assert title == f"lag {'+' if lag > 0 else ''}{lag}:" and list(values) == ["layers 0, 1 · head 0", "layers 0, 1 · head 1"]
        assert [float(value) for value in values.values()] == [approximately(x) for x in wanted[:, lag + 1]]
    tab.select_option("[data-part]", label="decoder.encoding")
    assert [float(value) for value in told(tab, "prior-values")[1].values()] == [
        approximately(x) for x in torch.tensor([[0.0, 1.0], [2.0, 0.0]]).softmax(-1)[:, 1]
    ]
    tab.select_option("[data-prior]", "sine-spe")
    assert tab.is_hidden("[data-part]") and "kernel stands here" in tab.inner_text("[data-prior-words]")
    box = tab.locator("[data-priors] svg").bounding_box()
    tab.mouse.move(box["x"] + 70, box["y"] + 50)
    assert told(tab, "prior-values") == ("lag -1:", {"layers 0, 1 · head 0": "0.5", "layers 0, 1 · head 1": "0.25"})


def test_a_browser_reads_learning_curves_and_sorts_the_standings(opened, runs):
    tab = opened(make_page(runs, ""))
    title, values = told(tab, "values")
    assert title == "Step 30:" and list(values) == ["at5", "t5", "none"] and values["at5"] == "0.8317 (0.8267 to 0.8367)"
    tab.focus("[data-curves] svg")
    tab.keyboard.press("ArrowLeft")
    title, values = told(tab, "values")
    assert title == "Step 20:" and values["at5"].startswith("0.815 ")
    tab.select_option("[data-what]", "training loss")
    assert told(tab, "values")[1]["at5"] == "0.5333 (0.03333 to 1.033)"
    tab.locator("[data-standings] thead button").nth(2).click()
    assert tab.locator("[data-standings] tbody th").all_inner_texts() == ["none", "t5", "at5"]
    tab.select_option("[data-baseline]", "none")
    assert tab.locator("[data-differences] tbody th").all_inner_texts() == ["at5", "t5"]
    assert tab.locator("[data-scatter] circle").count() == 3


def test_a_finger_that_taps_reads_a_chart(opened, runs):
    tab = opened(make_page(runs, ""))
    box = tab.locator("[data-curves] svg").bounding_box()
    tab.locator("[data-curves] svg").dispatch_event("pointerdown", {"clientX": box["x"] + 60, "clientY": box["y"] + 50})
    assert told(tab, "values")[0] == "Step 10:"


CHARTS = ["curves", "priors", "scatter"]


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_charts_are_drawn_for_the_width_of_the_screen(opened, with_priors, tmp_path, width):
    options = {"realizations": 32}
    tab = opened(
        make_page([*with_priors, make_run(tmp_path, "sine-spe", 3, 0.5, encoding_options=options)], "lagwise compare " * 20)
    )
    for other in (1100, width):
        resize(tab, other, "curves")
        assert_readable(tab, CHARTS)
    # Long names have room beside the curves of a wide screen alone.
    assert tab.locator("[data-curves] .legend li").count() == (0 if width > 1000 else 7)


def test_tables_scroll_in_boxes_of_their_own_by_keys_too(opened, runs):
    tab = opened(make_page(runs, ""))
    tab.set_viewport_size({"width": 400, "height": 900})
    box = tab.locator(".wide:has([data-standings])")
    inner, outer = box.evaluate("box => [box.scrollWidth, box.clientWidth]")
    assert inner > outer
    box.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_function("() => document.querySelector('.wide:has([data-standings])').scrollLeft > 0")
    assert_readable(tab, ["curves", "scatter"])


def test_charts_fit_on_paper_and_come_back(opened, with_priors):
    tab = opened(make_page(with_priors, ""))
    tab.set_viewport_size({"width": 1400, "height": 900})
    widths = "marks => marks.map(mark => +document.querySelector(`[data-${mark}] svg`).getAttribute('width'))"
    tab.wait_for_function(f"() => ({widths})(['curves'])[0] === 1152")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    # A4 with margins of 12 mm is 703 pixels wide.
    assert all(width <= 703 for width in tab.evaluate(widths, CHARTS))
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate(widths, CHARTS) == [1152] * 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_of_curves_can_be_read_on_the_page(opened, tmp_path, scheme):
    names = ["t5", "at5", "none", "alibi", "rotary", "xpos", "shaw"]
    tab = opened(make_page([make_run(tmp_path, name, 0, 0.1 * number) for number, name in enumerate(names)], ""))
    tab.emulate_media(color_scheme=scheme)
    found = contrasts(tab, "[data-curves] .series text")
    assert len(found) == len(names) and min(found) >= 4.5
