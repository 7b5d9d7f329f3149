"""Collectives over rows that need not be spread evenly, on any torch.distributed group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from xmlc.errors import WorkerError


class Workers:
    """The workers of a process group; without one, this process alone, for which nothing is communicated.

    Every call is one collective. Uneven rows are padded to the longest part, as gloo needs equal ones.
    ``calls`` counts the collectives by name.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, alone: bool = False) -> None:
        """Take a group, or the default group if there is one and ``alone`` is false."""
        spread = distributed.is_available() and distributed.is_initialized() and not alone
        self.group = group
        self.rank = distributed.get_rank(group) if spread else 0
        self.size = distributed.get_world_size(group) if spread else 1
        self.calls: dict[str, int] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> Workers:
        """Return this object: a process group cannot be copied, nor would a copy be another one."""
        return self

    def gather_sizes(self, *sizes: int, device: torch.device) -> list[list[int]]:
        """Return the given sizes of all workers [worker][size]."""
        own = torch.tensor(sizes, dtype=torch.int64, device=device)
        return [part.tolist() for part in self._gather(own)]

    def gather_rows(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Return the rows of all workers one below the other: [lengths[rank], …] to [sum(lengths), …]."""
        if self.size == 1:
            return rows
        parts = self._gather(_padded(rows, max(lengths)))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter_rows(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Return this worker's rows of the sum over workers: [sum(lengths), …] to [lengths[rank], …]."""
        if self.size == 1:
            return rows
        longest = max(lengths)
        parts = [_padded(part, longest) for part in rows.split(lengths)]
        own = torch.empty_like(parts[0])
        self._call("reduce_scatter", distributed.reduce_scatter, own, parts)
        return own[: lengths[self.rank]]

    def sum(self, values: Tensor) -> Tensor:
        """Add values of all workers, in place."""
        if self.size > 1:
            self._call("all_reduce", distributed.all_reduce, values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the largest of the values of all workers, in place."""
        if self.size > 1:
            self._call("all_reduce", distributed.all_reduce, values, op=distributed.ReduceOp.MAX)
        return values

    def _gather(self, own: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._call("all_gather", distributed.all_gather, parts, own.contiguous())
        return parts

    def _call(self, name: str, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        try:
            collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            raise WorkerError(
                f"parallel: {name} needs all {self.size} workers, worker {self.rank} found: {error}; "
                "another worker has stopped or failed, see its own message"
            ) from error


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows.contiguous()
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
