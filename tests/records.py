"""Lines of `metrics.jsonl`, written by hand."""

from __future__ import annotations

from typing import Any

METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")


def entry(epoch: int, **changes: Any) -> dict[str, Any]:
    """Return a line of metrics with all that this version records; a change to None takes a key away."""
    line = {
        "epoch": epoch,
        "step": 12 * epoch,
        "loss": 5.0 / epoch,
        "learning_rate_factor": 1.0,
        "validation": {name: 0.1 * epoch + 0.01 * rank for rank, name in enumerate(METRICS)},
        "validation_deciles": [
            {"labels": 3 + n, "training_positives": 20, "P@1": 0.01 * n, "P@5": 0.02, "PSP@5": 0.5}
            | {"coverage@5": 1.0 - 0.1 * n}
            for n in range(10)
        ],
        "best": True,
        "redistributions": [{"step": 12 * epoch - 7, "moved": 50}, {"step": 12 * epoch - 2, "moved": 30}],
        "active_share": 0.02,
        "train_seconds": 2.5 * epoch,
        "phase_seconds": {"data": 0.5, "forward": 0.5, "output_step": 1.0, "checkpoint": 0.0},
        "peak_memory_bytes": 300 * 2**20,
    } | changes
    return {key: value for key, value in line.items() if value is not None}


def old_entry(epoch: int) -> dict[str, Any]:
    """Return a line of metrics as the first versions wrote it."""
    new = ("validation_deciles", "redistributions", "active_share", "phase_seconds")
    return entry(epoch, **dict.fromkeys(new))
