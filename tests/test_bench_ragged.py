"""Sequences that are not equally long: what the bench gives to each contender, and that all compute the same."""

from dataclasses import replace

import pytest
import torch
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import lagwise
from lagwise.lab.bench import ragged, timing
from lagwise.lab.bench import softmax as bench
from lagwise.lab.bench.cases import Case, save_records
from lagwise.lab.bench.changes import compare_lines, labels_of, read_lines
from lagwise.lab.cli.bench.screen import COLUMNS, add_rows

CPU = torch.device("cpu")
KINDS = ["lengths", "cu_seqlens"]


def tiny(kind: str) -> Case:
    return Case("t5", 3, 2, 24, 8, ragged=kind)


def test_lengths_are_between_a_quarter_and_all_of_the_time_and_always_the_same():
    case = Case("t5", 200, 1, 40, 8, ragged="lengths")
    lengths = ragged.make_lengths(case)
    assert set(lengths) == set(range(10, 41)) and lengths == ragged.make_lengths(case)
    assert ragged.make_lengths(Case("t5", 4, 1, 1, 8, ragged="lengths")) == [1] * 4


def test_ends_begin_with_nothing():
    assert ragged.ends_of([3, 1, 2], CPU).tolist() == [0, 3, 4, 6]


def one_sequence_at_a_time(q, k, v, query_ends, ends, longest_q, longest_k):
    """What torch's variable-length attention computes, with its signature."""
    parts = []
    for start, end, key_start, key_end in zip(query_ends, query_ends[1:], ends, ends[1:], strict=False):
        assert end - start <= longest_q and key_end - key_start <= longest_k
        rows = (q[start:end], k[key_start:key_end], v[key_start:key_end])
        parts.append(ragged.plain_attention(*(x.transpose(0, 1)[None] for x in rows), causal=False)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_without_positions_is_ours_without_positions(kind, monkeypatch):
    monkeypatch.setattr(ragged, "varlen_attn", one_sequence_at_a_time)
    (q, k, v, dout), lengths = ragged.make_ragged(tiny(kind), CPU, torch.float64)
    assert q.shape == ((3, 2, 24, 8) if kind == "lengths" else (1, 2, sum(lengths), 8)) and q.transpose(1, 2).is_contiguous()
    options = ragged.options_for(lengths, kind, CPU)
    expected = lagwise.attention(q, k, v, impl="dense", **options)
    torch.testing.assert_close(ragged.one_by_one(q, k, v, lengths, kind), expected)
    vendor = ragged.varlen_contender(q, k, v, lengths, kind)
    torch.testing.assert_close(vendor.call(), expected)
    # Gradients go to q, and to k and v or to what was packed of them.
    found = torch.autograd.grad(vendor.call(), [q, *(vendor.learned or (k, v))], dout)
    wanted = torch.autograd.grad(expected, [q, k, v], dout)
    if kind == "lengths":
        wanted = [wanted[0], *(torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)]) for x in wanted[1:])]
    torch.testing.assert_close(list(found), list(wanted))


def test_on_a_gpu_the_vendors_kernel_is_what_ratios_are_taken_to():
    with FakeTensorMode():
        q = torch.empty(1, 2, 24, 8, device="cuda")
        assert list(ragged.plain_ragged(q, q, q, [6, 11, 7], "cu_seqlens")) == ["plain varlen"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_case_has_a_line_for_plain_and_for_ours(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)
    case = replace(tiny(kind), goal=1.6)
    records = bench.measure_attention(case, device=CPU, dtype=torch.float32, repeats=1, deterministic=True)
    assert [record["contender"] for record in records] == ["plain, one by one", "lagwise", "lagwise, deterministic"]
    assert all(record["training_ratio"] > 0 and record["ragged"] == kind for record in records), records
    # Ratios are to the first line, and the goal is shown for ours alone.
    assert records[0]["training_ratio"] == 1.0 and records[1]["impl"] == bench_choice(kind)
    table = Table(*COLUMNS)
    add_rows(table, records, words=case.words)
    assert [*table.columns[COLUMNS.index("goal")].cells] == ["", "1.60", ""]
    assert kind in next(iter(table.columns[1].cells)).split()
    # The saved lines are compared with those of another run of the same kind.
    save_records(records, tmp_path / "lines.jsonl")
    lines = read_lines(tmp_path / "lines.jsonl")
    found = compare_lines(lines, lines).changes
    assert {change.what for change in found} == {"training ms", "forward ms"} and len(found) == 6
    assert all(kind in labels_of(change.line)[1].split() and change.ratios is not None for change in found)


def bench_choice(kind: str) -> str:
    """Returns what `auto` takes for the tiny case."""
    (q, k, v, _), lengths = ragged.make_ragged(tiny(kind), CPU, torch.float32)
    encoding = lagwise.make("t5", heads=2, head_dim=8)
    return lagwise.which_impl(q, k, v, encoding, **ragged.options_for(lengths, kind, CPU)).impl
