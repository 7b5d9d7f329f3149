"""Tensors that are written piece by piece, and read by some of their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from xmlc.checkpoint import CheckpointReader, Pieces, format, read_checkpoint, write_checkpoint, writing_order
from xmlc.errors import CheckpointError

WHOLE = {
    "wide": torch.arange(60.0).view(12, 5),
    "narrow": torch.arange(24, dtype=torch.int32).view(12, 2).to(torch.uint16),
    "flat": torch.arange(12.0),
    "small": torch.arange(36).view(12, 3).to(torch.float8_e5m2),
}


def in_pieces(whole: Tensor) -> Pieces:
    data = whole.reshape(-1).view(torch.uint8).view(len(whole), -1)
    return Pieces(tuple(whole.shape), whole.dtype, lambda: iter(data.split(5)))


def test_pieces_make_the_same_files_as_whole_tensors(tmp_path: Path) -> None:
    assert writing_order(WHOLE) == ["wide", "flat", "narrow", "small"]  # by falling item size
    write_checkpoint(tmp_path / "whole", WHOLE, {})
    write_checkpoint(tmp_path / "pieces", {name: in_pieces(each) for name, each in WHOLE.items()}, {})
    for file in ("manifest.json", "tensors-0.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "pieces" / file).read_bytes()


@pytest.mark.parametrize("chunk_bytes", [1, 24, 1 << 20])
@pytest.mark.parametrize("rows", [[0, 3, 4, 11], [5], [], list(range(12))])
def test_some_rows_are_read_whatever_the_chunk(
    rows: list[int], chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "made", WHOLE, {})
    monkeypatch.setattr(format, "CHUNK_BYTES", chunk_bytes)
    reader = CheckpointReader(tmp_path / "made")
    for name, whole in read_checkpoint(tmp_path / "made").tensors.items():
        own = torch.zeros(len(rows), *whole.shape[1:], dtype=whole.dtype)
        version = own._version
        reader.read_rows_into(name, np.array(rows, np.int64), own)
        expected = whole.numpy(force=True) if whole.itemsize > 1 else whole.float().numpy()
        found = own.numpy(force=True) if whole.itemsize > 1 else own.float().numpy()
        assert np.array_equal(found, expected[rows])
        assert own._version > version


def test_rows_that_do_not_fit_or_are_damaged_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", WHOLE, {})
    reader = CheckpointReader(tmp_path / "made")
    for rows, own in (
        ([12], torch.zeros(1, 5)),
        ([0, 1], torch.zeros(1, 5)),
        ([0], torch.zeros(1, 4)),
        ([0], torch.zeros(1, 5, dtype=torch.float64)),
        ([0, 1], torch.zeros(5, 2).T),
    ):
        with pytest.raises(CheckpointError, match="must be read into contiguous"):
            reader.read_rows_into("wide", np.array(rows), own)
    file = tmp_path / "made" / "tensors-0.safetensors"
    data = bytearray(file.read_bytes())
    place = bytes(data).index(WHOLE["wide"].numpy().tobytes()) + 4 * 59  # the last number
    data[place] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="must have the checksum"):
        reader.read_rows_into("wide", np.array([0]), torch.zeros(1, 5))
