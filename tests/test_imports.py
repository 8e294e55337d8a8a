"""What `import lagwise` loads, and how long it takes beside torch."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
began = time.process_time()
import torch
between = time.process_time()
import lagwise
done = time.process_time()
times = {"seconds": done - between, "torch": between - began}
print(json.dumps({**times, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""

HEAVY = {"triton", "transformers", "matplotlib", "typer", "rich", "accelerate", "datasets"}


def in_a_fresh_process() -> dict:
    # Triton comes with some builds of torch, which load it themselves; what counts is what we add.
    return json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)


def test_importing_lagwise_loads_nothing_heavy():
    plain = subprocess.run(
        [sys.executable, "-c", "import json, sys, torch; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    added = set(in_a_fresh_process()["loaded"]) - set(json.loads(plain.stdout))
    assert not added & HEAVY


def test_importing_lagwise_takes_little_longer_than_torch():
    # Of the processor, which other processes do not take away; a busy machine may still take longer now and then, and a slow one
    # takes longer for both.
    told = [in_a_fresh_process() for _ in range(4)]
    assert any(each["seconds"] <= max(0.2, 0.3 * each["torch"]) for each in told), [(x["seconds"], x["torch"]) for x in told]
