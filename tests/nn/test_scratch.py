"""Tensors in scratch files: what is in them, what of them is in memory, and disks that refuse."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from disk import small_files

from xmlc.errors import CheckpointError, ConfigError
from xmlc.nn import scratch
from xmlc.nn.scratch import ScratchFiles

DTYPES = (torch.float32, torch.bfloat16, torch.uint16, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_starts_with_zeros_and_keeps_what_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = ScratchFiles(tmp_path, 1).zeros((37, 3), dtype)
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (37, 3), True)
    assert not tensor.view(torch.uint8).any()
    tensor.copy_(torch.arange(111).reshape(37, 3))
    assert torch.equal(tensor.int(), torch.arange(111, dtype=torch.int32).reshape(37, 3))


def test_no_name_leads_to_the_file(tmp_path: Path) -> None:
    kept = ScratchFiles(tmp_path, 1).zeros((5,), torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert kept.sum() == 0.0


def test_what_is_dropped_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page, so that nearly all are dropped, many times, while they are written and read."""
    monkeypatch.setattr(scratch, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(scratch, "LOOK_SECONDS", 1e-4)
    files = ScratchFiles(tmp_path, 1)
    tensor, expected = files.zeros((64 * 1024,), torch.int32), torch.zeros(64 * 1024, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        places = torch.randint(len(tensor), (100,), generator=generator)
        for each in (tensor, expected):
            each[places] += places.int() + 1
        time.sleep(1e-3)
        assert torch.equal(tensor, expected)


def test_a_thread_ends_with_its_files(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    files = ScratchFiles(tmp_path, 1)
    tensor = files.zeros((3,), torch.float32)
    [thread] = set(threading.enumerate()) - before
    del files
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()
    assert tensor.sum() == 0.0


def test_little_is_in_memory_and_nothing_of_it_anonymous(tmp_path: Path) -> None:
    """Of 256 MiB, at the speed of a fast disk; a pass over pages that the kernel has anyway may outrun the
    thread that drops them.
    """
    code = """
import sys, time
from pathlib import Path
import torch
from xmlc.memory.process import usage
from xmlc.nn.scratch import ScratchFiles
def shared():  # pages of files, on whichever file system
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem"))) * 1024
files = ScratchFiles(Path(sys.argv[1]), 1)
tensor = files.zeros((64 << 20,), torch.float32)
start, anonymous, most = shared(), usage().anonymous, 0
for number in range(3):
    for block in tensor.split(1 << 18):
        block += 1.0
        time.sleep(0.002)
        most = max(most, shared() - start)
assert bool((tensor[:: 1 << 10] == 3.0).all())
print(most, usage().anonymous - anonymous)
"""
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most, anonymous = map(int, done.stdout.split())
    assert most < 64 << 20
    assert anonymous < 8 << 20


def test_a_full_disk_refuses_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError) as error:
        ScratchFiles(tmp_path, 1).zeros((1000, 3), torch.bfloat16)
    assert str(error.value) == (
        f"{tmp_path}: training.storage = disk must have 6,000 bytes of room there for [1000, 3] of bfloat16, "
        "found: No space left on device; free space, or set it to memory"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_quota_refuses_as_a_full_disk_does(tmp_path: Path) -> None:
    with small_files(1 << 16), pytest.raises(CheckpointError, match=r"must have 131,072 bytes of room"):
        ScratchFiles(tmp_path, 1).zeros((1 << 15,), torch.float32)


def test_systems_that_do_not_tell_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_PAGEMAP", tmp_path / "pagemap")
    with pytest.raises(ConfigError, match=r"training\.storage: disk needs Linux's .*pagemap, found: No such"):
        ScratchFiles(tmp_path, 1)


def test_the_block_behind_the_one_in_use_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `look` asks the kernel for: the next block, and behind the last one the first."""
    monkeypatch.setattr(scratch, "BLOCK_BYTES", 1 << 20)
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: asked.append(start))
    monkeypatch.setattr(scratch, "LOOK_SECONDS", 60.0)  # the test looks itself
    files = ScratchFiles(tmp_path, 1)
    tensor = files.zeros((4 << 20,), torch.uint8).numpy()
    [file] = files._files
    with scratch._PAGEMAP.open("rb", buffering=0) as pages:
        for block, following in ((1, 2), (3, 0)):
            np.add(tensor[block << 20 : (block + 1) << 20], 1, tensor[block << 20 : (block + 1) << 20])
            file.look(pages, kept=2)
            assert asked[-1] == ((following + 1) << 20) - (128 << 10)
        file.look(pages, kept=2)
        assert file.in_use == [1, 3]
        tensor[: 1 << 20] += 1
        file.look(pages, kept=2)
        assert file.in_use == [3, 0]
        assert not file._used(pages, 1)
    assert (tensor[1 << 20 : 2 << 20] == 1).all()
