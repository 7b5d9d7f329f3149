"""Checkpoints that load whole or not at all, without pickle."""

from xmlc.checkpoint.format import (
    Checkpoint,
    CheckpointFolder,
    CheckpointReader,
    Pieces,
    Storable,
    read_checkpoint,
    read_into,
    read_metadata,
    write_checkpoint,
    writing_order,
)

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "CheckpointReader",
    "Pieces",
    "Storable",
    "read_checkpoint",
    "read_into",
    "read_metadata",
    "write_checkpoint",
    "writing_order",
]
