"""Writes the tables and figures of docs/findings anew, from lines in results/.

    python tools/findings.py
    python tools/findings.py --check

A mark in a page says which table stands there, up to its end:

    <!-- findings: published -->
    <!-- end -->

`--check` writes nothing, and fails where a table or a figure does not say what the lines say.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from statistics import fmean

from findings_figures import CODES, FIGURES, RELU, code_differences, described, is_significant
from findings_numbers import (
    RATES,
    ROOT,
    Source,
    at_length,
    curve,
    difference,
    group_of,
    lines_of,
    music_scores,
    paired,
    percent,
    scores,
    style_scores,
)
from findings_spe import LIMIT

from lagwise.lab.estimates import Estimate, estimate
from lagwise.lab.report.tables import markdown, signed

PAGES = ROOT / "docs" / "findings"
DRAWN = ROOT / "docs" / "figures"
BLOCK = re.compile(r"(<!-- findings: (.*?) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
LOG = "../log"

SQUAD, MINILM = Source("squad"), Source("squad-minilm", RATES[:1], ("absolute=remove",))
SECOND, LONG = Source("squad-8192"), Source("squad-went-on-long", RATES[:1], ("seed0",))
FIRST_TOKEN = percent("lra-image-first", RATES[:1], (*RELU, "steps=3600"))
TEXT = percent("lra-text", RATES[:1], RELU)
PERFORMER = percent("lra-text", RATES[:1], ("redraw=0", "feature_map=favor"))
RETRIEVAL = percent("lra-retrieval-mean", RATES[:1], RELU)
PRETRAIN, PRETRAIN_LONG = Source("pretrain", RATES[1:]), Source("pretrain", RATES[1:], score=at_length(2048))


def five_pretrainings() -> Estimate:
    """Returns what method 4 gains over the unchanged model, with a pre-training of its own for each of five seeds."""
    own = Source("squad-went-on-long", RATES[:1], ("seed{seed}",))
    found = {}
    for name in ("huang4", "learned"):
        found[name] = {0: scores(LONG, name)[0], **scores(own, name)}
    return needed(paired(found["huang4"], found["learned"]))


def needed(found: Estimate | None) -> Estimate:
    """Returns a difference that must be there."""
    if found is None:
        raise ValueError("both encodings must have a seed in common, but have none")
    return found


def without_priors(name: str) -> Estimate:
    """Returns what the validation F1 of SQuAD loses where no head has its prior."""
    curves = [line["values"] for line in lines_of("ablation") if line["config"]["encoding"] == name]
    return estimate([values[0] - values[-1] for values in curves])


def longer_windows(name: str) -> Estimate:
    """Returns by how many bits per byte windows of 2,048 tokens differ from those of the training."""
    return needed(paired(scores(PRETRAIN_LONG, name), scores(PRETRAIN, name)))


def beyond(file: str, name: str) -> Estimate:
    """Returns by how many nats per token music beyond the training length differs from sinusoidal positions."""
    return needed(paired(music_scores(file, name, beyond=True), music_scores(file, "sinusoidal", beyond=True)))


def last_quarter() -> Estimate:
    """Returns how much more like their piece drums with filters are than with sinusoidal positions, in the last quarter."""
    return needed(paired(style_scores("conv-spe", 3), style_scores("sinusoidal", 3)))


def gap(source: Source, name: str, baseline: str) -> Callable[[], Estimate]:
    """Returns what measures a difference."""
    return lambda: difference(source, name, baseline)


def short(found: Estimate) -> str:
    """Returns a difference with its sign, that of one run with two digits.

    >>> short(Estimate(-0.04071, None, 1)), short(Estimate(6.62, 0.6, 10))
    ('-0.041', '+6.62 ± 0.60')
    """
    return f"{found.mean:+.2g}" if found.half_width is None else signed(found)


@dataclass(frozen=True)
class Decision:
    """A row of the table "which encoding when".

    Args:
        need: What a reader has or needs.
        take: What to take.
        grade: Of the evidence.
        why: Why, with a place for the number.
        number: That number.
        link: The section of the log, and what it is called.
    """

    need: str
    take: str
    grade: str
    why: str
    number: Callable[[], Estimate]
    link: tuple[str, str]


DECISIONS = [
    Decision(
        "Little data, and order decides", "`at5`", "A", "{} points of accuracy over T5 on Reber",
        gap(percent("reber", RATES), "at5", "t5"), ("paper1.md#reber", "Reber"),
    ),
    Decision(
        "An encoder trained from scratch", "`at5` or `t5`", "B", "{} F1 for T5 over learned positions on SQuAD",
        gap(SQUAD, "t5", "learned"), ("paper1.md#squad-from-scratch", "SQuAD"),
    ),
    Decision(
        "Inputs longer than in training", "`at5`", "B", "{} bits per byte at eight times the length; first in all set-ups",
        lambda: longer_windows("at5"), ("paper2.md#at-256-tokens", "windows"),
    ),
    Decision(
        "A converted model, and text to pre-train on", "`at5` or `huang4`, after 6,000 steps", "B",
        "{} F1 for AT5 over the unchanged model", gap(LONG, "at5", "learned"),
        ("paper2.md#six-thousand-further-steps", "MiniLM"),
    ),
    Decision(
        "A converted model, and little data", 'any, with `absolute="keep"`', "B", "{} F1 for AT5 without absolute positions",
        gap(MINILM, "at5", "learned"), ("paper2.md#a-converted-minilm", "conversion"),
    ),
    Decision(
        "Linear attention, classification", "`rotary` or absolute; SPE with `fixed=True`", "B",
        "{} points on images for sines with new codes", gap(FIRST_TOKEN, "new sine-spe", "learned"),
        ("paper3.md#images-read-from-a-first-token", "images"),
    ),
    Decision(
        "Linear attention, longer than in training", "`t5-free`, then `conv-spe`", "B",
        "{} nats for `t5-free` against sinusoidal on piano", lambda: beyond("piano", "t5-free"), ("paper3.md#piano", "piano"),
    ),
]  # fmt: skip


def decision_lines() -> list[str]:
    """Returns the table "which encoding when"."""
    rows = [
        [row.need, row.take, row.grade, row.why.format(short(row.number())), f"[{row.link[1]}]({LOG}/{row.link[0]})"]
        for row in DECISIONS
    ]
    return markdown(["You have or need", "Take", "Grade", "Why", "Log"], rows)


@dataclass(frozen=True)
class Claim:
    """A published result beside ours.

    Args:
        words: What is compared.
        published: The published difference, or "higher" or "lower" where it has no number.
        measured: Ours.
        unit: Of both.
        link: The section of the log.
        level: The published difference is within its own noise: ours is compared with it, not with zero.
    """

    words: str
    published: float | str
    measured: Callable[[], Estimate]
    unit: str
    link: str
    level: bool = False


PAPER1 = [
    Claim("AT5 over T5, Reber", "higher", gap(percent("reber", RATES), "at5", "t5"), "points", "#reber"),
    Claim("AT5 over T5, Process-50", "higher", gap(percent("process-50", RATES), "at5", "t5"), "points", "#process-50"),
    Claim("AT5 over T5, SQuAD, first encoders", 0.51, gap(SQUAD, "at5", "t5"), "F1", "#squad-from-scratch"),
    Claim("AT5 over T5, SQuAD, second encoders", 0.51, gap(SECOND, "at5", "t5"), "F1", "#second-encoders"),
    Claim("T5 without its priors, SQuAD", -57.22, lambda: without_priors("t5"), "F1", "#ablation-of-priors"),
]  # fmt: skip
PAPER2 = [
    Claim("Method 4 over absolute, from scratch", 2.02, gap(SQUAD, "huang4", "learned"), "F1", "#squad"),
    Claim("Method 4 over absolute, converted MiniLM", 2.02, five_pretrainings, "F1", "#six-thousand-further-steps"),
    Claim("Method 4 under method 3, pre-training", "lower", gap(PRETRAIN, "huang4", "huang3"), "bits", "#at-256-tokens"),
]  # fmt: skip
PAPER3 = [
    Claim(
        "Sines over absolute, text, fixed codes", 0.11, gap(TEXT, "fixed sine-spe", "sinusoidal"), "points", "#text",
        level=True,
    ),
    Claim("Sines over absolute, text, new codes", 0.11, gap(TEXT, "new sine-spe", "sinusoidal"), "points", "#text", level=True),
    Claim(
        "Sines over absolute, images, fixed codes", -1.04, gap(FIRST_TOKEN, "fixed sine-spe", "learned"), "points",
        "#images-read-from-a-first-token", level=True,
    ),
    Claim(
        "Sines over absolute, images, new codes", -1.04, gap(FIRST_TOKEN, "new sine-spe", "learned"), "points",
        "#images-read-from-a-first-token", level=True,
    ),
    Claim("Sines over absolute, retrieval", 3.61, gap(RETRIEVAL, "sine-spe", "sinusoidal"), "points", "#retrieval-a-substitute"),
    Claim("Filters under absolute, piano beyond length", "lower", lambda: beyond("piano", "conv-spe"), "nats", "#piano"),
    Claim("Filters over absolute, drums, last quarter", 0.15, last_quarter, "cosine", "#drums"),
]  # fmt: skip
CLAIMS = {"paper1": PAPER1, "paper2": PAPER2, "paper3": PAPER3}
"""What the papers say and we measured, by the page of the log."""


def verdict(claim: Claim, found: Estimate) -> str:
    """Returns what a measurement says about a claim, by one rule for all."""
    published = {"higher": 1.0, "lower": -1.0}[claim.published] if isinstance(claim.published, str) else claim.published
    same_direction = found.mean * published > 0
    if found.half_width is None:
        return "same direction, one run" if same_direction else "other direction, one run"
    if claim.level:
        return "compatible" if covers(found, published) else f"{'higher' if found.mean > published else 'lower'} than published"
    if not is_significant(found):
        return "no significant difference"
    if not same_direction:
        return "contradicted"
    if isinstance(claim.published, str) or covers(found, published):
        return "confirmed"
    return f"confirmed, {'larger' if abs(found.mean) > abs(published) else 'smaller'}"


def covers(found: Estimate, value: float) -> bool:
    """Says whether a value is inside an interval."""
    return abs(found.mean - value) <= (found.half_width or 0.0)


def published_lines() -> list[str]:
    """Returns the table of published against measured."""
    rows = []
    for page, claims in CLAIMS.items():
        for claim in claims:
            found = claim.measured()
            told = claim.published if isinstance(claim.published, str) else f"{claim.published:+g}"
            words = f"[{claim.words}]({LOG}/{page}.md{claim.link})"
            rows.append([words, told, f"{short(found)} {claim.unit}", verdict(claim, found)])
    return markdown(["What is compared", "Published", "Measured", "Verdict"], rows)


def code_lines() -> list[str]:
    """Returns SPE beside absolute positions, with new and with fixed codes."""
    kinds = {kind: code_differences(kind) for kind in ("sine-spe", "conv-spe")}
    rows = [
        [
            title,
            *(signed(kinds[kind][title][word]) if title in kinds[kind] else "" for kind in kinds for word in ("new", "fixed")),
        ]
        for title in CODES
    ]
    return markdown(["Task", "sines, new codes", "sines, fixed", "filters, new codes", "filters, fixed"], rows)


def fixed_lines() -> list[str]:
    """Returns how much more SPE has with fixed codes than with new ones."""
    rows = []
    for title, (source, _) in CODES.items():
        both = [paired(scores(source, f"fixed {kind}"), scores(source, f"new {kind}")) for kind in ("sine-spe", "conv-spe")]
        rows.append([title, *("" if found is None else signed(found) for found in both)])
    return markdown(["Fixed minus new codes, points", "sines", "filters"], rows)


def sum_lines() -> list[str]:
    """Returns how many sums of queries no longer fit the published seed."""
    rows = []
    for task, title in {"listops": "ListOps", "image": "images", "text": "text"}.items():
        found = [abs(each) for line in lines_of("spe-seeds") if line.get("task") == task for each in line["sums"]]
        beyond_limit = sum(each > LIMIT for each in found)
        rows.append([title, str(len(found)), str(beyond_limit), f"{min(found):,.0f}", f"{max(found):,.0f}"])
    return markdown(["Task", "layers", f"of them beyond {LIMIT:.0f}", "smallest sum", "largest sum"], rows)


def cast_lines() -> list[str]:
    """Returns what jax makes of sums."""
    found = [line for line in lines_of("spe-seeds") if line["kind"] == "casts"]
    rows = [[f"{given:,.0f}", *(f"{line['seeds'][place]:,}" for line in found)] for place, given in enumerate(found[0]["sums"])]
    heads = [f"seed, jax {line['environment']['jax']}, {line['environment']['platform'].upper()}" for line in found]
    return markdown(["sum of queries", *heads], rows)


def swap_lines() -> list[str]:
    """Returns the accuracy of trained models with their own codes and with others."""
    rows = []
    for fixed, title in ((True, "fixed codes"), (False, "new codes each step")):
        found = [line for line in lines_of("spe-swaps") if line["config"]["encoding_options"]["fixed"] is fixed]
        own = [100 * line["own"] for line in found]
        others = [100 * fmean(line["others"]) for line in found]
        rows.append(
            [
                title,
                str(estimate(own)),
                str(estimate(others)),
                signed(estimate([b - a for a, b in zip(own, others, strict=True)])),
            ]
        )
    return markdown(["Trained with", "own codes", "five other draws", "change in points"], rows)


def overfit_lines() -> list[str]:
    """Returns losses of SQuAD from scratch, by the step: the mean over seeds."""
    group = group_of(SQUAD)
    rows = []
    for name, seeds in group.runs.items():
        runs = list(seeds.values())
        trained, checked = curve(runs, None), curve(runs, "validation")
        rows.append((min(checked.values()), [f"`{name}`", f"{trained[2000]:.2f}", *(f"{loss:.2f}" for loss in checked.values())]))
    head = ["encoding", "training loss, step 2,000", *(f"validation loss, {step:,}" for step in (500, 1000, 1500, 2000))]
    return markdown(head, [row for _, row in sorted(rows)])


TABLES: dict[str, Callable[[], list[str]]] = {
    "decisions": decision_lines,
    "published": published_lines,
    "codes": code_lines,
    "fixed": fixed_lines,
    "sums": sum_lines,
    "casts": cast_lines,
    "swaps": swap_lines,
    "overfit": overfit_lines,
}


def filled(text: str) -> str:
    """Returns a page with its tables written anew."""
    return BLOCK.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[3], text)


def pages() -> list[Path]:
    """Returns the pages that have marks of findings."""
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if "<!-- findings:" in page.read_text()]


def stored_numbers(path: Path) -> object:
    """Returns the numbers that a figure carries."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), flags=re.DOTALL)
    return json.loads(unescape(found[1])) if found else None


def draw(name: str) -> None:
    """Writes a figure with its numbers."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "DejaVu Sans"}):
        metadata = {"Description": described(name), "Date": None}
        FIGURES[name][1]().savefig(DRAWN / f"{name}.svg", facecolor="white", metadata=metadata)


def stale() -> list[str]:
    """Returns what does not say what the lines say."""
    found = [str(page.relative_to(ROOT)) for page in pages() if filled(page.read_text()) != page.read_text()]
    for name in FIGURES:
        path = DRAWN / f"{name}.svg"
        if not path.is_file() or stored_numbers(path) != json.loads(described(name)):
            found.append(str(path.relative_to(ROOT)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; fail where something is not what the lines say.")
    if parser.parse_args(arguments).check:
        found = stale()
        if found:
            print(f"{', '.join(found)}: not what the lines say; run python tools/findings.py", file=sys.stderr)
        return int(bool(found))
    for page in pages():
        page.write_text(filled(page.read_text()))
    for name in FIGURES:
        draw(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
