"""The fixed fan-in layer as a differentiable op: the unfused path, and the oracle of the fused one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xmlc import native
from xmlc.errors import NativeError
from xmlc.ops import checks, float8

_NAME = "sparse_linear"

torch.library.define(
    "xmlc::sparse_linear",
    "(Tensor features, Tensor weight, Tensor indices, Tensor bias, int group_size, "
    "Tensor? weight_scale=None) -> Tensor",
)
torch.library.define(
    "xmlc::sparse_linear_feature_gradient",
    "(Tensor logit_gradient, Tensor weight, Tensor indices, int group_size, int input, "
    "Tensor? weight_scale=None) -> Tensor",
)
torch.library.define(
    "xmlc::sparse_linear_weight_gradient",
    "(Tensor logit_gradient, Tensor features, Tensor indices, int group_size) -> Tensor",
)


def sparse_linear(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    group_size: int = 1,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """Compute the logits of a layer in which every label has ``fan_in`` inputs.

    ``logits[l, b] = bias[l] + sum_k weight[l, k] * features[indices[l // group_size, k], b]``,
    that is, ``W @ features + bias[:, None]`` with the dense ``W`` of `dense_weight`. Differentiable once
    in features, weight and bias; float8 weights, whose gradient they could not hold, take none.

    bfloat16 features are as exact as their values in float32: every product is exact, sums are float32. With
    weights in bfloat16 and groups of at least 16, backward passes round the logit gradient to bfloat16 for
    the gradients of features and weights, on every backend; a CUDA device then computes all three products on
    its tensor cores.

    Args:
        features: float32 or bfloat16 [input, batch].
        weight: float32, bfloat16, float8_e4m3fn or float8_e5m2 [label, fan_in].
        indices: uint16 or int32 [group, fan_in] with values in [0, input), group = ceil(label / group_size).
        bias: float32 [label].
        group_size: Labels that share one row of indices: 1, 16, 32 or 64.
        weight_scale: Of float8 weights, float32 [ceil(label / 64)]: a weight is its code times the scale of
            label // 64. None otherwise.

    Returns:
        Logits, float32 [label, batch]; sums in float32.

    Raises:
        NativeError: A dtype, shape, device, layout or index does not fit.
    """
    checks.tensors(_NAME, features=features, weight=weight, indices=indices, bias=bias)
    checks.integers(_NAME, group_size=group_size)
    if weight_scale is not None:
        checks.tensors(_NAME, weight=weight, weight_scale=weight_scale)
    if weight.requires_grad and float8.is_float8(weight.dtype):
        raise NativeError(
            f"{_NAME}: float8 weights must not require a gradient, got requires_grad=True; "
            "train them by fused_step"
        )
    return torch.ops.xmlc.sparse_linear(features, weight, indices, bias, group_size, weight_scale)


def dense_weight(
    weight: Tensor, indices: Tensor, group_size: int, input: int, weight_scale: Tensor | None = None
) -> Tensor:
    """Return the layer's weights as a dense matrix [label, input] of their dtype; of float8, float32."""
    weight = float8.widen(weight, weight_scale)
    label = weight.shape[0]
    columns = indices.to(torch.int64).repeat_interleave(group_size, dim=0)[:label]
    dense = weight.new_zeros(label, input)
    return dense.scatter_add(1, columns, weight)


def sparse_linear_reference(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    group_size: int = 1,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """Compute `sparse_linear` by a dense matrix product, in any floating dtype; for small layers."""
    dense = dense_weight(weight, indices, group_size, features.shape[0], weight_scale)
    return dense @ features + bias[:, None]


def _check_logit_gradient(logit_gradient: Tensor, label: int, batch: int) -> None:
    checks.tensor(
        _NAME, "logit_gradient", logit_gradient, (label, batch), "[label, batch]", *checks.FEATURE_DTYPES
    )


@torch.library.impl("xmlc::sparse_linear", ("cpu", "cuda"))
def _forward(
    features: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    group_size: int,
    weight_scale: Tensor | None = None,
) -> Tensor:
    input, batch = checks.features(_NAME, features)
    layer = checks.layer(_NAME, weight, indices, bias, group_size, input, weight_scale)
    features, addresses = checks.narrow("features", features, weight.dtype, group_size)
    logits = torch.empty(weight.shape[0], batch, dtype=torch.float32, device=features.device)
    native.run(
        "sparse_linear",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        **addresses,
        logits=logits.data_ptr(),
        batch=batch,
    )
    return logits


@torch.library.impl("xmlc::sparse_linear_feature_gradient", ("cpu", "cuda"))
def _feature_gradient(
    logit_gradient: Tensor,
    weight: Tensor,
    indices: Tensor,
    group_size: int,
    input: int,
    weight_scale: Tensor | None = None,
) -> Tensor:
    _, batch = checks.matrix(_NAME, "logit_gradient", logit_gradient, "[label, batch]")
    no_bias = weight.new_empty(weight.shape[:1], dtype=torch.float32)
    layer = checks.layer(_NAME, weight, indices, no_bias, group_size, input, weight_scale)
    logit_gradient = logit_gradient.contiguous()
    _check_logit_gradient(logit_gradient, weight.shape[0], batch)
    # The sums of one order know no tensor cores.
    ordered = torch.are_deterministic_algorithms_enabled()
    logit_gradient, addresses = checks.narrow(
        "logit_gradient", logit_gradient, torch.float32 if ordered else weight.dtype, group_size
    )
    gradient = logit_gradient.new_empty(input, batch, dtype=torch.float32)
    native.run(
        "sparse_linear_feature_gradient",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        **addresses,
        feature_gradient=gradient.data_ptr(),
        batch=batch,
    )
    return gradient


@torch.library.impl("xmlc::sparse_linear_weight_gradient", ("cpu", "cuda"))
def _weight_gradient(logit_gradient: Tensor, features: Tensor, indices: Tensor, group_size: int) -> Tensor:
    input, batch = checks.features(_NAME, features)
    label, _ = checks.matrix(_NAME, "logit_gradient", logit_gradient, "[label, batch]")
    logit_gradient = logit_gradient.contiguous()
    _check_logit_gradient(logit_gradient, label, batch)
    gradient = torch.empty(label, indices.shape[-1], dtype=torch.float32, device=logit_gradient.device)
    layer = checks.layer(_NAME, gradient, indices, gradient.new_empty(label), group_size, input)
    # Both in bfloat16 ask for products of bfloat16; no weight takes part.
    features, addresses = checks.narrow("features", features, logit_gradient.dtype, group_size)
    logit_gradient, others = checks.narrow("logit_gradient", logit_gradient, features.dtype, group_size)
    native.run(
        "sparse_linear_weight_gradient",
        gradient.device,
        gradient.numel() * batch,
        layer=layer,
        **addresses,
        **others,
        weight_gradient=gradient.data_ptr(),
        batch=batch,
    )
    return gradient


@torch.library.register_fake("xmlc::sparse_linear")
def _forward_fake(features: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return features.new_empty(weight.shape[0], features.shape[1], dtype=torch.float32)


@torch.library.register_fake("xmlc::sparse_linear_feature_gradient")
def _feature_gradient_fake(
    logit_gradient: Tensor, weight: Tensor, indices: Tensor, group_size: int, input: int, *_: object
) -> Tensor:
    return logit_gradient.new_empty(input, logit_gradient.shape[1], dtype=torch.float32)


@torch.library.register_fake("xmlc::sparse_linear_weight_gradient")
def _weight_gradient_fake(
    logit_gradient: Tensor, features: Tensor, indices: Tensor, group_size: int
) -> Tensor:
    return logit_gradient.new_empty(logit_gradient.shape[0], indices.shape[1], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, indices, _, ctx.group_size, ctx.weight_scale = inputs
    ctx.save_for_backward(features, weight, indices)


@torch.autograd.function.once_differentiable
def _backward(ctx: Any, logit_gradient: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, indices = ctx.saved_tensors
    # Products of bfloat16 take the logit gradient in it as well; the bias does not.
    narrow = features.dtype == weight.dtype == torch.bfloat16 and ctx.group_size > 1
    factor = logit_gradient.to(torch.bfloat16) if narrow else logit_gradient
    feature_gradient = weight_gradient = bias_gradient = None
    if ctx.needs_input_grad[0]:
        feature_gradient = torch.ops.xmlc.sparse_linear_feature_gradient(
            factor, weight, indices, ctx.group_size, features.shape[0], ctx.weight_scale
        ).to(features.dtype)
    if ctx.needs_input_grad[1]:
        weight_gradient = torch.ops.xmlc.sparse_linear_weight_gradient(
            factor, features, indices, ctx.group_size
        ).to(weight.dtype)
    if ctx.needs_input_grad[3]:
        bias_gradient = logit_gradient.sum(1)
    return feature_gradient, weight_gradient, None, bias_gradient, None, None


torch.library.register_autograd("xmlc::sparse_linear", _backward, setup_context=_save_for_backward)
