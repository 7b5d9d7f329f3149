"""A disk that refuses or loses power at a chosen one of the changes made to it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class PowerCut(BaseException):
    """Not an Exception, so that no handler takes it for an ordinary failure."""


@contextmanager
def failing_disk(after: int, failure: BaseException, forever: bool) -> Iterator[list[str]]:
    """Let ``after`` changes to the disk happen, then fail the next one, or that and every later one."""
    done: list[str] = []

    def guarded(name: str, change: Any, before_failing: Any = None) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            done.append(name)
            if len(done) == after + 1 or (forever and len(done) > after):
                if before_failing is not None and len(done) == after + 1:
                    before_failing(*arguments)
                raise failure
            return change(*arguments, **keywords)

        return call

    class Stream(io.BufferedWriter):
        def write(self, data: Any) -> int:
            write = super().write

            def write_half(data: Any) -> None:
                write(memoryview(data)[: len(data) // 2])
                self.flush()

            return guarded("write", write, write_half)(data)

    open_file = Path.open

    def opened(path: Path, mode: str = "r", **keywords: Any) -> Any:
        if mode in ("wb", "xb", "ab", "a"):
            stream = guarded("open", lambda: Stream(io.FileIO(path, mode.rstrip("b"))))()
            return stream if "b" in mode else io.TextIOWrapper(stream, **keywords)
        return open_file(path, mode, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opened)
        for name in ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        yield done
