"""Calls under torch's transforms: compiled for any length, exported, on the meta device, under `torch.func`."""

import pytest
import torch
from oracle import make_encoding
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import lagwise

pytestmark = [
    # Inductor's and export's own imports warn on some Python versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

SEED = torch.tensor(5)


def tensors(time, batch=2, heads=4, kv_heads=4):
    return [torch.randn(batch, count, time, 8) for count in (heads, kv_heads, kv_heads)]


class Attention(torch.nn.Module):
    """A call as a module."""

    def __init__(self, encoding, **options):
        super().__init__()
        self.encoding, self.options = encoding, options

    def forward(self, q, k, v, **more):
        return lagwise.attention(q, k, v, self.encoding, seed=SEED, **self.options, **more)


def check_one_graph(model, kv_heads=4, ends=False):
    """Requires that a call is compiled once, and computes what it computes otherwise."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    frames = set()
    for time in (150, 170, 210):
        q, k, v = tensors(time, batch=1 if ends else 2, kv_heads=kv_heads)
        more = {"cu_seqlens": torch.tensor([0, 20, time])} if ends else {}
        torch.testing.assert_close(compiled(q, k, v, **more), model(q, k, v, **more))
        frames.add(counter.frame_count)
    assert len(frames) == 1, "another length is compiled anew"


def test_one_dynamic_graph_for_all_lengths(relative_name):
    check_one_graph(Attention(make_encoding(relative_name)))


OPTIONS = {
    "causal": {"causal": True},
    "lengths": {"lengths": torch.tensor([150, 20])},
    "query_start": {"query_start": 3},
    "query_start per row": {"query_start": torch.tensor([0, 3])},
    "window": {"window": (3, 4)},
    "dropout": {"dropout": 0.2},
    "scale": {"scale": -0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_dynamic_graphs_with_every_option(option):
    check_one_graph(Attention(make_encoding("t5") + make_encoding("rotary"), **OPTIONS[option]), kv_heads=2)


def test_one_dynamic_graph_for_packed_sequences():
    check_one_graph(Attention(make_encoding("t5") + make_encoding("rotary")), ends=True)


@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_program_takes_any_length(relative_name, causal):
    model = Attention(make_encoding(relative_name), causal=causal)
    any_length = {name: {2: Dim("time", min=2, max=10**5)} for name in "qkv"}
    program = export(model, tuple(tensors(50)), dynamic_shapes=any_length).module()
    for time in (3, 60, 200):
        given = tensors(time)
        torch.testing.assert_close(program(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_the_meta_device_computes_shapes(encoding_name):
    """Of layers that are made there too, forward and backward."""
    attention = "linear" if lagwise.ENCODINGS[encoding_name].linear_only else "softmax"
    with torch.device("meta"):
        encoder = lagwise.nn.Encoder(16, layers=1, heads=2, encoding=encoding_name, attention=attention)
        out = encoder(torch.randn(2, 50, 16), lengths=torch.tensor([50, 20]))
        out.sum().backward()
    assert out.is_meta and out.shape == (2, 50, 16)
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in encoder.parameters())


@pytest.mark.parametrize("impl", ["auto", "dense", "blockwise", "split"])
@pytest.mark.parametrize("name", ["none", "t5", "huang4", "rotary", "kerple"])
def test_gradients_of_torch_func_are_those_of_autograd(name, impl):
    encoding = make_encoding(name)
    q, k, v = (x.requires_grad_() for x in tensors(140))

    def loss(q, k, v):
        return lagwise.attention(q, k, v, encoding, causal=True, impl=impl).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(found, torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_vmap_and_forward_mode_of_every_encoding(relative_name):
    encoding = make_encoding(relative_name)
    q, k, v = tensors(150, batch=3)

    def attend(q, k, v):
        return lagwise.attention(q[None], k[None], v[None], encoding, causal=True)[0]

    if encoding.random:
        with pytest.raises(ValueError, match="cannot be made under vmap"):
            torch.func.vmap(attend)(q, k, v)
        return
    torch.testing.assert_close(torch.func.vmap(attend)(q, k, v), lagwise.attention(q, k, v, encoding, causal=True, impl="dense"))
    for name, parameter in encoding.named_parameters():
        # The derivative along ones is the sum of the gradient.
        def loss(x, name=name):
            terms = torch.func.functional_call(Bias(encoding), {f"encoding.{name}": x}, (150,))
            return lagwise.attention(q, k, v, terms, impl="dense").square().sum()

        _, found = torch.func.jvp(loss, (parameter.detach(),), (torch.ones_like(parameter),))
        torch.testing.assert_close(found, torch.autograd.grad(loss(parameter), parameter)[0].sum(), rtol=1e-3, atol=1e-3)


def test_gradients_of_each_example():
    """`vmap` of `grad`, with a length for each example."""
    encoding = make_encoding("t5")
    q, k, v = tensors(20, batch=3)
    lengths = torch.tensor([20, 5, 1])
    parameters = dict(encoding.named_parameters())

    def loss(parameters, q, k, v, length):
        terms = torch.func.functional_call(Bias(encoding), {f"encoding.{n}": x for n, x in parameters.items()}, (20,))
        return lagwise.attention(q[None], k[None], v[None], terms, lengths=length[None]).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0, 0))(parameters, q, k, v, lengths)["weight"]
    for row, each in enumerate(found):
        alone = loss(parameters, q[row], k[row], v[row], lengths[row])
        torch.testing.assert_close(each, torch.autograd.grad(alone, parameters["weight"])[0])


class Bias(torch.nn.Module):
    """The terms of an encoding as a forward pass, which `functional_call` takes."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, time):
        return self.encoding.terms(1 - time, time - 1, scale=1.0)
