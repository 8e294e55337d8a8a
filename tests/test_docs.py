"""The documents: examples run, pages exist and tell the options, links lead somewhere."""

import contextlib
import inspect
import io
import re
from pathlib import Path

import pytest
import torch

import lagwise
from lagwise.encodings import ALIASES, options_of
from lagwise.errors import ELSEWHERE

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SECTIONS = ["Formula", "Paper", "Where its table ends", "Cost", "Options", "Example"]

PUBLIC = {
    "AT5", "AT5Free", "ALiBi", "ConvSPE", "ENCODINGS", "Encoding", "Favor", "FeatureMap", "FeatureTransform", "HuangM1",
    "HuangM2", "HuangM3", "HuangM4", "Kerple", "LagTable", "Learned", "NoEncoding", "PermuteFormer", "Rotary", "Sandwich", "Shaw",
    "SineSPE", "Sinusoidal", "T5", "T5Free", "Terms", "Transform", "XL", "XPos", "attention", "linear", "linear_attention",
    "make", "nn", "which_impl",
}  # fmt: skip


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run_as_they_stand(page):
    torch.manual_seed(0)
    for example in examples(page):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(example, str(page), "exec"), {"__name__": "example"})


def test_the_readme_has_examples():
    assert len(examples(ROOT / "README.md")) >= 2


def sections(page: Path) -> set[str]:
    """Returns the names by which links reach the headings of a page."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, section in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            path = page.parent / target if target else page
            assert path.exists(), f"{target} in {page.name}"
            assert not section or section in sections(path), f"{target}#{section} in {page.name}"


def on_an_index(words: str) -> str:
    """Returns the README as an index of packages shows it, without the files beside it."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11, which reads pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"][0] == {"path": "README.md"}
    for each in hook["substitutions"]:
        words = re.sub(each["pattern"], each["replacement"], words)
    return words


def test_the_readme_of_an_index_has_no_links_that_lead_nowhere():
    readme, code = (ROOT / "README.md").read_text(), re.compile(r"```.*?```", flags=re.DOTALL)
    shown = on_an_index(readme)
    assert not re.findall(r"\]\((?!https?:)", shown)
    assert code.findall(shown) == code.findall(readme)
    links = "![a picture](docs/a.png), [`t5`](docs/t5.md#x), [GLUE](https://gluebenchmark.com)"
    assert on_an_index(links) == "a picture, `t5`, [GLUE](https://gluebenchmark.com)"


def test_authors_and_version_are_the_same_everywhere():
    project, citation = (ROOT / "pyproject.toml").read_text(), (ROOT / "CITATION.cff").read_text()
    assert 'authors = [{ name = "Lagwise contributors" }]' in project and 'name: "Lagwise contributors"' in citation
    assert f"version: {lagwise.__version__}\n" in citation


def test_every_encoding_has_a_page_with_its_options(encoding_name):
    page = (ROOT / "docs" / "encodings" / f"{encoding_name}.md").read_text()
    for section in SECTIONS:
        assert f"## {section}" in page
    assert examples(ROOT / "docs" / "encodings" / f"{encoding_name}.md")
    for option, default in options_of(encoding_name).items():
        row = re.search(rf"^\| `{option}` \| (.*?) \|", page, flags=re.MULTILINE)
        assert row, f"option {option} is missing"
        if default is not inspect.Parameter.empty:
            assert str(default).strip("'") in row.group(1).replace('"', "").replace("'", "").replace("`", ""), option


def test_the_page_of_calls_has_every_other_name_and_every_word_of_torch():
    page = (ROOT / "docs" / "calling.md").read_text()
    rows = {name: others for name, others in re.findall(r"^\| `([a-z0-9-]+)` \| (.*?) \|$", page, flags=re.MULTILINE)}
    for alias, name in ALIASES.items():
        assert f"`{alias}`" in rows[name], alias
    for word in ELSEWHERE:
        assert f"| `{word}" in page, word


def test_every_page_is_of_an_encoding():
    assert {page.stem for page in (ROOT / "docs" / "encodings").glob("*.md")} == set(lagwise.ENCODINGS)


def test_public_names_are_those_listed_here():
    assert set(lagwise.__all__) == PUBLIC


def test_every_public_function_and_class_says_what_it_does():
    for name in PUBLIC - {"ENCODINGS", "Transform"}:
        assert inspect.getdoc(getattr(lagwise, name)), name
