"""What the process holds, its peaks, and limits, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xmlc.errors import ConfigError
from xmlc.memory import process
from xmlc.memory.process import PeakWatch, usage

MEBIBYTE = 1 << 20


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


def test_a_peak_that_has_passed_is_seen_once() -> None:
    code = """
import torch
from xmlc.memory.process import PeakWatch, return_large_blocks, usage
return_large_blocks()
start = usage().anonymous
with PeakWatch() as watch:
    torch.ones(32 << 18).sum()
    print(watch.take() - start)
    torch.ones(8 << 18).sum()
    print(watch.take() - start)
"""
    done = child(code)
    assert done.returncode == 0, done.stderr
    first, second = (int(line) / MEBIBYTE for line in done.stdout.split())
    assert 31 <= first < 40  # what was held at the start may have been given back since
    assert 7 <= second < 16


def test_a_mapped_file_is_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1" * (32 * MEBIBYTE))
    code = """
import sys
import numpy as np
from xmlc.memory.process import PeakWatch
with PeakWatch() as watch:
    start = watch.take()
    mapped = np.memmap(sys.argv[1], np.uint8, "r")
    mapped.max()
    print(watch.take() - start)
"""
    done = child(code, str(file))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * MEBIBYTE


@pytest.mark.parametrize("told", [True, False])
def test_blocks_of_scratch_files_are_not_counted_where_no_sample_falls(told: bool, tmp_path: Path) -> None:
    code = """
import contextlib, sys, time
from pathlib import Path
import torch
from xmlc.memory import process
from xmlc.nn import scratch
told, process.SAMPLE_SECONDS = sys.argv[2:], 60.0
scratch.LOOK_SECONDS = 0.2
files = scratch.ScratchFiles(Path(sys.argv[1]), 1)
tensor = files.zeros((64 << 18,), torch.float32)
with process.PeakWatch() as watch, scratch.before_drop(watch.sample) if told else contextlib.nullcontext():
    start = watch.take()
    tensor.fill_(1.0)
    time.sleep(1.0)  # of 64 MiB, what is not kept is dropped
    print(watch.take() - start)
"""
    done = child(code, str(tmp_path), *["told"] * told)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 4 * MEBIBYTE) == told


def test_an_allocation_beyond_the_limit_fails_and_one_within_it_does_not() -> None:
    code = """
import torch
from xmlc.memory.process import hard_limit
torch.set_num_threads(1)
with hard_limit(64 << 20):
    torch.ones(32 << 18)
    try:
        torch.ones(96 << 18)
    except RuntimeError as error:
        print("allocate" in str(error))
torch.ones(96 << 18)
"""
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_freed_blocks_go_back_to_the_system() -> None:
    code = """
import torch
from xmlc.memory.process import return_large_blocks, usage
return_large_blocks()
start = usage().anonymous
kept = []
for _ in range(8):  # a small block that stays above each large one would keep a heap from shrinking
    large = torch.ones(4 << 18)
    kept.append(torch.ones(1 << 10))
    del large
print(usage().anonymous - start)
"""
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 * MEBIBYTE


def test_usage_counts_this_process() -> None:
    now = usage()
    assert 0 < now.anonymous <= now.data
    assert now.peak_resident >= now.anonymous + now.file - MEBIBYTE


def test_a_watch_ends_with_its_context() -> None:
    with PeakWatch() as watch:
        assert watch.take() > 0
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("limit", ["8MiB", "24MiB"])
def test_running_out_says_what_where_and_what_would_fit(limit: str, tmp_path: Path) -> None:
    """A run under a limit that its plan does not know of; the second lets it come as far as the head."""
    code = """
import resource, sys
import numpy as np, scipy.sparse, torch
from pathlib import Path
from xmlc.cli import main
import xmlc.training.api
from xmlc.memory.budget import parse_bytes
from xmlc.memory.process import usage
folder = Path(sys.argv[1])
folder.mkdir()
generator = np.random.default_rng(0)
np.save(folder / "trn_X_Xf.npy", generator.standard_normal((300, 32)).astype(np.float32))
matrix = scipy.sparse.random(300, 24, 0.1, "csr", np.float32, 0)
scipy.sparse.save_npz(folder / "trn_X_Y.npz", matrix)
torch.ones(1 << 20).sum()
limit = usage().data + parse_bytes(sys.argv[2]) + (48 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
settings = ("--set", "model.width=65536", "--set", "training.threads=1")
main(["train", str(folder), "--out", sys.argv[3], *settings])
"""
    done = child(code, str(tmp_path / "data"), limit, str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    message = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert message.startswith("xmlc: training: memory must suffice for ")
    assert "in phase forward" in message or "in phase output_step" in message
    assert "(features)" in message or "(workspace of fused_step)" in message or "gradient" in message
    assert "these settings would fit, in a new run: --set " in message
    assert message.endswith("no checkpoint was written before")


def test_systems_without_proc_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_STATUS", tmp_path / "status")
    with pytest.raises(
        ConfigError, match=r"measuring and limits need Linux's .*status, found none; plan without"
    ):
        process.require_linux()
    assert process.usage() == process.Usage(0, 0, 0, 0)
