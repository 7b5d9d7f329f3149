"""One training step of the output layer in one pass: logits, loss, gradients and update, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from xmlc import native
from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import checks, float8, logit_offsets
from xmlc.ops.logit_offsets import LogitOffsets

_NAME = "fused_step"

torch.library.define(
    "xmlc::fused_step",
    "(Tensor features, Tensor pair_label, Tensor pair_instance, Tensor(a!) weight, Tensor indices, "
    "Tensor(b!) bias, Tensor(c!)? weight_first, Tensor(d!)? weight_second, Tensor(e!)? bias_first, "
    "Tensor(f!)? bias_second, Tensor? positive_weight, int group_size, str loss, float scale, "
    "bool share_positives, float gradient_cutoff, str optimizer, float learning_rate, float weight_decay, "
    "float momentum, float beta1, float beta2, float eps, int step, int seed, "
    "Tensor? offset_label=None, Tensor? offset_instance=None, Tensor? offset_value=None, "
    "Tensor(g!)? offset_gradient=None, Tensor(h!)? weight_scale=None, Tensor(i!)? state_scale=None, "
    "Tensor? log_sum=None, Tensor? factor=None, Tensor? share=None) "
    "-> (Tensor, Tensor)",
)


STATE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
"""How the state can be kept, as far as it is one value for each connection."""
_MOST_STATE_SCALE = 247  # the least whose units hold every finite float32


@dataclass(frozen=True)
class OptimizerState:
    """State of the output layer's optimizer; what a kind does not need is None.

    | kind | weight_first | weight_second | bias_first | bias_second |
    |---|---|---|---|---|
    | sgd | | | | |
    | momentum | velocity [label, fan_in] | | velocity [label] | |
    | adam | first moment [label, fan_in] | second moment [label, fan_in] | [label] | [label] |
    | label_adam | | second moment [label], for the label's bias as well | | |

    What is [label, fan_in] is float32, bfloat16 or float8_e4m3fn, the rest float32. In float8, ``scale``,
    uint8 [label], holds exponents: a code of label l stands for its value times ``2 ** (scale[l] - 127)``,
    and the second moment is kept as its root. `widened` returns the values.
    """

    weight_first: Tensor | None = None
    weight_second: Tensor | None = None
    bias_first: Tensor | None = None
    bias_second: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def zeros(cls, kind: str, label: int, fan_in: int, dtype: torch.dtype = torch.float32) -> OptimizerState:
        """Return the state before the first step, all zeros.

        Args:
            kind: Of the optimizer.
            label: Number of labels.
            fan_in: Inputs of each label.
            dtype: Of what is [label, fan_in].

        Raises:
            NativeError: The kind or the dtype is unknown.
        """
        _check_dtype(dtype)
        weight, bias = (label, fan_in), (label,)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "sgd": {},
            "momentum": {"weight_first": weight, "bias_first": bias},
            "adam": {
                "weight_first": weight,
                "weight_second": weight,
                "bias_first": bias,
                "bias_second": bias,
            },
            "label_adam": {"weight_second": bias},
        }
        if kind not in shapes:
            raise NativeError(f"{_NAME}: optimizer must be one of {', '.join(shapes)}, got {kind!r}")
        state = {
            name: torch.zeros(shape, dtype=dtype if len(shape) == 2 else torch.float32)
            for name, shape in shapes[kind].items()
        }
        if float8.is_float8(dtype) and "weight_first" in state:
            state["scale"] = torch.zeros(bias, dtype=torch.uint8)
        return cls(**state)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is [label, fan_in]; float32 where nothing is."""
        return torch.float32 if self.weight_first is None else self.weight_first.dtype

    def widened(self) -> OptimizerState:
        """Return a float32 copy of the values; exact, but for squares too small or large for float32."""
        tensors = {name: value for name, value in self.tensors().items() if name != "scale"}
        state = {name: value.to(torch.float32, copy=True) for name, value in tensors.items()}
        if self.scale is not None:
            unit = (self.scale.int() << 23).view(torch.float32)[:, None]  # an exponent as float32 has it
            state["weight_first"] = state["weight_first"] * unit
            if "weight_second" in state:
                state["weight_second"] = (state["weight_second"] * unit).square()
        return OptimizerState(**state)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in use by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def by_connection(self) -> list[Tensor]:
        """Return the tensors [label, fan_in]: what a redistribution resets."""
        return [
            value
            for value in (self.weight_first, self.weight_second)
            if value is not None and value.dim() == 2
        ]


@dataclass(frozen=True)
class Normaliser:
    """What a softmax loss needs of all labels of an instance, where they lie in several layers.

    With S, the log of the sum of exp(logit) over all labels (``decoupled_softmax``: over the negatives), and
    a positive's weight w = positive_weight * share.
    """

    log_sum: Tensor
    """float64 [batch]: S; -inf where nothing is summed."""
    factor: Tensor
    """float64 [batch]: sum over all positives of w (``decoupled_softmax``: w * sigmoid(S - logit))."""
    share: Tensor
    """float64 [batch]: 1, or 1 / all positives of the instance."""
    loss: Tensor
    """float64 []: sum over this layer's positives, before the scale."""


def fused_step(
    features: Tensor,
    positive_offsets: Tensor,
    positive_labels: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    *,
    loss: str,
    optimizer: OptimizerConfig,
    learning_rate: float,
    state: OptimizerState,
    step: int,
    seed: int = 0,
    scale: float = 1.0,
    share_positives: bool = False,
    gradient_cutoff: float = 0.0,
    group_size: int = 1,
    positive_weight: Tensor | None = None,
    offsets: LogitOffsets | None = None,
    weight_scale: Tensor | None = None,
    normaliser: Normaliser | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute loss and feature gradient of a batch, and update weight, bias and state in place.

    Equivalent to (with float32 sums, and without ever holding anything [label, batch])::

        logits = sparse_linear(features, weight, indices, bias, group_size)    # plus the offsets
        value = scale * LOSSES[loss](logits, positive, factor).sum()
        value.backward(); optimizer.step()                  # torch.optim.SGD or AdamW, see below

    with positive [label, batch] true for the given pairs and ``factor`` their weight (positive_weight, or 1).
    `LOSSES` holds the formulas. ``squared_hinge`` is exactly zero beyond the margin, and a label whose
    gradients are zero skips all backward work (the published "implicit negative mining"). ``bce`` has every
    gradient active. ``softmax`` and ``decoupled_softmax`` need the sum over all labels first, and take one
    more pass for it. A positive given twice counts once.

    Optimizers: ``sgd``, ``momentum`` (SGD with momentum, no dampening) and ``adam`` are torch's; weight decay
    is decoupled in all of them (AdamW's; torch couples SGD's), and spares the bias. ``label_adam`` is Adam
    without a first moment and with one second moment v for the fan_in + 1 parameters of a label::

        v = beta2 * v + (1 - beta2) * mean(gradient ** 2)
        w = w * (1 - learning_rate * weight_decay)
            - learning_rate * gradient / (sqrt(v / (1 - beta2 ** step)) + eps)

    bfloat16 and float8 weights are rounded stochastically, from a counter of (seed, step, label, connection);
    the expectation is exact, except that a finite value stays finite beyond the largest. Of 64 labels with a
    common scale, all float8 weights are updated in float32 first; then the scale is doubled until the largest
    fits, or halved where the largest takes less than an eighth of the range; then they are rounded in its
    units. Labels of a block in which no gradient is active keep weights and scale.

    The state of connections in bfloat16 or float8 is widened, updated in float32 and, after the weight has
    moved by it, rounded stochastically (in float8 not the second moment but its root). A root that is not
    zero does not become zero, and both moments of a label are in units of one scale: no step is much larger
    than Adam's can be.

    Outside autograd: no hooks and no ``.grad``. Same arguments, same bits, for any number of threads; on a
    CUDA device the feature gradient's last bits vary unless torch is told to use deterministic algorithms.

    Args:
        features: float32 or bfloat16 [input, batch]. bfloat16 is as exact as its values in float32, but for
            weights in bfloat16 and groups of at least 16 on a CUDA device: there logit gradients are rounded
            to bfloat16, to nearest, for the gradients of features and weights (not of the bias).
        positive_offsets: int64 [batch + 1]; instance b has positive_labels[offsets[b]:offsets[b + 1]].
            They, and only they, may lie on the CPU where the rest is on a device.
        positive_labels: int32 or int64 [pair], in [0, label).
        weight: float32, bfloat16, float8_e4m3fn or float8_e5m2 [label, fan_in], updated.
        indices: uint16 or int32 [group, fan_in].
        bias: float32 [label], updated; weight decay spares it.
        loss: ``squared_hinge``, ``bce``, ``softmax`` or ``decoupled_softmax``.
        optimizer: Update rule; its learning_rate is not read.
        learning_rate: Rate of this step.
        state: State of this optimizer kind, updated.
        step: Number of this step, from 1 (bias correction, rounding).
        seed: Seed of the rounding, at least 0.
        scale: Factor on loss and gradient, such as 1 / batch.
        share_positives: Of the softmax losses: divide an instance's positive weights by the number of its
            positives, so that every instance counts the same (suits recall; without it, precision:
            Menon et al. 2019, "Multilabel reductions").
        gradient_cutoff: At 0 the step is exact. Above, a label skips its backward work for the (16 to 64)
            instances of a batch tile when d loss / d logit is at most ``scale * gradient_cutoff`` in size for
            all of them.
        group_size: 1, 16, 32 or 64.
        positive_weight: float32 [label] or None for 1.
        offsets: Numbers to add to single logits, or None; their ``gradient`` is overwritten. Where a label
            skips its backward work (``gradient_cutoff``), it is 0.
        weight_scale: Of float8 weights, float32 [ceil(label / 64)], powers of two: a weight is its code times
            the scale of label // 64; updated. None otherwise.
        normaliser: Of the softmax losses: what they need of all labels, where these are only some of an
            instance's (`log_normaliser`), in place of the first pass; share_positives is in it. The loss
            returned is its ``loss`` times ``scale``. None where the layer has all labels.

    Returns:
        The loss, float64 [], and its gradient with respect to features, float32 [input, batch].

    Raises:
        NativeError: A dtype, shape, device, layout, label or state does not fit.
    """
    named = {"features": features, "weight": weight, "indices": indices, "bias": bias}
    positives = {"positive_offsets": positive_offsets, "positive_labels": positive_labels}
    checks.tensors(_NAME, **named, **state.tensors())
    if weight_scale is not None:
        checks.tensors(_NAME, weight=weight, weight_scale=weight_scale)
    checks.tensors(_NAME, **positives)
    if positive_weight is not None:
        checks.tensors(_NAME, positive_weight=positive_weight)
    checks.integers(_NAME, step=step, seed=seed, group_size=group_size)
    checks.numbers(_NAME, learning_rate=learning_rate, scale=scale, gradient_cutoff=gradient_cutoff)
    _, batch = checks.matrix(_NAME, "features", features, "[input, batch]")
    label, _ = checks.matrix(_NAME, "weight", weight, "[label, fan_in]")
    logit_offsets.check_tensors(_NAME, offsets)
    sums: dict[str, Tensor] = {}
    if normaliser is not None:
        sums = {name: value for name, value in vars(normaliser).items() if name != "loss"}
        checks.tensors(_NAME, features=features, **vars(normaliser))
        checks.tensor(_NAME, "normaliser.loss", normaliser.loss, (), "[]", torch.float64)
    pair_label, pair_instance = (
        pair.to(features.device) for pair in pairs_by_label(positive_offsets, positive_labels, batch, label)
    )
    with torch.no_grad():
        loss_sum, feature_gradient = torch.ops.xmlc.fused_step(
            features,
            pair_label,
            pair_instance,
            weight,
            indices,
            bias,
            state.weight_first,
            state.weight_second,
            state.bias_first,
            state.bias_second,
            positive_weight,
            group_size,
            loss,
            scale,
            share_positives,
            gradient_cutoff,
            optimizer.kind,
            learning_rate,
            optimizer.weight_decay,
            optimizer.momentum,
            optimizer.beta1,
            optimizer.beta2,
            optimizer.eps,
            step,
            seed,
            *(() if offsets is None else (offsets.label, offsets.instance, offsets.value, offsets.gradient)),
            weight_scale=weight_scale,
            state_scale=state.scale,
            **sums,
        )
    return (loss_sum if normaliser is None else scale * normaliser.loss), feature_gradient


NO_STEP: dict[str, Any] = {
    "feature_gradient": 0,
    "positive_weight": 0,
    "scale": 1.0,
    "share_positives": False,
    "gradient_cutoff": 0.0,
    "optimizer": "sgd",
    "learning_rate": 0.0,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 1.0,
    "step": 1,
    "weight_first": 0,
    "weight_second": 0,
    "state_dtype": "float32",
    "state_scale": 0,
    "bias_first": 0,
    "bias_second": 0,
    "seed": 0,
    "loss_sum": 0,
}
"""Arguments of the native step that neither its workspace nor its first pass depends on."""


def workspace_bytes(
    layer: dict[str, Any],
    batch: int,
    pairs: int,
    loss: str,
    optimizer: str,
    threads: int,
    narrow: bool = False,
) -> int:
    """Return the bytes that a step allocates beside its results; see `checks.absent_layer`.

    ``threads`` as of `native.workspace_bytes`; ``narrow``: features stay bfloat16 (`checks.narrow`).
    """
    return native.workspace_bytes(
        _NAME,
        threads,
        layer=layer,
        features=0,
        pair_label=0,
        pair_instance=0,
        pair=pairs,
        batch=batch,
        loss=loss,
        offsets=logit_offsets.ABSENT,
        narrow_features=int(narrow),  # an address that nothing follows
        **{**NO_STEP, "optimizer": optimizer},
    )


def squared_hinge(logits: Tensor, positive: Tensor, factor: Tensor) -> Tensor:
    """Return max(0, 1 - t * logit)^2 of each logit, t = +1 or -1, times ``factor`` on positives.

    ``positive`` and ``factor`` [label, batch] or broadcastable, as in all `LOSSES`.
    """
    values = (1.0 - _target(positive, logits) * logits).clamp_min(0.0).square()
    return torch.where(positive, factor * values, values)


def binary_cross_entropy(logits: Tensor, positive: Tensor, factor: Tensor) -> Tensor:
    """Return log(1 + exp(-t * logit)) of each logit, t = +1 or -1, times ``factor`` on positives."""
    values = functional.softplus(-_target(positive, logits) * logits)
    return torch.where(positive, factor * values, values)


def softmax(logits: Tensor, positive: Tensor, factor: Tensor) -> Tensor:
    """Return factor * (log sum_l exp(logit_l) - logit) of each positive, 0 elsewhere; the sum over dim 0."""
    values = logits.logsumexp(0) - logits
    return torch.where(positive, factor * values, 0.0)


def decoupled_softmax(logits: Tensor, positive: Tensor, factor: Tensor) -> Tensor:
    """Return factor * (log(exp(logit) + N) - logit) of each positive, 0 elsewhere.

    N is the sum of exp over the instance's negatives: positives do not compete with each other
    (Gupta et al. 2024, "Dual-encoders for extreme multi-label classification").
    """
    negatives = logits.masked_fill(positive, -math.inf).logsumexp(0)
    values = functional.softplus(negatives - logits)
    return torch.where(positive, factor * values, 0.0)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "squared_hinge": squared_hinge,
    "bce": binary_cross_entropy,
    "softmax": softmax,
    "decoupled_softmax": decoupled_softmax,
}
NORMALISED = ("softmax", "decoupled_softmax")
"""Those that need the sum over all labels of an instance."""


def _target(positive: Tensor, like: Tensor) -> Tensor:
    return torch.where(positive, 1.0, -1.0).to(like.dtype)


def pairs_by_label(
    offsets: Tensor, labels: Tensor, batch: int, label: int, op: str = _NAME
) -> tuple[Tensor, Tensor]:
    """Return the positives as (label, instance), int32 [pair] each: each once, by rising label.

    Raises:
        NativeError: A dtype, shape, offset or label does not fit; in the name of the op.
    """
    checks.tensor(op, "positive_offsets", offsets, (batch + 1,), "[batch + 1]", torch.int64)
    checks.tensor(op, "positive_labels", labels, (labels.numel(),), "[pair]", torch.int32, torch.int64)
    counts = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != labels.numel() or bool((counts < 0).any()):
        raise NativeError(
            f"{op}: positive_offsets must rise from 0 to {labels.numel()}, the number of positive_labels, "
            f"got {int(offsets[0])} to {int(offsets[-1])}"
        )
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= label):
        raise NativeError(
            f"{op}: positive_labels must lie in [0, label) = [0, {label}), "
            f"got values from {int(labels.min())} to {int(labels.max())}"
        )
    instances = torch.arange(batch, device=labels.device).repeat_interleave(counts)
    keys = torch.unique(labels.to(torch.int64) * batch + instances)
    return (keys // batch).to(torch.int32), (keys % batch).to(torch.int32)


@torch.library.impl("xmlc::fused_step", ("cpu", "cuda"))
def _fused_step(
    features: Tensor,
    pair_label: Tensor,
    pair_instance: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    weight_first: Tensor | None,
    weight_second: Tensor | None,
    bias_first: Tensor | None,
    bias_second: Tensor | None,
    positive_weight: Tensor | None,
    group_size: int,
    loss: str,
    scale: float,
    share_positives: bool,
    gradient_cutoff: float,
    optimizer: str,
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    seed: int,
    offset_label: Tensor | None = None,
    offset_instance: Tensor | None = None,
    offset_value: Tensor | None = None,
    offset_gradient: Tensor | None = None,
    weight_scale: Tensor | None = None,
    state_scale: Tensor | None = None,
    log_sum: Tensor | None = None,
    factor: Tensor | None = None,
    share: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input, batch = checks.features(_NAME, features)
    layer = checks.layer(_NAME, weight, indices, bias, group_size, input, weight_scale)
    label, fan_in = weight.shape
    if loss not in LOSSES:
        raise NativeError(f"{_NAME}: loss must be one of {', '.join(LOSSES)}, got {loss!r}")
    if not gradient_cutoff >= 0.0:
        raise NativeError(f"{_NAME}: gradient_cutoff must be at least 0, got {gradient_cutoff}")
    if step < 1:
        raise NativeError(f"{_NAME}: step must count from 1, got {step}")
    checks.counters(_NAME, seed=seed)
    state = OptimizerState(weight_first, weight_second, bias_first, bias_second, state_scale)
    _check_state(optimizer, state, label, fan_in)
    check_pairs(_NAME, pair_label, pair_instance, label, batch)
    if positive_weight is not None:
        checks.tensor(_NAME, "positive_weight", positive_weight, (label,), "[label]", torch.float32)
    offsets = LogitOffsets.given(offset_label, offset_instance, offset_value, offset_gradient)
    native_offsets = logit_offsets.checked(_NAME, offsets, label, batch)
    sums = _checked_sums(loss, batch, log_sum=log_sum, factor=factor, share=share)
    features, addresses = checks.narrow("features", features, weight.dtype, group_size)
    feature_gradient = torch.empty_like(features, dtype=torch.float32)
    loss_sum = torch.empty((), dtype=torch.float64, device=features.device)
    native.run(
        "fused_step",
        weight.device,
        weight.numel() * batch,
        layer=layer,
        **addresses,
        feature_gradient=feature_gradient.data_ptr(),
        pair_label=pair_label.data_ptr(),
        pair_instance=pair_instance.data_ptr(),
        pair=pair_label.numel(),
        positive_weight=_address(positive_weight),
        batch=batch,
        loss=loss,
        scale=scale,
        share_positives=share_positives,
        gradient_cutoff=gradient_cutoff,
        optimizer=optimizer,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        momentum=momentum,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        step=step,
        weight_first=_address(weight_first),
        weight_second=_address(weight_second),
        state_dtype=checks.name_of(state.dtype),
        state_scale=_address(state_scale),
        bias_first=_address(bias_first),
        bias_second=_address(bias_second),
        seed=seed,
        loss_sum=loss_sum.data_ptr(),
        offsets=native_offsets,
        **{name: value.data_ptr() for name, value in sums.items()},
    )
    checks.written(weight, bias, offsets.gradient, *state.tensors().values())
    if weight_scale is not None:
        checks.written(weight_scale)
    return loss_sum, feature_gradient


@torch.library.register_fake("xmlc::fused_step")
def _fused_step_fake(features: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return features.new_empty((), dtype=torch.float64), torch.empty_like(features, dtype=torch.float32)


def check_pairs(op: str, pair_label: Tensor, pair_instance: Tensor, label: int, batch: int) -> None:
    """Require pairs as `pairs_by_label` makes them.

    Raises:
        NativeError: A dtype, shape, range or their order does not fit.
    """
    for name, pair in (("pair_label", pair_label), ("pair_instance", pair_instance)):
        checks.tensor(op, name, pair, (pair_label.numel(),), "[pair]", torch.int32)
    for name, pair, end in (("pair_label", pair_label, label), ("pair_instance", pair_instance, batch)):
        if pair.numel() and not 0 <= int(pair.min()) <= int(pair.max()) < end:
            raise NativeError(
                f"{op}: {name} must lie in [0, {end}), got values from {int(pair.min())} to {int(pair.max())}"
            )
    keys = pair_label.to(torch.int64) * batch + pair_instance
    if bool((keys.diff() <= 0).any()):
        raise NativeError(
            f"{op}: pairs must rise by label, then instance, each once, got others; "
            "make them by pairs_by_label"
        )


def _checked_sums(loss: str, batch: int, **sums: Tensor | None) -> dict[str, Tensor]:
    """Check what a softmax loss needs of all labels, and return it as the native core takes it."""
    given = {name: value for name, value in sums.items() if value is not None}
    if not given:
        return {}
    if loss not in NORMALISED or len(given) < len(sums):
        raise NativeError(
            f"{_NAME}: normaliser must have {', '.join(sums)}, for the losses {', '.join(NORMALISED)} only, "
            f"got {', '.join(given)} for loss {loss!r}; leave it out"
        )
    for name, value in given.items():
        checks.tensor(_NAME, f"normaliser.{name}", value, (batch,), "[batch]", torch.float64)
    return {name: value.float() for name, value in given.items()}


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in STATE_DTYPES:
        known = ", ".join(map(checks.name_of, STATE_DTYPES))
        raise NativeError(f"{_NAME}: state must be one of {known}, got {checks.name_of(dtype)}")


def _check_state(kind: str, state: OptimizerState, label: int, fan_in: int) -> None:
    with torch.device("meta"):
        wanted = OptimizerState.zeros(kind, label, fan_in, state.dtype)
    for name, like in vars(wanted).items():
        value = getattr(state, name)
        if (value is None) != (like is None):
            raise NativeError(
                f"{_NAME}: state must fit optimizer {kind!r}, got {name} "
                f"{'absent' if value is None else 'too many'}; make it by OptimizerState.zeros"
            )
        if value is not None:
            axes = "[label, fan_in]" if like.dim() == 2 else "[label]"
            checks.tensor(_NAME, f"state.{name}", value, like.shape, axes, like.dtype)
    largest = 0 if state.scale is None else int(state.scale.max())
    if largest > _MOST_STATE_SCALE:
        raise NativeError(
            f"{_NAME}: state.scale must be at most {_MOST_STATE_SCALE}, got {largest}; make it by "
            "OptimizerState.zeros"
        )


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()
