"""Which encoding is best, in words that the numbers support.

An encoding is behind if it is significantly worse than another one, by a paired t-test within seeds whose level of 5 % is shared
out among the others that it is compared to. The truly best one is called behind with a probability of 5 % at most, so that it is
among the rest with 95 % confidence: multiple comparisons with the best (Hsu 1984), with Bonferroni's bound. The 5 % are those of
each encoding: that any of several equally good ones is called behind is likelier.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from lagwise.lab.estimates import CONFIDENCE, t_probability
from lagwise.lab.grouping import Group, best_first
from lagwise.lab.standings import scores_of

Scores = Mapping[str, Mapping[int, float]]
"""The metric by the name of the encoding and by the seed."""

SAMPLE = "The data is the small built-in sample, which supports no claim: pass --data for the real one."


def verdict_on(group: Group) -> str:
    """Returns which encodings of a group lead, in words."""
    if any(result["sample"] for run in group.members if (result := run.result)):
        return SAMPLE
    scores = {name: scores_of(seeds.values(), group.metric) for name, seeds in group.runs.items()}
    return verdict_on_scores(scores, metric=group.metric, higher_is_better=group.higher_is_better)


def verdict_on_scores(scores: Scores, *, metric: str, higher_is_better: bool) -> str:
    """Returns which encodings lead and which are behind, as far as the numbers support it.

    >>> scores = {"t5": {0: 0.8, 1: 0.81, 2: 0.82}, "none": {0: 0.5, 1: 0.5, 2: 0.51}}
    >>> verdict_on_scores(scores, metric="accuracy", higher_is_better=True).split(". ")[0]
    't5 is best: its accuracy is significantly higher than that of none'
    """
    finite = {name: own for name, own in scores.items() if own and all(map(math.isfinite, own.values()))}
    ranked = sorted(finite, key=lambda name: best_first(fmean(finite[name].values()), higher_is_better))
    said = [ranking(finite, ranked, metric, higher_is_better)] if len(ranked) > 1 else ["There is nothing to compare."]
    broken = [name for name in scores if name not in finite]
    said += [f"Without a finite {metric}, and left out: {list_names(broken)}."] if broken else []
    return " ".join(said)


def ranking(scores: Scores, ranked: Sequence[str], metric: str, higher_is_better: bool) -> str:
    """Returns what can be said of encodings in the order of their means."""
    best, *others = ranked
    untested = [name for name in others if len(scores[best].keys() & scores[name].keys()) < 2]
    tested = [name for name in ranked if name not in untested]
    highest = "highest" if higher_is_better else "lowest"
    if len(tested) == 1:
        return f"{best} has the {highest} {metric}, but one seed supports no claim: pass --seeds 3 or more."
    behind = [name for name in tested[1:] if is_behind(name, {each: scores[each] for each in tested}, higher_is_better)]
    leaders = [name for name in tested if name not in behind]
    higher = "higher" if higher_is_better else "lower"
    if len(leaders) == 1:
        said = [f"{best} is best: its {metric} is significantly {higher} than that of {list_names(behind)}."]
    elif tested[: len(leaders)] == leaders:
        said = [f"{list_names(leaders)} lead; no significant difference between them."]
    else:
        # One that varies much may be lower in the mean than one that is behind.
        said = [f"{best} has the {highest} {metric}; no significant difference between it and {list_names(leaders[1:])}."]
    said += [f"Significantly behind: {list_names(behind)}."] if behind and len(leaders) > 1 else []
    said += [f"One seed in common with {best} supports no claim about {list_names(untested)}."] if untested else []
    return " ".join([*said, method_words(len(tested) - 1)])


def is_behind(name: str, scores: Scores, higher_is_better: bool) -> bool:
    """Says whether an encoding is significantly worse than any other."""
    sign = 1 if higher_is_better else -1
    level = (1 - CONFIDENCE) / (len(scores) - 1)
    differences = [paired_differences(others, scores[name]) for other, others in scores.items() if other != name]
    return any(sign * sum(own) > 0 and p_value(own) < level for own in differences)


def paired_differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Returns the differences within the seeds that two encodings have in common."""
    return [first[seed] - second[seed] for seed in first if seed in second]


def p_value(differences: Sequence[float]) -> float:
    """Returns the p-value of a two-sided t-test of differences against zero; fewer than two say nothing.

    >>> round(p_value([1.0, 2.0, 3.0]), 4)
    0.0742
    """
    if len(differences) < 2 or not any(differences):
        return 1.0
    freedom = len(differences) - 1
    spread = stdev(differences) / math.sqrt(len(differences))
    # The angle whose tangent is t by the root of the degrees of freedom; a spread of zero is a right angle.
    return 1 - t_probability(math.atan2(abs(fmean(differences)), spread * math.sqrt(freedom)), freedom)


def method_words(others: int) -> str:
    """Returns how significance is come by where each encoding is compared to so many others."""
    shared = f" for each encoding, with Bonferroni's correction for its {others} others" if others > 1 else ""
    return f"(Paired t-tests within seeds at {100 * (1 - CONFIDENCE):.0f} %{shared}.)"


def list_names(names: Sequence[str]) -> str:
    """Returns names as a sentence lists them.

    >>> list_names(["t5", "at5", "shaw"])
    't5, at5 and shaw'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
