"""The registered operators: they pass torch's own check, and `torch.compile` goes through them without a recompile per length."""

import pytest
import torch
from encoders import assert_gradients_within_budget, twelve_layers
from oracle import INTERPRETED, make_encoding, make_terms
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import lagwise
from lagwise.call import Call
from lagwise.encodings.shared import Shared
from lagwise.ops.lowering import flat, lower

pytestmark = [
    # Inductor's own imports warn on some Python versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TRITON = pytest.param("triton", marks=INTERPRETED)


def call_of(*tables, by_token=False):
    terms = make_terms(*tables, heads=2, head_dim=4, value_dim=4, max_lag=2)
    drawn = [torch.randn(1, 20, 2, 4).transpose(1, 2) if by_token else torch.randn(1, 2, 20, 4) for _ in range(3)]
    q, k, v = (x.requires_grad_() for x in drawn)
    return flat(lower(q, k, v, terms, Call(scale=0.5)))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("tables", [("bias",), ("bias", "gain", "query", "key", "value")], ids=len)
@pytest.mark.parametrize("name", ["blockwise", "split", TRITON])
def test_operators_pass_the_operator_check(name, tables, by_token):
    """Also where the heads of a token lie side by side: what is traced has to lie as what is computed."""
    torch.library.opcheck(getattr(torch.ops.lagwise, name).default, call_of(*tables, by_token=by_token))


def test_the_operator_of_shared_values_passes_the_operator_check():
    shared = Shared(torch.tensor([1, 0, 1, 2]), count=3, device="cpu")
    weight = torch.randn(2, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.lagwise.gather.default, (weight, shared.place, shared.lags, shared.starts))


@pytest.mark.parametrize("name", ["none", "t5", "shaw", "huang4", "rotary"])
def test_torch_can_keep_what_it_compiles(name):
    """Its cache of autograd graphs takes none with a function of autograd: each start of a program would trace it anew."""
    torch._dynamo.reset()
    encoding, counter = make_encoding(name), CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda q: lagwise.attention(q, q, q, encoding), fullgraph=True, backend=counter)
    compiled(torch.randn(1, 4, 200, 8, requires_grad=True))
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert targets and not any("autograd_function" in target for target in targets)


@pytest.mark.parametrize("impl", ["dense", "blockwise", "split"])
@pytest.mark.parametrize("name", ["none", "t5", "at5", "huang4", "kerple", "rotary", "sine-spe"])
def test_compiled_attention_is_attention(impl, name):
    check_compiled(impl, name, heads=4, times=(40, 41))


@INTERPRETED
@pytest.mark.parametrize("name", ["huang4", "rotary"])
def test_compiled_kernels_are_kernels(name):
    check_compiled("triton", name, heads=1, times=(15, 17))


def check_compiled(impl, name, heads, times):
    """Compares compiled with eager calls, outputs and gradients."""
    torch._dynamo.reset()
    encoding = make_encoding(name, heads=heads)
    seed = torch.tensor(3)

    def function(q, k, v):
        return lagwise.attention(q, k, v, encoding, causal=True, seed=seed, impl=impl)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for time in times:
        q, k, v = (torch.randn(2, heads, time, 8).requires_grad_() for _ in range(3))
        wanted = [q, k, v, *encoding.parameters()]
        expected, actual = function(q, k, v), compiled(q, k, v)
        torch.testing.assert_close(actual, expected)
        for a, b in zip(
            torch.autograd.grad(actual.square().sum(), wanted, allow_unused=True),
            torch.autograd.grad(expected.square().sum(), wanted, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "t5", "huang4", "kerple", "rotary"])
@pytest.mark.parametrize("impl", ["blockwise", "split"])
def test_lengths_do_not_recompile(name, impl):
    torch._dynamo.reset()
    encoding = make_encoding(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q: lagwise.attention(q, q, q, encoding, impl=impl), fullgraph=True, backend=counter)
    for time in (100, 120, 140, 160, 180):
        compiled(torch.randn(1, 4, time, 8))
    # Once for the first length, once for all others.
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_seed_is_an_argument_where_something_is_dropped(dropout):
    """Otherwise a compiled model would draw it and keep it for the backward pass, and kernels would have a variant for it."""
    seed, q = torch.tensor(3), torch.randn(1, 2, 20, 4)
    arguments = flat(lower(q, q, q, make_terms("bias", heads=2), Call(scale=0.5, dropout=dropout, seed=seed)))
    assert [x for x in arguments if x is seed] == [seed] * (dropout > 0)


def test_a_compiled_encoder_trains():
    torch._dynamo.reset()
    encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding="at5", attention_dropout=0.1)
    compiled = torch.compile(encoder, backend="aot_eager")
    compiled(torch.randn(2, 200, 16)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize(("name", "dynamic", "first"), [("t5", True, (150,)), ("huang4", True, (150,)), ("t5", None, (150, 140))])
def test_twelve_layers_train_as_one_graph_at_any_length(name, dynamic, first):
    """Compiled once, or a second time where the first length was taken for the only one, and then for no length again."""
    torch._dynamo.reset()
    counters.clear()
    model = twelve_layers(name)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for time in first:
        compiled(torch.randn(2, time, model.dim)).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for time in (163, 201):
            assert_gradients_within_budget(model, compiled, torch.randn(2, time, model.dim))
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["t5", "huang4"])
def test_padded_and_packed_batches_do_not_compile_again_for_a_length(name):
    masks = {
        "lengths": lambda time: {"lengths": torch.tensor([time, time // 2])},
        "key_mask": lambda time: {"key_mask": torch.rand(2, time) < 0.5},
        "cu_seqlens": lambda time: {"cu_seqlens": torch.tensor([0, time // 3, time]), "max_seqlen": time - time // 3},
    }
    model = lagwise.nn.Encoder(16, layers=1, heads=2, encoding=make_encoding(name, heads=2))
    for option, make in masks.items():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

        def train(time, option=option, make=make, compiled=compiled):
            compiled(torch.randn(1 if option == "cu_seqlens" else 2, time, model.dim), **make(time)).sum().backward()

        train(150)
        train(160)
        with torch.compiler.set_stance("fail_on_recompile"):
            train(190)
