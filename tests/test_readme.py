"""The README: short, its examples run, its links lead somewhere, and its speeds are those of results/."""

import contextlib
import io
import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PROSE = re.sub(r"```.*?```|<!--.*?-->", "", README, flags=re.DOTALL)
LINES = PROSE.splitlines()
TABLES = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
CONTENDERS = ("lagwise", "FlexAttention", "dense bias")


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


def lines_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / f"{name}-cuda-2026-11-15.jsonl").read_text().splitlines()]


def measured(encoding: str, time: int, contender: str, commit: str) -> list[str]:
    """Returns the training ratios of a case at a commit, as they are written here."""
    case = {"encoding": encoding, "time": time, "contender": contender, "commit": commit}
    lines = [line for line in lines_of("attention") if case.items() <= line.items()]
    return [f"{line['training_ratio']:.2f}" if "training_ratio" in line else "does not fit" for line in lines]


def test_speeds_are_those_of_the_lines_and_a_row_is_of_one_run():
    rows = [row for row in TABLES if re.match(r"[\d,]+$", row[1])]
    commits = {line["commit"] for line in lines_of("attention")}
    assert len(rows) == 6
    for name, time, *cells in rows:
        case = name.split("`")[1], int(time.replace(",", ""))
        given = [(contender, cell) for contender, cell in zip(CONTENDERS, cells, strict=True) if cell]
        assert any(all(cell in measured(*case, contender, commit) for contender, cell in given) for commit in commits), name


def test_the_speed_of_t5_is_that_of_its_lines():
    case = {"model": "t5-base-encoder", "time": 4096, "dropout": 0.0}
    speeds = {line["contender"]: line.get("training_tokens_per_s") for line in lines_of("hf") if case.items() <= line.items()}
    for contender in ("sdpa", "eager"):
        assert f"{speeds['lagwise'] / speeds[contender]:.1f} times as fast as with `{contender}`" in README
