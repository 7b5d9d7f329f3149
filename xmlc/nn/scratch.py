"""Tensors in scratch files in place of memory, read ahead, written back and dropped block by block.

A tensor is a shared mapping of a file, so to every op it is a tensor like any other, and no bit can differ
from one in memory. Whatever passes over the output layer (steps, ranking, redistribution, checkpoints) does
so by rising label, each thread over a share of its own. A thread watches which blocks the process has in use:
where a block comes into use, the one after it is read meanwhile; the block that came into use longest ago is
dropped, and written back by the kernel. To drop what is in use after all costs time, never content.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import CheckpointError, ConfigError
from xmlc.files import reason

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of zeros, of a shape and a dtype."""

BLOCK_BYTES, MOST_BLOCKS = 4 << 20, 128
"""Least bytes of a block, and the most blocks of a tensor: to look at one takes a microsecond."""
SPARE_BLOCKS = 2
"""Blocks of a tensor that stay in use beside one for each thread."""
LOOK_SECONDS = 0.002
"""Between two looks at how much of files is in use; blocks are looked at where that has changed."""

_STATM = Path("/proc/self/statm")
_PAGEMAP = Path("/proc/self/pagemap")
_IN_USE = 1 << 63  # of an entry: the process has the page in its page table
_READ_AT_ONCE = 128 << 10  # the kernel cuts what is asked for in one piece to what it reads ahead by itself


_before_drop: list[Callable[[], None]] = []


@contextmanager
def before_drop(call: Callable[[], None]) -> Iterator[None]:
    """Within the body, call this before a block is dropped, when the process has the most of files in use.

    Who samples memory may otherwise miss that, and take the block for memory of the process's own.
    """
    _before_drop.append(call)
    try:
        yield
    finally:
        _before_drop.remove(call)


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in memory."""
    return torch.zeros(shape, dtype=dtype)


class ScratchFiles:
    """Makes tensors that lie in files without a name: they are gone with the process, however it ends.

    Args:
        folder: Where the files lie; a disk with room, not a file system in memory.
        threads: Of the ops that pass over the tensors.

    Raises:
        ConfigError: The system does not tell which pages are in use.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self.kept_blocks = threads + SPARE_BLOCKS
        self._files: list[_MappedFile] = []
        try:
            pages = _PAGEMAP.open("rb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"training.storage: disk needs Linux's {_PAGEMAP}, found: {reason(error)}; set it to memory"
            ) from None
        ended = threading.Event()
        weakref.finalize(self, ended.set)
        arguments = (self._files, pages, self.kept_blocks, ended)
        threading.Thread(target=_page, args=arguments, name="label-blocks", daemon=True).start()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in a file of its own, whose room on the disk is taken now.

        Raises:
            CheckpointError: The disk refuses; later it cannot for want of room, which would end the process.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            with ExitStack() as opened:
                file = opened.enter_context(tempfile.TemporaryFile(dir=self.folder, prefix=".output-layer-"))
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
                opened.pop_all()
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: training.storage = disk must have {size:,} bytes of room there for "
                f"{list(shape)} of {str(dtype).removeprefix('torch.')}, found: {reason(error)}; free space, "
                "or set it to memory"
            ) from None
        flat = torch.frombuffer(mapped, dtype=dtype)
        native.watch_pages(
            mapped,
            flat.data_ptr(),
            size,
            f"{self.folder}: the disk must read and write the files of training.storage = disk there, found "
            "a block that it could not; the last checkpoint is whole: go on from it with --resume where the "
            "disk is sound, or with training.storage = memory",
        )
        self._files.append(_MappedFile(file, mapped, flat.data_ptr()))
        return flat.view(shape)


class _MappedFile:
    """The file of one tensor, and which of its blocks are in use."""

    def __init__(self, file: IO[bytes], mapped: mmap.mmap, address: int) -> None:
        self.file = file
        self.mapped = mapped
        self.size = len(mapped)
        block = max(BLOCK_BYTES, math.ceil(self.size / MOST_BLOCKS))
        self.block = math.ceil(block / mmap.PAGESIZE) * mmap.PAGESIZE
        self.blocks = math.ceil(self.size / self.block)
        self.first_page = address // mmap.PAGESIZE
        self.in_use: list[int] = []  # blocks, in the order in which they came into use

    def look(self, pages: IO[bytes], kept: int) -> None:
        """Note the blocks that came into use, read ahead and drop."""
        came = [
            block for block in range(self.blocks) if block not in self.in_use and self._used(pages, block)
        ]
        for block in came:
            self.in_use.append(block)
            self._read_ahead((block + 1) % self.blocks)  # behind the last one the next pass begins
        while len(self.in_use) > kept:
            self._drop(self.in_use.pop(0))

    def _used(self, pages: IO[bytes], block: int) -> bool:
        # Its last page: the kernel maps pages around the one that is asked for, also of the block before.
        page = self.first_page + (self._end(block) - 1) // mmap.PAGESIZE
        middle = self.first_page + (block * self.block + self._end(block)) // 2 // mmap.PAGESIZE
        return any(
            int.from_bytes(os.pread(pages.fileno(), 8, 8 * each), "little") & _IN_USE
            for each in (middle, page)
        )

    def _end(self, block: int) -> int:
        return min((block + 1) * self.block, self.size)

    def _read_ahead(self, block: int) -> None:
        for start in range(block * self.block, self._end(block), _READ_AT_ONCE):
            os.posix_fadvise(self.file.fileno(), start, _READ_AT_ONCE, os.POSIX_FADV_WILLNEED)

    def _drop(self, block: int) -> None:
        for call in _before_drop:
            call()
        # What was changed stays with the kernel, which writes it when it is old or the room is wanted. To
        # ask for that at once makes this thread wait for the disk, and the next step for the block.
        self.mapped.madvise(mmap.MADV_DONTNEED, block * self.block, self._end(block) - block * self.block)


def _of_files(sizes: IO[bytes]) -> int:
    """Return how many bytes of files the process has in use."""
    return int(os.pread(sizes.fileno(), 128, 0).split()[2]) * mmap.PAGESIZE


def _page(files: list[_MappedFile], pages: IO[bytes], kept: int, ended: threading.Event) -> None:
    """Look after the files until the end."""
    with pages, _STATM.open("rb", buffering=0) as sizes:
        before = 0
        while not ended.wait(LOOK_SECONDS):
            if abs(_of_files(sizes) - before) >= BLOCK_BYTES // 2:
                for file in files:
                    file.look(pages, kept)
                before = _of_files(sizes)
    for file in files:
        file.file.close()
