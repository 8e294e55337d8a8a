"""What is kept between calls: it is found again, bounded, safe from others, and left alone where it would be wrong."""

import copy
import io
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lagwise
from lagwise import kept
from lagwise.kept import over_lags

CPU = torch.device("cpu")
ENCODINGS = ["at5", "kerple", "sandwich", "xl"]


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """Starts with nothing kept, and leaves nothing."""
    monkeypatch.setattr(kept, "_kept", type(kept._kept)())


def squares():
    """Returns a function of lags that is kept, and the calls of what it is made by."""
    calls = []

    @over_lags
    def make(first, last, device, *facts):
        calls.append((first, last, *facts))
        lags = torch.arange(first, last + 1, device=device)
        return lags**2, torch.stack([lags, -lags], 1)

    return make, calls


def make(name, **options):
    torch.manual_seed(0)
    return lagwise.make(name, heads=2, head_dim=8, max_lag=9, **options)


def table(encoding, first=-20, last=20):
    return encoding.terms(first, last, scale=0.5).bias.values


@pytest.mark.parametrize("lags", [(-3, 5), (0, 7), (-9, 0), (3, 4), (-9, -8), (0, 0), (-300, 20), (-20000, 3)])
def test_what_is_cut_is_what_would_be_made(lags):
    find, _ = squares()
    expected = torch.arange(lags[0], lags[1] + 1)
    for _ in range(2):
        square, both = find(*lags, CPU)
        assert torch.equal(square, expected**2) and torch.equal(both, torch.stack([expected, -expected], 1))


def test_other_lengths_find_what_is_kept():
    find, calls = squares()
    for length in range(1, 257):
        find(-length, length, CPU)
    assert calls == [(-256, 256)]
    find(-257, 256, CPU)
    find(-256, 256, CPU, "fact")
    assert calls[1:] == [(-512, 256), (-256, 256, "fact")]


def test_far_lags_are_not_kept():
    find, calls = squares()
    for _ in range(2):
        find(-(2**13) - 1, 0, CPU)
    assert calls == [(-(2**13) - 1, 0)] * 2 and not kept._kept


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch):
    find, calls = squares()
    # An entry has three numbers of eight bytes for each of 257 lags.
    monkeypatch.setattr(kept, "MOST_BYTES", 3 * 8 * 257 * 4)
    for fact in range(100):
        find(0, 9, CPU, fact)
        find(0, 9, CPU, 0)
        assert len(kept._kept) <= 4
    assert calls == [(0, 256, fact) for fact in range(100)]


def test_what_is_larger_than_all_may_be_is_not_kept(monkeypatch):
    find, _ = squares()
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    assert torch.equal(find(0, 3, CPU)[0], torch.tensor([0, 1, 4, 9])) and not kept._kept


def test_a_change_in_place_is_no_change_for_others():
    find, _ = squares()
    find(0, 3, CPU)[0].zero_()
    assert torch.equal(find(0, 3, CPU)[0], torch.tensor([0, 1, 4, 9]))


@pytest.mark.parametrize("name", ENCODINGS)
def test_training_after_inference(name):
    encoding = make(name)
    with torch.inference_mode():
        expected = table(encoding).clone()
    found = table(encoding)
    torch.testing.assert_close(found, expected.clone(), rtol=0, atol=0)
    if found.requires_grad:
        found.sum().backward()


# The first weights of AT5 are drawn by looking at numbers, which fake tensors have not.
@pytest.mark.parametrize("name", ["kerple", "sandwich", "xl"])
def test_fake_tensors_and_real_ones_do_not_meet(name):
    expected = table(make(name))
    for _ in range(2):
        kept._kept.clear()
        with FakeTensorMode():
            assert table(make(name)).shape == expected.shape
        assert torch.equal(table(make(name)), expected)
        with FakeTensorMode():
            assert table(make(name)).shape == expected.shape


@pytest.mark.parametrize("name", ENCODINGS)
def test_transforms_of_torch_neither_find_nor_keep(name):
    encoding = make(name)
    parameters = dict(encoding.named_parameters())
    kept._kept.clear()

    def total(parameters):
        return torch.func.functional_call(Table(encoding), {f"encoding.{key}": x for key, x in parameters.items()}, ()).sum()

    torch.func.grad(total)(parameters) if parameters else None
    torch.func.vmap(lambda x: table(encoding) * x)(torch.ones(3))
    assert not kept._kept


class Table(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self):
        return table(self.encoding)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_compiler_neither_finds_nor_keeps(name):
    torch._dynamo.reset()
    encoding = make(name)
    compiled = torch.compile(lambda: table(encoding), backend="aot_eager", fullgraph=True)
    found = compiled()
    assert not kept._kept
    torch.testing.assert_close(found, table(encoding))


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_move_copy_and_pickle(name):
    encoding = make(name)
    expected = table(encoding)
    stored = io.BytesIO()
    torch.save(encoding, stored)
    stored.seek(0)
    for other in (copy.deepcopy(encoding), torch.load(stored, weights_only=False)):
        assert torch.equal(table(other), expected)
    assert table(copy.deepcopy(encoding).to("meta")).is_meta
    double = table(encoding.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), expected)


class Seen(TorchDispatchMode):
    """Notes which operations there are."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_notes_operations_sees_the_same_ones_twice():
    """Selective checkpointing would otherwise take one operation of the second pass for another one of the first."""
    seen = []
    for _ in range(2):
        with Seen() as mode:
            table(make("sandwich"))
        seen.append(mode.names)
    assert seen[0] == seen[1]


def test_threads_share_what_is_kept(monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 2**15)
    find, _ = squares()
    wrong = []

    def work(seed):
        for step in range(200):
            last = (seed * 37 + step * 11) % 900
            if not torch.equal(find(0, last, CPU, step % 3)[0], torch.arange(last + 1) ** 2):
                wrong.append(last)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("first", [0, 5, 2**14])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_turns_the_same_by_kept_factors(first, interleaved):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 9, 8, dtype=torch.float64)
    turned = lagwise.Rotary(head_dim=8, interleaved=interleaved).terms(-8, 8, scale=1.0).transform
    expected = turned(q, k, *[torch.arange(first, first + 9)] * 2)
    for _ in range(2):
        at = kept.positions(first, first + 8, CPU)
        assert kept.range_of(at) == (first, first + 8)
        assert all(torch.equal(a, b) for a, b in zip(turned(q, k, at, at), expected, strict=True))


def test_positions_that_are_changed_are_no_range():
    at = kept.positions(0, 8, CPU)
    at += 3
    assert kept.range_of(at) is None and kept.range_of(torch.arange(9)) is None
    assert kept.positions(0, 8, CPU).tolist() == list(range(9))


def test_positions_of_inference_are_of_use_in_training():
    with torch.inference_mode():
        kept.range_of(kept.positions(0, 2**14, CPU))
        kept.positions(0, 8, CPU)
    assert not kept.positions(0, 8, CPU).is_inference()
