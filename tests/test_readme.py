"""The README: short, its examples run, its links lead somewhere, and its speeds are those of results/."""

import contextlib
import importlib
import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PROSE = re.sub(r"```.*?```|<!--.*?-->", "", README, flags=re.DOTALL)
LINES = PROSE.splitlines()
TABLES = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]

sys.path.insert(0, str(ROOT / "tools"))
speed_tables = importlib.import_module("speed_tables")


def words(text: str) -> list[str]:
    """Returns what has a letter or a digit, a link by its text alone."""
    return [word for word in re.sub(r"\]\([^)]*\)", "]", text).split() if re.search(r"\w", word)]


def test_it_has_at_most_900_words():
    assert len(words(README)) <= 900


def test_no_sentence_has_more_than_thirty_words():
    paragraphs = "\n".join("" if line.startswith(("|", "#")) else line for line in LINES).split("\n\n")
    for sentence in (part for paragraph in paragraphs for part in re.split(r"[.!?:]\**\s", paragraph)):
        assert len(words(sentence)) <= 30, sentence


def test_no_cell_of_a_table_has_more_than_fifteen_words():
    for cell in (cell for row in TABLES for cell in row):
        assert len(words(cell)) <= 15, cell


def test_the_choice_of_an_encoding_is_that_of_the_findings():
    rows = [row for row in TABLES if re.match(r"\[[ABC]\]\(docs/findings/", row[-1])]
    findings = (ROOT / "docs" / "findings" / "index.md").read_text()
    assert 1 <= len(rows) <= 7
    for need, take, why, grade in rows:
        assert f"| {need} | {take} | {grade[1]} | {why} |" in findings


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run_as_they_stand_and_offline(example, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", refuse)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(example, "README.md", "exec"), {"__name__": "example"})


def refuse(*address):
    raise AssertionError(f"the example asks the network for {address}")


def test_each_way_in_has_an_example():
    ways = re.findall(r"^## (.*)\n+[^#]*?```(\w+)", README, flags=re.MULTILINE)
    assert {
        ("My model calls SDPA", "python"), ("My model is from Hugging Face", "python"), ("Which encoding suits my task", "bash"),
    } <= set(ways)  # fmt: skip


def test_ci_runs_the_test_command():
    (reading,) = re.findall(r"^test_command=\$\((.*)\)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    command = subprocess.run(["bash", "-c", reading], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (written,) = re.findall(r"<!-- test command -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert command == written and command.count("\n") == 1


def test_both_commands_install_the_tested_versions():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert [command.split(" && ")[-1] for command in commands] == ["lagwise compare", "pytest -n 2"]
    assert all("pip install -c constraints.txt" in command for command in commands)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#\s]+)", README))))
def test_links_lead_somewhere(target):
    assert target.startswith("https:") or (ROOT / target).exists()


def test_speeds_are_those_of_the_newest_lines():
    (shown,) = re.findall(r"<!-- speed -->\n(.*)\n<!-- end of speed -->", README, flags=re.DOTALL)
    assert shown == speed_tables.readme(), "`python tools/speed_tables.py` writes them anew"


def test_columns_of_speed_are_of_the_newest_files_that_have_them(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)
    case = {"bench": "attention", "encoding": "t5", "options": {}, "causal": False, "head_dim": 64, "time": 512}
    facts = {"device": "a GPU", "dtype": "bfloat16", "torch": "2.11.0", "commit": None}
    older = {**case, **facts, "date": "2026-11-15"}
    newer = {**case, **facts, "date": "2026-11-18", "contender": "lagwise"}
    for day, lines in {
        "2026-11-15": [{**older, "contender": name, "training_ratio": 4.0} for name in ("lagwise", "FlexAttention")],
        "2026-11-18": [{**newer, "training_ratio": 1.5}, {**newer, "training_ratio": 9.0, "eager": True}],
    }.items():
        (tmp_path / f"attention-cuda-{day}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = speed_tables.readme().splitlines()
    assert shown[2:4] == ["| `t5` | 512 | 1.50 | 4.00 |  |", "| `t5` | 32,768 |  |  |  |"]
    assert "on 2026-11-18, commit unknown. The other columns are of 2026-11-15." in shown[-2]
