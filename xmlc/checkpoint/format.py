"""The checkpoint format: a folder of safetensors data under a checksummed manifest; no pickle anywhere.

One atomic rename commits a checkpoint. Its tensors go into a data file of a name not used before, which reaches
the disk first; then ``manifest.json`` is replaced. So a folder holds the old checkpoint until it holds the new
one, whatever interrupts the writing, and what an interrupted write left is removed by the next one.
``docs/checkpoint-format.md`` specifies every byte.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, ValidationError, model_validator

from xmlc.errors import CheckpointError

FORMAT = "xmlc-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 16 * 2**20
"""Most bytes that a tensor off the CPU is copied through, and that are hashed at once."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes a checkpoint can hold, by their name in safetensors."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLANK_CHECKSUM = "0" * 64
_DATA_FILE = re.compile(r"tensors-[0-9]+\.safetensors")
_TEMPORARY_FILE = re.compile(r"\..+\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    metadata: Mapping[str, JsonValue]
    tensors: Mapping[str, torch.Tensor]


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, JsonValue]
) -> None:
    """Make ``folder`` the checkpoint of ``tensors`` and ``metadata``, replacing the one it may hold.

    At every instant the folder holds either the old checkpoint whole or the new one. Tensors are streamed one by
    one: a contiguous tensor on the CPU is not copied, one on another device goes through 16 MB at a time, a
    non-contiguous one is copied alone. One process at a time may write to a folder.

    Args:
        folder: Created where it does not exist, with its parents.
        tensors: Any shapes; dtypes of ``DTYPES``; any names but ``__metadata__``.
        metadata: JSON values; NaN and infinities are not JSON.

    Raises:
        CheckpointError: A dtype, a name or the metadata cannot be stored, or the disk refuses (full, read-only).
            The old checkpoint is whole, and nothing of the new one remains.
    """
    entries = _describe(folder, tensors)
    text = _manifest_text(folder, entries, metadata)  # finds metadata that is not JSON before anything is written
    try:
        _clean(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = (f"tensors-{number}.safetensors" for number in itertools.count())
        path = next(folder / name for name in names if not (folder / name).exists())
        entries = _write_tensors(path, entries, tensors)
        _sync_folder(folder)
        text = _manifest_text(folder, entries, metadata)
        write_atomic(folder / MANIFEST, text)
        _sync_folder(folder.parent)
    except OSError as error:
        raise _refused_by_disk(folder, error) from error
    finally:
        with suppress(OSError):
            _clean(folder)
