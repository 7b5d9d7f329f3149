"""Saving and loading a checkpoint of large tensors adds at most 64 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST = 64_000_000

CODE = """
import sys
from pathlib import Path
import torch
from xmlc.checkpoint import CheckpointReader, read_into, write_checkpoint
from xmlc.memory.process import PeakWatch, return_large_blocks
return_large_blocks()
folder = Path(sys.argv[1])
tensors = {
    "weight": torch.ones(3 << 20, 32, dtype=torch.bfloat16),
    "state": torch.ones(2 << 20, 32),
    "indices": torch.ones(3 << 20, 32).to(torch.uint16),
}
assert min(tensor.nbytes for tensor in tensors.values()) > 3 * 64_000_000 - 1
with PeakWatch() as watch:
    for work in (
        lambda: write_checkpoint(folder, tensors, {}),
        lambda: read_into(folder, tensors),
        lambda: CheckpointReader(folder).check_rest(),
    ):
        start = watch.take()
        work()
        print(watch.take() - start)
"""


def test_saving_loading_and_checking_take_no_copy_of_a_tensor(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", CODE, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    added = [int(line) for line in done.stdout.split()]
    assert len(added) == 3
    assert max(added) < MOST, added
