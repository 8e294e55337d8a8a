"""Tables of documents from lines of results: what they say, and that the published ones say what their lines say."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_compare import stored
from typer.testing import CliRunner

from lagwise.lab import records
from lagwise.lab.cli import app
from lagwise.lab.config import Config
from lagwise.lab.estimates import estimate
from lagwise.lab.report import tables
from lagwise.lab.tasks import TASKS

ROOT = Path(__file__).parent.parent
HEAD = {"device": "a GPU", "torch": "2.11", "commit": "abc", "date": "2026-01-01", "data": "files"}


PUBLISHED = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "\n<!-- results:" in page.read_text()]


@pytest.mark.parametrize("page", PUBLISHED, ids=lambda page: str(page.relative_to(ROOT)))
def test_published_pages_say_what_their_lines_say(page):
    assert tables.fill_document(page, ROOT, figures=False) == page.read_text(), f"run `lagwise results {page.relative_to(ROOT)}`"


def test_the_log_has_the_tables_of_all_papers():
    assert {page.name for page in PUBLISHED if page.parent.name == "log"} == {"models.md", "paper1.md", "paper2.md", "paper3.md"}
    assert sum(page.read_text().count("<!-- results:") for page in PUBLISHED) >= 39


def project(folder: Path, mark: str) -> Path:
    """Makes a page with one mark, and its lines."""
    runs = []
    for encoding, values in {"t5": [0.5, 0.7], "at5": [0.6, 0.82]}.items():
        for seed, value in enumerate(values):
            lengths = {"64": {"loss": 1.0, "accuracy": value / 2}, "128": {"refused": "too long"}}
            run = stored(folder / "runs", encoding, seed, value, environment=HEAD, lengths=lengths, seconds=3.0)
            run.log({"step": 1, "loss": 1.0, "seconds": 1.0, "tokens": 9})
            run.log({"step": 2, "loss": 0.5, "seconds": 1.0, "tokens": 9})
            runs.append(run)
    records.save_runs(runs, folder / "results" / "some.jsonl")
    page = folder / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"# Before\n<!-- results: {mark} -->\nold\n<!-- end -->\nafter\n")
    return page


def test_standings_by_hand(tmp_path):
    page = project(tmp_path, "standings results/some.jsonl --percent --figure docs/some.png")
    lines = tables.fill_document(page, tmp_path, figures=True).splitlines()
    # Two seeds have t = 12.7062: at5's mean is 71, its deviation 11 sqrt(2), so that the half-width is 12.7062 x 11; the
    # differences are 10 and 12.
    assert lines[2:6] == [
        "| encoding | test accuracy in % | minus `t5` | at 64 | at 128 | seeds | its parameters |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| `at5` | 71 ± 140 | +11 ± 13 | 36 ± 70 | refused | 2 | 10 |",
        "| `t5` | 60 ± 127 |  | 30 ± 64 | refused | 2 | 10 |",
    ]
    assert lines[7] == "4 runs in results/some.jsonl: a GPU, torch 2.11, commit abc, 2026-01-01, 3.0 s of training each."
    assert lines[9] == "![Learning curves and means with intervals, from results/some.jsonl](some.png)"
    assert lines[0] == "# Before" and lines[10:] == ["<!-- end -->", "after"]
    assert (tmp_path / "docs" / "some.png").read_bytes().startswith(b"\x89PNG")


def test_a_baseline_and_what_is_tuned_are_in_the_table(tmp_path):
    page = project(tmp_path, "standings results/some.jsonl --baseline at5 --tune rate")
    lines = tables.fill_document(page, tmp_path, figures=False).splitlines()
    assert lines[2] == "| encoding | test accuracy | minus `at5` | at 64 | at 128 | rate | seeds | its parameters |"
    assert lines[5] == f"| `t5` | 0.6 ± 1.3 | -0.11 ± 0.13 | 0.30 ± 0.64 | refused | {Config('process-50').rate} | 2 | 10 |"


def test_another_metric_beside_the_one_that_counts(tmp_path):
    page = project(tmp_path, "standings results/some.jsonl --also loss")
    lines = tables.fill_document(page, tmp_path, figures=False).splitlines()
    head, row = ([cell.strip() for cell in lines[number].split("|")] for number in (2, 4))
    losses = [records.read_runs(tmp_path / "results" / "some.jsonl")[number].result["test"]["loss"] for number in (2, 3)]
    assert head[2:5] == ["test accuracy", "minus `t5`", "test loss"] and row[1] == "`at5`"
    assert row[4] == str(estimate(losses))


def overview(folder: Path, scores: dict[str, dict[str, list[float]]], words: str = "") -> list[str]:
    """Returns the overview of accuracies by the task, the encoding and the seed."""
    runs = [
        stored(
            folder / task,
            encoding,
            seed,
            value,
            config=Config(task),
            environment=HEAD,
            seconds=3.0,
            metric=TASKS[task].facts.metric,
        )
        for task, encodings in scores.items()
        for encoding, values in encodings.items()
        for seed, value in enumerate(values)
    ]
    records.save_runs(runs, folder / "results" / "some.jsonl")
    page = folder / "page.md"
    page.write_text(f"<!-- results: overview results/some.jsonl {words}-->\n<!-- end -->\n")
    return tables.fill_document(page, folder, figures=False).splitlines()[1:-1]


def test_an_overview_by_hand(tmp_path):
    scores = {
        "process-50": {"t5": [0.5, 0.7], "at5": [0.6, 0.82], "shaw": [0.5, 0.6]},
        "reber": {"t5": [0.9, 0.9], "at5": [1.0, 0.96], "shaw": [0.8, 0.6]},
        "adding": {"t5": [1.0, 1.0], "at5": [0.0, 0.0]},
    }
    # The mean leaves adding out, where shaw takes no part: at5 has 0.8 and 0.89, t5 0.7 and 0.8.
    assert overview(tmp_path, scores, "--percent ") == [
        "| encoding | adding: accuracy | process-50: accuracy | reber: accuracy | mean of 2 | seeds |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `at5` | 0 (-100) | 71 (+11 ± 13) | 98 (+8 ± 25) | 84.5 (+9.5 ± 6.4) | 2 |",
        "| `t5` | 100 | 60 | 90 | 75 | 2 |",
        "| `shaw` | - | 55 (-5 ± 64) | 70 (-20 ± 127) | 62.5 (-12 ± 95) | 2 |",
        "",
        "Test split, in %; in brackets the difference from `t5` within seeds.",
        "",
        "16 runs in results/some.jsonl: a GPU, torch 2.11, commit abc, 2026-01-01, 3.0 s of training each.",
    ]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ({"reber": {"t5": [1.0]}, "adding": {"shaw": [1.0]}}, "--baseline that takes part in all"),
        ({"reber": {"t5": [1.0], "shaw": [1.0]}, "adding": {"t5": [1.0], "at5": [1.0]}}, "a task and a seed that all"),
        ({"reber": {"t5": [1.0]}, "lm": {"t5": [1.0]}}, "all better when higher, or all when lower"),
    ],
)
def test_overviews_that_cannot_be_made(tmp_path, scores, words):
    with pytest.raises(ValueError, match=words):
        overview(tmp_path, scores)


def test_models_by_hand(tmp_path):
    common = {**HEAD, "bench": "models", "attention": "softmax"}
    records = [
        {**common, "contender": "none", "time": 512, "tokens_per_s": 1_234_567.0, "held_bytes": 3 * 2**30, "speed_ratio": 1.0},
        {**common, "contender": "t5", "time": 512, "speed_ratio": 0.875, "memory_ratio": 1.0312},
        {**common, "contender": "t5", "time": 64, "error": "OutOfMemoryError: CUDA out of memory"},
        {**common, "contender": "permute", "time": 512, "error": "ValueError: it acts on features"},
    ]
    page = project(tmp_path, "models results/models.jsonl")
    (tmp_path / "results" / "models.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = tables.fill_document(page, tmp_path, figures=False).splitlines()
    assert lines[2:8] == [
        "**softmax attention**", "", "| encoding | T = 64 | T = 512 |", "| --- | --- | --- |",
        "| `none` |  | 1,235 k tokens/s, 3.0 GiB |", "| `t5` | out of memory | 0.88, 1.03x |",
    ]  # fmt: skip
    assert lines[9] == "4 lines in results/models.jsonl: a GPU, torch 2.11, commit abc, 2026-01-01."


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("cup results/some.jsonl", r"a mark must be `results: .*`, but argument kind: invalid choice: 'cup'"),
        ("standings", r"a mark must be `results: .*`, but the following arguments are required: file"),
        ("standings results/some.jsonl --also los", r"--also must be one of loss, accuracy, but is 'los': did you mean 'loss'"),
        ("standings results/other.jsonl", r"page.md: a mark must name a file of results, but results/other.jsonl is not there"),
    ],
)
def test_marks_that_cannot_be_filled(tmp_path, mark, message):
    with pytest.raises(ValueError, match=message):
        tables.fill_document(project(tmp_path, mark), tmp_path, figures=False)


def test_a_mark_without_an_end(tmp_path):
    page = project(tmp_path, "standings results/some.jsonl")
    page.write_text("<!-- results: standings results/some.jsonl -->\n")
    with pytest.raises(ValueError, match="with an `<!-- end -->` after it"):
        tables.fill_document(page, tmp_path, figures=False)


def test_the_command_writes_and_checks(tmp_path):
    page = project(tmp_path, "standings results/some.jsonl")
    arguments = ["results", str(page), "--root", str(tmp_path)]
    stale = CliRunner().invoke(app, [*arguments, "--check"])
    assert stale.exit_code == 1 and "run lagwise results" in stale.output and "old" in page.read_text()
    assert "is written anew" in " ".join(CliRunner().invoke(app, arguments).output.split())
    assert "`at5`" in page.read_text() and CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0


def test_positions_by_hand(tmp_path):
    config = Config("lm", task_options={"length": 64})
    runs = []
    for encoding, shift in {"t5": 0.0, "at5": -0.5}.items():
        for seed in range(2):
            own = [[0, 2.0 + shift, 10], [32, 1.0 + shift, 30]]
            longer = [*own, [64, 3.0 + shift + seed, 10], [96, 5.0 + shift + seed, 10]]
            curves = {"own": {"loss_by_position": own}, "128": {"loss_by_position": longer}}
            run = stored(
                tmp_path / "runs", encoding, seed, 1.0, config=config, metric="bits_per_byte", environment=HEAD, curves=curves,
                seconds=3.0,
            )  # fmt: skip
            runs.append(run)
    # A table that ends with the training refuses the longer texts.
    ended = {"own": {"loss_by_position": [[0, 2.0, 10], [32, 4.0, 10]]}}
    more = {"config": config, "metric": "bits_per_byte", "environment": HEAD, "seconds": 3.0}
    runs.append(stored(tmp_path / "runs", "learned", 0, 1.0, curves=ended, **more))
    page = project(tmp_path, "positions results/lm.jsonl --figure docs/lm.png")
    records.save_runs(runs, tmp_path / "results" / "lm.jsonl")
    lines = tables.fill_document(page, tmp_path, figures=True).splitlines()
    # Within 64: (2 x 10 + 1 x 30) / 40. Beyond: 4 and 5 for the two seeds, whose interval is 12.7062 / 2.
    assert lines[2:7] == [
        "| encoding | nats per token up to 64 | beyond 64 | beyond, minus `t5` | seeds |",
        "| --- | --- | --- | --- | --- |",
        "| `at5` | 0.75 | 4.0 ± 6.4 | -0.5 | 2 |",
        "| `t5` | 1.25 | 4.5 ± 6.4 |  | 2 |",
        "| `learned` | 3 | refused |  | 1 |",
    ]
    assert lines[10] == "![Loss against position, from results/lm.jsonl](lm.png)"
    assert (tmp_path / "docs" / "lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("task", "metric", "words"),
    [("listops", "accuracy", "must be of a task with a length"), ("lm", "bits_per_byte", "must have losses by position")],
)
def test_positions_need_losses(tmp_path, task, metric, words):
    page = project(tmp_path, "positions results/some.jsonl")
    run = stored(tmp_path / "other", "t5", 0, 1.0, config=Config(task), metric=metric)
    records.save_runs([run], tmp_path / "results" / "some.jsonl")
    with pytest.raises(ValueError, match=words):
        tables.fill_document(page, tmp_path, figures=False)


def config_of(encoding: str, seed: int, **fields) -> dict:
    """Returns the config of a run on drums as its line has it."""
    return replace(Config("groove"), encoding=encoding, seed=seed, **fields).to_json()


def test_ablations_by_hand(tmp_path):
    known = {"bench": "ablation", "environment": HEAD, "split": "validation", "metric": "f1", "heads": []}
    page = project(tmp_path, "ablation results/ablation.jsonl --figure docs/ablation.png")
    found = [
        {**known, "config": config_of("t5", 0), "values": [1.0, 2.0, 3.0, 4.0, 5.0]},
        {**known, "config": config_of("t5", 1), "values": [1.0, 2.0, 3.0, 4.0, 7.0]},
        {**known, "config": config_of("at5", 0), "values": [0.0, 0.0, 8.0, 8.0, 9.0]},
    ]
    (tmp_path / "results" / "ablation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    lines = tables.fill_document(page, tmp_path, figures=True).splitlines()
    assert lines[2:6] == [
        "| encoding, validation f1 | without priors | a quarter of the heads | half | three quarters | all | heads | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `t5` | 1 | 2 | 3 | 4 | 6 ± 13 | 4 | 2 |",
        "| `at5` | 0 | 0 | 8 | 8 | 9 | 4 | 1 |",
    ]
    assert lines[7] == "3 lines in results/ablation.jsonl: a GPU, torch 2.11, commit abc, 2026-01-01."
    assert (tmp_path / "docs" / "ablation.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "results" / "ablation.jsonl").write_text((json.dumps(found[0]) + "\n") * 2)
    with pytest.raises(ValueError, match=r"line 1 and .*line 2 hold the same run"):
        tables.fill_document(page, tmp_path, figures=False)


def styles_of(encoding, seed, *rows, prompts=("test:0", "test:1"), **fields) -> dict:
    """Returns a line of `lagwise styles`."""
    known = {"bench": "styles", "environment": HEAD, "sampling": {"count": 3, "seed": 0}, "prompts": list(prompts)}
    return {**known, "config": config_of(encoding, seed, **fields), "styles": {"onset-drum": rows}}


ROWS = ([0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2])


def styles_page(folder: Path, lines: list[dict], more: str = "") -> Path:
    """Makes a page with the styles of some lines."""
    page = project(folder, f"styles results/styles.jsonl{more}")
    (folder / "results" / "styles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return page


def test_styles_by_hand(tmp_path):
    found = [
        styles_of("rotary", 0, *ROWS),
        styles_of("sinusoidal", 0, [0.9, 0.8, 0.1, 0.1], [0.7, 0.6, 0.1, 0.1]),
        styles_of("rotary", 1, [0.5, 0.4, 0.3, 0.4]),
    ]
    page = styles_page(tmp_path, found, " --figure docs/styles.png")
    lines = tables.fill_document(page, tmp_path, figures=True).splitlines()
    # Medians of the continuations, then means of the seeds; only seed 0 has both encodings.
    assert lines[2:6] == [
        "| encoding, onset-drum | 1st quarter | 2nd | 3rd | 4th | 4th, minus `sinusoidal` | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| `rotary` | 0.5 | 0.4 | 0.3 | 0.3 ± 1.3 | +0.1 | 2 |",
        "| `sinusoidal` | 0.8 | 0.7 | 0.1 | 0.1 |  | 1 |",
    ]
    assert lines[7] == (
        "3 lines (3 continuations of 2 pieces each) in results/styles.jsonl: a GPU, torch 2.11, commit abc, 2026-01-01."
    )
    assert (tmp_path / "docs" / "styles.png").read_bytes().startswith(b"\x89PNG")
    figure = tables.style_figure(tmp_path, tables.parse_mark("styles results/styles.jsonl"))
    assert [name.get_text() for name in figure.legends[0].get_texts()] == ["rotary", "sinusoidal"]
    assert figure.axes[0].get_ylabel() == "onset-drum, cosine with the piece"


def test_styles_tell_options_of_one_encoding_apart(tmp_path):
    gates = [styles_of("sine-spe", 0, *ROWS, encoding_options={"gated": gated}) for gated in (True, False)]
    text = tables.fill_document(styles_page(tmp_path, gates), tmp_path, figures=False)
    assert "`sine-spe (gated=true)`" in text and "`sine-spe (gated=false)`" in text


@pytest.mark.parametrize(
    ("second", "more", "words"),
    [
        (styles_of("t5", 0, *ROWS), " --baseline at5", "--baseline must be one of rotary, t5, but is 'at5'"),
        (styles_of("t5", 0, *ROWS, prompts=["test:9"]), "", "must have lines that are drawn alike from the same prompts"),
        (styles_of("t5", 0, *ROWS, task="piano"), "", "but they differ in task, task_options: put them into files of their own"),
        (styles_of("t5", 0, *ROWS, task_options={"length": 9}), "", "but they differ in task_options"),
        (styles_of("rotary", 1, *ROWS, dim=512), "", "but they differ in dim"),
        (styles_of("rotary", 1, *ROWS, rate=0.5), "", "but they differ in rate.* or name what was tuned by --tune"),
        (styles_of("rotary", 0, *ROWS), "", "line 1 and .*line 2 hold the same run"),
    ],
)
def test_styles_of_runs_that_do_not_belong_together_are_refused(tmp_path, second, more, words):
    page = styles_page(tmp_path, [styles_of("rotary", 0, *ROWS), second], more)
    with pytest.raises(ValueError, match=words):
        tables.fill_document(page, tmp_path, figures=False)


def test_styles_of_tuned_runs_are_compared(tmp_path):
    found = [styles_of("rotary", 0, *ROWS), styles_of("t5", 0, *ROWS, rate=0.5)]
    assert "`t5`" in tables.fill_document(styles_page(tmp_path, found, " --tune rate"), tmp_path, figures=False)


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("styles", "", "must have lines of `lagwise styles --save`, but is empty"),
        ("ablation", "", "must have lines of `lagwise ablate --save`, but is empty"),
        ("ablation", '{"bench": "run"}', "line 1: is no line of 'ablation': expected are those of `lagwise ablate --save`"),
        ("models", '{"bench": "run"}', "line 1: is no line of 'models': expected are those of `lagwise bench models`"),
        ("models", "{", "char 1)): expected is a line of `lagwise bench models`: mend the line, or delete it"),
    ],
)
def test_lines_of_another_kind_are_refused(tmp_path, kind, content, words):
    page = project(tmp_path, f"{kind} results/other.jsonl")
    (tmp_path / "results" / "other.jsonl").write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        tables.fill_document(page, tmp_path, figures=False)


def test_models_have_no_figure(tmp_path):
    page = project(tmp_path, "models results/some.jsonl --figure docs/some.png")
    (tmp_path / "results" / "some.jsonl").write_text("")
    with pytest.raises(ValueError, match="a mark of kind 'models' must have no --figure"):
        tables.fill_document(page, tmp_path, figures=False)
