"""The command line: what it lists, what its help says at any width, and what it answers to what cannot be done."""

import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import lagwise
from lagwise import extras
from lagwise.extras import install_command
from lagwise.lab.cli import app, console
from lagwise.lab.cli import bench as bench
from lagwise.lab.experiment import make_config
from lagwise.lab.tasks import TASKS
from lagwise.lab.threads import is_small, use_threads

COMMANDS = {
    " ".join([*group, command.name or command.callback.__name__]): command.callback
    for group, commands in (((), app.registered_commands), (("bench",), bench.app.registered_commands))
    for command in commands
}


def invoke(*arguments, **options):
    return CliRunner().invoke(app, list(map(str, arguments)), **options)


def words(output):
    return " ".join(output.split())


# What it shows


def test_the_version():
    shown = invoke("--version")
    assert shown.exit_code == 0 and shown.output == f"lagwise {lagwise.__version__}\n"


def test_the_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "lagwise", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "encodings" in result.stdout and "LAGWISE_CACHE" in result.stdout


def test_encodings_lists_all_of_them():
    result = invoke("encodings")
    assert result.exit_code == 0 and all(name in result.output for name in lagwise.ENCODINGS)


def examples_in(command):
    return [line for line in inspect.getdoc(command).splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_keep_their_lines_at_any_width(name, width):
    shown = invoke(*name.split(), "--help", env={"COLUMNS": str(width)})
    lines = [line.strip() for line in shown.output.splitlines()]
    examples = examples_in(COMMANDS[name])
    assert any(f"lagwise {name}" in line for line in examples)
    assert [line for line in examples if line.strip() not in lines] == []


@pytest.mark.parametrize("width", [60, 160])
def test_paragraphs_of_the_help_fill_the_width(width):
    text = words(inspect.getdoc(COMMANDS["compare"]).split("\n\n")[2])
    shown = invoke("compare", "--help", env={"COLUMNS": str(width)}).output.splitlines()
    first = next(number for number, line in enumerate(shown) if "Without arguments" in line)
    # The next word would not have fitted into the line.
    line, next_word = shown[first].strip(), shown[first + 1].split()[0]
    assert text.startswith(f"{line} {next_word}") and len(line) + 1 + len(next_word) > width - 2


def test_every_group_has_examples():
    for arguments in ([], ["bench"]):
        assert re.search(r"^ lagwise ", invoke(*arguments, "--help").output, flags=re.MULTILINE)


def test_tasks_fit_a_screen(monkeypatch):
    monkeypatch.setattr(console.console, "_width", 80)
    lines = invoke("tasks").output.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    for name in TASKS:
        family, _, member = name.partition("/")
        assert any(line.startswith(family) and member in line for line in lines), name
    assert all(any(line.startswith(name) for line in invoke("tasks", "glue").output.splitlines()) for name in ("glue/cola",))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_tells_all_that_is_known_about_it(name):
    shown = invoke("tasks", name)
    facts = TASKS[name].facts
    assert shown.exit_code == 0, shown.output
    for known in (facts.words, facts.source, facts.size, facts.licence, facts.published, facts.files, *TASKS[name].presets):
        assert words(known) in words(shown.output)
    assert f"lagwise compare --task {name}" in shown.output and "is better" in shown.output
    assert ("LAGWISE_CACHE" in shown.output) == bool(facts.files)


# What it refuses

SMALL = ("--steps", "1", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["train", "process-50", "--encoding", "t6"], "unknown encoding 't6': did you mean 't5'?"),
        (["train", "process50"], "'process50' is no task: did you mean 'process-50'?"),
        (["train", "process-50", "--preset", "peper"], "preset must be one of process-50's (paper, paper-at5)"),
        (["train", "process-50", "layer=3"], "'layer' is no field of a run: did you mean 'layers'?"),
        (["train", "process-50", "layers=no"], "layers must be int, but is 'no'"),
        (["train", "process-50", "dim=30", "heads=4"], "dim"),
        (["train", "process-50", "encoding.bucket=3"], "unknown option 'bucket' for encoding 't5': did you mean 'buckets'?"),
        (["train", "process-50", "task.lenght=3"], "'lenght' is no option of the task: did you mean 'length'?"),
        (["train", "process-50", "--precision", "fp8"], "precision must be 'fp32', 'bf16', 'fp16', but is 'fp8'"),
        (["train", "process-50", "--device", "gpu"], "--device must be auto, cpu or cuda, but is 'gpu'"),
        (["train", "process-50", "--data", "."], "--data must be left out for process-50, whose data is generated"),
        (["train", "text", "--data", "nowhere"], "--data must be a folder or hub, but nowhere is no folder"),
        (["train", "text", "--data", "."], "data must be a folder with train.tsv"),
        (["train", "listops", "--data", "hub"], "this task is not on the Hub"),
        (["train", "process-50", "--threads", "0"], "should be greater than or equal to 1"),
        (["train", "process-50", "start=nowhere"], "nowhere holds no run"),
        (["compare", "--encodings", "t5,t6"], "unknown encoding 't6': did you mean 't5'?"),
        (["compare", "--baseline", "at6"], "--baseline must be one of none, sinusoidal, t5, at5"),
        (["compare", "--seeds", "0"], "should be greater than or equal to 1"),
        (["compare", "--jobs", "0"], "should be greater than or equal to 1"),
        (["compare", "--task", "text", "--data", ".", "--encodings", "t5,at5", "--seeds", "2"], "all runs failed: data must be"),
        (["compare", "--tune", "ratee=1,2"], "did you mean 'rate'?"),
        (["compare", "--lengths", "long"], "--lengths must be whole numbers with commas between, but is 'long'"),
        (["compare", "--from", "."], "no run is complete"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_cannot_be_done_is_answered_in_words_and_leaves_nothing(arguments, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    given = [] if "--from" in arguments else ["--jobs", "1"] if arguments[0] == "compare" and "--jobs" not in arguments else []
    more = [] if "--from" in arguments else [each for each in SMALL if "--device" not in arguments or each not in SMALL[2:]]
    ended = invoke(*arguments, *given, *more, "--out", "made/runs")
    assert ended.exit_code == 2 and answer in words(ended.output), ended.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["bench", "attention", "--device", "gpu"], "--device must be auto, cpu or cuda, but is 'gpu'"),
        (["bench", "attention", "--dtype", "float33"], "--dtype must be float32, bfloat16 or float16, but is 'float33'"),
        (["bench", "linear", "--dtype", "int8"], "--dtype must be"),
        (["bench", "attention", "--repeats", "0"], "should be greater than or equal to 1"),
        (["bench", "loop", "process50"], "did you mean 'process-50'?"),
        (["tasks", "listop"], "did you mean 'listops'?"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_other_commands_answer_in_words_too(arguments, answer):
    ended = invoke(*arguments, env={"COLUMNS": "200"})
    assert ended.exit_code == 2 and answer in words(ended.output), ended.output


def test_what_a_stored_comparison_has_no_use_for_is_refused(tmp_path):
    ended = invoke("compare", "dim=16", "--from", tmp_path, "--encodings", "t5", "--seeds", "3")
    assert ended.exit_code == 2 and "must be left out beside --from" in ended.output
    assert all(each in ended.output for each in ("FIELD=VALUE", "--encodings", "--seeds"))


def test_a_folder_that_cannot_be_made_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    ended = invoke("train", "process-50", *SMALL, "--out", tmp_path / "file" / "runs")
    assert ended.exit_code == 2 and "Not a directory" in ended.output


# How extras are installed


def test_a_clone_is_installed_from_its_folder(monkeypatch):
    clone = extras.Path(extras.__file__).parent.parent
    monkeypatch.chdir(clone)
    assert install_command("train") == "pip install '.[train]'"
    monkeypatch.chdir(clone / "tests")
    assert install_command("lens") == f"pip install '{clone}[lens]'"


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ({"dir_info": {}, "url": "file:///home/me/a%20clone"}, "pip install '/home/me/a clone[hf]'"),
        ({"vcs_info": {"vcs": "git"}, "url": "https://x.org/l.git"}, "pip install 'lagwise[hf] @ git+https://x.org/l.git'"),
        ({}, "pip install 'lagwise[hf]'"),
    ],
    ids=["folder", "repository", "index"],
)
def test_an_installed_package_is_installed_from_where_it_came(noted, command, monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "lagwise" / "extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: extras_note(json.dumps(noted) if noted else None))
    assert install_command("hf") == command


class extras_note:
    def __init__(self, text):
        self.text = text

    def read_text(self, name):
        return self.text if name == "direct_url.json" else None


def test_one_place_words_how_to_install():
    package = extras.Path(extras.__file__).parent
    wording = {path.name for path in package.rglob("*.py") if re.search(r"pip install", path.read_text())}
    assert wording == {"extras.py"}


# Threads


def test_small_models_have_one_thread(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small, large = make_config("process-50"), make_config("process-50", dim=512, batch=64)
    assert is_small(small) and not is_small(large)
    use_threads(None, [small, small])
    use_threads(None, [small, large])
    use_threads(3, [large])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_threads(None, [small])
    assert chosen == [1, 3]
