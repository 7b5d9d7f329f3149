"""Whatever lies in a checkpoint folder, the loader returns it whole or says why not, and takes little memory.

The manifests get a valid checksum again, because a stranger can compute one: it guards against damage only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xmlc.checkpoint import CheckpointFolder, read_checkpoint, read_metadata, write_checkpoint
from xmlc.errors import CheckpointError

TENSORS = {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "step": torch.tensor(1)}
DATA = "tensors-0.safetensors"

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 24, 2**31, 2**62, 2**63, 2**64, 10**30, "F32", "U8", DATA, "../x", "0" * 64])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**62, 2**63, 10**30]), max_size=5)
entries = st.fixed_dictionaries(
    {
        "file": st.sampled_from([DATA, "tensors-1.safetensors", "tensors-00.safetensors"]),
        "dtype": st.sampled_from(["F32", "U8", "I64", "BOOL", "F8_E4M3"]),
        "shape": shapes,
        "bytes": st.sampled_from([0, 1, 8, 24, 2**62, 10**30]),
        "checksum": st.sampled_from(["0" * 64, hashlib.sha256(b"").hexdigest()]),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "step-1"


@contextmanager
def memory_counted() -> Iterator[list[int]]:
    """Count the bytes of the tensors that are made."""
    made: list[int] = []
    empty = torch.empty

    def counting(*arguments: Any, **named: Any) -> torch.Tensor:
        tensor = empty(*arguments, **named)
        made.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counting)
        yield made


def load(folder: Path) -> None:
    """Load what the folder holds, or have it refused; nothing else may happen."""
    size = sum(path.stat().st_size for path in folder.glob("tensors-*"))
    with memory_counted() as made:
        try:
            read_checkpoint(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
            assert len(str(error)) < 2000
        finally:
            assert sum(made) <= size
    try:
        read_metadata(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)


def write_manifest(folder: Path, document: dict[str, Any]) -> None:
    """Write a manifest with the checksum that its text needs."""
    head = {key: document[key] for key in ("format", "version") if key in document}
    text = json.dumps(head | {"checksum": "0" * 64} | document)
    stated = json.loads(text)["checksum"]
    if stated == "0" * 64:
        text = text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1)
    (folder / "manifest.json").write_text(text)


def write_data(file: Path, tensors: dict[str, Any]) -> None:
    """Write the data file that the entries ask for, as far as it has a size that can be written."""
    fields, end = {}, 0
    for name, entry in tensors.items():
        start, end = end, end + entry["bytes"]
        fields[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [start, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(min(end, 1000)))


def fresh(folder: Path) -> dict[str, Any]:
    """Make the folder a whole checkpoint again and return its manifest."""
    for path in folder.glob("*"):
        path.unlink()
    write_checkpoint(folder, TENSORS, {"epoch": 1})
    document = json.loads((folder / "manifest.json").read_text())
    document["checksum"] = "0" * 64
    return dict(document)


@settings(max_examples=150)
@given(st.dictionaries(st.text(max_size=6) | st.just("weight"), entries, max_size=3))
@example({"weight": {"file": DATA, "dtype": "F32", "shape": [0, 2**62, 4], "bytes": 0, "checksum": "0" * 64}})
@example({"weight": {"file": DATA, "dtype": "U8", "shape": [2**63, 0], "bytes": 0, "checksum": "0" * 64}})
def test_any_entries_load_or_are_refused(folder: Path, tensors: dict[str, Any]) -> None:
    document = fresh(folder)
    write_manifest(folder, document | {"tensors": tensors})
    write_data(folder / DATA, tensors)
    load(folder)


@settings(max_examples=150)
@given(st.data())
def test_any_value_in_any_place_of_the_manifest_loads_or_is_refused(
    folder: Path, data: st.DataObject
) -> None:
    document = fresh(folder)
    place: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()):
        place[key] = data.draw(json_values)
    else:
        del place[key]
    write_manifest(folder, document)
    load(folder)


@settings(max_examples=150)
@given(st.sampled_from(["manifest.json", DATA]), st.integers(0, 10**9), st.integers(0, 40), st.binary())
def test_any_bytes_in_any_place_load_or_are_refused(
    folder: Path, file: str, start: int, length: int, put: bytes
) -> None:
    fresh(folder)
    content = (folder / file).read_bytes()
    start %= len(content) + 1
    (folder / file).write_bytes(content[:start] + put + content[start + length :])
    load(folder)


@settings(max_examples=50)
@given(
    st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: b'{"format":"xmlc-checkpoint",' + rest)
)
def test_any_manifest_is_refused(folder: Path, content: bytes) -> None:
    fresh(folder)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_checkpoint(folder)


@settings(max_examples=50)
@given(st.binary(max_size=2000))
@example(b"step-1")
@example(b"step-1\n\n")
@example(b"../checkpoints/step-1")
@example(b"\0")
def test_any_pointer_names_a_checkpoint_beside_it_or_is_refused(folder: Path, content: bytes) -> None:
    fresh(folder)
    (folder.parent / "latest").write_bytes(content)
    try:
        assert CheckpointFolder(folder.parent).latest() == folder
    except CheckpointError as error:
        assert "latest: must name a checkpoint beside it" in str(error)
        assert len(str(error)) < 2000
