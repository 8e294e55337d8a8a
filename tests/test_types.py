"""The shapes in the signatures are true: part of the suite runs once more with all of them checked."""

import subprocess
import sys
from pathlib import Path


def test_signatures_hold():
    chosen = "test_every_encoding or test_odd_shapes or test_query_start_per_row or test_packed or test_lengths or test_key_mask"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--jaxtyping-packages=lagwise,beartype.beartype", "tests/test_impl.py", "-k", chosen,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
