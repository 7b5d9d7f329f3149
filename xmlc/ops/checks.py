"""Checks at the boundary of the ops, so that the native code can trust every address and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import NativeError, XmlcError
from xmlc.ops import float8

GROUP_SIZES = (1, 16, 32, 64)
INDEX_DTYPES = (torch.uint16, torch.int32)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FEATURE_DTYPES = (torch.float32, torch.bfloat16)
MOST_INPUTS = {torch.uint16: 1 << 16, torch.int32: (1 << 31) - 1}
"""Inputs that indices of each dtype can name."""
CHECKED_AT_ONCE = 1 << 22
"""Of indices on a device, which are widened to look for the largest."""


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def tensors(op: str, **values: Tensor) -> None:
    """Require dense torch tensors on the CPU, one CUDA device or the meta device, before torch's dispatch.

    Its own messages are less helpful, and a single tensor on the meta device would make every result empty.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise NativeError(f"{op}: {name} must be a torch tensor, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise NativeError(f"{op}: {name} must be a dense tensor, got {value.layout}; call .to_dense()")
    devices = {str(value.device) for value in values.values()}
    if len(devices) > 1 or not {value.device.type for value in values.values()} <= {"cpu", "cuda", "meta"}:
        raise NativeError(
            f"{op}: all tensors must be on the CPU or on one CUDA device, got {', '.join(sorted(devices))}; "
            "move them with .cpu() or .cuda()"
        )


def integers(op: str, **values: int) -> None:
    """Require integers that fit an int64."""
    for name, value in values.items():
        if not isinstance(value, int | np.integer) or not -(2**63) <= value < 2**63:
            raise NativeError(f"{op}: {name} must be an integer of 64 bits, got {value!r}")


def numbers(op: str, **values: float | None) -> None:
    """Require numbers, where they are given."""
    for name, value in values.items():
        if value is not None and not isinstance(value, int | float | np.number):
            raise NativeError(f"{op}: {name} must be a number, got {value!r}")


def counters(op: str, **values: int) -> None:
    """Require that what seeds the random numbers is not negative."""
    for name, value in values.items():
        if value < 0:
            raise NativeError(f"{op}: {name} must be at least 0, got {value}")


def tensor(op: str, name: str, value: Tensor, shape: Sequence[int], axes: str, *dtypes: torch.dtype) -> None:
    """Require a contiguous tensor of this shape and one of these dtypes.

    Raises:
        NativeError: With what must hold and what was found.
    """
    if value.dtype not in dtypes or tuple(value.shape) != tuple(shape):
        wanted = " or ".join(name_of(dtype) for dtype in dtypes)
        raise NativeError(
            f"{op}: {name} must be {wanted} {axes} = {list(shape)}, "
            f"got {name_of(value.dtype)} {list(value.shape)}"
        )
    if not value.is_contiguous():
        raise NativeError(
            f"{op}: {name} must be contiguous {axes}, got strides {list(value.stride())}; "
            "call .contiguous() first"
        )


def features(op: str, value: Tensor) -> tuple[int, int]:
    """Require features [input, batch] and return their sizes."""
    sizes = matrix(op, "features", value, "[input, batch]")
    tensor(op, "features", value, sizes, "[input, batch]", *FEATURE_DTYPES)
    return sizes


def narrow(
    name: str, value: Tensor, weight_dtype: torch.dtype, group_size: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return features, or a logit gradient, as the device's kernels take them, and their addresses.

    What is bfloat16 stays so where products of bfloat16 are to be had: in CUDA kernels, with weights of the
    same type and groups of at least 16. Elsewhere it is widened to float32, which changes no value.

    Args:
        name: Of the argument in the native modules; in bfloat16, ``narrow_`` and the name.
        value: Checked; the caller holds what is returned until the call is over.
        weight_dtype: Of the layer.
        group_size: Of the layer.
    """
    both = value.dtype == weight_dtype == torch.bfloat16
    if both and group_size > 1 and native.multiplies_bfloat16(value.device):
        return value, {name: 0, f"narrow_{name}": value.data_ptr()}
    value = value.float()
    return value, {name: value.data_ptr()}


def groups(label: int, group_size: int) -> int:
    """Return the number of groups, ``ceil(label / group_size)``."""
    return -(-label // group_size)


def matrix(op: str, name: str, value: Tensor, axes: str) -> tuple[int, int]:
    """Require two axes of at least one element each and return their sizes."""
    if value.dim() != 2 or 0 in value.shape:
        raise NativeError(
            f"{op}: {name} must be {axes} with at least one element each, got {list(value.shape)}"
        )
    return value.shape[0], value.shape[1]


def layer(
    op: str,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    group_size: int,
    input: int,
    weight_scale: Tensor | None = None,
) -> dict[str, Any]:
    """Check the output layer's tensors and return them as the native core's ``Layer`` takes them."""
    label, fan_in = matrix(op, "weight", weight, "[label, fan_in]")
    if group_size not in GROUP_SIZES:
        raise NativeError(f"{op}: group_size must be one of {GROUP_SIZES}, got {group_size}")
    tensor(op, "weight", weight, (label, fan_in), "[label, fan_in]", *WEIGHT_DTYPES)
    tensor(op, "indices", indices, (groups(label, group_size), fan_in), "[group, fan_in]", *INDEX_DTYPES)
    tensor(op, "bias", bias, (label,), "[label]", torch.float32)
    float8.check_scale(op, weight, weight_scale)
    _indices_in_range(op, indices, input)
    return {
        "indices": indices.data_ptr(),
        "weight": weight.data_ptr(),
        "bias": bias.data_ptr(),
        "indices_dtype": name_of(indices.dtype),
        "weight_dtype": name_of(weight.dtype),
        "input": input,
        "label": label,
        "group_size": group_size,
        "fan_in": fan_in,
        "weight_scale": 0 if weight_scale is None else weight_scale.data_ptr(),
    }


def absent_layer(
    label: int, fan_in: int, input: int, group_size: int, weight_dtype: torch.dtype
) -> dict[str, Any]:
    """Return `layer` of tensors that do not exist yet, to ask an op for the size of its workspace."""
    return {
        "indices": 0,
        "weight": 0,
        "bias": 0,
        "indices_dtype": name_of(torch.uint16 if input <= MOST_INPUTS[torch.uint16] else torch.int32),
        "weight_dtype": name_of(weight_dtype),
        "input": input,
        "label": label,
        "group_size": group_size,
        "fan_in": fan_in,
        "weight_scale": 0,
    }


def differentiated_once(where: str) -> None:
    """Refuse ``create_graph=True``; called in a backward pass.

    torch's ``once_differentiable`` takes the gradients for constants where the loss is the end of the graph.

    Raises:
        XmlcError: A graph of the gradients was asked for.
    """
    if torch.is_grad_enabled():
        raise XmlcError(f"{where}: must be differentiated once, found create_graph=True; leave it out")


def written(*tensors: Tensor) -> None:
    """Give tensors that native code has changed a new version, which autograd reads."""
    torch.autograd.graph.increment_version([value for value in tensors if not value.is_inference()])


def _indices_in_range(op: str, indices: Tensor, input: int) -> None:
    # At each call: a write through .numpy() or .data leaves no trace.
    on_device = indices.device.type != "cpu"
    if (_largest_on_device(indices) if on_device else _largest(indices)) >= input:
        values = indices.cpu().numpy()
        raise NativeError(
            f"{op}: indices must lie in [0, input) = [0, {input}), "
            f"got values from {values.min()} to {values.max()}"
        )


def _largest(indices: Tensor) -> int:
    """Return the largest index, read as unsigned: so a negative index is a large one."""
    values = indices.numpy()  # torch has no maximum of uint16
    return int(values.view(f"u{values.itemsize}").max())


def _largest_on_device(indices: Tensor) -> int:
    """Return `_largest`; in pieces, because torch must widen them, and waiting for the device once."""
    signed, wide, mask = (
        (torch.int16, torch.int32, 0xFFFF)
        if indices.dtype == torch.uint16
        else (torch.int32, torch.int64, 0xFFFFFFFF)
    )
    pieces = indices.flatten().view(signed).split(CHECKED_AT_ONCE)
    return int(torch.stack([(piece.to(wide) & mask).max() for piece in pieces]).max())
