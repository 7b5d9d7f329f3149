"""Exact top-k labels of every instance without a [batch, label] tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import NativeError
from xmlc.ops import checks, logit_offsets
from xmlc.ops.logit_offsets import LogitOffsets
from xmlc.ops.sparse_linear import sparse_linear_reference

_NAME = "top_labels"

torch.library.define(
    "xmlc::top_labels",
    "(Tensor features, Tensor weight, Tensor indices, Tensor bias, int k, int group_size, "
    "Tensor? offset_label=None, Tensor? offset_instance=None, Tensor? offset_value=None, "
    "Tensor? weight_scale=None) "
    "-> (Tensor, Tensor)",
)


def top_labels(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    k: int,
    group_size: int = 1,
    offsets: LogitOffsets | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each instance and their labels; ties go to the lowest label.

    Equivalent to sorting each column of `sparse_linear`, plus offsets, by (falling logit, rising label) and
    taking the first k, in memory of batch × k per thread. A logit that is NaN or -inf is never taken.
    Outside autograd.

    Args:
        features: float32 or bfloat16 [input, batch]; see `sparse_linear`.
        weight: float32, bfloat16, float8_e4m3fn or float8_e5m2 [label, fan_in].
        indices: uint16 or int32 [group, fan_in].
        bias: float32 [label].
        k: Labels wanted, 1 <= k <= label.
        group_size: 1, 16, 32 or 64.
        offsets: Numbers to add to single logits, or None; their gradient is not touched.
        weight_scale: Of float8 weights, float32 [ceil(label / 64)]; see `fused_step`. None otherwise.

    Returns:
        Scores, float32 [batch, k], falling, and labels, int64 [batch, k]; where an instance has fewer than k
        logits above -inf, the rest is (-inf, -1).

    Raises:
        NativeError: A dtype, shape, device, layout, index or k does not fit.
    """
    checks.tensors(_NAME, features=features, weight=weight, indices=indices, bias=bias)
    checks.integers(_NAME, k=k, group_size=group_size)
    logit_offsets.check_tensors(_NAME, offsets)
    if weight_scale is not None:
        checks.tensors(_NAME, weight=weight, weight_scale=weight_scale)
    with torch.no_grad():
        return torch.ops.xmlc.top_labels(
            features,
            weight,
            indices,
            bias,
            k,
            group_size,
            *(() if offsets is None else (offsets.label, offsets.instance, offsets.value)),
            weight_scale=weight_scale,
        )


def workspace_bytes(layer: dict[str, Any], batch: int, k: int, threads: int) -> int:
    """Return the bytes that a call allocates beside its results; see `fused_step.workspace_bytes`."""
    return native.workspace_bytes(
        _NAME,
        threads,
        layer=layer,
        features=0,
        scores=0,
        labels=0,
        batch=batch,
        k=k,
        offsets=logit_offsets.ABSENT,
    )


def top_labels_reference(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    k: int,
    group_size: int = 1,
    offsets: LogitOffsets | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `top_labels` from all logits by a stable sort; for small layers, in any floating dtype."""
    logits = sparse_linear_reference(features, weight, indices, bias, group_size, weight_scale)
    logits = logit_offsets.add_reference(logits, offsets).T
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores, labels = logits.sort(dim=1, descending=True, stable=True)
    scores, labels = scores[:, :k], labels[:, :k]
    return scores, labels.where(scores > -torch.inf, torch.tensor(-1))


@torch.library.impl("xmlc::top_labels", ("cpu", "cuda"))
def _top_labels(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    k: int,
    group_size: int,
    offset_label: Tensor | None = None,
    offset_instance: Tensor | None = None,
    offset_value: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input, batch = checks.features(_NAME, features)
    layer = checks.layer(_NAME, weight, indices, bias, group_size, input, weight_scale)
    if not 1 <= k <= weight.shape[0]:
        raise NativeError(f"{_NAME}: k must lie in [1, label] = [1, {weight.shape[0]}], got {k}")
    offsets = LogitOffsets.given(offset_label, offset_instance, offset_value)
    native_offsets = logit_offsets.checked(_NAME, offsets, weight.shape[0], batch)
    features, addresses = checks.narrow("features", features, weight.dtype, group_size)
    scores = torch.empty(batch, k, dtype=torch.float32, device=features.device)
    labels = torch.empty(batch, k, dtype=torch.int64, device=features.device)
    native.run(
        "top_labels",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        **addresses,
        scores=scores.data_ptr(),
        labels=labels.data_ptr(),
        batch=batch,
        k=k,
        offsets=native_offsets,
    )
    return scores, labels


@torch.library.register_fake("xmlc::top_labels")
def _top_labels_fake(
    features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, k: int, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    batch = features.shape[1]
    return features.new_empty(batch, k, dtype=torch.float32), features.new_empty(batch, k, dtype=torch.int64)
