"""The counter-based generator: right numbers, right statistics, independence of how it is asked."""

import torch

from lagwise import noise


def reference(seed: int, *counters: int) -> int:
    """SplitMix64 in Python's integers, as published."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    state = mix(seed % 2**64)
    for counter in counters:
        state = mix((state + 0x9E3779B97F4A7C15 * counter) % 2**64)
    return state


def test_bits_are_those_of_splitmix64():
    for seed, counters in ((0, (0,)), (7, (1, 2, 3)), (2**62 - 1, (5, 1_000_000)), (-3, (9,)), (1, (-4,))):
        assert int(noise.bits(torch.tensor(seed), *counters)) % 2**64 == reference(seed, *counters)


def test_counters_broadcast():
    rows, columns = torch.arange(5)[:, None], torch.arange(7)
    grid = noise.bits(torch.tensor(1), rows, columns)
    assert grid.shape == (5, 7) and grid[3, 4] == noise.bits(torch.tensor(1), 3, 4)
    assert torch.equal(noise.bits(torch.tensor(1), rows[2:], columns[3:]), grid[2:, 3:])


def test_binomial_numbers_are_counts_of_bits():
    made = noise.binomial(torch.tensor(4), 9, torch.arange(3), size=7, dtype=torch.float64)
    assert made.shape == (3, 7)
    for place in range(3):
        for number in range(7):
            word = reference(4, 9, place, number // 4) >> 16 * (number % 4)
            assert float(made[place, number]) == (bin(word % 2**16).count("1") - 8) / 2


def test_binomial_numbers_have_the_moments_that_are_promised():
    x = noise.binomial(torch.tensor(11), torch.arange(1000), size=1000, dtype=torch.float64)
    # Five standard errors of a million draws; the variance of a power is at most that of the normal distribution's.
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 2.875, 96.0)):
        assert abs(float((x**power).mean()) - expected) < 5 * (variance / x.numel()) ** 0.5
    neighbours = (x[:, :-1] * x[:, 1:]).mean(), (x[:-1] * x[1:]).mean()
    assert all(abs(float(product)) < 5 / x.numel() ** 0.5 for product in neighbours)


def test_binomial_numbers_are_the_same_in_all_types():
    made = [
        noise.binomial(torch.tensor(3), torch.arange(1000), size=10, dtype=dtype).double()
        for dtype in (torch.bfloat16, torch.float64)
    ]
    assert torch.equal(*made)


def test_dropout_keeps_the_right_share():
    kept = noise.keep(0.3, torch.tensor(5), torch.arange(1000)[:, None], torch.arange(1000))
    assert abs(float(kept.double().mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    assert noise.keep(0.0, torch.tensor(5), torch.arange(1000)).all()


def test_streams_are_independent():
    counter = torch.arange(100_000)
    a, b = (
        noise.binomial(torch.tensor(1), stream, counter, size=1, dtype=torch.float64)
        for stream in (noise.Stream.CODE, noise.Stream.GATE)
    )
    assert abs(float((a * b).mean())) < 5 / len(counter) ** 0.5


def test_seeds_are_fresh_in_training_and_fixed_in_evaluation():
    device = torch.device("cpu")
    assert noise.draw_seed(True, device) != noise.draw_seed(True, device)
    assert noise.draw_seed(False, device) == noise.draw_seed(False, device)
