"""Tables and figures of a document, made from lines of results: what stands between two marks is written anew.

<!-- results: standings results/reber.jsonl --tune rate --percent -->
(written by `lagwise results`)
<!-- end -->
"""

import argparse
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from lagwise.errors import nearest
from lagwise.lab.curves import stored_losses
from lagwise.lab.estimates import Estimate, estimate
from lagwise.lab.experiment import make_task
from lagwise.lab.grouping import Group, as_argument, best_first, by_encoding, common_fields, groups, only_group
from lagwise.lab.records import Recorded, lines_of, read_runs
from lagwise.lab.report.figure import plot
from lagwise.lab.run_folder import Run
from lagwise.lab.standings import Row, baselines, differences_of, rows_of, scores_of
from lagwise.lens import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = re.compile(r"(<!-- results: (.*?) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


class MarkParser(argparse.ArgumentParser):
    """The words of a mark, whose mistakes are told like others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ValueError(f"a mark must be `{usage}`, but {message}")


def parse_mark(mark: str) -> argparse.Namespace:
    """Returns what a mark asks for."""
    parser = MarkParser(prog="results:", add_help=False)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--tune", action="append", default=[])
    parser.add_argument("--baseline")
    parser.add_argument("--also", action="append", default=[])
    parser.add_argument("--percent", action="store_true")
    parser.add_argument("--figure", type=Path)
    return parser.parse_args(shlex.split(mark))


def fill_document(document: Path, root: Path, *, figures: bool) -> str:
    """Returns a document with its tables written anew, and draws its figures if asked for.

    Args:
        document: The document.
        root: The folder that the files of marks are in.
        figures: Draw the figures of marks too.
    """

    def fill(found: re.Match[str]) -> str:
        wanted = parse_mark(found[2])
        if not (root / wanted.file).is_file():
            raise ValueError(f"{document}: a mark must name a file of results, but {wanted.file} is not there")
        kind = KINDS[wanted.kind]
        lines = kind.lines(root, wanted)
        if wanted.figure is not None:
            if kind.figure is None:
                raise ValueError(f"{document}: a mark of kind {wanted.kind!r} must have no --figure: there is none")
            if figures:
                (root / wanted.figure).parent.mkdir(parents=True, exist_ok=True)
                kind.figure(root, wanted).savefig(root / wanted.figure, dpi=90)
            link = os.path.relpath(root / wanted.figure, document.parent)
            lines += ["", f"![{kind.caption}, from {wanted.file}]({link})"]
        return found[1] + "\n".join(lines) + "\n" + found[3]

    text = document.read_text()
    if text.count("<!-- results:") != len(BLOCK.findall(text)):
        raise ValueError(
            f"{document}: each mark `<!-- results: ... -->` must stand on a line of its own, with an `<!-- end -->` after it"
        )
    return BLOCK.sub(fill, text)


def standings_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns the standings of some runs, and what they were run on."""
    runs = read_runs(root / wanted.file)
    found = groups(runs, wanted.tune)
    lines = []
    for group, baseline in zip(found, baselines(found, wanted.baseline), strict=True):
        lines += [f"**{group.title}**", ""] if len(found) > 1 else []
        lines += [*standings_table(group, baseline, wanted.also, 100.0 if wanted.percent else 1.0), ""]
    return [*lines, runs_provenance(wanted.file, runs)]


def standings_table(group: Group, baseline: str, also: Sequence[str], factor: float) -> list[str]:
    """Returns standings as a table, the best first, with other metrics beside the one that counts."""
    rows, known = rows_of(group), (group.members[0].result or {})["test"]
    for metric in also:
        if metric not in known:
            raise ValueError(f"--also must be one of {', '.join(known)}, but is {metric!r}{nearest(metric, known)}")
    paired = {found.encoding: found.estimate for found in differences_of(group, baseline)}
    lengths = sorted({length for row in rows for length in row.lengths})
    unit = " in %" if factor == 100.0 else ""
    head = ["encoding", f"test {group.metric}{unit}", f"minus `{baseline}`", *(f"test {metric}{unit}" for metric in also)]
    head += [*(f"at {length:,}" for length in lengths), *(field.replace("_", " ") for field in group.tune)]
    body = [standings_cells(row, paired.get(row.encoding), also, lengths, group, factor) for row in rows]
    return markdown([*head, "seeds", "its parameters"], body)


def standings_cells(
    row: Row, paired: Estimate | None, also: Sequence[str], lengths: Sequence[int], group: Group, factor: float
) -> list[str]:
    """Returns the cells of an encoding."""
    difference = "" if paired is None else signed(in_unit(paired, factor))
    others = (estimate(list(scores_of(group.runs[row.encoding].values(), metric).values())) for metric in also)
    told = (row.lengths.get(length, "-") for length in lengths)
    return [
        f"`{row.encoding}`", str(in_unit(row.test, factor)), difference, *(str(in_unit(other, factor)) for other in others),
        *("refused" if isinstance(found, str) else str(in_unit(found, factor)) for found in told),
        *(as_argument(row.options[field]) for field in group.tune), str(len(row.seeds)), f"{row.parameters:,}",
    ]  # fmt: skip


def overview_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns the tasks of some runs side by side: the metric of each, and its difference from the baseline within seeds.

    The mean is that of the tasks in which all encodings take part; it is taken for each seed, and so is its difference.
    """
    runs, factor = read_runs(root / wanted.file), 100.0 if wanted.percent else 1.0
    found = groups(runs, wanted.tune)
    if len({group.higher_is_better for group in found}) != 1:
        raise ValueError("tasks of an overview must have metrics that are all better when higher, or all when lower")
    baseline, *others = dict.fromkeys(baselines(found, wanted.baseline))
    if others:
        raise ValueError("an overview must have a --baseline that takes part in all of its tasks")
    names = list(dict.fromkeys(name for group in found for name in group.runs))
    scores = [{name: scores_of(seeds.values(), group.metric) for name, seeds in group.runs.items()} for group in found]
    complete = [own for own in scores if len(own) == len(names)]
    means = {name: mean_scores([own[name] for own in complete]) for name in names}
    head = ["encoding", *(f"{group.title}: {group.metric}" for group in found), f"mean of {len(complete)}", "seeds"]
    body = [
        [f"`{name}`", *(overview_cell(own, name, baseline, factor) for own in (*scores, means)), str(len(means[name]))]
        for name in sorted(names, key=lambda name: best_first(fmean(means[name].values()), found[0].higher_is_better))
    ]
    told = f"Test split{', in %' if wanted.percent else ''}; in brackets the difference from `{baseline}` within seeds."
    return [*markdown(head, body), "", told, "", runs_provenance(wanted.file, runs)]


def mean_scores(tasks: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Returns the mean over tasks for each seed that all of them have."""
    seeds = set.intersection(*(set(own) for own in tasks)) if tasks else set()
    if not seeds:
        raise ValueError("an overview must have a task and a seed that all encodings take part in")
    return {seed: fmean(own[seed] for own in tasks) for seed in sorted(seeds)}


def overview_cell(scores: Mapping[str, Mapping[int, float]], name: str, baseline: str, factor: float) -> str:
    """Returns the mean of an encoding, and how far it is from the baseline's."""
    own = scores.get(name)
    if own is None:
        return "-"
    differences = [own[seed] - scores[baseline][seed] for seed in own if seed in scores[baseline]]
    paired = f" ({signed(in_unit(estimate(differences), factor))})" if name != baseline and differences else ""
    return f"{in_unit(estimate(list(own.values())), factor).mean:.4g}{paired}"


def in_unit(found: Estimate, factor: float) -> Estimate:
    """Returns an estimate in another unit."""
    return Estimate(factor * found.mean, None if found.half_width is None else factor * found.half_width, found.count)


def signed(found: Estimate) -> str:
    """Returns a difference with its sign."""
    return f"{'+' if found.mean > 0 else ''}{found}"


def standings_figure(root: Path, wanted: argparse.Namespace) -> "Figure":
    """Returns learning curves and standings of some runs."""
    return plot(read_runs(root / wanted.file), wanted.tune)


def position_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns the loss of some runs within the length of their training and beyond, with differences within seeds."""
    runs = read_runs(root / wanted.file)
    group = only_group(runs)
    trained, (baseline,) = trained_length(group), baselines([group], wanted.baseline)
    parts = {name: {seed: parts_of(bins, trained) for seed, bins in position_losses(group, name).items()} for name in group.runs}
    beyond = {name: [own[1] for own in seeds.values()] for name, seeds in parts.items()}
    body = []
    for name, seeds in sorted(parts.items(), key=lambda each: best_first(fmean(beyond[each[0]]), higher_is_better=False)):
        differences = [own[1] - parts[baseline][seed][1] for seed, own in seeds.items() if seed in parts[baseline]]
        refused = any(map(math.isnan, beyond[name]))
        paired = "" if name == baseline or refused or not differences else signed(estimate(differences))
        within = estimate([own[0] for own in seeds.values()])
        told = "refused" if refused else str(estimate(beyond[name]))
        body.append([f"`{name}`", str(within), told, paired, str(len(seeds))])
    head = ["encoding", f"nats per token up to {trained:,}", f"beyond {trained:,}", f"beyond, minus `{baseline}`", "seeds"]
    return [*markdown(head, body), "", runs_provenance(wanted.file, runs)]


def position_figure(root: Path, wanted: argparse.Namespace) -> "Figure":
    """Returns the loss of some runs against the position, the mean over seeds."""
    group = only_group(read_runs(root / wanted.file))
    drawn = {}
    for name in group.runs:
        seeds = list(position_losses(group, name).values())
        drawn[name] = (sorted(seeds[0]), [fmean(own[start][0] for own in seeds) for start in sorted(seeds[0])])
    return plots.loss_by_position(drawn, trained_length=trained_length(group))


def trained_length(group: Group) -> int:
    """Returns the length that runs were trained at."""
    length = make_task(group.members[0].config, None).length
    if length is None:
        raise ValueError("runs must be of a task with a length, such as lm or piano, to have losses by position")
    return length


def position_losses(group: Group, name: str) -> dict[int, dict[int, tuple[float, int]]]:
    """Returns nats and tokens by the first position of a bin, at the longest length that an encoding takes, by the seed."""
    found = {}
    for seed, run in group.runs[name].items():
        by_length = stored_losses(run.result or {})
        if not by_length:
            raise ValueError(f"{run.folder} must have losses by position, but has none: train it with this version")
        own = by_length[max(by_length, key=lambda length: length or 0)]
        found[seed] = {start: (nats, count) for start, nats, count in zip(*(column.tolist() for column in own), strict=True)}
    return found


def parts_of(bins: dict[int, tuple[float, int]], trained: int) -> tuple[float, float]:
    """Returns the mean loss of the tokens within a length, and beyond it: not a number where there are none."""

    def mean(own: list[tuple[float, int]]) -> float:
        return sum(nats * count for nats, count in own) / sum(count for _, count in own) if own else math.nan

    within = [found for start, found in bins.items() if start < trained]
    return mean(within), mean([found for start, found in bins.items() if start >= trained])


def ablation_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns the metric of models with none of their priors, with some and with all, the mean over seeds."""
    runs = ablations(root, wanted)
    body = []
    for name, seeds in by_encoding(runs).items():
        curves = [run.content["values"] for run in seeds.values()]
        parts = ([curve[round(share * (len(curve) - 1) / 4)] for curve in curves] for share in range(5))
        body.append([f"`{name}`", *(str(estimate(values)) for values in parts), str(len(curves[0]) - 1), str(len(curves))])
    shares = ["without priors", "a quarter of the heads", "half", "three quarters", "all"]
    lines = markdown([f"encoding, validation {runs[0].content['metric']}", *shares, "heads", "seeds"], body)
    return [*lines, "", provenance(wanted.file, [run.environment for run in runs], "lines")]


def ablation_figure(root: Path, wanted: argparse.Namespace) -> "Figure":
    """Returns the metric against the number of heads that have their priors, the mean over seeds."""
    runs = ablations(root, wanted)
    means = {
        name: [fmean(values) for values in zip(*(run.content["values"] for run in seeds.values()), strict=True)]
        for name, seeds in by_encoding(runs).items()
    }
    return plots.ablation_curve(means, metric=f"validation {runs[0].content['metric']}, mean over seeds")


def ablations(root: Path, wanted: argparse.Namespace) -> list[Recorded]:
    """Returns the lines of `lagwise ablate`."""
    return measurements(root / wanted.file, "ablation", "lagwise ablate --save", wanted.tune)


def measurements(path: Path, kind: str, command: str, tune: Sequence[str]) -> list[Recorded]:
    """Returns lines of what was measured on runs, which differ in encoding, seed and fields that were tuned alone."""
    found = [Recorded(place, line) for place, line in lines_of(path, kind, command).items()]
    if not found:
        raise ValueError(f"{path} must have lines of `{command}`, but is empty")
    fields = [common_fields(run, tune) for run in found]
    others = [name for name in fields[0] if any(own[name] != fields[0][name] for own in fields)]
    if others:
        raise ValueError(
            f"{path} must have lines of runs that differ in encoding and seed alone, but they differ in {', '.join(others)}: "
            "put them into files of their own, or name what was tuned by --tune"
        )
    return found


def style_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns how like their pieces continuations are: the median of each quarter, the mean over seeds, for each histogram."""
    runs = styles(root, wanted)
    encodings = by_encoding(runs)
    baseline = wanted.baseline or ("sinusoidal" if "sinusoidal" in encodings else next(iter(encodings)))
    if baseline not in encodings:
        raise ValueError(f"--baseline must be one of {', '.join(encodings)}, but is {baseline!r}{nearest(baseline, encodings)}")
    lines = []
    for histogram in runs[0].content["styles"]:
        medians = {
            name: {seed: quarters_of(run.content["styles"][histogram]) for seed, run in seeds.items()}
            for name, seeds in encodings.items()
        }
        body = []
        for name, seeds in sorted(medians.items(), key=lambda each: -fmean(own[3] for own in each[1].values())):
            last = [own[3] - medians[baseline][seed][3] for seed, own in seeds.items() if seed in medians[baseline]]
            paired = "" if name == baseline or not last else signed(estimate(last))
            quarters = (str(estimate([own[quarter] for own in seeds.values()])) for quarter in range(4))
            body.append([f"`{name}`", *quarters, paired, str(len(seeds))])
        head = [f"encoding, {histogram}", "1st quarter", "2nd", "3rd", "4th", f"4th, minus `{baseline}`", "seeds"]
        lines += [*markdown(head, body), ""]
    what = f"lines ({runs[0].content['sampling']['count']} continuations of {len(runs[0].content['prompts'])} pieces each)"
    return [*lines, provenance(wanted.file, [run.environment for run in runs], what)]


def style_figure(root: Path, wanted: argparse.Namespace) -> "Figure":
    """Returns boxes of the first histogram, over all continuations of all seeds."""
    runs = styles(root, wanted)
    histogram = next(iter(runs[0].content["styles"]))
    rows = {
        name: Tensor([row for run in seeds.values() for row in run.content["styles"][histogram]])
        for name, seeds in by_encoding(runs).items()
    }
    return plots.quarter_boxes(rows, measure=f"{histogram}, cosine with the piece")


def styles(root: Path, wanted: argparse.Namespace) -> list[Recorded]:
    """Returns the lines of `lagwise styles`, all drawn alike from the same prompts."""
    found = measurements(root / wanted.file, "styles", "lagwise styles --save", wanted.tune)
    first = found[0].content
    if any((run.content["sampling"], run.content["prompts"]) != (first["sampling"], first["prompts"]) for run in found):
        raise ValueError(f"{root / wanted.file} must have lines that are drawn alike from the same prompts, but has others")
    return found


def quarters_of(rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns the median over continuations for each quarter."""
    return [median(quarter) for quarter in zip(*rows, strict=True)]


def model_lines(root: Path, wanted: argparse.Namespace) -> list[str]:
    """Returns speed and memory of whole models with each encoding, relative to none: a table for each kind of attention."""
    records = list(lines_of(root / wanted.file, "models", "lagwise bench models").values())
    lines = []
    for attention in dict.fromkeys(record["attention"] for record in records):
        own = [record for record in records if record["attention"] == attention]
        times = sorted({record["time"] for record in own})
        cells = {(record["contender"], record["time"]): model_cell(record) for record in own}
        names = [
            name for name in dict.fromkeys(record["contender"] for record in own) if any((name, time) in cells for time in times)
        ]
        body = [[f"`{name}`", *(cells.get((name, time), "") for time in times)] for name in names]
        body = [row for row in body if any(row[1:])]
        lines += [f"**{attention} attention**", "", *markdown(["encoding", *(f"T = {time:,}" for time in times)], body), ""]
    return [*lines, provenance(wanted.file, records, "lines")]


def model_cell(record: dict[str, Any]) -> str:
    """Returns the speed and the memory of a model; nothing where its attention cannot use the encoding."""
    if "error" in record:
        return "out of memory" if "OutOfMemory" in record["error"] else ""
    if record["contender"] == "none":
        return f"{record['tokens_per_s'] / 1000:,.0f} k tokens/s, {record['held_bytes'] / 2**30:.1f} GiB"
    return f"{record['speed_ratio']:.2f}, {record['memory_ratio']:.2f}x"


def runs_provenance(file: Path, runs: Iterable[Run]) -> str:
    """Returns where the numbers of runs come from, in one line."""
    return provenance(file, [{**run.environment, **(run.result or {})} for run in runs], "runs")


def provenance(file: Path, records: Sequence[dict[str, Any]], what: str) -> str:
    """Returns where numbers come from, in one line."""

    def all_of(name: str) -> str:
        return " and ".join(dict.fromkeys(str(record[name]) for record in records))

    seconds = [record["seconds"] for record in records if "seconds" in record]
    each = f", {fmean(seconds):,.1f} s of training each" if seconds else ""
    where = f"{all_of('device')}, torch {all_of('torch')}, commit {all_of('commit')}, {all_of('date')}"
    return f"{len(records)} {what} in {file}: {where}{each}."


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Returns a table.

    >>> markdown(["a", "b"], [["1", "2"]])
    ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    """
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


class Kind(NamedTuple):
    """What a mark may ask for."""

    lines: Callable[[Path, argparse.Namespace], list[str]]
    figure: Callable[[Path, argparse.Namespace], "Figure"] | None = None
    caption: str = ""


KINDS = {
    "standings": Kind(standings_lines, standings_figure, "Learning curves and means with intervals"),
    "overview": Kind(overview_lines),
    "positions": Kind(position_lines, position_figure, "Loss against position"),
    "ablation": Kind(ablation_lines, ablation_figure, "Metric with the priors of more and more heads"),
    "styles": Kind(style_lines, style_figure, "Likeness by quarter of the continuation"),
    "models": Kind(model_lines),
}
"""Made of runs that `lagwise compare --save` wrote; three of the lines of `lagwise ablate`, `styles` and `bench models`."""
