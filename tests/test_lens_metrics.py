"""Numbers for distributions over lags and for attention maps, against hand-worked ones and definitions."""

import math
from itertools import combinations

import pytest
import torch

from lagwise import lens


def test_effective_ranges_of_hand_worked_curves():
    lags = torch.arange(-3, 4)
    probability = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0]])
    assert lens.effective_range(probability, lags, (0.5, 1.0)).tolist() == [[0, 2], [0, 3]]
    assert lens.effective_size(probability, (0.5, 1.0)).tolist() == [[1, 1], [1, 2]]
    with pytest.raises(ValueError, match=r"shares must be above 0 and at most 1, but are \(90,\)"):
        lens.effective_range(probability, lags, (90,))


def test_a_toeplitz_map_is_invariant_and_another_is_not():
    lags = torch.arange(9) - torch.arange(9)[:, None]
    toeplitz = torch.randn(17)[lags + 8]
    assert lens.translation_invariance(toeplitz).item() == pytest.approx(0.0, abs=1e-12)
    assert lens.translation_invariance(torch.full((5, 5), 1 / 3)).item() == 0.0
    # Of [[0, 2], [2, 4]] the main diagonal has variance 4, the others none; the total variance is 2.
    assert lens.translation_invariance(torch.tensor([[0.0, 2.0], [2.0, 4.0]])).item() == pytest.approx(2 * 4 / (4 * 2))
    # With the lower triangle alone: the diagonal 0, 4 and the corner 2, of total variance 8 / 3.
    visible = torch.ones(2, 2, dtype=torch.bool).tril()
    maps = torch.tensor([[[0.0, 99.0], [2.0, 4.0]], [[1.0, 7.0], [2.0, 1.0]]])
    torch.testing.assert_close(lens.translation_invariance(maps, visible), torch.tensor([1.0, 0.0]).double())


def test_monotonicity_counts_inversions():
    near = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 2.0], [1.0, 2.0, 3.0]])
    assert lens.monotonicity_violation(torch.stack([near, -near])).tolist() == [0.0, 1.0]
    # Causal rows [5], [1, 2], [3, 1, 2]: of 1 + 3 pairs, (3, 1) and (3, 2) are wrong.
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    rows = torch.tensor([[5.0, 0.0, 9.0], [1.0, 2.0, 9.0], [3.0, 1.0, 2.0]])
    assert lens.monotonicity_violation(rows, visible).item() == 0.5
    # One query at position 2: all keys are past.
    assert lens.monotonicity_violation(torch.tensor([[1.0, 2.0, 3.0]]), query_start=2).item() == 0.0
    assert math.isnan(lens.monotonicity_violation(torch.ones(1, 1)).item())


def violations_by_hand(values: torch.Tensor, visible: torch.Tensor, start: int) -> float:
    """Returns the share of wrong pairs of one map, pair by pair."""
    wrong = pairs = 0
    for query, row in enumerate(values.tolist()):
        for first, second in combinations(visible[query].nonzero()[:, 0].tolist(), 2):
            lags = first - query - start, second - query - start
            if lags[0] < 0 < lags[1]:
                continue
            near, far = (row[second], row[first]) if lags[1] <= 0 else (row[first], row[second])
            wrong, pairs = wrong + (near < far), pairs + 1
    return wrong / pairs if pairs else math.nan


@pytest.mark.parametrize("trial", range(20))
def test_monotonicity_is_its_definition(trial):
    torch.manual_seed(trial)
    (queries, keys), start = torch.randint(1, 12, (2,)).tolist(), trial % 4
    # Ties, infinite values, masks, and queries that stand before, among and behind the keys.
    maps = torch.randint(-2, 3, (2, queries, keys)).float()
    maps[torch.rand(maps.shape) < 0.1] = -torch.inf
    visible = torch.rand(2, queries, keys) < (1.0 if trial % 3 == 0 else 0.7)
    found = lens.monotonicity_violation(maps, visible, query_start=start)
    wanted = [violations_by_hand(*each, start) for each in zip(maps, visible, strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), equal_nan=True, atol=0.0, rtol=1e-12)


def test_monotonicity_keeps_other_types_and_leaves_nan_aside():
    maps = torch.tensor([[3.0, torch.nan, 1.0], [3.0, torch.nan, 1.0], [3.0, torch.nan, 1.0]])
    # The rows have 3, 2 and 3 pairs, of which one is wrong: that of the last query, whose farthest key has more than its own.
    assert lens.monotonicity_violation(maps).item() == 1 / 8
    assert lens.monotonicity_violation(maps.bfloat16()).item() == 1 / 8
