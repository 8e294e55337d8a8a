"""Means with confidence intervals by Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean, and how far from it the 95 % confidence interval goes: None for a single value, which says nothing about that."""

    mean: float
    half_width: float | None
    count: int

    def __str__(self) -> str:
        """Returns it with as many decimals as the interval has two digits of.

        >>> print(Estimate(0.84123, 0.00512, 3), Estimate(0.84123, None, 1))
        0.8412 ± 0.0051 0.8412
        """
        if not self.half_width or not math.isfinite(self.half_width):
            return f"{self.mean:.4g}"
        decimals = min(max(1 - magnitude(self.half_width), 0), 6)
        return f"{self.mean:.{decimals}f} ± {self.half_width:.{decimals}f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of some values with its confidence interval by Student's t.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2.0 ± 2.5
    """
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), None, count)
    return Estimate(fmean(values), t_quantile(count - 1) * stdev(values) / math.sqrt(count), count)


def align(estimates: Sequence[Estimate], *, most: int = 6) -> list[str]:
    """Returns the estimates of a column with as many decimals each, and their points below each other.

    The interval in the middle has two digits, but none has more than `most` decimals.

    >>> align([Estimate(0.84123, 0.00512, 3), Estimate(-10.5, 0.0312, 3), Estimate(0.5, None, 1)])
    ['  0.8412 ± 0.0051', '-10.5000 ± 0.0312', '  0.5000         ']
    """
    decimals = min(shared_decimals(estimates), most)
    means = [f"{each.mean:.{decimals}f}" for each in estimates]
    halves = ["" if each.half_width is None else f" ± {each.half_width:.{decimals}f}" for each in estimates]
    widths = [max(map(len, column), default=0) for column in (means, halves)]
    return [f"{mean:>{widths[0]}}{half:<{widths[1]}}" for mean, half in zip(means, halves, strict=True)]


def shared_decimals(estimates: Sequence[Estimate]) -> int:
    """Returns the decimals of a column: by its intervals, or without any, four digits of its largest mean."""
    halves = [each.half_width for each in estimates if each.half_width and math.isfinite(each.half_width)]
    means = [abs(each.mean) for each in estimates if each.mean and math.isfinite(each.mean)]
    by_means = 3 - magnitude(max(means, default=1.0))
    wanted = 1 - magnitude(median_low(halves)) if halves else by_means
    return min(max(wanted, 0), 6)


def magnitude(value: float) -> int:
    """Returns the power of ten of the first digit of a number.

    >>> magnitude(0.00512), magnitude(31.2)
    (-3, 1)
    """
    return math.floor(math.log10(value))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Returns the t that Student's distribution exceeds in size with probability `1 - confidence`.

    For whole degrees of freedom the probability of |t| below `sqrt(freedom) tan(angle)` is a finite sum over powers of the
    cosine (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4), which rises with the angle: bisection finds the angle.

    >>> round(t_quantile(2), 6)
    4.302653
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def t_probability(angle: float, freedom: int) -> float:
    """Returns the probability that |t| is below `sqrt(freedom) tan(angle)`."""
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + total) if odd else total
