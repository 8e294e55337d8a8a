"""What holds for every encoding, by being in `ENCODINGS`."""

import copy
import inspect
import math

import pytest
import torch
from oracle import make_encoding

import lagwise
from lagwise.encodings import ALIASES, SHARED_OPTIONS, canonical_name, options_of


def terms_of(encoding, first=-30, last=30):
    return encoding.terms(first, last, scale=0.35, seed=torch.tensor(3))


def test_every_encoding_is_made_in_one_loop(encoding_name):
    encoding = lagwise.make(encoding_name, heads=4, head_dim=8, dim=32, max_lag=20)
    assert type(encoding) is lagwise.ENCODINGS[encoding_name]


@pytest.mark.parametrize(
    ("alias", "name"),
    [*ALIASES.items(), ("RoPE", "rotary"), ("T5", "t5"), ("sine_spe", "sine-spe"), ("Relative_Key_Query", "huang4")],
)
def test_names_that_the_field_has_make_the_same(alias, name):
    assert type(lagwise.make(alias, heads=4, head_dim=8, dim=32)) is lagwise.ENCODINGS[name]
    assert canonical_name(alias) == name


def test_other_names_are_other_names():
    assert not ALIASES.keys() & lagwise.ENCODINGS.keys()
    assert set(ALIASES.values()) <= lagwise.ENCODINGS.keys()
    assert all(alias == alias.lower().replace("_", "-") for alias in ALIASES)


def test_a_layer_takes_other_names_and_their_causal_form():
    assert isinstance(lagwise.nn.RelativeAttention(32, heads=4, encoding="rope").encoding, lagwise.Rotary)
    assert lagwise.nn.RelativeAttention(32, heads=4, encoding="T5_bias", causal=True).encoding.causal


def test_strict_refuses_shared_options_that_are_not_used(encoding_name):
    shared = dict(heads=4, head_dim=8, dim=32, max_lag=20)
    used = {option: value for option, value in shared.items() if option in options_of(encoding_name)}
    lagwise.make(encoding_name, strict=True, **used)
    for option in shared.keys() - used.keys():
        with pytest.raises(ValueError, match=f"unknown option '{option}' for encoding '{encoding_name}'"):
            lagwise.make(encoding_name, strict=True, **used, **{option: shared[option]})


def test_every_encoding_is_public(encoding_name):
    kind = lagwise.ENCODINGS[encoding_name]
    assert getattr(lagwise, kind.__name__) is kind


def test_options_are_keywords_with_one_meaning(encoding_name):
    known = {
        *SHARED_OPTIONS, "causal", "buckets", "per_head", "reach", "realizations", "sines", "kernel_size", "grid", "gated",
        "widths", "slopes", "activation", "dropout", "std", "kind", "values", "base", "interleaved", "unit", "length", "decay",
        "seed", "fixed",
    }  # fmt: skip
    assert options_of(encoding_name).keys() <= known
    kinds = {p.kind for p in inspect.signature(lagwise.ENCODINGS[encoding_name]).parameters.values()}
    assert inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds


def test_tables_have_heads_and_cover_what_is_asked_or_have_constant_tails(relative_name):
    encoding = make_encoding(relative_name)
    for first, last in ((-30, 30), (-30, 0), (-3, 2), (0, 0), (7, 12), (-12, -7)):
        if relative_name == "xpos" and last > 0:
            continue
        terms = terms_of(encoding, first, last)
        for name, table in terms.tables().items():
            assert table.heads in (1, 4), name
            wide = terms_of(encoding, -60, 60).tables()[name] if relative_name not in ("alibi",) else table
            lags = torch.arange(first, last + 1)
            torch.testing.assert_close(table.at(lags), wide.at(lags), rtol=1e-5, atol=1e-6)


def test_gradients_reach_every_parameter(relative_name):
    encoding = make_encoding(relative_name).double()
    q, k, v = (torch.randn(1, 4, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    lagwise.attention(q, k, v, encoding, seed=torch.tensor(1)).square().sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_gradients_of_the_parameters_are_the_derivative(relative_name):
    encoding = make_encoding(relative_name, heads=2, head_dim=2, max_lag=3).double()
    parameters = dict(encoding.named_parameters())
    if not parameters:
        pytest.skip("nothing is learned")
    q, k, v = (torch.randn(1, 2, 4, 2, dtype=torch.float64) for _ in range(3))

    def function(*values):
        changed = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(Attend(encoding), {f"encoding.{n}": x for n, x in changed.items()}, (q, k, v))

    torch.autograd.gradcheck(function, tuple(parameters.values()), atol=1e-4)


class Attend(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q, k, v):
        return lagwise.attention(q, k, v, self.encoding, impl="blockwise", seed=torch.tensor(1))


def test_state_dicts_carry_everything_that_is_learned(encoding_name):
    encoding = make_encoding(encoding_name)
    fresh = make_encoding(encoding_name)
    fresh.load_state_dict(encoding.state_dict())
    for (name, a), (_, b) in zip(encoding.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert encoding.state_dict().keys() == {name for name, _ in encoding.named_parameters()}


def test_encodings_can_be_copied_and_pickled(encoding_name, tmp_path):
    encoding = make_encoding(encoding_name)
    torch.save(encoding, tmp_path / "encoding.pt")
    for other in (copy.deepcopy(encoding), torch.load(tmp_path / "encoding.pt", weights_only=False)):
        assert type(other) is type(encoding) and other is not encoding
        for (name, a), (_, b) in zip(encoding.state_dict().items(), other.state_dict().items(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr(), name


@pytest.mark.parametrize("name", ["huang1", "huang2", "huang3"])
def test_gains_start_at_one(name):
    """Near zero, all logits would vanish and attention would be uniform."""
    gain = lagwise.make(name, heads=4, head_dim=8).terms(-9, 9, scale=1.0).gain.values
    assert torch.equal(gain, torch.ones_like(gain))


def test_dropout_of_at5_is_drawn_per_lag_from_the_seed():
    encoding = make_encoding("at5", dropout=0.5).train()
    one, again, other = (terms_of_seed(encoding, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    narrow = encoding.terms(-2, 2, scale=1.0, seed=torch.tensor(1)).bias
    torch.testing.assert_close(narrow.values, one[:, 3:8])
    assert torch.equal(terms_of_seed(encoding.eval(), 1), terms_of_seed(encoding, 2))


def terms_of_seed(encoding, seed):
    return encoding.terms(-5, 5, scale=1.0, seed=torch.tensor(seed)).bias.values


@pytest.mark.parametrize("name", ["t5", "at5", "shaw", "rotary"])
def test_encodings_that_are_not_random_leave_the_generator_alone(name):
    encoding, q = make_encoding(name, heads=2), torch.randn(1, 2, 9, 8)
    assert not encoding.random and (encoding + make_encoding("sine-spe", heads=2)).random
    before = torch.get_rng_state()
    lagwise.attention(q, q, q, encoding.train())
    assert torch.equal(torch.get_rng_state(), before)


def test_training_draws_fresh_codes_and_evaluation_keeps_them():
    encoding = make_encoding("sine-spe")
    q = torch.randn(1, 4, 9, 8)
    assert torch.equal(lagwise.attention(q, q, q, encoding), lagwise.attention(q, q, q, encoding))
    encoding.train()
    torch.manual_seed(5)
    one, other = lagwise.attention(q, q, q, encoding), lagwise.attention(q, q, q, encoding)
    assert not torch.equal(one, other)
    torch.manual_seed(5)
    assert torch.equal(one, lagwise.attention(q, q, q, encoding))


@pytest.mark.parametrize("name", ["sine-spe", "conv-spe"])
def test_fixed_codes_stay_in_training_and_travel_with_the_state(name):
    encoding, other, redrawn = (make_encoding(name, fixed=fixed) for fixed in (True, True, False))
    q, before = torch.randn(1, 4, 9, 8), torch.get_rng_state()
    expected = lagwise.attention(q, q, q, encoding.train())
    assert torch.equal(lagwise.attention(q, q, q, encoding), expected) and not encoding.random
    assert torch.equal(lagwise.attention(q, q, q, encoding, seed=torch.tensor(1)), expected)
    assert torch.equal(lagwise.attention(q, q, q, encoding.eval()), expected)
    assert torch.equal(torch.get_rng_state(), before)
    redrawn.load_state_dict({key: value for key, value in encoding.state_dict().items() if key != "fixed_seed"})
    assert torch.equal(lagwise.attention(q, q, q, redrawn, seed=encoding.fixed_seed), expected)
    other.load_state_dict(redrawn.state_dict() | {"fixed_seed": other.fixed_seed})
    assert not torch.equal(lagwise.attention(q, q, q, other), expected)
    other.load_state_dict(encoding.state_dict())
    assert torch.equal(lagwise.attention(q, q, q, other), expected)


def test_an_encoding_is_tested_plotted_and_measured_by_one_file_and_one_entry():
    """What CONTRIBUTING promises: a class with `terms`, an entry, and it runs everywhere."""

    class Nearest(lagwise.Encoding):
        def __init__(self, *, heads: int):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(heads))

        def terms(self, first, last, *, scale, seed=None):
            curve = self.weight[:, None] * torch.tensor([0.0, 1.0, 0.0])
            return lagwise.Terms(bias=lagwise.LagTable(curve, -1))

    q = torch.randn(1, 4, 200, 8)
    outputs = [lagwise.attention(q, q, q, Nearest(heads=4), impl=impl) for impl in ("dense", "blockwise", "split")]
    for out in outputs[1:]:
        torch.testing.assert_close(out, outputs[0])


@pytest.mark.parametrize(("kind", "p", "a"), [("log", -0.3, -0.2), ("power", 2.4, 0.3), ("power", -0.3, -0.2)])
def test_kerple_comes_back_from_outside_its_range(kind, p, a):
    """A step that leaves the range is undone by gradients that lead back; those that lead farther out do nothing."""
    inside = lagwise.Kerple(heads=1, kind=kind)
    encoding = lagwise.Kerple(heads=1, kind=kind)
    with torch.no_grad():
        encoding.p.fill_(p), encoding.a.fill_(a)
        inside.p.fill_(min(max(p, 0.01), math.inf if kind == "log" else 2.0)), inside.a.fill_(max(a, 0.01))

    def gradients(of, sign):
        values = of.terms(-9, 0, scale=1.0).bias.values
        return torch.autograd.grad(sign * values.sum(), [of.p, of.a])

    torch.testing.assert_close(encoding.terms(-9, 0, scale=1.0).bias.values, inside.terms(-9, 0, scale=1.0).bias.values)
    for parameter, number in ((0, p), (1, a)):
        for sign in (1.0, -1.0):
            wanted, found = gradients(inside, sign)[parameter], gradients(encoding, sign)[parameter]
            outside = number < 0.01 or (kind == "power" and parameter == 0 and number > 2.0)
            outward = outside and (wanted > 0) == (number < 0.01)
            assert torch.equal(found, torch.zeros_like(found) if outward else wanted)
