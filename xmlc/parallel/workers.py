"""Collectives over rows that need not be spread evenly, on any torch.distributed group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from xmlc.errors import ConfigError, WorkerError

BUCKET_BYTES = 25 << 20


class Workers:
    """The workers of a process group; without one, this process alone, for which nothing is communicated.

    Every call is one collective. Uneven rows are padded to the longest part, as gloo needs equal ones.
    ``calls`` counts the collectives by name; ``place`` says where the run is that waits for one of them.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, alone: bool = False) -> None:
        """Take a group, or the default group if there is one and ``alone`` is false."""
        spread = distributed.is_available() and distributed.is_initialized() and not alone
        self.group = group
        self.rank = distributed.get_rank(group) if spread else 0
        self.size = distributed.get_world_size(group) if spread else 1
        self.calls: dict[str, int] = {}
        self.place: Callable[[], str] = lambda: "the caller's loop"

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

    def exchange_rows(self, rows: Tensor) -> Tensor:
        """Send row r to worker r, and return the rows that they sent, by rank: [worker, …] both."""
        if self.size == 1:
            return rows
        received = torch.empty_like(rows)
        self._call("all_to_all", distributed.all_to_all_single, received, rows.contiguous())
        return received

    def sum(self, values: Tensor) -> Tensor:
        """Add values of all workers, in place."""
        if self.size > 1:
            self._call("all_reduce", distributed.all_reduce, values)
        return values

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Add the gradients of all workers, in place, in buckets of up to 25 MiB; a larger one alone.

        All workers must give tensors of the same shapes in the same order, all of one device.
        """
        if self.size == 1:
            return
        for number, bucket in enumerate(_buckets(gradients)):
            sizes = tuple(each.numel() for each in bucket)
            flat = self._sum_bucket(torch.cat([each.flatten() for each in bucket]), number, sizes)
            for each, part in zip(bucket, flat.split(sizes), strict=True):
                each.copy_(part.view_as(each))

    def _sum_bucket(self, flat: Tensor, _number: int, _sizes: tuple[int, ...]) -> Tensor:
        """Return the sum over all workers of one bucket: the number-th, of gradients of these sizes."""
        return self.sum(flat)

    def sum_sparse(self, gradient: Tensor) -> Tensor:
        """Return the sum of all workers' sparse gradients of rows, coalesced; see `gather_sizes`."""
        gradient = gradient.coalesce()
        if self.size == 1:
            return gradient
        rows, values = gradient.indices()[0], gradient.values()
        lengths = [size[0] for size in self.gather_sizes(len(rows), device=rows.device)]
        rows, values = self.gather_rows(rows, lengths), self.gather_rows(values, lengths)
        summed = torch.sparse_coo_tensor(rows[None], values, gradient.shape, check_invariants=False)
        return summed.coalesce()

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
        started = time.monotonic()
        try:
            collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise WorkerError(
                    f"parallel: {name} needs all {self.size} workers, worker {self.rank} waited "
                    f"{time.monotonic() - started:.0f} s for another one in {self.place()}; it hangs or "
                    "cannot be reached, see its own output; where it is only slow, raise the group's timeout "
                    "(training.worker_timeout_seconds)"
                ) from error
            raise WorkerError(
                f"parallel: {name} needs all {self.size} workers, worker {self.rank} found: {error}; "
                "another worker has stopped or failed, see its own message"
            ) from error


def check_group(group: object, where: str) -> None:
    """Check that a group is one of torch.distributed, or None.

    Args:
        group: What a caller has given.
        where: Names the caller in the error.

    Raises:
        ConfigError: It is something else.
    """
    if group is None or (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        return
    raise ConfigError(
        f"{where}: group must be a torch.distributed process group or None, found {group!r}; make one with "
        "torch.distributed.new_group"
    )


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one dtype and of up to `BUCKET_BYTES`, or single larger ones."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(each.nbytes for each in bucket) + tensor.nbytes
        if bucket and (size > BUCKET_BYTES or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows.contiguous()
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


@contextmanager
def joined(device: str, timeout_seconds: float) -> Iterator[Workers]:
    """Join the workers that torchrun has started, or the caller in torch.distributed's default group.

    Alone where there are none. Of a group that is made here, this ends with it.

    Args:
        device: ``cpu`` or ``cuda``, of which every worker of a machine takes another one.
        timeout_seconds: How long a worker waits for the others, in a group that is made here.

    Raises:
        WorkerError: The others do not come.
    """
    if distributed.is_available() and distributed.is_initialized():
        yield Workers()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"parallel: torchrun's {os.environ['WORLD_SIZE']} workers must reach each other, worker "
            f"{os.environ['RANK']} found: {error}; see torchrun's --rdzv options, and GLOO_SOCKET_IFNAME"
        ) from error
    try:
        yield Workers()
    finally:
        distributed.destroy_process_group()


ALONE = Workers(alone=True)
"""This process, whatever group there may be."""
