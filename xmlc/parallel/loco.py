"""Gradients in 4 or 8 bits between data-parallel workers, as a communication hook of DDP, and without DDP.

After Xie et al. 2024, "LoCo: Low-bit communication adaptor for large-scale model training": what rounding
takes from a gradient is fed back to later ones, as a moving average, so that no part of it is lost for good.
"""

# No postponed annotations: DDP looks at those of `loco_hook`.
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn import functional

from xmlc.errors import ConfigError
from xmlc.parallel.workers import Workers, check_group

BLOCK = 1024
"""Numbers with a common scale."""


@dataclass
class _Errors:
    """What rounding has taken from a bucket of gradients and not yet given back."""

    parameters: tuple[int, ...]  # whose gradients they are
    own: Tensor  # of this worker's gradient, float32 [worker, part]
    mean: Tensor  # of the part of the mean gradient that this worker forms, float32 [part]


class LoCo:
    """State of `loco_hook`: settings, and the errors of every bucket.

    Used as ``ddp.register_comm_hook(LoCo(bits=4), loco_hook)``. Of a bucket every worker forms one part of
    the mean gradient, from what the others send it, and sends that to them, all of it in ``bits``. With the
    error e of what is sent, at the start 0, both times::

        code = round(value + e)                 # in units of the largest of 1,024 numbers / (2^(bits-1) - 1)
        e    = moving_average * e + (1 - moving_average) * (value + e - code)

    so that over n steps the sums of what was sent and of the values differ by e / (1 - moving_average), and
    their means by an n-th of that. A worker sends and receives about ``2 * bits / 32`` of the gradient's
    float32 bytes, however many workers there are, and keeps 4 bytes for each number, and 4 / workers. All
    workers get the same bits. A step with NaN or infinity gives NaN, and leaves no trace in the errors.

    The errors are no part of a model's or optimizer's state: a run that goes on starts without them.
    """

    def __init__(
        self,
        bits: Literal[4, 8] = 8,
        moving_average: float = 0.9,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Take the settings.

        Args:
            bits: Of every number sent.
            moving_average: Share of the old error that is kept, in [0, 1); 0 is plain error feedback.
            group: DDP's process group; None is the default group.

        Raises:
            ConfigError: A setting is out of range or no group.
        """
        if bits not in (4, 8):
            raise ConfigError(f"LoCo: bits must be 4 or 8, found {bits!r}")
        if not 0.0 <= moving_average < 1.0:
            raise ConfigError(f"LoCo: moving_average must lie in [0, 1), found {moving_average!r}")
        check_group(group, "LoCo")
        self.bits = bits
        self.moving_average = moving_average
        self.workers = Workers(group)
        self._errors: dict[int, _Errors] = {}

    def mean(self, gradient: Tensor, bucket: int, parameters: tuple[int, ...]) -> Tensor:
        """Return the mean of all workers' gradients [number], of which bucket and parameters tell the errors.

        DDP makes its buckets anew after the first step: errors of other parameters are forgotten.
        """
        size = self.workers.size
        part = BLOCK * math.ceil(len(gradient) / (BLOCK * size))
        errors = self._errors.get(bucket)
        if errors is None or errors.parameters != parameters:
            own = torch.zeros(size, part, device=gradient.device)
            errors = self._errors[bucket] = _Errors(parameters, own, own.new_zeros(part))
        value = functional.pad(gradient.float(), (0, size * part - len(gradient))).view(size, part)
        received = self.workers.exchange_rows(self._send(value, errors.own))
        mean = decoded(received, self.bits).mean(0)
        parts = self.workers.gather_rows(self._send(mean[None], errors.mean[None]), [1] * size)
        return decoded(parts, self.bits).view(-1)[: len(gradient)].to(gradient.dtype)

    def _send(self, value: Tensor, error: Tensor) -> Tensor:
        """Return codes of value + error, both float32 [row, number], and update the error in place."""
        value = value + error
        codes = encoded(value, self.bits)
        lost = value - decoded(codes, self.bits)
        error.lerp_(lost, 1.0 - self.moving_average).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return codes


class LowBitWorkers(Workers):
    """Workers that add up gradients in few bits; all else is exact, as theirs."""

    def __init__(self, bits: Literal[4, 8], group: distributed.ProcessGroup | None = None) -> None:
        """Take the bits of every number sent, and a group; see `LoCo`."""
        super().__init__(group)
        self._loco = LoCo(bits, group=group)
        self._loco.workers = self

    def _sum_bucket(self, flat: Tensor, number: int, sizes: tuple[int, ...]) -> Tensor:
        """Return the rounded sum, by two collectives.

        Errors are those of a place in the list: gradients of the same sizes must be of the same parameters.
        """
        return self._loco.mean(flat, number, sizes) * self.size


def loco_hook(state: LoCo, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean gradient of a bucket; see `LoCo`. Takes two collectives, within the backward pass."""
    gradient = bucket.buffer()
    parameters = tuple(map(id, bucket.parameters()))
    devices = [gradient.device] if gradient.is_cuda else None
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    done.set_result(state.mean(gradient, bucket.index(), parameters))
    return done


def encoded(values: Tensor, bits: int) -> Tensor:
    """Return float32 [row, number], whole blocks, as codes and scales, uint8 [row, byte]."""
    largest = 2 ** (bits - 1) - 1
    blocks = values.reshape(len(values), -1, BLOCK)
    scale = blocks.abs().amax(2, keepdim=True) / largest
    codes = (blocks / scale.where(scale > 0.0, 1.0)).round()  # NaN is told by the scale
    codes = codes.nan_to_num(0.0).clamp(-largest, largest).to(torch.int8).view(len(values), -1)
    if bits == 4:
        codes = (codes[:, 0::2] & 0xF) | (codes[:, 1::2] << 4)
    return torch.cat([codes.view(torch.uint8), scale.view(len(values), -1).view(torch.uint8)], 1)


def decoded(rows: Tensor, bits: int) -> Tensor:
    """Return what `encoded` was given, rounded."""
    block_bytes = BLOCK * bits // 8
    blocks = rows.shape[1] // (block_bytes + 4)
    codes = rows[:, : blocks * block_bytes].contiguous().view(torch.int8)
    if bits == 4:  # a shift to the right of int8 keeps the sign
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], 2).view(len(rows), -1)
    scale = rows[:, blocks * block_bytes :].contiguous().view(torch.float32)
    return (codes.view(len(rows), blocks, BLOCK) * scale[:, :, None]).view(len(rows), -1)
