"""The findings: tables and figures say what the lines in results/ say, and the pages can be read."""

import doctest
import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

pytest.importorskip("matplotlib", reason="needs the extra plots")

import findings  # noqa: E402
import findings_figures  # noqa: E402
import findings_numbers  # noqa: E402
import findings_spe  # noqa: E402
from findings_numbers import Source, group_of, percent, runs_of, scores  # noqa: E402

from lagwise.lab.standings import Estimate  # noqa: E402

FINDINGS = sorted((ROOT / "docs" / "findings").glob("*.md"))
LOG = sorted((ROOT / "docs" / "log").glob("*.md"))
MOST_WORDS_IN_A_SENTENCE, MOST_WORDS_IN_A_CELL, MOST_WORDS_OF_THE_PAGE = 30, 15, 1500


def prose(page: Path) -> str:
    """Returns the text of a page without code, tables, headings, pictures, marks and provenance; links as their words."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"(?m)!\[[^\]]*\]\([^)]*\)|^\|.*$|^#.*$|^\d+ (?:runs|lines) .*$", "", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def prose_sentences(page: Path) -> list[str]:
    """Returns the sentences of a page."""
    parts = re.split(r"\n\s*\n|\n- ", prose(page))
    return [each for part in parts for each in re.split(r"(?<=[.!?])\**\s+", " ".join(part.split())) if each]


def cells(page: Path) -> list[str]:
    """Returns the cells of the tables of a page."""
    rows = re.findall(r"^\|(.*)\|$", page.read_text(), flags=re.MULTILINE)
    return [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).strip() for row in rows for cell in row.split("|")]


def test_tables_and_figures_say_what_the_lines_say():
    assert findings.stale() == [], "run `python tools/findings.py`"


def test_the_check_finds_what_is_stale(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- findings: decisions -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(findings, "ROOT", tmp_path)
    monkeypatch.setattr(findings, "DRAWN", tmp_path / "docs")
    monkeypatch.setattr(findings, "FIGURES", {})
    assert findings.main(["--check"]) == 1 and "docs/page.md: not what the lines say" in capsys.readouterr().err
    assert findings.main([]) == 0 and "`at5`" in page.read_text()
    assert findings.main(["--check"]) == 0


def test_the_heat_map_shows_its_numbers():
    path = ROOT / "docs" / "figures" / "findings-heat-map.svg"
    drawn = [unescape(words).strip() for words in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), flags=re.DOTALL)]
    numbers = findings_figures.heat_numbers()
    expected = [words for own in numbers.values() for words in own.values()]
    found = [words.replace("\N{MINUS SIGN}", "-") for words in drawn]
    assert sorted(
        words for words in found if re.fullmatch(r"base|[+-]?[\d.]+\*?", words) and words not in ("-5", "0", "+5")
    ) == sorted(expected)
    assert all(own[column.baseline] == "base" for column, own in zip(findings_figures.columns(), numbers.values(), strict=True))


def test_a_cell_of_the_heat_map_by_hand():
    own, others = (scores(percent("reber", ("rate", "encoding_rate")), name) for name in ("at5", "t5"))
    by_hand = sum(own[seed] - others[seed] for seed in own) / len(own)
    assert findings_figures.heat_numbers()["Reber"]["at5"] == f"{by_hand:+.1f}"
    bits = {
        line["config"]["encoding"]: line["result"]["test"]["bits_per_byte"]
        for line in map(json.loads, (ROOT / "results" / "pretrain.jsonl").read_text().splitlines())
    }
    lower = 100 * (1 - bits["rotary"] / bits["t5"])
    assert findings_figures.heat_numbers()["masked LM, bits"]["rotary"] == f"{lower:+.1f}*"


@pytest.mark.parametrize(
    ("published", "level", "found", "words"),
    [
        ("higher", False, Estimate(2.0, 1.0, 3), "confirmed"),
        ("lower", False, Estimate(2.0, 1.0, 3), "contradicted"),
        (2.5, False, Estimate(2.0, 1.0, 3), "confirmed"),
        (0.5, False, Estimate(2.0, 1.0, 3), "confirmed, larger"),
        (-9.0, False, Estimate(-2.0, 1.0, 3), "confirmed, smaller"),
        (2.0, False, Estimate(2.0, 3.0, 3), "no significant difference"),
        ("lower", False, Estimate(-2.0, None, 1), "same direction, one run"),
        (0.1, True, Estimate(-0.5, 1.0, 3), "compatible"),
        (-1.0, True, Estimate(-9.0, 4.0, 3), "lower than published"),
    ],
)
def test_verdicts_follow_one_rule(published, level, found, words):
    claim = findings.Claim("", published, lambda: found, "", "", level=level)
    assert findings.verdict(claim, found) == words


def test_numbers_in_the_text_of_the_findings_are_those_of_the_lines():
    page = (ROOT / "docs" / "findings" / "index.md").read_text()
    rotary = next(line for line in findings.overfit_lines() if "`rotary`" in line)
    assert "from 3.80 to 6.10" in page and "| 3.80 |" in rotary and "| 6.10 |" in rotary
    losses = [[float(cell) for cell in line.split("|")[3:7]] for line in findings.overfit_lines()[2:]]
    assert len(losses) == 14 and all(own[-1] > own[0] for own in losses)
    lost = findings.difference(findings.MINILM, "rotary", "learned").mean
    assert "up to 47 F1" in page and round(lost) == -47
    chosen = {name: next(iter(seeds.values())).config.rate for name, seeds in group_of(findings.MINILM).runs.items()}
    converted = [rate for name, rate in chosen.items() if name != "none" and not name.startswith("learned")]
    assert "seven of nine encodings chose another" in page and (len(converted), converted.count(1e-4)) == (9, 2)
    assert {run.config.rate for run in runs_of("glue-minilm")} == {1e-4}
    sines = {
        run.config.encoding_options.get("fixed", False): run.config.rate
        for run in runs_of("lra-listops")
        if run.config.encoding == "sine-spe" and run.config.encoding_options["realizations"] == 32
    }
    assert "5e-4 with new codes, 2e-3 with fixed codes" in page and sines == {False: 5e-4, True: 2e-3}
    assert {run.config.start.split("-")[-1] for run in runs_of("squad")} == {"seed0"}
    assert not {run.config.encoding for run in runs_of("pretrain-tuning")} & {"rotary", "sinusoidal", "none"}


@pytest.mark.parametrize(
    "module", [findings, findings_figures, findings_numbers, findings_spe], ids=lambda module: module.__name__
)
def test_examples_of_the_tools_run(module):
    assert doctest.testmod(module).failed == 0


def test_a_source_must_name_one_group():
    with pytest.raises(ValueError, match="must name one group"):
        group_of(Source("glue"))


def test_the_page_is_short():
    words = (
        prose(ROOT / "docs" / "findings" / "index.md").split() + " ".join(cells(ROOT / "docs" / "findings" / "index.md")).split()
    )
    assert len(words) <= MOST_WORDS_OF_THE_PAGE
    assert len(findings.DECISIONS) <= 7


@pytest.mark.parametrize("page", FINDINGS + LOG, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_sentences_are_short(page):
    assert [each for each in prose_sentences(page) if len(each.split()) > MOST_WORDS_IN_A_SENTENCE] == []


@pytest.mark.parametrize("page", FINDINGS + LOG, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_cells_are_short(page):
    assert [each for each in cells(page) if len(each.split()) > MOST_WORDS_IN_A_CELL] == []


@pytest.mark.parametrize("page", FINDINGS + LOG, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert (page.parent / target).resolve().is_file(), target
        assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), f"{target} is not on the site"


def test_every_figure_is_shown():
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in (ROOT / "docs" / "figures").iterdir() if f"figures/{path.name}" not in text] == []


@pytest.mark.parametrize("page", LOG, ids=lambda page: page.name)
def test_files_of_results_that_the_log_names_are_there(page):
    for name in re.findall(r"`results/([\w.-]+\.jsonl)`", page.read_text()):
        assert (ROOT / "results" / name).is_file(), name


def test_all_runs_are_in_the_log():
    """Every file of runs is named on a page of the log, in a mark or in words; those of single calls are on the page of speed."""
    text = "".join(page.read_text() for page in LOG + FINDINGS)
    files = [path.name for path in (ROOT / "results").glob("*.jsonl") if not re.search(r"-(cpu|cuda)-\d{4}", path.name)]
    assert [name for name in files if name not in text] == []
