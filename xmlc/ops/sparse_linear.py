"""The fixed fan-in layer as a differentiable op: the unfused path, and the oracle of the fused one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xmlc import native
from xmlc.ops import checks

_NAME = "sparse_linear"

torch.library.define(
    "xmlc::sparse_linear",
    "(Tensor features, Tensor weight, Tensor indices, Tensor bias, int group_size) -> Tensor",
)
torch.library.define(
    "xmlc::sparse_linear_feature_gradient",
    "(Tensor logit_gradient, Tensor weight, Tensor indices, int group_size, int input) -> Tensor",
)
torch.library.define(
    "xmlc::sparse_linear_weight_gradient",
    "(Tensor logit_gradient, Tensor features, Tensor indices, int group_size) -> Tensor",
)


def sparse_linear(
    features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, group_size: int = 1
) -> Tensor:
    """Compute the logits of a layer in which every label has ``fan_in`` inputs.

    ``logits[l, b] = bias[l] + sum_k weight[l, k] * features[indices[l // group_size, k], b]``,
    that is, ``W @ features + bias[:, None]`` with the dense ``W`` of `dense_weight`. Differentiable once
    in features, weight and bias.

    Args:
        features: float32 [input, batch].
        weight: float32 or bfloat16 [label, fan_in].
        indices: uint16 or int32 [group, fan_in] with values in [0, input), group = ceil(label / group_size).
        bias: float32 [label].
        group_size: Labels that share one row of indices: 1, 16, 32 or 64.

    Returns:
        Logits, float32 [label, batch]; sums in float32.

    Raises:
        NativeError: A dtype, shape, device, layout or index does not fit.
    """
    checks.tensors(_NAME, features=features, weight=weight, indices=indices, bias=bias)
    checks.integers(_NAME, group_size=group_size)
    return torch.ops.xmlc.sparse_linear(features, weight, indices, bias, group_size)


def dense_weight(weight: Tensor, indices: Tensor, group_size: int, input: int) -> Tensor:
    """Return the layer's weights as a dense matrix [label, input] of the weight's dtype."""
    label = weight.shape[0]
    columns = indices.to(torch.int64).repeat_interleave(group_size, dim=0)[:label]
    dense = weight.new_zeros(label, input)
    return dense.scatter_add(1, columns, weight)


def sparse_linear_reference(
    features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, group_size: int = 1
) -> Tensor:
    """Compute `sparse_linear` by a dense matrix product, in any floating dtype; for small layers."""
    return dense_weight(weight, indices, group_size, features.shape[0]) @ features + bias[:, None]


def _features(op: str, features: Tensor) -> tuple[int, int]:
    sizes = checks.matrix(op, "features", features, "[input, batch]")
    checks.tensor(op, "features", features, sizes, "[input, batch]", torch.float32)
    return sizes


def _check_logit_gradient(logit_gradient: Tensor, label: int, batch: int) -> None:
    checks.tensor(_NAME, "logit_gradient", logit_gradient, (label, batch), "[label, batch]", torch.float32)


@torch.library.impl("xmlc::sparse_linear", ("cpu", "cuda"))
def _forward(features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, group_size: int) -> Tensor:
    input, batch = _features(_NAME, features)
    layer = checks.layer(_NAME, weight, indices, bias, group_size, input)
    logits = features.new_empty(weight.shape[0], batch)
    native.run(
        "sparse_linear",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        features=features.data_ptr(),
        logits=logits.data_ptr(),
        batch=batch,
    )
    return logits


@torch.library.impl("xmlc::sparse_linear_feature_gradient", ("cpu", "cuda"))
def _feature_gradient(
    logit_gradient: Tensor, weight: Tensor, indices: Tensor, group_size: int, input: int
) -> Tensor:
    _, batch = checks.matrix(_NAME, "logit_gradient", logit_gradient, "[label, batch]")
    layer = checks.layer(
        _NAME, weight, indices, weight.new_empty(weight.shape[:1], dtype=torch.float32), group_size, input
    )
    logit_gradient = logit_gradient.contiguous()
    _check_logit_gradient(logit_gradient, weight.shape[0], batch)
    gradient = logit_gradient.new_empty(input, batch)
    native.run(
        "sparse_linear_feature_gradient",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        logit_gradient=logit_gradient.data_ptr(),
        feature_gradient=gradient.data_ptr(),
        batch=batch,
    )
    return gradient


@torch.library.impl("xmlc::sparse_linear_weight_gradient", ("cpu", "cuda"))
def _weight_gradient(logit_gradient: Tensor, features: Tensor, indices: Tensor, group_size: int) -> Tensor:
    input, batch = _features(_NAME, features)
    label, _ = checks.matrix(_NAME, "logit_gradient", logit_gradient, "[label, batch]")
    logit_gradient = logit_gradient.contiguous()
    _check_logit_gradient(logit_gradient, label, batch)
    gradient = torch.empty(label, indices.shape[-1], dtype=torch.float32, device=logit_gradient.device)
    layer = checks.layer(_NAME, gradient, indices, gradient.new_empty(label), group_size, input)
    native.run(
        "sparse_linear_weight_gradient",
        gradient.device,
        gradient.numel() * batch,
        layer=layer,
        features=features.data_ptr(),
        logit_gradient=logit_gradient.data_ptr(),
        weight_gradient=gradient.data_ptr(),
        batch=batch,
    )
    return gradient


@torch.library.register_fake("xmlc::sparse_linear")
def _forward_fake(features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, group_size: int) -> Tensor:
    return features.new_empty(weight.shape[0], features.shape[1])


@torch.library.register_fake("xmlc::sparse_linear_feature_gradient")
def _feature_gradient_fake(
    logit_gradient: Tensor, weight: Tensor, indices: Tensor, group_size: int, input: int
) -> Tensor:
    return logit_gradient.new_empty(input, logit_gradient.shape[1])


@torch.library.register_fake("xmlc::sparse_linear_weight_gradient")
def _weight_gradient_fake(
    logit_gradient: Tensor, features: Tensor, indices: Tensor, group_size: int
) -> Tensor:
    return logit_gradient.new_empty(logit_gradient.shape[0], indices.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, weight, indices, _, ctx.group_size = inputs
    ctx.save_for_backward(features, weight, indices)


@torch.autograd.function.once_differentiable
def _backward(ctx: Any, logit_gradient: Tensor) -> tuple[Tensor | None, ...]:
    features, weight, indices = ctx.saved_tensors
    feature_gradient = weight_gradient = bias_gradient = None
    if ctx.needs_input_grad[0]:
        feature_gradient = torch.ops.xmlc.sparse_linear_feature_gradient(
            logit_gradient, weight, indices, ctx.group_size, features.shape[0]
        )
    if ctx.needs_input_grad[1]:
        weight_gradient = torch.ops.xmlc.sparse_linear_weight_gradient(
            logit_gradient, features, indices, ctx.group_size
        ).to(weight.dtype)
    if ctx.needs_input_grad[3]:
        bias_gradient = logit_gradient.sum(1)
    return feature_gradient, weight_gradient, None, bias_gradient, None


torch.library.register_autograd("xmlc::sparse_linear", _backward, setup_context=_save_for_backward)
