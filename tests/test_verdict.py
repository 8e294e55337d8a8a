"""The verdict on a comparison: what hand-made numbers support, and what they do not."""

import pytest

from lagwise.lab.report.verdict import p_value, verdict_on_scores

NOISE = (0.0, 0.01, -0.01, 0.005, -0.005)


def scores(seeds=3, **means):
    """Returns scores around some means; the noise is that of the seed, and a little of the encoding's own."""
    return {
        name: {seed: mean + NOISE[seed] + 0.1 * NOISE[(seed + number) % 5] for seed in range(seeds)}
        for number, (name, mean) in enumerate(means.items(), 1)
    }


def say(given, higher_is_better=True):
    return verdict_on_scores(given, metric="accuracy", higher_is_better=higher_is_better)


def test_one_encoding_is_best():
    found = say(scores(none=0.5, t5=0.8, rotary=0.6))
    assert found.startswith("t5 is best: its accuracy is significantly higher than that of rotary and none.")
    assert "5 % for each encoding, with Bonferroni's correction for its 2 others" in found


def test_several_lead_and_others_are_behind():
    found = say(scores(none=0.5, t5=0.8, at5=0.8002, rotary=0.6))
    assert found.startswith("at5 and t5 lead; no significant difference between them. Significantly behind: rotary and none.")


def test_no_difference_at_all():
    assert say(scores(t5=0.8, at5=0.8)).startswith("t5 and at5 lead; no significant difference between them. (")


def test_a_lower_loss_is_better():
    found = say(scores(none=2.0, t5=1.0), higher_is_better=False)
    assert found.startswith("t5 is best: its accuracy is significantly lower than that of none.")
    assert "correction" not in found


def test_one_seed_supports_no_claim():
    found = say(scores(seeds=1, none=0.5, t5=0.99))
    assert found == "t5 has the highest accuracy, but one seed supports no claim: pass --seeds 3 or more."


def test_two_seeds_support_only_what_hardly_varies():
    noisy = {"none": {0: 0.5, 1: 0.6}, "t5": {0: 0.8, 1: 0.8}}
    assert "no significant difference" in say(noisy)


def test_the_more_encodings_the_more_it_takes_to_be_behind():
    """A difference that a table shows as one that leaves zero out may be chance among many."""
    pair = {"t5": {0: 0.80, 1: 0.81, 2: 0.82}, "none": {0: 0.78, 1: 0.80, 2: 0.805}}
    assert p_value([0.02, 0.01, 0.015]) < 0.05 and "t5 is best" in say(pair)
    many = pair | {f"other{number}": {0: 0.81, 1: 0.78 + 0.01 * number, 2: 0.83} for number in range(4)}
    assert "Significantly behind" not in say(many) and "and none lead" in say(many)


def test_one_that_varies_much_is_not_behind_though_its_mean_is_lower():
    given = {"at5": {0: 0.8, 1: 0.81, 2: 0.82}, "t5": {0: 0.79, 1: 0.8, 2: 0.8101}, "rotary": {0: 0.75, 1: 0.82, 2: 0.78}}
    found = say(given)
    assert found.startswith("at5 has the highest accuracy; no significant difference between it and rotary.")
    assert "Significantly behind: t5." in found


def test_seeds_are_paired():
    """Encodings whose scores overlap over seeds differ all the same where one is better with each seed."""
    noise = {0: 0.0, 1: 0.2, 2: 0.4}
    assert "t5 is best" in say({"t5": {s: x + 0.05 + 0.001 * s for s, x in noise.items()}, "none": noise})
    assert "no significant difference" in say({"t5": {0: 0.4, 1: 0.0, 2: 0.3}, "none": noise})


def test_encodings_without_common_seeds_are_named():
    given = scores(t5=0.8, none=0.5) | {"at5": {7: 0.7}}
    assert "One seed in common with t5 supports no claim about at5." in say(given)


def test_what_is_no_number_is_left_out_and_named():
    given = scores(t5=0.8, none=0.5) | {"at5": {0: float("nan"), 1: 0.9}}
    assert "t5 is best" in say(given) and "Without a finite accuracy, and left out: at5." in say(given)


@pytest.mark.parametrize("given", [{"t5": {0: 0.8, 1: 0.9}}, {}])
def test_one_encoding_alone(given):
    assert say(given) == "There is nothing to compare."


def test_equal_scores_are_no_difference():
    assert p_value([0.0, 0.0, 0.0]) == 1.0 and p_value([0.1]) == 1.0
    # Student's distribution with two degrees of freedom: P(|t| > 4.3027) is 5 %.
    assert p_value([4.302653 + x for x in (-(3**0.5), 0.0, 3**0.5)]) == pytest.approx(0.05, abs=1e-6)
