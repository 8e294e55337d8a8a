"""The report: the page, the figure and the table say what the runs say, and nothing in them can break out of its place."""

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lagwise.train import report
from lagwise.train.compare import FAILURE, folder_of, groups, league
from lagwise.train.config import Config
from lagwise.train.store import Run, write

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


def make_run(out, encoding, seed, test, *, finish=True, sample=False, lengths=None, device="a CPU", **fields):
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
        })  # fmt: skip
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
    text = report.page(runs, "lagwise compare")
    found = read(text)
    assert found.addresses == [] and "@import" not in text and "url(" not in text and "{{" not in text
    assert len(found.scripts) == 2 and "prefers-color-scheme: dark" in text
    assert "process-50: 3 position encodings in the same model, trained for 30 steps with seeds 0, 1; test accuracy" in text
    assert "lagwise compare" in text and "mean nothing" not in text


def test_the_tables_of_the_page_have_the_numbers_of_the_league(runs):
    rows = {
        row[0]: row for row in reversed(read(report.page(runs, "")).rows) if row[0] in ("t5", "none", "at5") and len(row) == 9
    }
    for row in league(runs):
        cells = rows[row.encoding]
        assert cells[1:3] == ["2", str(row.test)] and cells[4:] == [str(row.validation), "12", "3.0", "1,234", "3.0"]
    order = [row[0] for row in read(report.page(runs, "")).rows if len(row) == 9][1:]
    assert order == ["at5", "t5", "none"]


def test_headers_sort_by_buttons_that_say_so(runs):
    text = report.page(runs, "")
    assert text.count('aria-sort="none"><button type="button">') == 8 + 4
    assert re.search(r'<td data-value="0\.82\d*">0\.82 ± 0\.25</td>', text)


def test_the_data_of_the_page_is_that_of_the_runs(runs):
    (group,) = data_in(report.page(runs, ""))["groups"]
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
    text = report.page(runs, "")
    assert "Test accuracy at other lengths" in text
    assert ["t5", "0.82 ± 0.25", "0.7", "refused"] in read(text).rows
    assert "t5 at 4,096: the table &lt;ends&gt; at 512" in text


def test_a_sample_is_called_one(tmp_path):
    text = report.page([make_run(tmp_path, "t5", 0, 0.5, sample=True)], "")
    assert "mean nothing" in text and "at other lengths" not in text


def test_what_is_not_complete_is_named_with_its_reason(runs, tmp_path):
    failed = make_run(tmp_path, "rotary", 3, 0.0, finish=False)
    write(failed.folder / FAILURE, {"error": "the loss is nan"})
    stopped = make_run(tmp_path, "rotary", 4, 0.0, finish=False)
    text = report.page([*runs, failed, stopped], "")
    assert "rotary, seed 3, takes no part: the loss is nan" in text
    assert "rotary, seed 4, takes no part: it was stopped before its end" in text
    assert [row["encoding"] for row in data_in(text)["groups"][0]["rows"]] == ["at5", "t5", "none"]


def test_settings_have_sections_of_their_own_and_devices_are_not_mixed_in_silence(runs, tmp_path):
    text = report.page([*runs, make_run(tmp_path, "t5", 0, 0.9, dim=256, device="a GPU")], "")
    assert len(data_in(text)["groups"]) == 2 and text.count("<section") == 2
    assert "<h2>process-50, dim=256</h2>" in text and "different devices" in text


def test_nothing_breaks_out_of_its_place(tmp_path):
    run = make_run(tmp_path / "a", "t5", 0, 0.5, encoding_options={EVIL: EVIL}, lengths={"64": {"refused": EVIL}})
    other = make_run(tmp_path / "a", "t5", 0, 0.6, encoding_options={EVIL: "x"})
    failed = make_run(tmp_path / "a", "t5", 1, 0.5, finish=False, device=EVIL)
    write(failed.folder / FAILURE, {"error": EVIL})
    text = report.page([run, other, failed], EVIL)
    found = read(text)
    assert len(found.scripts) == 2 and "img" not in found.tags
    assert {row["encoding"] for row in data_in(text)["groups"][0]["rows"]} == {f"t5 ({EVIL}={EVIL})", f"t5 ({EVIL}=x)"}
    assert "innerHTML" not in text


def test_what_is_no_number_leaves_json_whole(tmp_path):
    runs = [make_run(tmp_path, "t5", 0, math.nan), make_run(tmp_path, "none", 0, 0.5)]
    text = report.page(runs, "")
    assert data_in(text)["groups"][0]["rows"][1]["mean"] is None and "NaN" not in read(text).scripts[0]
    report.plot(runs).canvas.draw()


def test_the_figure_shows_the_curves_and_the_league(runs):
    left, right = report.plot(runs).axes
    assert left.get_ylabel() == "validation accuracy"
    drawn = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in left.lines}
    assert list(drawn) == [(10, 20, 30)]
    means = sorted(round(line.get_ydata()[-1], 4) for line in left.lines)
    assert means == [0.4717, 0.7867, 0.8317]
    assert {text.get_text() for text in left.texts} == {"t5", "none", "at5"}
    assert [label.get_text() for label in right.get_yticklabels()] == ["at5", "t5", "none"]
    assert [round(bar[0].get_xdata()[0], 3) for bar in right.containers] == [0.865, 0.82, 0.505]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in left.lines}) == 3


def test_without_evaluations_on_the_way_the_loss_of_training_is_drawn(tmp_path):
    run = make_run(tmp_path, "t5", 0, 0.5)
    lines = [line for line in run.lines if "split" not in line]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(report.curves(groups([run])[0])) == ["training loss"]
    assert report.plot([run]).axes[0].get_ylabel() == "training loss"


def test_a_report_is_three_files(runs, tmp_path):
    paths = report.write_report(runs, tmp_path / "new", "lagwise compare")
    assert [path.name for path in paths] == ["report.html", "league.csv", "report.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    lines = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert [line["encoding"] for line in lines] == ["at5", "t5", "none"]
    t5 = lines[1]
    assert float(t5["test"]) == pytest.approx(0.82) and float(t5["test_half_width_95"]) == pytest.approx(0.254124, abs=1e-6)
    assert (t5["seeds"], t5["test_at_64"], t5["test_at_4096"]) == ("0 1", "0.7", "refused: the table <ends> at 512")


def test_there_must_be_something_to_report(tmp_path):
    with pytest.raises(ValueError, match="at least one that is complete"):
        report.page([make_run(tmp_path, "t5", 0, 0.5, finish=False)], "")
