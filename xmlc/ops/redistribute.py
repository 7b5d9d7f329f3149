"""Connection redistribution: prune the weakest connections and regrow as many elsewhere, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import NativeError
from xmlc.ops import checks
from xmlc.ops.fused_step import STATE_DTYPES

_NAME = "redistribute"
NEW_VALUES = ("zero", "random", "keep")
SCOPES = ("layer", "group")

torch.library.define(
    "xmlc::redistribute",
    "(Tensor(a!) weight, Tensor(b!) indices, Tensor(c!)? state0, Tensor(d!)? state1, int input, "
    "int group_size, float? fraction, float? threshold, str scope, str new_value, float new_value_bound, "
    "int step, int seed, Tensor(e!)? weight_scale=None) -> Tensor",
)


def redistribute(
    weight: Tensor,
    indices: Tensor,
    input: int,
    *,
    fraction: float | None = None,
    threshold: float | None = None,
    scope: str = "layer",
    new_value: str = "zero",
    new_value_bound: float = 0.0,
    states: Sequence[Tensor] = (),
    group_size: int = 1,
    step: int = 0,
    seed: int = 0,
    weight_scale: Tensor | None = None,
) -> int:
    """Replace weak connections by random ones, keeping ``fan_in`` distinct inputs in every group.

    The score of connection k of a group is the mean of ``|weight[l, k]|`` over its labels; NaN ranks highest.
    With ``fraction``, exactly ``floor(fraction * group * fan_in + 1/2)`` connections of lowest score go: over
    the whole layer (``scope = "layer"``), or, within each group, its floor or ceiling of an equal share
    (``scope = "group"``); ties are broken by a hash of (seed, step, position). With ``threshold``, every
    connection whose score is below it (in float32) goes.

    All pruned inputs of a group leave first; then each pruned connection gets an input drawn uniformly from
    those that the group does not have at that moment. Its weights become 0, uniform in
    [-new_value_bound, new_value_bound), or stay, and its entries of ``states`` become 0. New values are
    rounded to the nearest; scales of float8 weights that are too small for new_value_bound rise first.

    Scratch is half a megabyte and 17 bytes × fan_in per thread, whatever the layer's size. Same arguments,
    same bits, for any number of threads.

    Args:
        weight: float32, bfloat16, float8_e4m3fn or float8_e5m2 [label, fan_in], updated.
        indices: uint16 or int32 [group, fan_in], updated. Distinct within a row, which is not checked: a
            repeated input may stay repeated.
        input: Number of inputs, at least fan_in; at most 65,536 for uint16 and 2^31 - 1 for int32.
        fraction: Share of the connections, in [0, 1]; exactly one of fraction and threshold.
        threshold: Score below which a connection goes, at least 0.
        scope: ``layer`` or ``group``.
        new_value: ``zero``, ``random`` or ``keep``.
        new_value_bound: Of ``random``; finite.
        states: Up to two [label, fan_in], updated: float32, bfloat16 or float8_e4m3fn, both alike.
        group_size: 1, 16, 32 or 64.
        step: Counter from 0: another step draws other connections.
        seed: Seed of draws and ties, at least 0.
        weight_scale: Of float8 weights, float32 [ceil(label / 64)], updated; see `fused_step`. Else None.

    Returns:
        The number of connections replaced (a group's connection counts once).

    Raises:
        NativeError: An argument does not fit.
    """
    if len(states) > 2:
        raise NativeError(f"{_NAME}: states must be at most two tensors, got {len(states)}")
    named = {f"state {number}": state for number, state in enumerate(states)}
    if weight_scale is not None:
        named["weight_scale"] = weight_scale
    checks.tensors(_NAME, weight=weight, indices=indices, **named)
    checks.integers(_NAME, input=input, group_size=group_size, step=step, seed=seed)
    checks.numbers(_NAME, fraction=fraction, threshold=threshold, new_value_bound=new_value_bound)
    state0, state1, *_ = *states, None, None
    return int(
        torch.ops.xmlc.redistribute(
            weight,
            indices,
            state0,
            state1,
            input,
            group_size,
            fraction,
            threshold,
            scope,
            new_value,
            new_value_bound,
            step,
            seed,
            weight_scale,
        )
    )


def workspace_bytes(layer: dict[str, Any], threads: int, within_group: bool = False) -> int:
    """Return the bytes that a call allocates beside its result; see `fused_step.workspace_bytes`."""
    return native.workspace_bytes(
        _NAME,
        threads,
        layer=layer,
        state0=0,
        state1=0,
        state_bytes=4,
        by_threshold=False,
        within_group=within_group,
        threshold=0.0,
        prune=0,
        new_value="zero",
        new_value_bound=0.0,
        seed=0,
        step=0,
        pruned=0,
    )


@torch.library.impl("xmlc::redistribute", ("cpu", "cuda"))
def _redistribute(
    weight: Tensor,
    indices: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    input: int,
    group_size: int,
    fraction: float | None,
    threshold: float | None,
    scope: str,
    new_value: str,
    new_value_bound: float,
    step: int,
    seed: int,
    weight_scale: Tensor | None = None,
) -> Tensor:
    no_bias = weight.new_empty(weight.shape[:1], dtype=torch.float32)
    layer = checks.layer(_NAME, weight, indices, no_bias, group_size, input, weight_scale)
    if (fraction is None) == (threshold is None):
        raise NativeError(
            f"{_NAME}: exactly one of fraction and threshold must be given, got {fraction}, {threshold}"
        )
    if fraction is not None and not 0.0 <= fraction <= 1.0:
        raise NativeError(f"{_NAME}: fraction must lie in [0, 1], got {fraction}")
    if threshold is not None and not threshold >= 0.0:
        raise NativeError(f"{_NAME}: threshold must be at least 0, got {threshold}")
    if not math.isfinite(new_value_bound):
        raise NativeError(f"{_NAME}: new_value_bound must be finite, got {new_value_bound}")
    checks.counters(_NAME, step=step, seed=seed)
    if weight.shape[1] > input:
        raise NativeError(f"{_NAME}: fan_in must be at most input = {input}, got {weight.shape[1]}")
    if input > checks.MOST_INPUTS[indices.dtype]:
        raise NativeError(
            f"{_NAME}: input must be at most {checks.MOST_INPUTS[indices.dtype]} for indices of "
            f"{checks.name_of(indices.dtype)}, got {input}"
        )
    if new_value not in NEW_VALUES:
        raise NativeError(f"{_NAME}: new_value must be one of {', '.join(NEW_VALUES)}, got {new_value!r}")
    if scope not in SCOPES:
        raise NativeError(f"{_NAME}: scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    dtypes = STATE_DTYPES
    for name, state in (("state 0", state0), ("state 1", state1)):
        if state is not None:
            checks.tensor(_NAME, name, state, weight.shape, "[label, fan_in]", *dtypes)
            dtypes = (state.dtype,)
    pruned = torch.empty((), dtype=torch.int64, device=weight.device)
    native.run(
        "redistribute",
        weight.device,
        8 * weight.numel(),
        layer=layer,
        state0=0 if state0 is None else state0.data_ptr(),
        state1=0 if state1 is None else state1.data_ptr(),
        state_bytes=dtypes[0].itemsize,
        by_threshold=threshold is not None,
        within_group=scope == "group",
        threshold=threshold or 0.0,
        prune=int((fraction or 0.0) * indices.numel() + 0.5),
        new_value=new_value,
        new_value_bound=new_value_bound,
        seed=seed,
        step=step,
        pruned=pruned.data_ptr(),
    )
    checks.written(weight, indices, *(value for value in (state0, state1, weight_scale) if value is not None))
    return pruned


@torch.library.register_fake("xmlc::redistribute")
def _redistribute_fake(weight: Tensor, *_: object, **__: object) -> Tensor:
    return weight.new_empty((), dtype=torch.int64)
