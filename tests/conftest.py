"""Seeds, and memory that shows what was not written."""

import os
import shutil

# Some virtual machines announce matrix units that end the program which uses them. oneDNN reads this at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Without a GPU the Triton kernels run under Triton's interpreter, which a kernel asks for when it is defined.
if shutil.which("nvidia-smi") is None and not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

import lagwise

# The suite runs one process per core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch):
    """Fills `torch.empty` and `new_empty` with NaN, so that a number that was never written shows."""

    def fill(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: fill(empty(*sizes, **options)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *sizes, **options: fill(new_empty(self, *sizes, **options)))


def pytest_generate_tests(metafunc):
    """Runs a test that asks for `encoding_name` once for each encoding that there is.

    Those of `softmax_name` can be used with softmax attention, and those of `relative_name` act on it.
    """
    softmax = [name for name, kind in lagwise.ENCODINGS.items() if not kind.linear_only]
    if "encoding_name" in metafunc.fixturenames:
        metafunc.parametrize("encoding_name", list(lagwise.ENCODINGS))
    if "relative_name" in metafunc.fixturenames:
        metafunc.parametrize("relative_name", [name for name in softmax if not lagwise.ENCODINGS[name].absolute])
    if "softmax_name" in metafunc.fixturenames:
        metafunc.parametrize("softmax_name", softmax)
