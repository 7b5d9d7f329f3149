"""What a layer's labels add to the softmax losses of a batch whose other labels lie in other layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import NativeError
from xmlc.ops import checks, logit_offsets
from xmlc.ops.fused_step import NO_STEP, NORMALISED, check_pairs, pairs_by_label
from xmlc.ops.logit_offsets import LogitOffsets

_NAME = "log_normaliser"

torch.library.define(
    "xmlc::log_normaliser",
    "(Tensor features, Tensor pair_label, Tensor pair_instance, Tensor weight, Tensor indices, Tensor bias, "
    "int group_size, str loss, Tensor? offset_label=None, Tensor? offset_instance=None, "
    "Tensor? offset_value=None, Tensor? weight_scale=None) -> (Tensor, Tensor)",
)


@dataclass(frozen=True)
class LabelSums:
    """The sums over a layer's labels, and its positives: each once, by rising label."""

    log_sum: Tensor
    """float64 [batch]; -inf where nothing is summed."""
    label: Tensor
    """int32 [pair]."""
    instance: Tensor
    """int32 [pair]."""
    logit: Tensor
    """float32 [pair]: of the positives."""


def log_normaliser(
    features: Tensor,
    positive_offsets: Tensor,
    positive_labels: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    *,
    loss: str,
    group_size: int = 1,
    offsets: LogitOffsets | None = None,
    weight_scale: Tensor | None = None,
) -> LabelSums:
    """Return log sum exp of each instance's logits, and the logits of its positives.

    Equivalent to (without ever holding anything [label, batch])::

        logits = sparse_linear(features, weight, indices, bias, group_size)    # plus the offsets
        log_sum = logits.logsumexp(0)                                          # softmax
        log_sum = logits.masked_fill(positive, -inf).logsumexp(0)              # decoupled_softmax
        logit = logits[label, instance]

    which is the first pass of a `fused_step` under these losses. Where the labels of an instance lie in
    several layers, their ``log_sum`` and positives make the `Normaliser` with which each takes its step.
    Outside autograd. The same bits for any number of threads.

    Args:
        features: float32 or bfloat16 [input, batch].
        positive_offsets: int64 [batch + 1]; see `fused_step`.
        positive_labels: int32 or int64 [pair], in [0, label).
        weight: float32, bfloat16, float8_e4m3fn or float8_e5m2 [label, fan_in].
        indices: uint16 or int32 [group, fan_in].
        bias: float32 [label].
        loss: ``softmax`` or ``decoupled_softmax``.
        group_size: 1, 16, 32 or 64.
        offsets: Numbers to add to single logits, or None; their gradient is not touched.
        weight_scale: Of float8 weights, float32 [ceil(label / 64)]; see `fused_step`. None otherwise.

    Raises:
        NativeError: A dtype, shape, device, layout, label or loss does not fit.
    """
    checks.tensors(_NAME, features=features, weight=weight, indices=indices, bias=bias)
    checks.tensors(_NAME, positive_offsets=positive_offsets, positive_labels=positive_labels)
    if weight_scale is not None:
        checks.tensors(_NAME, weight=weight, weight_scale=weight_scale)
    checks.integers(_NAME, group_size=group_size)
    logit_offsets.check_tensors(_NAME, offsets)
    _, batch = checks.matrix(_NAME, "features", features, "[input, batch]")
    label, _ = checks.matrix(_NAME, "weight", weight, "[label, fan_in]")
    pair_label, pair_instance = (
        pair.to(features.device)
        for pair in pairs_by_label(positive_offsets, positive_labels, batch, label, _NAME)
    )
    with torch.no_grad():
        log_sum, logit = torch.ops.xmlc.log_normaliser(
            features,
            pair_label,
            pair_instance,
            weight,
            indices,
            bias,
            group_size,
            loss,
            *(() if offsets is None else (offsets.label, offsets.instance, offsets.value)),
            weight_scale=weight_scale,
        )
    return LabelSums(log_sum, pair_label, pair_instance, logit)


@torch.library.impl("xmlc::log_normaliser", ("cpu", "cuda"))
def _log_normaliser(
    features: Tensor,
    pair_label: Tensor,
    pair_instance: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    group_size: int,
    loss: str,
    offset_label: Tensor | None = None,
    offset_instance: Tensor | None = None,
    offset_value: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input, batch = checks.features(_NAME, features)
    layer = checks.layer(_NAME, weight, indices, bias, group_size, input, weight_scale)
    if loss not in NORMALISED:
        raise NativeError(f"{_NAME}: loss must be one of {', '.join(NORMALISED)}, got {loss!r}")
    check_pairs(_NAME, pair_label, pair_instance, weight.shape[0], batch)
    offsets = LogitOffsets.given(offset_label, offset_instance, offset_value)
    native_offsets = logit_offsets.checked(_NAME, offsets, weight.shape[0], batch)
    features, addresses = checks.narrow("features", features, weight.dtype, group_size)
    log_sum = torch.empty(batch, dtype=torch.float64, device=features.device)
    logit = torch.empty(pair_label.numel(), dtype=torch.float32, device=features.device)
    native.run(
        "fused_step",  # no more of it than its first pass, by the first two arguments
        weight.device,
        weight.numel() * batch,
        own_log_sum=log_sum.data_ptr(),
        own_pair_logit=logit.data_ptr(),
        layer=layer,
        **addresses,
        pair_label=pair_label.data_ptr(),
        pair_instance=pair_instance.data_ptr(),
        pair=pair_label.numel(),
        batch=batch,
        loss=loss,
        offsets=native_offsets,
        **NO_STEP,
    )
    return log_sum, logit


@torch.library.register_fake("xmlc::log_normaliser")
def _log_normaliser_fake(
    features: Tensor, pair_label: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    log_sum = features.new_empty(features.shape[1], dtype=torch.float64)
    return log_sum, features.new_empty(pair_label.shape[0], dtype=torch.float32)
