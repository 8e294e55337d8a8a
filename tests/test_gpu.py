"""On a GPU: the same comparisons with the specification, the vendor's kernels in the far field. `pytest -m gpu` runs them."""

import os

import pytest
import torch
from oracle import assert_within_budget, make_encoding, make_terms

import lagwise

# cuBLAS repeats its results only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch's own, once, when the first product of a process runs in a backward pass.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


def tensors(batch=2, heads=4, queries=300, keys=None, head_dim=64, value_dim=None, kv_heads=None, dtype=torch.bfloat16):
    keys, kv_heads = keys or queries, kv_heads or heads
    return (
        torch.randn(batch, heads, queries, head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, keys, head_dim, device="cuda").to(dtype),
        torch.randn(batch, kv_heads, keys, value_dim or head_dim, device="cuda").to(dtype),
    )


def on_gpu(terms: lagwise.Terms) -> lagwise.Terms:
    def move(table):
        slopes = table.slopes and tuple(slope.cuda() for slope in table.slopes)
        return lagwise.LagTable(table.values.cuda(), table.first, slopes)

    return lagwise.Terms(**{name: move(table) for name, table in terms.tables().items()}, transform=terms.transform)


def budget(impl, *args, **options):
    assert_within_budget(impl, *args, seed=torch.tensor(7, device="cuda"), **options)


@pytest.mark.parametrize("causal", [False, True])
def test_split_with_every_encoding(relative_name, causal):
    if relative_name == "alibi":
        pytest.skip("sloped tails: the support table says no")
    budget("split", *tensors(), make_encoding(relative_name, head_dim=64).cuda(), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_with_every_encoding(relative_name, dtype):
    budget("blockwise", *tensors(head_dim=32, dtype=dtype), make_encoding(relative_name, head_dim=32).cuda(), causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"query_start": 100}, {"query_start": -40}, {"window": (20, 3)}],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_split_with_unequal_lengths(dtype, options, causal):
    terms = on_gpu(make_terms("bias", "gain", "query", "key", "value", head_dim=64, value_dim=64))
    budget("split", *tensors(queries=150, keys=300, dtype=dtype), terms, causal=causal, **options)


@pytest.mark.parametrize("shape", [{"kv_heads": 2}, {"head_dim": 40, "value_dim": 40}, {"value_dim": 32}], ids=str)
def test_split_with_odd_shapes(shape):
    q, k, v = tensors(**shape)
    terms = on_gpu(make_terms("bias", "query", "value", head_dim=q.shape[3], value_dim=v.shape[3]))
    budget("split", q, k, v, terms)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_mode_uses_flash_and_repeats(deterministic):
    from lagwise.impl import far

    q, k, v = (x.requires_grad_() for x in tensors(queries=1500))
    assert far.backend(q, k) == "flash"
    encoding = make_encoding("huang4", head_dim=64).cuda()

    def run():
        out = lagwise.attention(q, k, v, encoding, impl="split")
        return [out, *torch.autograd.grad(out.float().square().sum(), [q, k, v, *encoding.parameters()])]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)
    budget("split", *tensors(), encoding)
