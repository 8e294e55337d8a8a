"""Every encoding against a double loop over queries and keys, transcribed from its paper's equation.

The loops know no tables, transforms or lags: each `score_...` below is the logit of one pair as its paper writes it,
with the paper's own sign of the relative position. Everything is float64 and small. The laws that the papers imply
follow: agreement with Hugging Face's code, limits, parameter counts, nestings, statistics of stochastic encodings.
PAPERS is the project's collection of equations, from which the numbers of sections are taken.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lagwise
from lagwise import noise
from lagwise.encodings.buckets import t5_bucket
from lagwise.noise import Stream

BATCH, HEADS, DIM, TIME = 2, 3, 4, 6
SEED = 7
MILLION = 1_000_000


@pytest.fixture(autouse=True)
def double_precision():
    """Makes float64 the default, so that constants of an encoding (slopes of ALiBi) are as exact as the loops."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    # The tensors are tiny: on a busy machine threads would only wait for each other.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def t5_attention():
    """Hugging Face's layer; imported late because transformers takes seconds to import."""
    from transformers.models.t5.modeling_t5 import T5Attention

    return T5Attention


def built(name: str, **options: Any) -> lagwise.Encoding:
    """Makes an encoding whose parameters are all away from their first, often neutral, values."""
    encoding = lagwise.make(name, **{"heads": HEADS, "head_dim": DIM, **options})
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return encoding


def tokens(queries: int = TIME, keys: int = TIME) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(BATCH, HEADS, queries, DIM),
        torch.randn(BATCH, HEADS, keys, DIM),
        torch.randn(BATCH, HEADS, keys, DIM),
    )


def dense(q: Tensor, k: Tensor, v: Tensor, encoding: Any, **options: Any) -> Tensor:
    return lagwise.attention(q, k, v, encoding, impl="dense", seed=torch.tensor(SEED), **options)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


class Cell(NamedTuple):
    """One pair of a query at position i and a key at position j."""

    scale: float
    head: int
    i: int
    j: int
    q: Tensor
    k: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[[Cell], Tensor], value: Callable[[Cell], Tensor] | None = None, *,
    causal: bool = False, query_start: int = 0, scale: float = DIM**-0.5,
) -> Tensor:  # fmt: skip
    """Softmax attention by loops, out_i = sum_j exp(e_ij) (v_j + value_ij) / sum_j exp(e_ij)."""
    out = torch.zeros_like(q)
    for b, head, row in product(*map(range, q.shape[:3])):
        i = query_start + row
        total, mass = torch.zeros(v.shape[3]), torch.zeros(())
        for j in range(k.shape[2]):
            if causal and j > i:
                continue
            cell = Cell(scale, head, i, j, q[b, head, row], k[b, head, j])
            weight = torch.exp(score(cell))
            total = total + weight * (v[b, head, j] + (value(cell) if value else 0.0))
            mass = mass + weight
        out[b, head, row] = total / mass
    return out


def own(table: Tensor, head: int) -> Tensor:
    """The row of a head, in a table that has one per head or a single one for all."""
    return table[head] if len(table) > 1 else table[0]


def clip(x: int, end: int) -> int:
    # Shaw et al. (2018), equation 3: clip(x, k) = max(-k, min(k, x)).
    return max(-end, min(end, x))


def score_plain(encoding, cell: Cell) -> Tensor:
    # Vaswani et al. (2017), equation 1: q.k / sqrt(D).
    return cell.scale * (cell.q @ cell.k)


def score_t5(encoding, cell: Cell, causal: bool = False) -> Tensor:
    # Raffel et al. (2020), PAPERS 1.2: q.k + table[bucket(r), h], r = key - query; the bias is not scaled.
    r, buckets, most = cell.j - cell.i, 8, 5
    if causal:
        offset, n = 0, max(-r, 0)
    else:
        buckets //= 2
        offset, n = (buckets if r > 0 else 0), abs(r)
    exact = buckets // 2
    if n < exact:
        bucket = offset + n
    else:
        growth = math.floor(math.log(n / exact) / math.log(most / exact) * (buckets - exact))
        bucket = offset + min(buckets - 1, exact + growth)
    return score_plain(encoding, cell) + encoding.weight[cell.head, bucket]


def score_t5_causal(encoding, cell: Cell) -> Tensor:
    return score_t5(encoding, cell, causal=True)


def score_t5_free(encoding, cell: Cell) -> Tensor:
    # Wu et al. (2021), the ablation T5-NoB: one scalar per head and relative position.
    r = clip(cell.j - cell.i, 3)
    return score_plain(encoding, cell) + encoding.weight[cell.head, r + 3]


def perceptron(readout, direction: int, head: int, x: Tensor, r: int) -> Tensor:
    # Wu et al. (2021): g(x) = w3 . act(W2 . dropout(act(w1 x + c1)) + c2) + c3, by loops over the units.
    act = {"relu": lambda y: y.clamp(min=0.0), "sigmoid": lambda y: 1.0 / (1.0 + torch.exp(-y))}[readout.activation]
    first, second, third = (getattr(readout, f"weight{layer}")[direction, head] for layer in (1, 2, 3))
    c1, c2, c3 = (getattr(readout, f"offset{layer}")[direction, head, 0] for layer in (1, 2, 3))
    hidden = [act(first[0, unit] * x + c1[unit]) for unit in range(first.shape[1])]
    if readout.training and readout.dropout:
        # One draw per lag and unit; a unit that stays is scaled up by the probability of staying.
        for unit in range(len(hidden)):
            stays = bool(noise.keep(readout.dropout, torch.tensor(SEED), Stream.AT5, head, r, unit))
            hidden[unit] = hidden[unit] / (1.0 - readout.dropout) if stays else torch.zeros(())
    total = c3[0]
    for unit in range(second.shape[1]):
        total = total + third[unit, 0] * act(sum(h * second[a, unit] for a, h in enumerate(hidden)) + c2[unit])
    return total


def score_at5(encoding, cell: Cell) -> Tensor:
    # Wu et al. (2021), PAPERS 1.3: f(r) = 1 - exp(-alpha r) for r > 0, 1 - exp(beta r) for r <= 0, with slopes
    # relu(a) / L_max; then one MLP per head and direction. The end of the table, where there is one, is ours.
    r = cell.j - cell.i if encoding.max_lag is None else clip(cell.j - cell.i, encoding.max_lag)
    past, future = 0, 1
    if r > 0:
        alpha = encoding.slope[future, cell.head].clamp(min=0.0) / encoding.reach
        bias = perceptron(encoding.readout, future, cell.head, 1.0 - torch.exp(-alpha * r), r)
    else:
        beta = encoding.slope[past, cell.head].clamp(min=0.0) / encoding.reach
        bias = perceptron(encoding.readout, past, cell.head, 1.0 - torch.exp(beta * r), r)
    return score_plain(encoding, cell) + bias


def score_at5_free(encoding, cell: Cell) -> Tensor:
    # Wu et al. (2021), the ablation AT5-NoB: the MLP, one per head, of a sigmoid of one free scalar per lag.
    r = clip(cell.j - cell.i, 3)
    x = 1.0 / (1.0 + torch.exp(-encoding.weight[cell.head, r + 3]))
    return score_plain(encoding, cell) + perceptron(encoding.readout, 0, cell.head, x, r)


def alibi_slope(head: int, heads: int) -> float:
    # Press et al. (2022), section 3: 2^(-8 h / H), h from 1, for H a power of two; otherwise those of the largest power
    # of two below, then every second one of twice that power.
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return 2.0 ** (-8.0 * (head + 1) / power)
    every_second = 2 * (head - power) + 1
    return 2.0 ** (-8.0 * every_second / (2 * power))


def score_alibi(encoding, cell: Cell) -> Tensor:
    # Press et al. (2022): q.k / sqrt(D) - slope |i - j|.
    return score_plain(encoding, cell) - alibi_slope(cell.head, HEADS) * abs(cell.i - cell.j)


def score_kerple_log(encoding, cell: Cell) -> Tensor:
    # Chi et al. (2022), logarithmic kernel: -p ln(1 + a |i - j|).
    p, a = encoding.p[cell.head], encoding.a[cell.head]
    return score_plain(encoding, cell) - p * torch.log(1.0 + a * abs(cell.i - cell.j))


def score_kerple_power(encoding, cell: Cell) -> Tensor:
    # Chi et al. (2022), power kernel: -a |i - j|^p, 0 < p <= 2.
    p, a = encoding.p[cell.head], encoding.a[cell.head]
    return score_plain(encoding, cell) - a * abs(cell.i - cell.j) ** p


def score_sandwich(encoding, cell: Cell) -> Tensor:
    # Chi et al. (2023): (sum_{c=1}^{D/2} cos(r / 10000^(2c/D)) - D/2) / (8 h / H), h from 1.
    r = cell.i - cell.j
    inner = sum(math.cos(r / 10000.0 ** (2 * c / DIM)) for c in range(1, DIM // 2 + 1))
    return score_plain(encoding, cell) + (inner - DIM / 2) / (8.0 * (cell.head + 1) / HEADS)


def score_shaw(encoding, cell: Cell) -> Tensor:
    # Shaw et al. (2018), equation 2: q_i . (k_j + a^K_clip(j - i)) / sqrt(D).
    return cell.scale * (cell.q @ (cell.k + own(encoding.keys, cell.head)[clip(cell.j - cell.i, 2) + 2]))


def value_shaw(encoding, cell: Cell) -> Tensor:
    # Shaw et al. (2018), equation 1: z_i = sum_j alpha_ij (v_j + a^V_clip(j - i)).
    return own(encoding.values, cell.head)[clip(cell.j - cell.i, 2) + 2]


def score_huang1(encoding, cell: Cell) -> Tensor:
    # Huang et al. (2020), method 1: (q.k) a_|j-i| / sqrt(D).
    return cell.scale * (cell.q @ cell.k) * own(encoding.weight, cell.head)[min(abs(cell.j - cell.i), 3)]


def score_huang2(encoding, cell: Cell) -> Tensor:
    # Huang et al. (2020), method 2: (q.k) a_{j-i} / sqrt(D).
    return cell.scale * (cell.q @ cell.k) * own(encoding.weight, cell.head)[clip(cell.j - cell.i, 3) + 3]


def score_huang3(encoding, cell: Cell) -> Tensor:
    # Huang et al. (2020), method 3: sum_c q_ic k_jc a_{j-i,c} / sqrt(D).
    a = own(encoding.weight, cell.head)[clip(cell.j - cell.i, 3) + 3]
    return cell.scale * sum(cell.q[c] * cell.k[c] * a[c] for c in range(DIM))


def score_huang4(encoding, cell: Cell) -> Tensor:
    # Huang et al. (2020), method 4: (q.k + q.a_{j-i} + k.a_{j-i}) / sqrt(D).
    a = own(encoding.weight, cell.head)[clip(cell.j - cell.i, 3) + 3]
    return cell.scale * (cell.q @ cell.k + cell.q @ a + cell.k @ a)


def score_xl(encoding, cell: Cell) -> Tensor:
    # Dai et al. (2019), section 3.3: ((q_i + u).k_j + (q_i + v).(W_R R_{i-j})) / sqrt(D), R sines, then cosines.
    frequencies = [10000.0 ** (-2.0 * c / encoding.dim) for c in range(encoding.dim // 2)]
    r = cell.i - cell.j
    sinusoid = torch.tensor([math.sin(r * f) for f in frequencies] + [math.cos(r * f) for f in frequencies])
    u, v = encoding.u[cell.head], encoding.v[cell.head]
    return cell.scale * ((cell.q + u) @ cell.k + (cell.q + v) @ (encoding.weight[cell.head] @ sinusoid))


def complex_pairs(x: Tensor, interleaved: bool) -> Tensor:
    half = DIM // 2
    pairs = [(2 * c, 2 * c + 1) if interleaved else (c, c + half) for c in range(half)]
    return torch.stack([torch.complex(x[real], x[imaginary]) for real, imaginary in pairs])


def score_rotary(encoding, cell: Cell, interleaved: bool = True, decay: Callable[[int], float] | None = None) -> Tensor:
    # Su et al. (2021), equation 12, for each pair of channels: Re(q_m conj(k_n) e^{i (m - n) theta_c}),
    # theta_c = 10000^(-2c / D), c from 0.
    q, k = complex_pairs(cell.q, interleaved), complex_pairs(cell.k, interleaved)
    total = torch.zeros(())
    for c in range(DIM // 2):
        angle = (cell.i - cell.j) * 10000.0 ** (-2.0 * c / DIM)
        factor = decay(c) if decay else 1.0
        total = total + factor * (q[c] * k[c].conj() * complex(math.cos(angle), math.sin(angle))).real
    return cell.scale * total


def score_rotary_halves(encoding, cell: Cell) -> Tensor:
    return score_rotary(encoding, cell, interleaved=False)


def score_xpos(encoding, cell: Cell) -> Tensor:
    # Sun et al. (2022): rotary times zeta_c^((m - n) / unit), zeta_c = (2c + 0.4 D) / (1.4 D).
    def decay(c: int) -> float:
        return ((2 * c + 0.4 * DIM) / (1.4 * DIM)) ** ((cell.i - cell.j) / encoding.unit)

    return score_rotary(encoding, cell, decay=decay)


@cache
def white(stream: Stream, *counters: int) -> float:
    """One number of the library's own noise, so that a loop and the library see the same draw."""
    *place, r = counters
    return float(noise.binomial(torch.tensor(SEED), stream, *place, size=r + 1, dtype=torch.float64)[r])


def sine_parameters(encoding, head: int, d: int, k: int) -> tuple[float, float, float]:
    # Liutkus et al. (2021), PAPERS 3.2: f = sigmoid(freq) / 2, theta = offset, lambda = softplus(gain).
    frequency = float(torch.sigmoid(encoding.freq[head, d, k].double())) / 2.0
    return frequency, float(encoding.offset[head, d, k]), math.log1p(math.exp(float(encoding.gain[head, d, k])))


def sine_code(encoding, head: int, d: int, r: int, position: int, side: str) -> float:
    # PAPERS 3.2: Qbar = Omega_q Z, Kbar = Omega_k Z. Omega: cosines and sines of 2 pi f m, plus theta for the queries;
    # Z: normal numbers times lambda / sqrt(2K).
    sines = encoding.freq.shape[2]
    total = 0.0
    for k in range(sines):
        frequency, theta, gain = sine_parameters(encoding, head, d, k)
        # Whole turns are taken off exactly, so that the loop is right at position one million too.
        angle = 2.0 * math.pi * float(Fraction(frequency) * position % 1) + (theta if side == "query" else 0.0)
        total += gain * math.cos(angle) * white(Stream.CODE, head, d, 2 * k, r)
        total += gain * math.sin(angle) * white(Stream.CODE, head, d, 2 * k + 1, r)
    return total / math.sqrt(2 * sines)


def conv_code(encoding, head: int, d: int, r: int, position: int, side: str) -> float:
    # PAPERS 3.3: both sides filter the same white noise, each with its own taps (valid cross-correlation).
    taps = encoding.taps[0 if side == "query" else 1, head, d]
    return sum(float(tap) * white(Stream.CODE, head, d, position + p, r) for p, tap in enumerate(taps))


def gated_code(encoding, head: int, d: int, r: int, position: int, side: str) -> float:
    # PAPERS 3.4: sqrt(1 - delta) Qbar_d(m) + sqrt(delta) eps_d, with eps the same for q and k and at all positions.
    code = sine_code if isinstance(encoding, lagwise.SineSPE) else conv_code
    positional = code(encoding, head, d, r, position, side)
    if encoding.gate is None:
        return positional
    delta = 1.0 / (1.0 + math.exp(-float(encoding.gate[head, d])))
    return math.sqrt(1.0 - delta) * positional + math.sqrt(delta) * white(Stream.GATE, head, d, r)


def random_feature(encoding, x: Tensor, head: int, r: int, position: int, side: str) -> float:
    return sum(float(x[d]) * gated_code(encoding, head, d, r, position, side) for d in range(DIM))


def score_spe(encoding, cell: Cell) -> Tensor:
    # PAPERS 3.1: the mean over r of (sum_d q_d Qbar_d(m)[r]) (sum_d k_d Kbar_d(n)[r]), over sqrt(D).
    realizations = encoding.realizations
    products = [
        random_feature(encoding, cell.q, cell.head, r, cell.i, "query")
        * random_feature(encoding, cell.k, cell.head, r, cell.j, "key")
        for r in range(realizations)
    ]
    return torch.tensor(cell.scale * sum(products) / realizations)


def sine_kernel(encoding, head: int, d: int, difference: int) -> float:
    # PAPERS 3.2: P_d(m - n) = 1 / (2K) sum_k lambda^2 cos(2 pi f (m - n) + theta), m the query's position.
    sines = encoding.freq.shape[2]
    parameters = [sine_parameters(encoding, head, d, k) for k in range(sines)]
    return sum(g**2 * math.cos(2.0 * math.pi * f * difference + theta) for f, theta, g in parameters) / (2 * sines)


def conv_kernel(encoding, head: int, d: int, difference: int) -> float:
    # PAPERS 3.3: P_d(m - n) = sum_p phi_q(p) phi_k(p + m - n), m the query's position.
    queries, keys = encoding.taps[0, head, d], encoding.taps[1, head, d]
    inside = [p for p in range(len(queries)) if 0 <= p + difference < len(keys)]
    return sum(float(queries[p] * keys[p + difference]) for p in inside)


def gated_kernel(encoding, head: int, d: int, difference: int) -> float:
    # PAPERS 3.4: P <- delta + (1 - delta) P.
    kernel = sine_kernel if isinstance(encoding, lagwise.SineSPE) else conv_kernel
    positional = kernel(encoding, head, d, difference)
    if encoding.gate is None:
        return positional
    delta = 1.0 / (1.0 + math.exp(-float(encoding.gate[head, d])))
    return delta + (1.0 - delta) * positional


def score_expected_spe(encoding, cell: Cell) -> Tensor:
    # PAPERS 3.1: sum_d q_md P_d(m - n) k_nd / sqrt(D).
    gains = [gated_kernel(encoding, cell.head, d, cell.i - cell.j) for d in range(DIM)]
    return cell.scale * sum(cell.q[d] * cell.k[d] * gains[d] for d in range(DIM))


@dataclass(frozen=True)
class Case:
    """An encoding with its options, and the equations of its logits and, if it has them, of its values."""

    name: str
    score: Callable[[Any, Cell], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    value: Callable[[Any, Cell], Tensor] | None = None

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{option}={value}" for option, value in self.options.items())])


AT5_OPTIONS = {"reach": 5, "widths": (3, 2)}
SMALL_SPE = {"realizations": 3}

CASES = [
    Case("none", score_plain),
    Case("t5", score_t5, {"buckets": 8, "max_lag": 5}),
    Case("t5", score_t5_causal, {"buckets": 8, "max_lag": 5, "causal": True}),
    Case("t5-free", score_t5_free, {"max_lag": 3}),
    Case("t5-free", score_t5_free, {"max_lag": 3, "causal": True}),
    Case("at5", score_at5, {**AT5_OPTIONS, "max_lag": None}),
    Case("at5", score_at5, {**AT5_OPTIONS, "max_lag": 3}),
    Case("at5", score_at5, {**AT5_OPTIONS, "max_lag": None, "activation": "sigmoid"}),
    Case("at5", score_at5, {**AT5_OPTIONS, "max_lag": None, "dropout": 0.4}),
    Case("at5", score_at5, {**AT5_OPTIONS, "max_lag": None, "causal": True}),
    Case("at5-free", score_at5_free, {"max_lag": 3, "widths": (3, 2)}),
    Case("at5-free", score_at5_free, {"max_lag": 3, "widths": (3, 2), "activation": "sigmoid", "dropout": 0.4}),
    Case("at5-free", score_at5_free, {"max_lag": 3, "widths": (3, 2), "causal": True}),
    Case("alibi", score_alibi),
    Case("kerple", score_kerple_log, {"kind": "log"}),
    Case("kerple", score_kerple_power, {"kind": "power"}),
    Case("sandwich", score_sandwich),
    Case("shaw", score_shaw, {"max_lag": 2}, value_shaw),
    Case("shaw", score_shaw, {"max_lag": 2, "values": False}),
    Case("shaw", score_shaw, {"max_lag": 2, "per_head": True}, value_shaw),
    Case("huang1", score_huang1, {"max_lag": 3}),
    Case("huang1", score_huang1, {"max_lag": 3, "per_head": False}),
    Case("huang2", score_huang2, {"max_lag": 3}),
    Case("huang2", score_huang2, {"max_lag": 3, "per_head": False}),
    Case("huang3", score_huang3, {"max_lag": 3}),
    Case("huang3", score_huang3, {"max_lag": 3, "per_head": True}),
    Case("huang4", score_huang4, {"max_lag": 3}),
    Case("huang4", score_huang4, {"max_lag": 3, "per_head": True}),
    Case("xl", score_xl),
    Case("xl", score_xl, {"dim": 6}),
    Case("rotary", score_rotary, {"interleaved": True}),
    Case("rotary", score_rotary_halves, {"interleaved": False}),
    Case("xpos", score_xpos),
    # A short unit makes the decay visible within six positions.
    Case("xpos", score_xpos, {"unit": 3.0}),
    Case("sine-spe", score_spe, {**SMALL_SPE, "sines": 2, "gated": False}),
    Case("sine-spe", score_spe, {**SMALL_SPE, "sines": 2, "gated": True}),
    Case("conv-spe", score_spe, {**SMALL_SPE, "kernel_size": 3, "gated": False}),
    Case("conv-spe", score_spe, {**SMALL_SPE, "kernel_size": 3, "gated": True}),
]

SETTINGS = {
    "square": {},
    "causal": {"causal": True},
    "offset": {"query_start": 2, "scale": 0.7},
}


@torch.no_grad()
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_papers_equation(case: Case, setting: str):
    options = dict(SETTINGS[setting])
    if case.options.get("causal"):
        options["causal"] = True
    encoding = built(case.name, **case.options)
    if case.name == "kerple":
        # The noise may leave the range in which the paper defines p and a.
        encoding.p.data, encoding.a.data = 0.1 + 1.8 * torch.rand(HEADS), 0.1 + torch.rand(HEADS)
    if case.name == "at5":
        encoding.slope.data[0, 0] = -1.0
    q, k, v = tokens(queries=3 if setting == "offset" else TIME)
    value = None if case.value is None else lambda cell: case.value(encoding, cell)
    expected = attend(q, k, v, lambda cell: case.score(encoding, cell), value, **options)
    assert_same(dense(q, k, v, encoding, **options), expected)


def test_every_encoding_has_its_equation():
    absolute = {"sinusoidal", "learned"}
    linear = {name for name, kind in lagwise.ENCODINGS.items() if kind.linear_only}
    assert {case.name for case in CASES} | absolute | linear == set(lagwise.ENCODINGS)


def test_sinusoidal_is_the_papers_equation():
    # Vaswani et al. (2017), section 3.5: sin(t / 10000^(2c / d)) in channel 2c and the cosine in channel 2c + 1.
    x, positions = torch.randn(BATCH, 3, 6), [0, 5, 900]
    expected = x.clone()
    for t, c in product(range(3), range(3)):
        angle = positions[t] / 10000.0 ** (2 * c / 6)
        expected[:, t, 2 * c] += math.sin(angle)
        expected[:, t, 2 * c + 1] += math.cos(angle)
    assert_same(lagwise.make("sinusoidal", dim=6).embed(x, torch.tensor(positions)), expected)


def test_learned_is_the_papers_equation():
    # Devlin et al. (2019): input_t = x_t + p_t.
    encoding, x, positions = built("learned", dim=6, length=9), torch.randn(BATCH, 3, 6), [8, 0, 4]
    expected = torch.stack([x[:, t] + encoding.weight[position] for t, position in enumerate(positions)], dim=1)
    assert_same(encoding.embed(x, torch.tensor(positions)), expected)


@pytest.mark.parametrize("name", ["t5", "at5", "alibi", "sandwich"])
def test_attention_is_prior_times_likelihood(name: str):
    # Wu et al. (2021): with the prior softmax_j(b) and the likelihood exp(q.k / sqrt(D)), alpha is the posterior.
    encoding = built(name)
    q, k, _ = tokens()
    reads_weights = torch.eye(TIME).expand(BATCH, HEADS, TIME, TIME)
    prior = dense(torch.zeros_like(q), k, reads_weights, encoding)
    assert not torch.allclose(prior, torch.full_like(prior, 1.0 / TIME))
    joint = prior * torch.exp(DIM**-0.5 * q @ k.mT)
    assert_same(dense(q, k, reads_weights, encoding), joint / joint.sum(-1, keepdim=True))


def test_a_constant_added_to_a_bias_changes_nothing():
    encoding = built("t5-free", max_lag=3)
    q, k, v = tokens()
    before = dense(q, k, v, encoding)
    encoding.weight.data += 3.0
    assert_same(dense(q, k, v, encoding), before)


BUCKETS = [(32, 128), (64, 128), (64, 256), (128, 512), (32, 64), (4, 3), (6, 128), (10, 20), (30, 128), (7, 16), (33, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "max_lag"), BUCKETS)
def test_t5_buckets_are_those_of_hugging_face(t5_attention, buckets: int, max_lag: int, causal: bool):
    lags = torch.arange(-5000, 5001)
    sizes = {"num_buckets": buckets, "max_distance": max_lag}
    theirs = t5_attention._relative_position_bucket(lags, bidirectional=not causal, **sizes)
    assert torch.equal(t5_bucket(lags, buckets, max_lag, causal), theirs)
    # The encoding's table ends with its last bucket; what it says beyond must be right too.
    encoding = built("t5", heads=1, buckets=buckets, max_lag=max_lag, causal=causal)
    reached = lags[lags <= 0] if causal else lags
    bias = encoding.terms(int(reached[0]), int(reached[-1]), scale=1.0).bias.at(reached)
    assert torch.equal(bias, encoding.weight[:, theirs[: len(reached)]])


@pytest.mark.parametrize(
    ("causal", "starts"),
    [
        (False, [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]),
        (True, [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]),
    ],
)
def test_t5_bucket_starts(causal: bool, starts: list[int]):
    # PAPERS 1.2, for 32 buckets and 128: the distances at which each bucket of one direction starts.
    expected = [max(bucket for bucket, start in enumerate(starts) if start <= n) for n in range(1000)]
    assert t5_bucket(-torch.arange(1000), 32, 128, causal).tolist() == expected
    future = [0] * 999 if causal else [16 + bucket for bucket in expected[1:]]
    assert t5_bucket(torch.arange(1, 1000), 32, 128, causal).tolist() == future


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize(("buckets", "max_lag"), [(32, 128), (8, 10)])
def test_t5_from_weight_is_the_bias_of_hugging_face(t5_attention, buckets: int, max_lag: int, is_decoder: bool):
    from transformers import T5Config

    config = T5Config(
        d_model=8, d_kv=4, num_heads=2, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_lag, is_decoder=is_decoder,
    )  # fmt: skip
    theirs = t5_attention(config, has_relative_attention_bias=True, layer_idx=0)
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    queries, keys = 40, 200
    start = keys - queries
    expected = theirs.compute_bias(queries, keys, past_seen_tokens=start)[0]
    encoding = lagwise.T5.from_weight(theirs.relative_attention_bias.weight, max_lag=max_lag, causal=is_decoder)
    lags = torch.arange(keys) - (start + torch.arange(queries)[:, None])
    seen = lags <= 0 if is_decoder else torch.ones_like(lags, dtype=torch.bool)
    bias = encoding.terms(1 - keys, 0 if is_decoder else queries - 1, scale=1.0).bias.at(lags)
    assert torch.equal(bias[:, seen], expected[:, seen])


def at5_bias(encoding: lagwise.Encoding, lags: Tensor) -> Tensor:
    return encoding.terms(int(lags.min()), int(lags.max()), scale=1.0).bias.at(lags)


def make_readout_identity(encoding: lagwise.Encoding) -> None:
    """Lets one unit of each layer pass its input on, so that the bias is the soft bucket f itself (f >= 0, ReLU)."""
    with torch.no_grad():
        for parameter in encoding.readout.parameters():
            parameter.zero_()
        for layer in (1, 2, 3):
            getattr(encoding.readout, f"weight{layer}")[:, :, 0, 0] = 1.0


def zero_read_by(encoding: lagwise.Encoding, direction: int) -> Tensor:
    """g(0) of all heads, by the transcription."""
    zero = torch.zeros(())
    return torch.stack([perceptron(encoding.readout, direction, head, zero, 0) for head in range(HEADS)])


def test_at5_lag_zero_belongs_to_the_past():
    encoding = built("at5", max_lag=None)
    assert_same(at5_bias(encoding, torch.tensor([0]))[:, 0], zero_read_by(encoding, 0))
    assert not torch.allclose(zero_read_by(encoding, 0), zero_read_by(encoding, 1))


def test_at5_soft_bucket_is_monotone_and_bounded():
    encoding = built("at5", max_lag=None, reach=20)
    make_readout_identity(encoding)
    encoding.slope.data = torch.tensor([[0.1, 1.0, 5.0], [0.3, 2.0, 4.0]])
    for sign in (-1, 1):
        bucket = at5_bias(encoding, sign * torch.arange(100))
        assert (bucket[:, 0] == 0.0).all()
        assert (bucket.diff(dim=1) > 0.0).all()
        assert (bucket < 1.0).all()


def test_at5_range_is_reach_over_slope():
    # 1 / alpha is the dependency range: there f = 1 - 1/e.
    encoding = built("at5", max_lag=None, reach=40)
    make_readout_identity(encoding)
    slopes = [[1, 2, 4], [8, 5, 10]]
    encoding.slope.data = torch.tensor(slopes).double()
    for direction, head in product(range(2), range(HEADS)):
        dependency_range = 40 // slopes[direction][head]
        lags = torch.tensor([0, dependency_range if direction else -dependency_range])
        assert_same(at5_bias(encoding, lags)[head], torch.tensor([0.0, 1.0 - math.exp(-1.0)]))


def test_at5_without_slope_is_constant_in_each_direction():
    encoding = built("at5", max_lag=None)
    encoding.slope.data.zero_()
    lags = torch.arange(-50, 51)
    bias = at5_bias(encoding, lags)
    assert_same(bias[:, lags <= 0], zero_read_by(encoding, 0)[:, None].expand(-1, 51))
    assert_same(bias[:, lags > 0], zero_read_by(encoding, 1)[:, None].expand(-1, 50))


def test_at5_saturates():
    # f tends to 1, so that b tends to g(1) on each side.
    encoding = built("at5", max_lag=None, reach=10)
    encoding.slope.data.uniform_(1.0, 10.0)
    one = torch.ones(())
    for direction, lag in enumerate((-5000, 5000)):
        end = torch.stack([perceptron(encoding.readout, direction, head, one, 0) for head in range(HEADS)])
        assert_same(at5_bias(encoding, torch.tensor([0, lag]))[:, 1], end)


def test_at5_gradients_reach_the_slopes():
    encoding = built("at5", activation="sigmoid")
    q, k, v = tokens()
    dense(q, k, v, encoding).square().sum().backward()
    assert encoding.slope.grad.shape == (2, HEADS)
    assert (encoding.slope.grad != 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slope", [0.0, -5.0, 1e3, 1e30])
def test_at5_is_finite_at_any_slope_and_lag(slope: float, dtype: torch.dtype):
    encoding = lagwise.AT5(heads=1, max_lag=None, reach=1, widths=(2, 2)).to(dtype)
    encoding.slope.data.fill_(slope)
    bias = encoding.terms(-MILLION, MILLION, scale=1.0).bias.values
    bias.sum().backward()
    assert bias.shape == (1, 2 * MILLION + 1)
    assert bias.isfinite().all()
    for parameter in encoding.parameters():
        assert parameter.grad.isfinite().all()


def test_at5_causal_uses_the_past_branch_alone():
    both, past = built("at5", max_lag=4), built("at5", max_lag=4, causal=True)
    with torch.no_grad():
        for mine, theirs in zip(past.parameters(), both.parameters(), strict=True):
            mine.copy_(theirs[:1])
    q, k, v = tokens()
    out = dense(q, k, v, both, causal=True)
    assert_same(dense(q, k, v, past, causal=True), out)
    out.square().sum().backward()
    for parameter in both.parameters():
        assert (parameter.grad[0] != 0.0).any()
        assert (parameter.grad[1] == 0.0).all()


@pytest.mark.parametrize(("first", "last"), [(-9, -2), (-3, -1), (1, 1), (2, 9)])
def test_at5_evaluates_lags_of_one_direction_alone(first: int, last: int):
    # Queries that all stand after (or before) the keys: chunks of a cache, ring attention.
    encoding = built("at5", max_lag=None)
    lags = torch.arange(first, last + 1)
    assert_same(at5_bias(encoding, lags), encoding.terms(-20, 20, scale=1.0).bias.at(lags))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # PAPERS 1.3, for 8 heads.
        ("at5", {"widths": (32, 4)}, 3_232),
        ("at5", {"widths": (100, 40)}, 68_512),
        ("t5", {"buckets": 32}, 256),
        # PAPERS 2.2, for one layer of BERT-base: m scalars per head, 2m - 1 scalars per head, 2m - 1 shared vectors.
        ("huang1", {"heads": 12, "max_lag": 511}, 73_728 // 12),
        ("huang2", {"heads": 12, "max_lag": 511}, 147_312 // 12),
        ("huang4", {"heads": 12, "head_dim": 64, "max_lag": 511}, 785_664 // 12),
        # PAPERS 3.2 and 3.3: 3 K D H and 2 K D H; a gate adds D H.
        ("sine-spe", {"sines": 5, "gated": False}, 3 * 5 * 16 * 8),
        ("conv-spe", {"kernel_size": 7, "gated": True}, 2 * 7 * 16 * 8 + 16 * 8),
    ],
)
def test_parameter_counts(name: str, options: dict[str, Any], count: int):
    encoding = lagwise.make(name, **{"heads": 8, "head_dim": 16, **options})
    assert sum(parameter.numel() for parameter in encoding.parameters()) == count


def test_huang2_with_a_symmetric_table_is_huang1():
    first, second = built("huang1", max_lag=3), built("huang2", max_lag=3)
    for lag in range(-3, 4):
        second.weight.data[:, lag + 3] = first.weight.data[:, abs(lag)]
    q, k, v = tokens()
    assert_same(dense(q, k, v, second), dense(q, k, v, first))


def test_huang3_with_equal_channels_is_huang2():
    second, third = built("huang2", max_lag=3), built("huang3", max_lag=3, per_head=True)
    third.weight.data = second.weight.data[..., None].repeat(1, 1, DIM)
    q, k, v = tokens()
    assert_same(dense(q, k, v, third), dense(q, k, v, second))


@pytest.mark.parametrize("name", ["huang1", "huang2", "huang3"])
def test_multiplicative_methods_start_as_plain_attention(name: str):
    # Without noise: all three must start at one, where near zero attention would be uniform.
    encoding = lagwise.make(name, heads=HEADS, head_dim=DIM, max_lag=3)
    q, k, v = tokens()
    assert_same(dense(q, k, v, encoding), dense(q, k, v, None))


def test_huang4_without_vectors_is_plain_attention():
    encoding = built("huang4", max_lag=3)
    encoding.weight.data.zero_()
    q, k, v = tokens()
    assert_same(dense(q, k, v, encoding), dense(q, k, v, None))


def test_huang4_without_its_key_term_is_shaw_on_keys():
    encoding = built("huang4", max_lag=3)
    shaw = lagwise.Shaw.from_tables(encoding.weight[0], heads=HEADS)
    query_only = lagwise.Terms(query=encoding.terms(-5, 5, scale=1.0).query)
    q, k, v = tokens()
    assert_same(dense(q, k, v, query_only), dense(q, k, v, shaw))
    assert not torch.allclose(dense(q, k, v, encoding), dense(q, k, v, shaw))


def test_huang4_has_a_factored_form():
    # ((q + a).(k + a) - a.a) / sqrt(D)
    encoding = built("huang4", max_lag=3)

    def score(cell: Cell) -> Tensor:
        a = encoding.weight[0, clip(cell.j - cell.i, 3) + 3]
        return cell.scale * ((cell.q + a) @ (cell.k + a) - a @ a)

    q, k, v = tokens()
    assert_same(dense(q, k, v, encoding), attend(q, k, v, score))


def test_shaw_with_values_adds_to_shaw_on_keys():
    keys, values = torch.randn(5, DIM), torch.randn(5, DIM)
    with_values = lagwise.Shaw.from_tables(keys, values, heads=HEADS)
    keys_only = lagwise.Shaw.from_tables(keys, heads=HEADS)
    q, k, v = tokens()
    vectors_alone = dense(q, k, torch.zeros_like(v), with_values)
    assert_same(dense(q, k, v, with_values), dense(q, k, v, keys_only) + vectors_alone)
    assert vectors_alone.abs().min() > 0.0


def test_kerple_power_one_is_alibi():
    kerple, alibi = built("kerple", kind="power"), lagwise.ALiBi(heads=HEADS)
    slopes = 0.1 + torch.rand(HEADS)
    kerple.p.data, kerple.a.data, alibi.slope = torch.ones(HEADS), slopes.clone(), slopes
    q, k, v = tokens()
    assert_same(dense(q, k, v, kerple), dense(q, k, v, alibi))


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_stays_in_its_range_with_finite_gradients(kind: str):
    # p and a are kept above 0.01 (and the power's p at most 2); lag 0 is where |n|^p has no logarithm.
    kerple = built("kerple", kind=kind)
    kerple.p.data, kerple.a.data = torch.tensor([-1.0, 1.5, 9.0]), torch.tensor([0.5, -1.0, 0.5])
    bias = kerple.terms(-4, 4, scale=1.0).bias.at(torch.tensor([0, -3, 3]))
    low, high = 0.01, 2.0 if kind == "power" else 9.0
    for head, (p, a) in enumerate([(low, 0.5), (1.5, low), (high, 0.5)]):
        expected = -p * math.log(1.0 + 3 * a) if kind == "log" else -a * 3**p
        assert_same(bias[head], torch.tensor([0.0, expected, expected]))
    bias.sum().backward()
    assert kerple.p.grad.isfinite().all() and kerple.a.grad.isfinite().all()


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [(8, [1, 2, 3, 4, 5, 6, 7, 8]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])],
)
def test_alibi_slopes(heads: int, exponents: list[float]):
    bias = lagwise.ALiBi(heads=heads).terms(-7, 7, scale=1.0).bias.at(torch.tensor([-7, 0, 7]))
    slopes = torch.tensor([2.0**-exponent for exponent in exponents])
    assert_same(bias, slopes[:, None] * torch.tensor([-7.0, 0.0, -7.0]))


@pytest.mark.parametrize("method", ["relative_key", "relative_key_query"])
def test_distance_embeddings_of_bert(method: str):
    # transformers 4.30, modeling_bert.py: row (i - j) + m - 1 of one table; all terms are divided by sqrt(D).
    longest = TIME
    weight = torch.randn(2 * longest - 1, DIM)

    def score(cell: Cell) -> Tensor:
        a = weight[(cell.i - cell.j) + longest - 1]
        key_term = cell.k @ a if method == "relative_key_query" else 0.0
        return (cell.q @ cell.k + cell.q @ a + key_term) * cell.scale

    encoding_class = lagwise.Shaw if method == "relative_key" else lagwise.HuangM4
    encoding = encoding_class.from_distance_embedding(weight, heads=HEADS)
    q, k, v = tokens()
    assert_same(dense(q, k, v, encoding), attend(q, k, v, score))


def content_products(encoding: lagwise.Encoding, q: Tensor, k: Tensor, start: int) -> Tensor:
    positions = start + torch.arange(q.shape[2])
    transform = encoding.terms(1 - TIME, TIME - 1, scale=1.0, seed=torch.tensor(SEED)).transform
    q, k = transform(q, k, positions, positions)
    return q @ k.mT


@pytest.mark.parametrize(
    ("name", "options"),
    [("rotary", {"interleaved": True}), ("rotary", {"interleaved": False}), ("xpos", {"unit": 99.0})],
)
def test_rotations_depend_on_the_lag_alone(name: str, options: dict[str, Any]):
    encoding = built(name, **options)
    q, k = (torch.randn(1, 1, 1, DIM).expand(1, 1, TIME, DIM) for _ in range(2))
    products = content_products(encoding, q, k, 0)[0, 0]
    for lag in range(1 - TIME, TIME):
        diagonal = products.diagonal(lag)
        assert_same(diagonal, diagonal[:1].expand_as(diagonal))
    # It must depend on the lag at all, and past and future must differ.
    assert len({round(float(products.diagonal(lag)[0]), 9) for lag in range(1 - TIME, TIME)}) == 2 * TIME - 1
    assert_same(content_products(encoding, q, k, 1234)[0, 0], products)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_exact_at_position_one_million(interleaved: bool):
    encoding = built("rotary", head_dim=32, interleaved=interleaved)
    q, k = torch.randn(1, 2, 50, 32).float(), torch.randn(1, 2, 50, 32).float()
    reference = content_products(encoding, q.double(), k.double(), 0)
    near, far = (content_products(encoding, q, k, start) for start in (0, MILLION))
    assert near.dtype == torch.float32
    near_error, far_error = ((x.double() - reference).abs().max() for x in (near, far))
    # float32 phases at one million would be wrong by 0.03 radians; a rounded product of width 32 errs by 1e-6.
    assert far_error < 1e-5
    assert far_error < 2.0 * near_error


SPE_CASES = [
    ("sine-spe", {"sines": 2, "gated": False}),
    ("sine-spe", {"sines": 2, "gated": True}),
    ("conv-spe", {"kernel_size": 3, "gated": False}),
    ("conv-spe", {"kernel_size": 3, "gated": True}),
]
over_stochastic = pytest.mark.parametrize(("name", "options"), SPE_CASES)


@torch.no_grad()
@pytest.mark.parametrize("start", [0, MILLION])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@over_stochastic
def test_stochastic_features_are_their_definition(name: str, options: dict[str, Any], dtype: torch.dtype, start: int):
    encoding = built(name, realizations=3, **options).to(dtype)
    if name == "sine-spe":
        # High frequencies: there a rounded phase shows.
        encoding.freq.data.uniform_(-2.0, 2.0)
    q, k, _ = tokens(3, 3)
    positions = start + torch.arange(3)
    transform = encoding.terms(-2, 2, scale=1.0, seed=torch.tensor(SEED)).transform
    actual = transform(q.to(dtype), k.to(dtype), positions, positions)
    # 2 pi f m is a double with an error of 1e-10 turns at one million; a single would be wrong by 0.03 turns.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-8 if start else 1e-10
    for x, features, side in zip((q, k), actual, ("query", "key"), strict=True):
        expected = torch.zeros(BATCH, HEADS, 3, 3)
        for b, head, t, r in product(*map(range, expected.shape)):
            expected[b, head, t, r] = random_feature(encoding, x[b, head, t], head, r, start + t, side) / math.sqrt(3)
        torch.testing.assert_close(features, expected.to(dtype), rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("setting", SETTINGS)
@over_stochastic
def test_exact_twin_is_the_papers_kernel(name: str, options: dict[str, Any], setting: str):
    encoding, call = built(name, **options), SETTINGS[setting]
    q, k, v = tokens(queries=3 if setting == "offset" else TIME)
    terms = encoding.exact_terms(1 - TIME, TIME - 1, scale=call.get("scale", DIM**-0.5))
    expected = attend(q, k, v, lambda cell: score_expected_spe(encoding, cell), **call)
    assert_same(dense(q, k, v, terms, **call), expected)


@pytest.mark.parametrize("name", ["sine-spe", "conv-spe"])
def test_gate_mixes_the_kernel_with_one(name: str):
    gated, ungated = built(name, gated=True), lagwise.make(name, heads=HEADS, head_dim=DIM, gated=False)
    ungated.load_state_dict({key: x for key, x in gated.state_dict().items() if key != "gate"})
    lags = torch.arange(-200, 201)
    mixed, pure = (encoding.exact_terms(-200, 200, scale=1.0).gain.at(lags) for encoding in (gated, ungated))
    delta = torch.sigmoid(gated.gate)[:, None]
    assert_same(mixed, delta + (1.0 - delta) * pure)
    assert (mixed - pure).abs().max() > 0.1
    # A gate that is wide open leaves plain content attention.
    gated.gate.data.fill_(50.0)
    assert_same(gated.exact_terms(-200, 200, scale=1.0).gain.at(lags), torch.ones_like(mixed))


def test_conv_kernel_is_zero_beyond_its_length():
    size = 4
    encoding = built("conv-spe", kernel_size=size, gated=False)
    lags = torch.arange(-30, 31)
    gain = encoding.exact_terms(-30, 30, scale=1.0).gain.at(lags)
    assert (gain[:, lags.abs() >= size] == 0.0).all()
    assert (gain[:, lags.abs() < size] != 0.0).all()


def test_conv_kernel_starts_as_a_triangle():
    # PAPERS 3.3: taps from U(0, 1) / sqrt(K / 2) give P(tau) = (1 - |tau| / K) / 2 on average.
    size, channels = 8, 20_000
    encoding = lagwise.ConvSPE(heads=1, head_dim=channels, kernel_size=size, gated=False)
    gain = encoding.exact_terms(-size, size, scale=1.0).gain.at(torch.arange(-size, size + 1))[0]
    expected = torch.tensor([(1.0 - abs(tau) / size) / 2.0 for tau in range(-size, size + 1)])
    # The error of each mean, from its own scatter; the two ends are exactly zero.
    error = gain.std(dim=1) / math.sqrt(channels)
    assert ((gain.mean(1) - expected).abs() <= 5.0 * error).all()
    assert error.max() < 0.005


class Estimate(NamedTuple):
    """What the product of one realization of q' and k' must have, for each head, query and key."""

    mean: Tensor
    variance: Tensor


def single_realization(encoding, q: Tensor, k: Tensor) -> Estimate:
    """The moments of X Y for the Gaussian features X of a query and Y of a key: E = cov, Var = var X var Y + cov^2."""

    def power(side: int, head: int, d: int) -> float:
        if isinstance(encoding, lagwise.SineSPE):
            sines = encoding.freq.shape[2]
            positional = sum(sine_parameters(encoding, head, d, k)[2] ** 2 for k in range(sines)) / (2 * sines)
        else:
            positional = float((encoding.taps[side, head, d] ** 2).sum())
        delta = 0.0 if encoding.gate is None else float(torch.sigmoid(encoding.gate[head, d]))
        return delta + (1.0 - delta) * positional

    time = q.shape[2]
    mean, variance = torch.zeros(2, HEADS, time, time)
    for head, m, n in product(range(HEADS), range(time), range(time)):
        x, y = q[0, head, m], k[0, head, n]
        covariance = sum(float(x[d] * y[d]) * gated_kernel(encoding, head, d, m - n) for d in range(DIM))
        var_x = sum(float(x[d]) ** 2 * power(0, head, d) for d in range(DIM))
        var_y = sum(float(y[d]) ** 2 * power(1, head, d) for d in range(DIM))
        mean[head, m, n], variance[head, m, n] = covariance, var_x * var_y + covariance**2
    return Estimate(mean, variance)


def resized(name: str, realizations: int, options: dict[str, Any], like: lagwise.Encoding) -> lagwise.Encoding:
    """Makes an encoding with the parameters of another and its own number of realizations."""
    encoding = lagwise.make(name, heads=HEADS, head_dim=DIM, realizations=realizations, **options)
    encoding.load_state_dict(like.state_dict())
    return encoding


def estimated(encoding: lagwise.Encoding, q: Tensor, k: Tensor, seed: int) -> Tensor:
    positions = torch.arange(q.shape[2])
    q, k = encoding.terms(-9, 9, scale=1.0, seed=torch.tensor(seed)).transform(q, k, positions, positions)
    return (q @ k.mT)[0]


@torch.no_grad()
@over_stochastic
def test_stochastic_products_average_to_the_kernel(name: str, options: dict[str, Any]):
    # With 20,000 realizations the error is about 1 percent; five standard errors have a chance of 2e-5 for 27 products.
    realizations, time = 20_000, 3
    encoding = built(name, realizations=realizations, **options)
    q, k = torch.randn(1, HEADS, time, DIM), torch.randn(1, HEADS, time, DIM)
    single = single_realization(encoding, q, k)
    error = estimated(encoding, q, k, SEED) - single.mean
    assert (error.abs() < 5.0 * (single.variance / realizations).sqrt()).all()
    # The same limit, by the library's own twin.
    gain = encoding.exact_terms(1 - time, time - 1, scale=1.0).gain
    lags = torch.arange(time) - torch.arange(time)[:, None]
    twin = torch.einsum("hmd,hnd,hmnd->hmn", q[0], k[0], gain.at(lags))
    assert_same(twin, single.mean)


@torch.no_grad()
@over_stochastic
def test_stochastic_error_falls_with_the_root_of_the_realizations(name: str, options: dict[str, Any]):
    # Over many seeds, R times the squared error must have the mean of the analytic variance, whatever R is.
    seeds, time = 300, 3
    parameters = built(name, **options)
    q, k = torch.randn(1, HEADS, time, DIM), torch.randn(1, HEADS, time, DIM)
    single = single_realization(parameters, q, k)
    for realizations in (4, 64):
        encoding = resized(name, realizations, options, parameters)
        estimates = torch.stack([estimated(encoding, q, k, seed) for seed in range(seeds)])
        normalised = (estimates - single.mean) / (single.variance / realizations).sqrt()
        # Averaging over the products first leaves one number per seed, and these are independent.
        squares = normalised.square().mean(dim=(1, 2, 3))
        error = squares.std() / math.sqrt(seeds)
        assert error < 0.15
        assert (squares.mean() - 1.0).abs() < 5.0 * error
        assert (normalised.mean(0).abs() < 5.0 / math.sqrt(seeds)).all()


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [SPE_CASES[1], SPE_CASES[3]])
def test_stochastic_attention_approaches_its_twin(name: str, options: dict[str, Any]):
    # Through the softmax the error still falls as R^-1/2: a factor of 8 from 64 to 4096 realizations.
    parameters = built(name, **options)
    q, k, v = tokens()
    twin = dense(q, k, v, parameters.exact_terms(1 - TIME, TIME - 1, scale=DIM**-0.5))
    errors = []
    for realizations in (64, 4096):
        encoding = resized(name, realizations, options, parameters)
        outs = [lagwise.attention(q, k, v, encoding, impl="dense", seed=torch.tensor(seed)) for seed in range(12)]
        errors.append(float((torch.stack(outs) - twin).square().mean().sqrt()))
    assert 5.0 < errors[0] / errors[1] < 12.0
