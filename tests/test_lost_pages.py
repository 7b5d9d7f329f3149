"""Mapped pages that the disk does not give end a process with a line and status 2, and without a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import problems
import pytest

STORAGE = """
import sys
from pathlib import Path
import torch
from xmlc.nn.scratch import ScratchFiles
files = ScratchFiles(Path(sys.argv[1]), 1)
tensor = files.zeros((1 << 20,), torch.float32)
print(float(tensor.sum()), flush=True)
files._files[0].file.truncate(0)  # as a disk that fails: the pages are gone
print(float(tensor.sum()))
"""
STORE = """
import sys
from pathlib import Path
from xmlc.data import open_dataset
dataset = open_dataset(sys.argv[1], cache=Path(sys.argv[2]))
print(dataset.train.features.shape, flush=True)
with Path(sys.argv[1], "trn_X_Xf.npy").open("r+b") as file:  # which the store refers to
    file.truncate(64)
print(dataset.train.features.sum())
"""
FORGOTTEN = """
import mmap, sys, tempfile
import numpy as np
from xmlc import native
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 16)
    mapped = mmap.mmap(file.fileno(), 1 << 16)
    other = np.frombuffer(mapped, np.uint8)
    class Owner: pass
    owner = Owner()
    native.watch_pages(owner, other.ctypes.data, 1 << 16, "nobody should read this")
    del owner
    file.truncate(0)
    print(other.sum())
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_block_of_the_output_layer_that_the_disk_has_lost_is_told(tmp_path: Path) -> None:
    done = run(STORAGE, tmp_path)
    assert (done.returncode, done.stdout) == (2, "0.0\n")
    [line] = done.stderr.split("\n")[1:-1]
    assert line.startswith(
        f"xmlc: {tmp_path}: the disk must read and write the files of training.storage = disk"
    )
    assert "the last checkpoint is whole" in line


def test_a_store_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "dense", train=3000)
    done = run(STORE, data, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (2, "(3000, 32)\n"), done.stderr
    assert "trn_X_Xf.npy: must stay whole while it is read, found a part that the disk" in done.stderr


def test_what_is_watched_no_more_ends_as_ever() -> None:
    done = run(FORGOTTEN)
    assert done.returncode == -signal.SIGBUS
    assert "nobody" not in done.stderr


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_store_that_was_cut_short_before_is_made_again(kind: problems.Kind, tmp_path: Path) -> None:
    """Also where its time of change is what it was."""
    import os

    from xmlc.data import open_dataset

    data = problems.write_folder(tmp_path / "data", kind)
    first = open_dataset(data, cache=tmp_path / "cache")
    before = np.array(first.train.labels.indices)
    del first
    for stored in (tmp_path / "cache").glob("*/*.npy"):
        times = stored.stat()
        with stored.open("r+b") as file:
            file.truncate(times.st_size - 1)
        os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = open_dataset(data, cache=tmp_path / "cache")
    assert np.array_equal(again.train.labels.indices, before)


def test_a_matrix_of_the_user_s_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    from xmlc.data import open_dataset
    from xmlc.errors import DataError

    data = problems.write_folder(tmp_path / "data", "dense")
    with (data / "trn_X_Xf.npy").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"trn_X_Xf\.npy: "):
        open_dataset(data, cache=tmp_path / "cache")
