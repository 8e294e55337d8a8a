"""The signatures are true: part of the suite runs with all shapes in them checked, and a type checker reads calls by them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CALLS = """
# pyright: reportUnnecessaryTypeIgnoreComment=true
import torch
from torch import Tensor
from typing_extensions import assert_type

import lagwise
from lagwise import nn

q = torch.zeros(1, 2, 3, 4)
x = torch.zeros(1, 3, 8)


def either(return_lse: bool) -> None:
    assert_type(lagwise.attention(q, q, q, return_lse=return_lse), Tensor | tuple[Tensor, Tensor])


assert_type(lagwise.attention(q, q, q, causal=True), Tensor)
assert_type(lagwise.attention(q, q, q, return_lse=False), Tensor)
assert_type(lagwise.attention(q, q, q, None, window=(1, 2), return_lse=True), tuple[Tensor, Tensor])
assert_type(lagwise.linear_attention(q, q, q), Tensor)
assert_type(lagwise.make("t5", heads=2), lagwise.Encoding)
assert_type(nn.RelativeAttention(8, heads=2)(x), Tensor)
assert_type(nn.Layer(8, heads=2)(x), Tensor)
assert_type(nn.Encoder(8, layers=1, heads=2)(x), Tensor)
assert_type(nn.Decoder(8, layers=1, heads=2)(x, cache=None), Tensor)
lagwise.attention(q, q, q, is_causal=True)  # pyright: ignore[reportCallIssue]
lagwise.attention(q, q, q, causal="no")  # pyright: ignore[reportArgumentType]
"""


def test_signatures_hold():
    chosen = "test_every_encoding or test_odd_shapes or test_query_start_per_row or test_packed or test_lengths or test_key_mask"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--jaxtyping-packages=lagwise,beartype.beartype", "tests/test_impl.py", "-k", chosen,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


def test_a_type_checker_knows_what_calls_return(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(CALLS)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(program)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
