"""Fixtures of the data tests: small files, own caches, and the real data sets where they are."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xmlc.data.reader.spool import Scratch

SHARED_FALLBACK = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XMLC_CACHE", str(folder))
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    with Scratch(tmp_path) as opened:
        yield opened


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write files into a folder; names ending in .gz are packed."""

    def write_files(files: dict[str, str | bytes], folder: str = "set") -> Path:
        target = tmp_path / folder
        target.mkdir(exist_ok=True)
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (target / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return target

    return write_files


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """Return the folder of a real data set, or skip."""

    def find(name: str) -> Path:
        root = Path(os.environ.get("XMLC_SHARED_DATA", SHARED_FALLBACK))
        if not (root / name).is_dir():
            pytest.skip(
                f"real data set {name} is not in {root}; set XMLC_SHARED_DATA to the folder that holds it"
            )
        return root / name

    return find
