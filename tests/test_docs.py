"""The documents: examples and commands are right, the reference is whole, links lead somewhere, sentences are short."""

import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import griffe
import pytest
import torch
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import lagwise
import lagwise.hf
import lagwise.lens
from lagwise.encodings import ALIASES, options_of
from lagwise.errors import ELSEWHERE
from lagwise.lab.cli import app
from lagwise.lens import plots

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# One page is made by another module, and tables of the log have several numbers in a cell.
PLAIN_PAGES = [page for page in PAGES if DOCS in page.parents and page != DOCS / "support.md"]
PLAIN_TABLES = [page for page in PLAIN_PAGES if page.parent != DOCS / "log"]
SECTIONS = ["Formula", "When", "Paper", "Example", "See also"]
MOST_COLUMNS_OF_CODE = 84

PUBLIC = {
    "AT5", "AT5Free", "ALiBi", "ConvSPE", "ENCODINGS", "Encoding", "Favor", "FeatureMap", "FeatureTransform", "HuangM1",
    "HuangM2", "HuangM3", "HuangM4", "Kerple", "LagTable", "Learned", "NoEncoding", "PermuteFormer", "Rotary", "Sandwich", "Shaw",
    "SineSPE", "Sinusoidal", "T5", "T5Free", "Terms", "Transform", "XL", "XPos", "attention", "linear", "linear_attention",
    "make", "nn", "warmup", "which_impl",
}  # fmt: skip

sys.path.insert(0, str(ROOT / "tools"))
encoding_pages, module_map, speed_tables, doctest_fences, unpacked_options = map(
    importlib.import_module, ("encoding_pages", "module_map", "speed_tables", "doctest_fences", "unpacked_options")
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Returns the code of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_examples_run_as_they_stand(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space = {"__name__": "example"}
    for example in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(example, str(page), "exec"), space)


def test_the_readme_and_every_guide_have_examples():
    for page in [ROOT / "README.md", *(DOCS / "guides").glob("*.md")]:
        assert len(blocks(page, "python")) >= 2, page


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each line of shell on a page."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def own_command(words: list[str]) -> list[str] | None:
    """Returns what a line gives to our own command, or None for a line that calls another program."""
    if words[0] == "lagwise":
        return words[1:]
    return words[words.index("lagwise") + 1 :] if "lagwise" in words and words[words.index("lagwise") - 1] == "-m" else None


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_and_their_options_exist(page):
    for words in commands(page):
        given = own_command(words)
        if given is None:
            assert "=" in words[0] or words[0] in ("cp", "git", "pip", "python", "python3", "pytest", "mkdocs", "."), words
            continue
        command = get_command(app)
        while hasattr(command, "commands"):
            command, given = command.commands[given[0]], given[1:]
        command.make_parser(type(command).context_class(command)).parse_args(args=given)


def training_commands() -> list[list[str]]:
    """Returns the runs that the documents ask for, as arguments of `train`; dots stand for fields of another line."""
    found = (own_command(words) for page in PAGES for words in commands(page))
    whole = (given for given in found if given and not {"--from", "..."} & set(given))
    return [as_training(given) for given in whole if given[0] in ("train", "compare")]


def as_training(given: list[str]) -> list[str]:
    """Returns the first run of a comparison as a command of its own; one that trains a single model stays."""
    if given[0] == "train":
        return [word for word in given if word != "--fields"]
    options, tuned = dict(pairwise(given)), {word for option, word in pairwise(given) if option == "--tune"}
    chosen = [options.get("--task", "process-50"), "--encoding", options.get("--encodings", "t5").split(",")[0]]
    preset = ["--preset", options["--preset"]] if "--preset" in options else []
    return ["train", *chosen, *preset, *(word for word in given if "=" in word and word not in tuned)]


@pytest.mark.parametrize("given", training_commands(), ids=lambda given: " ".join(given[1:4]))
def test_fields_and_presets_of_commands_exist(given):
    result = CliRunner().invoke(app, [*given, "--fields"])
    assert result.exit_code == 0, result.output


def sections(page: Path) -> set[str]:
    """Returns the names by which links reach the headings of a page, those of the reference included."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    words = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return words | set(re.findall(r"^::: (\S+)$", prose, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target, section in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            path = page.parent / target if target else page
            assert path.exists(), f"{target} in {page.name}"
            assert not section or section in sections(path), f"{target}#{section} in {page.name}"


def files_of(nav: object) -> list[str]:
    """Returns the files of a part of the site's navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [file for part in parts for file in files_of(part)]


def test_every_page_is_in_the_navigation():
    named = files_of(SITE["nav"])
    assert sorted(named) == sorted(set(named))
    assert {DOCS / file for file in named} == set(PAGES) - {ROOT / "README.md", ROOT / "CONTRIBUTING.md"}


def object_named(path: str) -> object:
    """Returns what a name with dots stands for."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:split]))
            for part in parts[split:]:
                found = getattr(found, part)
            return found
    raise AssertionError(f"{path} does not exist")


def test_the_reference_has_every_public_function_and_class():
    directives = [path for page in PAGES for path in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)]
    assert sorted(directives) == sorted(set(directives))
    there = {id(object_named(path)) for path in directives}
    for module in (lagwise, lagwise.encodings, lagwise.linear, lagwise.nn, lagwise.hf, lagwise.lens):
        for name in module.__all__:
            found = getattr(module, name)
            assert inspect.ismodule(found) or id(found) in there, f"{module.__name__}.{name}"
    for name, found in inspect.getmembers(plots, inspect.isfunction):
        assert found.__module__ != plots.__name__ or name.startswith("_") or id(found) in there, name


def test_the_start_names_every_extra_of_users():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11, which reads pyproject.toml")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "start.md").read_text(), flags=re.MULTILINE)
    assert set(named) == set(extras) - {"dev", "docs"}


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


def prose(page: Path) -> str:
    """Returns the words of a page without code, comments and what stands before them."""
    words = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL)
    words = re.sub(r"```.*?```|<!--.*?-->", "", words, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", words))


def count(words: str) -> int:
    return len([word for word in words.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=name_of)
def test_sentences_have_at_most_thirty_words(page):
    # Lines that name the runs of a table are made by `lagwise results`.
    lines = [line for line in prose(page).splitlines() if not re.match(r"\||#|:::|\d+ (?:runs|lines) in ", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] )", "\n".join(lines)):
        for sentence in re.split(r'(?<=[.!?])\**\s+(?=[A-Z\d"*(]|code)', " ".join(paragraph.split())):
            assert count(sentence) <= 30, sentence


@pytest.mark.parametrize("page", PLAIN_TABLES, ids=name_of)
def test_cells_have_at_most_fifteen_words_and_one_number(page):
    for line in prose(page).splitlines():
        for cell in line.strip("|").split("|") if line.startswith("|") else []:
            assert count(cell) <= 15, cell
            # An interval belongs to its number, and methods are called by theirs.
            assert len(re.findall(r"(?<![\w.])(?<!± )(?<!ethod )\d[\d,.]*", cell)) <= 1, cell


def test_every_encoding_has_a_page_whose_facts_are_generated(encoding_name):
    page = DOCS / "encodings" / f"{encoding_name}.md"
    for section in SECTIONS:
        assert f"## {section}\n" in page.read_text()
    assert page.read_text().count("\n<!-- facts -->\n") == 1 and blocks(page, "python")
    facts = encoding_pages.facts(encoding_name)
    for option, default in options_of(encoding_name).items():
        shown = "required" if default is inspect.Parameter.empty else f"`{default!r}`"
        assert f"| `{option}` | {shown} | " in facts
    for alias, name in ALIASES.items():
        assert (f"`{alias}`" in facts) == (name == encoding_name)


def test_generated_choices_are_those_of_real_tensors(relative_name):
    q = torch.empty(1, encoding_pages.HEADS, 512, encoding_pages.HEAD_DIM)
    encoding = encoding_pages.made(relative_name)
    expected = lagwise.which_impl(q, q, q, encoding).impl
    terms = encoding_pages.terms_of(encoding, 512, causal=False)
    assert encoding_pages.which(terms, 512, device="cpu", dtype=torch.float32, causal=False) == expected


def test_a_gpu_that_is_not_there_answers_as_one_that_is():
    terms = encoding_pages.terms_of(encoding_pages.made("t5"), 8192, causal=False)
    for dtype, expected in ((torch.float32, "triton"), (torch.half, "split")):
        assert encoding_pages.which(terms, 8192, device="cuda", dtype=dtype, causal=False) == expected


def test_the_table_of_encodings_has_all_of_them():
    assert "\n<!-- encodings -->\n" in (DOCS / "encodings" / "index.md").read_text()
    named = re.findall(r"^\| \[`(.*?)`\]", encoding_pages.overview(), flags=re.MULTILINE)
    assert named == list(lagwise.ENCODINGS)


@pytest.mark.parametrize("page", sorted((DOCS / "encodings").glob("*.md")), ids=name_of)
def test_formulas_and_examples_fit_the_width_of_the_site(page):
    lines = [line for block in re.findall(r"```.*?```", page.read_text(), flags=re.DOTALL) for line in block.splitlines()]
    assert [line for line in lines if len(line) > MOST_COLUMNS_OF_CODE] == []


def test_every_page_is_of_an_encoding():
    assert {page.stem for page in (DOCS / "encodings").glob("*.md")} == {"index", *lagwise.ENCODINGS}


def test_the_guide_has_every_word_of_torch():
    page = (DOCS / "guides" / "add-a-bias.md").read_text()
    for word in ELSEWHERE:
        assert f"| `{word}" in page, word


def test_every_table_of_speed_is_on_its_page():
    marks = re.findall(r"<!-- speed: (\S+) -->", (DOCS / "speed.md").read_text())
    assert sorted(marks) == sorted(speed_tables.TABLES)
    for mark in marks:
        table = speed_tables.TABLES[mark]()
        assert table == speed_tables.NO_LINES or (len(table.splitlines()) > 4 and "Measured on " in table)


MACHINE = {
    "device": "a GPU", "dtype": "bfloat16", "torch": "2.11.0+cu130", "triton": "3.6.0", "commit": "abc", "date": "2026-11-18",
}  # fmt: skip


def speed_line(contender: str = "lagwise", *, encoding: str = "t5", time: int = 512, **numbers) -> dict:
    """Returns a made-up line of attention."""
    sizes = {"batch": 4, "heads": 16, "time": time, "head_dim": 64}
    case = {"bench": "attention", "contender": contender, "encoding": encoding, "options": {}, "causal": False, **sizes}
    return {**case, **MACHINE, **numbers}


@pytest.fixture
def save_lines(tmp_path, monkeypatch):
    """Returns a function that saves lines under the name of a file, which are then all that there are."""
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)

    def save(name: str, *lines: dict) -> None:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return save


def rows_of(table: str) -> list[str]:
    """Returns the rows of a table below its head."""
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def test_the_newest_lines_are_the_last_of_the_newest_file(save_lines):
    assert speed_tables.newest("attention-cuda") == []
    old, new = speed_line(training_ratio=3.0), speed_line(training_ratio=2.0)
    save_lines("attention-cuda-2026-11-18", old, speed_line("plain"), new)
    save_lines("attention-cuda-2026-11-15", speed_line(training_ratio=9.0), speed_line("FlexAttention"))
    save_lines("linear-attention-cuda-2026-12-01", speed_line(training_ratio=9.0))
    save_lines("attention-cuda-begun", speed_line(training_ratio=9.0))
    assert speed_tables.newest("attention-cuda") == [new, speed_line("plain")]
    # What the newest file does not have is taken from the one before.
    assert speed_tables.newest("attention-cuda", lambda line: line["contender"] == "FlexAttention") == [
        speed_line("FlexAttention")
    ]
    assert speed_tables.newest("attention-cuda", lambda line: line["contender"] == "dense bias") == []


@pytest.mark.parametrize("mark", sorted(speed_tables.TABLES))
def test_a_table_of_speed_without_lines_says_so(save_lines, mark):
    assert speed_tables.TABLES[mark]() == speed_tables.NO_LINES


def test_lines_of_speed_say_where_they_were_measured(save_lines):
    save_lines("attention-cuda-2026-11-18")
    assert speed_tables.origin([speed_line(), speed_line()]) == (
        "Measured on a GPU in bfloat16 with PyTorch 2.11.0, Triton 3.6.0, on 2026-11-18, commit abc."
    )
    both = [speed_line(triton=None), speed_line(triton=None, commit=None, dtype="float32", transformers="5.17.0")]
    assert speed_tables.origin(both) == (
        "Measured on a GPU in bfloat16, float32 with PyTorch 2.11.0, transformers 5.17.0, on 2026-11-18, commit abc, unknown."
    )
    save_lines("host-cuda-2026-11-19")
    assert speed_tables.origin([speed_line()]).endswith("commit abc. Older than the newest lines, which are of 2026-11-19.")


@pytest.mark.parametrize(
    "numbers, cell",
    [
        ({"training_ratio": 1.234, "goal": 1.3}, "**1.23** (1.3)"),
        ({"training_ratio": 1.304, "goal": 1.3}, "1.30 (1.3)"),
        ({"training_ratio": 1.2, "goal": None}, "1.20"),
        ({"training_ratio": 1.2}, "1.20"),
        ({"contender": "FlexAttention", "training_ratio": 1.2, "goal": 1.3}, "1.20"),
        ({"training_ratio": None, "goal": 1.3}, ""),
        ({"goal": 1.3, "error": "OutOfMemoryError: CUDA out of memory"}, "out of memory"),
        ({"goal": 1.3, "error": "left out: a bias for each pair does not fit into memory"}, "does not fit"),
        ({"goal": 1.3, "error": "left out: it takes too long"}, "left out"),
        ({"goal": 1.3, "error": "RuntimeError: no"}, "failed"),
    ],
)
def test_numbers_of_speed_stand_beside_their_goals(numbers, cell):
    assert speed_tables.ratio_and_goal({"contender": "lagwise", **numbers}) == cell


def test_shapes_stand_side_by_side_and_wide_tables_apart(save_lines):
    early, whole = {"max_lag": 128}, {"max_lag": 512}
    save_lines(
        "attention-cuda-2026-11-18",
        speed_line(time=8192, training_ratio=1.5, graph=True),
        speed_line("plain flash", training_ratio=1.6),
        speed_line(training_ratio=2.0, goal=2.1),
        *(speed_line(encoding="huang4", time=time, options=early, training_ratio=4.0) for time in (128, 512)),
        speed_line(encoding="huang4", options=whole, training_ratio=9.0, memory_ratio=2.5, memory_goal=2.0),
        speed_line(encoding="kerple", error="RuntimeError: no"),
        speed_line(eager=True, training_ratio=3.0, training_ms=0.5, forward_ratio=2.0, goal=1.8),
        *(speed_line(ragged=kind, training_ratio=1.5, goal=1.6) for kind in ("lengths", "cu_seqlens")),
    )
    by_shape = speed_tables.TABLES["by-shape"]()
    assert by_shape.splitlines()[0] == "|  | B4 H16 T128 D64 | B4 H16 T512 D64 | B4 H16 T8192 D64 graph |"
    assert rows_of(by_shape) == [
        "| `huang4`, max_lag=128 | 4.00 | 4.00 |  |",
        "| `t5` |  | **2.00** (2.1) | 1.50 |",
        "| no positions, FlashAttention |  | 1.60 |  |",
    ]
    assert rows_of(speed_tables.TABLES["full-width"]()) == [
        "| `huang4`, max_lag=T, B4 H16 T512 D64 | 9.00 | 2.50 (2) |",
        "| `kerple`, B4 H16 T512 D64 | failed | failed |",
    ]
    assert rows_of(speed_tables.TABLES["eager"]()) == ["| `t5`, B4 H16 T512 D64 | 3.00 (1.8) | 0.50 | 2.00 |"]
    assert rows_of(speed_tables.TABLES["ragged"]()) == [
        "| `t5`, `lengths` | **1.50** (1.6) |",
        "| `t5`, `cu_seqlens` | **1.50** (1.6) |",
    ]


def test_types_of_numbers_have_columns_of_their_own(save_lines):
    goals = {"training_goal_ms": 0.45, "forward_goal_ms": 0.15, "kernels_goal": 12}
    calls = [
        speed_line("sdpa", bench="host", training_ms=0.1, forward_ms=0.05, kernels=3),
        speed_line("lagwise, t5", bench="host", training_ms=0.5, forward_ms=0.1, kernels=7, **goals),
    ]
    starts = {"bench": "first call", "first_kernels": 7, "second_s": 0.4, "second_kernels": 0}
    firsts = [
        speed_line("lagwise, t5", **starts, first_s=2.5, first_goal_s=5.0),
        speed_line("lagwise, t5", **starts, first_s=12.0, first_goal_s=10.0, dtype="float32"),
    ]
    save_lines("host-cuda-2026-11-18", *calls, *firsts)
    assert rows_of(speed_tables.TABLES["host"]()) == [
        "| torch's sdpa | 0.10 | 0.05 | 3 |",
        "| `t5` | 0.50 (0.45) | **0.10** (0.15) | **7** (12) |",
    ]
    expected = ["| `t5` | **2.5** (5) | 7 | 0.4 | 0 | 12.0 (10) | 7 | 0.4 | 0 |"]
    assert rows_of(speed_tables.TABLES["first-call"]()) == expected
    # The bench saves first calls in a file of their own.
    save_lines("host-cuda-2026-11-18", *calls)
    save_lines("first-call-cuda-2026-11-18", *firsts)
    assert rows_of(speed_tables.TABLES["first-call"]()) == expected


def test_compiled_models_keep_what_was_measured_before_an_error(save_lines):
    line = speed_line("lagwise, t5", bench="compiled", step_ms=24.0, layer_ms=2.0, step_ratio=1.2, graphs=1, graph_breaks=0)
    save_lines(
        "compiled-cuda-2026-11-18", {**line, "mode": "compile", "recompiles": 1}, {**line, "mode": "dynamic", "error": "no"}
    )
    assert rows_of(speed_tables.TABLES["compiled"]()) == [
        "| compile, `t5` | 24.0 | 2.00 | 1.20 | 1 | 0 | 1 |",
        "| dynamic, `t5` | 24.0 | 2.00 | 1.20 | 1 | 0 | failed |",
    ]


def test_t5_stands_beside_no_positions_and_torch(save_lines):
    case = {"bench": "hf", "model": "t5-base", "dropout": 0.0, **MACHINE}
    small, large = {"batch": 16, "time": 512, "floor_goal": 1.15}, {"batch": 2, "time": 4096, "goal": 3.0, "memory_goal": 0.5}
    save_lines(
        "hf-cuda-2026-11-18",
        {**case, **large, "contender": "sdpa", "error": "OutOfMemoryError: no"},
        {**case, **large, "contender": "lagwise", "floor_ratio": 1.2, "training_speedup": 4.0, "memory_ratio": 0.6},
        {**case, **small, "contender": "sdpa", "floor_ratio": 2.0},
        {**case, **small, "contender": "lagwise", "floor_ratio": 1.1, "training_speedup": 1.8, "memory_ratio": 0.6},
        {**case, **small, "contender": "no positions", "training_ms": 54.0, "floor_ratio": 1.0},
    )
    assert rows_of(speed_tables.TABLES["t5"]()) == [
        "| t5-base, B16 T512 | 54 | **1.10** (1.15) | 2.00 | 1.80 | 0.60 |",
        "| t5-base, B2 T4096 |  | 1.20 | out of memory | **4.00** (3) | 0.60 (0.5) |",
    ]
    assert speed_tables.speed_of_t5().endswith(" as with `sdpa`: 1.8 at 512, 4.0 at 4,096 tokens.")


def test_the_speed_of_an_encoder_is_that_of_its_lines():
    lines = speed_tables.newest("hf-cuda", lambda line: line["model"] == "t5-base-encoder")
    speeds = {(line["contender"], line["dropout"]): line.get("training_tokens_per_s") for line in lines}
    guide = " ".join((DOCS / "guides" / "hugging-face.md").read_text().split())
    for contender, dropout in (("sdpa", 0.0), ("eager", 0.1)):
        assert f"{speeds['lagwise', dropout] / speeds[contender, dropout]:.1f} times as fast as with `{contender}`" in guide


def test_kernels_and_constants_that_are_named_exist():
    code = "".join(path.read_text() for path in (ROOT / "lagwise" / "ops").rglob("*.py"))
    for name in set(re.findall(r"`(\w+_kernel|[A-Z]{4,})\b", (DOCS / "kernels.md").read_text())):
        assert re.search(rf"\b{name}\b", code), name


def test_modules_are_shown_by_their_first_sentence():
    shown = module_map.on_page_markdown("<!-- modules: lagwise/ops -->")
    assert "| `lagwise/ops/support.py` | Which implementation does what. |" in shown


def test_options_of_a_call_are_shown_one_by_one():
    package = griffe.load("lagwise", search_paths=[str(ROOT)], extensions=griffe.load_extensions(unpacked_options.__file__))
    for name, own in (("softmax.attention", lagwise.attention), ("linear.linear_attention", lagwise.linear_attention)):
        shown = {each.name: each.default for each in package[name].parameters}
        assert list(shown) == list(inspect.signature(own).parameters)
        assert shown["causal"] == "False" and shown["lengths"] == "None"
    assert [each.name for each in package["nn.stacks.Decoder.__init__"].parameters][-2:] == ["tied", "options"]


def test_doctests_are_shown_as_code():
    assert doctest_fences.fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def loaded(page: Path) -> list[str]:
    """Returns the addresses that a file of the site loads when it is shown; links that wait for a click are none."""
    words = page.read_text()
    if page.suffix == ".css":
        return re.findall(r"url\(\s*[\"']?(.*?)[\"']?\s*\)|@import\s+[\"'](.*?)[\"']", words)
    tags = re.findall(r"<(?:script|link|img|iframe|source|video|audio|object)\b[^>]*>", words)
    return [address for tag in tags for address in re.findall(r"\b(?:src|href|srcset|data)=\"?([^\"\s>]+)", tag)]


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 40
    for path in files:
        for address in loaded(path):
            assert not re.match(r"(?:https?:)?//", "".join(address)), f"{address} in {path.name}"


def test_public_names_are_those_listed_here():
    assert set(lagwise.__all__) == PUBLIC


def test_every_public_function_and_class_says_what_it_does():
    for name in PUBLIC - {"ENCODINGS", "Transform"}:
        assert inspect.getdoc(getattr(lagwise, name)), name
