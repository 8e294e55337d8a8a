"""What a report is about: the groups of runs that are compared, in words."""

from collections.abc import Iterable

from lagwise.lab.grouping import Group

SAMPLE_NOTE = "The data is the small built-in sample: these numbers mean nothing. Pass --data for the real one."


def sentence(group: Group) -> str:
    """Returns in one sentence what was compared."""
    seeds = sorted({seed for own in group.runs.values() for seed in own})
    encodings = f"{len(group.runs)} position encoding{'s' if len(group.runs) > 1 else ''}"
    better = "higher" if group.higher_is_better else "lower"
    return (
        f"{group.title}: {encodings} in the same model, trained for {group.fields['steps']:,} steps "
        f"with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}; test {group.metric}, {better} is better"
    )


def is_sample(found: Iterable[Group]) -> bool:
    """Says whether any data was a built-in sample."""
    return any(result["sample"] for group in found for run in group.members if (result := run.result))
