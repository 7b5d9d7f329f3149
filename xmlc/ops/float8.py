"""Weights of eight bits: codes of a float8 format, in units of a scale that 64 consecutive labels share."""

from __future__ import annotations

import torch
from torch import Tensor

from xmlc.errors import NativeError

SCALE_LABELS = 64
"""Labels of one scale: whole groups of any size."""

LEAST_SCALE = 2.0**-64
MOST_SCALE = {torch.float8_e4m3fn: 2.0**119, torch.float8_e5m2: 2.0**112}
"""The largest scale of each dtype: its largest weight is still a finite float32."""


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether weights of this dtype have scales."""
    return dtype in MOST_SCALE


def scales(label: int) -> int:
    """Return the number of scales, ``ceil(label / 64)``."""
    return -(-label // SCALE_LABELS)


def new_scale(label: int, dtype: torch.dtype) -> Tensor | None:
    """Return the scales float32 [ceil(label / 64)] of weights that are all zero; None without float8.

    They are the least there are: the first weights that are not zero raise them as far as they need.
    """
    return torch.full((scales(label),), LEAST_SCALE) if is_float8(dtype) else None


def quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round weights to the nearest codes.

    A scale is the smallest power of two with which the largest weight of its labels needs no saturation.

    Args:
        values: float32 [label, fan_in], finite.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        weight [label, fan_in] of the dtype, and weight_scale float32 [ceil(label / 64)].
    """
    label = len(values)
    largest = torch.stack([block.abs().amax() for block in values.split(SCALE_LABELS)])
    _, exponent = torch.frexp(largest / torch.finfo(dtype).max)  # below 2^exponent, or equal to half of it
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(largest <= torch.finfo(dtype).max * (0.5 * scale), 0.5 * scale, scale)
    scale = torch.where(largest > 0.0, scale, LEAST_SCALE).clamp(LEAST_SCALE, MOST_SCALE[dtype])
    return (values / _of_labels(scale, label)).to(dtype), scale


def widen(weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """Return float8 weights [label, fan_in] as float32, exactly; others, without scales, as they are."""
    if not is_float8(weight.dtype):
        return weight
    assert weight_scale is not None, "float8 weights come with their scales"
    return weight.to(torch.float32) * _of_labels(weight_scale, len(weight))


def check_scale(op: str, weight: Tensor, weight_scale: Tensor | None) -> None:
    """Require scales that fit the weights: powers of two in the range of the dtype, with float8 alone.

    Raises:
        NativeError: With what must hold and what was found.
    """
    name = str(weight.dtype).removeprefix("torch.")
    if not is_float8(weight.dtype):
        if weight_scale is not None:
            raise NativeError(f"{op}: weight_scale must be None for {name} weights, got a tensor")
        return
    shape = [scales(len(weight))]
    if weight_scale is None:
        raise NativeError(
            f"{op}: weight_scale must be float32 [ceil(label / 64)] = {shape} for {name} weights, got None"
        )
    if weight_scale.dtype != torch.float32 or list(weight_scale.shape) != shape:
        found = str(weight_scale.dtype).removeprefix("torch.")
        raise NativeError(
            f"{op}: weight_scale must be float32 [ceil(label / 64)] = {shape}, "
            f"got {found} {list(weight_scale.shape)}"
        )
    if not weight_scale.is_contiguous() or weight_scale.device != weight.device:
        raise NativeError(
            f"{op}: weight_scale must be contiguous and on {weight.device}, got strides "
            f"{list(weight_scale.stride())} on {weight_scale.device}"
        )
    least, most = LEAST_SCALE, MOST_SCALE[weight.dtype]
    fits = (weight_scale >= least) & (weight_scale <= most)
    fits &= (weight_scale.view(torch.int32) & 0x7FFFFF) == 0
    if not bool(fits.all()):
        raise NativeError(
            f"{op}: weight_scale must hold powers of two in [{least:g}, {most:g}], "
            f"got {float(weight_scale[~fits][0]):g}; make it by xmlc.ops.quantise"
        )


def _of_labels(scale: Tensor, label: int) -> Tensor:
    return scale.repeat_interleave(SCALE_LABELS)[:label, None]
