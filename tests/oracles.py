"""Dense float64 truth for the output layer, written from the formulas alone, and error budgets against it.

Nothing here calls the package's kernels or their references. Every function of a `Problem` takes the dtype
to compute in: float64 is the truth, float32 the *plain implementation* that the kernels are measured by.

Error budgets. With ``u = 2^-24`` and ``gamma(n) = n u / (1 - n u)``, a sum of products whose every term
passes at most n float32 roundings is off by at most ``gamma(n) * sum |terms|``, in any order, with or
without fused multiply-add (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1).
`logits_bound`, `gradient_bounds` and `update_bounds` are this for each element of each result; a single
element must be within it (`assert_within`). All elements together must, in root mean square, be off by no
more than twice the plain implementation's own error (`assert_no_worse_than_plain`).
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmlc import native
from xmlc.config import OptimizerConfig
from xmlc.ops import Normaliser, OptimizerState

UNIT = 2.0**-24
"""Unit roundoff of float32."""
TINY = 2.0**-126
"""Smallest normal float32: what results that underflow may be off by."""
ELEMENTARY = 8
"""Units of roundoff granted to exp and log1p."""
FLUSHED = 2.0**-125
"""Above exp(-87), below which exp may be 0."""
FAR, RUN = 40, 64
"""Of a sum of exp: how far a logit may exceed the reference, and labels that are added in float32."""
NORMALISED = ("softmax", "decoupled_softmax")
"""Losses of an instance's positives against the sum over its labels."""


def gamma(roundings: float | Tensor) -> float | Tensor:
    """Return the relative bound of that many float32 roundings in a row."""
    return roundings * UNIT / (1.0 - roundings * UNIT)


@dataclass(frozen=True)
class Problem:
    """An output layer and a batch."""

    features: Tensor  # float32 [input, batch]
    weight: Tensor  # float32 or bfloat16 [label, fan_in]
    indices: Tensor  # uint16 or int32 [group, fan_in]
    bias: Tensor  # float32 [label]
    offsets: Tensor  # int64 [batch + 1]
    labels: Tensor  # int64 [pair]
    group_size: int = 1

    @property
    def layer(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """The arguments of `sparse_linear`."""
        return self.features, self.weight, self.indices, self.bias, self.group_size

    @property
    def of_step(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors that `fused_step` takes by their places."""
        return self.features, self.offsets, self.labels, self.weight, self.indices, self.bias

    def copy(self) -> Problem:
        """Return a problem that shares no memory with this one."""
        return replace(
            self, **{name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
        )


def random_indices(
    generator: np.random.Generator, group: int, fan_in: int, input: int, dtype: torch.dtype
) -> Tensor:
    """Draw distinct inputs for every group; the last input is always in use."""
    if group * input <= 1 << 22:
        rows = generator.random((group, input)).argsort(axis=1)[:, :fan_in]
    else:
        rows = np.stack([generator.choice(input, fan_in, replace=False) for _ in range(group)])
    if input - 1 not in rows[0]:
        rows[0, -1] = input - 1
    return torch.from_numpy(rows.astype(np.uint16 if dtype == torch.uint16 else np.int32))


def pairs(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the positive labels of every instance as offsets int64 [batch + 1] and labels int64 [pair]."""
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    return offsets, torch.tensor([label for row in rows for label in row], dtype=torch.int64)


def make_problem(
    label: int = 65,
    fan_in: int = 16,
    input: int = 100,
    batch: int = 33,
    *,
    group_size: int = 1,
    weight_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> Problem:
    """Draw a problem; every third instance has no positives, the others up to four, in no order."""
    generator = np.random.default_rng([seed, label, fan_in, input, batch])
    group = -(-label // group_size)
    rows = [
        [] if b % 3 == 1 else list(generator.choice(label, min(label, 1 + b % 4), replace=False))
        for b in range(batch)
    ]
    offsets, labels = pairs(rows)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(shape).astype(np.float32))

    return Problem(
        features=normal(input, batch),
        weight=(normal(label, fan_in) / fan_in**0.5).to(weight_dtype),
        indices=random_indices(generator, group, fan_in, input, index_dtype),
        bias=normal(label) - 0.5,
        offsets=offsets,
        labels=labels,
        group_size=group_size,
    )


BATCHES = (1, 7, 16, 17, 33, 64, 100, 257)
FAN_INS = (1, 3, 15, 16, 17, 31, 32, 64, 130)
LABELS = (1, 2, 15, 33, 63, 65, 1009)
GROUP_SIZES = (1, 16, 32, 64)
FLOAT32, BFLOAT16, INT32, UINT16 = torch.float32, torch.bfloat16, torch.int32, torch.uint16


@dataclass(frozen=True)
class Shape:
    """Sizes and dtypes of a problem."""

    label: int
    fan_in: int
    input: int
    batch: int
    group_size: int
    weight_dtype: torch.dtype
    index_dtype: torch.dtype

    def __str__(self) -> str:
        weight, index = (str(dtype).removeprefix("torch.") for dtype in (self.weight_dtype, self.index_dtype))
        return (
            f"label{self.label}-fan_in{self.fan_in}-input{self.input}-batch{self.batch}"
            f"-group{self.group_size}-{weight}-{index}"
        )


def _awkward_shapes() -> list[Shape]:
    """Return shapes in which every pair of (batch, fan_in, label) meets, the rest cycling at other speeds."""
    shapes = [
        Shape(
            label=LABELS[i % 7],
            fan_in=FAN_INS[i % 9],
            input=FAN_INS[i % 9] + (0, 1, 50, 1000)[i // 5 % 4],
            batch=BATCHES[i % 8],
            group_size=GROUP_SIZES[i // 8 % 4],
            weight_dtype=(FLOAT32, BFLOAT16)[i // 2 % 2],
            index_dtype=(INT32, UINT16)[i // 3 % 2],
        )
        for i in range(72)
    ]
    return [
        *shapes,
        Shape(63, 31, 65_536, 17, 1, FLOAT32, UINT16),
        Shape(65, 16, 65_536, 7, 16, BFLOAT16, UINT16),
        Shape(33, 32, 70_000, 16, 1, BFLOAT16, INT32),
        Shape(63, 17, 70_000, 1, 32, FLOAT32, INT32),
        # Groups in tiles of 64, 32 (few batches are that wide with many inputs) and sixteen labels at a time.
        Shape(1009, 33, 100, 257, 16, FLOAT32, UINT16),
        Shape(65, 33, 40_000, 50, 16, FLOAT32, UINT16),
        Shape(63, 64, 40_000, 64, 32, BFLOAT16, INT32),
        Shape(20_001, 32, 300, 33, 1, FLOAT32, UINT16),  # many blocks of labels
        Shape(65, 33, 9_001, 64, 1, FLOAT32, UINT16),  # two tiles of 32 whose features exceed one MiB
        # Inputs that go by strips: more than 16,384, and at least four tiles of 16.
        Shape(65, 33, 17_001, 64, 1, FLOAT32, UINT16),
        Shape(33, 130, 16_385, 100, 1, BFLOAT16, INT32),
        Shape(1009, 15, 16_400, 51, 1, FLOAT32, INT32),
        Shape(63, 32, 70_000, 65, 1, FLOAT32, INT32),
        Shape(1, 1, 16_385, 49, 1, BFLOAT16, UINT16),
    ]


SHAPES = _awkward_shapes()
"""Sizes around the vector widths, the tiles and the group sizes."""


@cache
def shape_problem(shape: Shape) -> Problem:
    """Return the problem of a shape; shared, so work on a copy where it is changed."""
    return make_problem(
        shape.label,
        shape.fan_in,
        shape.input,
        shape.batch,
        group_size=shape.group_size,
        weight_dtype=shape.weight_dtype,
        index_dtype=shape.index_dtype,
    )


def dense(weight: Tensor, indices: Tensor, group_size: int, input: int) -> Tensor:
    """Return W [label, input]: W[l, i] is the sum of the weights of label l's connections to input i."""
    label = weight.shape[0]
    columns = torch.from_numpy(indices.numpy().astype(np.int64))[torch.arange(label) // group_size]
    rows = torch.arange(label)[:, None].expand_as(columns)
    return weight.new_zeros(label, input).index_put((rows, columns), weight, accumulate=True)


def logits(features: Tensor, weight: Tensor, indices: Tensor, bias: Tensor, group_size: int) -> Tensor:
    """Return the logits [label, batch] in the dtype of the arguments."""
    return dense(weight, indices, group_size, features.shape[0]) @ features + bias[:, None]


def targets(problem: Problem, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return [label, batch]: +1 for a positive, however often it is listed, else -1."""
    target = torch.full((problem.weight.shape[0], problem.features.shape[1]), -1.0, dtype=dtype)
    for b, (low, high) in enumerate(zip(problem.offsets[:-1], problem.offsets[1:], strict=True)):
        target[problem.labels[low:high], b] = 1.0
    return target


def log_sum(loss: str, logit: Tensor, target: Tensor) -> Tensor:
    """Return log sum exp of each instance's logits [batch]: over all labels, or over its negatives."""
    if loss == "decoupled_softmax":
        logit = torch.where(target > 0, -torch.inf, logit)
    return logit.logsumexp(0)


def losses(loss: str, logit: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each logit [label, batch]; of a softmax loss, 0 for negatives."""
    zero = torch.zeros_like(logit)
    if loss == "squared_hinge":
        return torch.clamp(1.0 - target * logit, min=0.0) ** 2
    if loss == "bce":
        return torch.logaddexp(zero, -target * logit)
    value = log_sum(loss, logit, target) - logit
    if loss == "decoupled_softmax":  # log(exp(z) + N) - z = log(1 + exp(log N - z))
        value = torch.logaddexp(zero, value)
    return torch.where(target > 0, value, zero)


def factors(
    loss: str, target: Tensor, positive_weight: Tensor | None, share_positives: bool = False
) -> Tensor:
    """Return [label, batch]: the label's positive weight on positives, else 1.

    A softmax loss with shared positives divides it by the number of the instance's positives.
    """
    positive = target > 0
    factor = torch.ones_like(target)
    if positive_weight is not None:
        factor = torch.where(positive, positive_weight.to(target.dtype)[:, None], factor)
    if loss in NORMALISED and share_positives:
        factor = torch.where(positive, factor / positive.sum(0), factor)
    return factor


def total_loss(
    loss: str, logit: Tensor, target: Tensor, positive_weight: Tensor | None, share_positives: bool
) -> Tensor:
    """Return sum(factor * loss) of logits [label, batch], in their dtype."""
    return (factors(loss, target, positive_weight, share_positives) * losses(loss, logit, target)).sum()


def batch_loss(
    problem: Problem,
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    loss: str,
    scale: float,
    positive_weight: Tensor | None,
    share_positives: bool = False,
) -> Tensor:
    """Return scale * sum(factor * loss) as a function of features, weight and bias, in their dtype."""
    logit = logits(features, weight, problem.indices, bias, problem.group_size)
    target = targets(problem, logit.dtype)
    return scale * total_loss(loss, logit, target, positive_weight, share_positives)


@dataclass(frozen=True)
class Gradients:
    """Loss of a batch and its gradients; or, for each of their elements, the bound of its error."""

    loss: Tensor  # []
    features: Tensor  # [input, batch]
    weight: Tensor  # [label, fan_in]
    bias: Tensor  # [label]


def gradients(problem: Problem, *, dtype: torch.dtype, **of_loss: Any) -> Gradients:
    """Return loss and gradients by dense algebra and autograd in this dtype; `batch_loss` takes the rest."""
    leaves = [
        value.detach().to(dtype, copy=True).requires_grad_()
        for value in (problem.features, problem.weight, problem.bias)
    ]
    value = batch_loss(problem, *leaves, **of_loss)
    return Gradients(value.detach(), *torch.autograd.grad(value, leaves))


def gradients_of_part(
    problem: Problem, normaliser: Normaliser, *, loss: str, scale: float, positive_weight: Tensor | None
) -> Gradients:
    """Return `gradients` in float64 of some of all labels under a softmax loss, by the sums of all.

    A logit's slope is factor * exp(z - S) less a positive's pull; decoupled, positives have the pull alone.
    """
    leaves = [
        value.detach().to(torch.float64, copy=True).requires_grad_()
        for value in (problem.features, problem.weight, problem.bias)
    ]
    logit = logits(leaves[0], leaves[1], problem.indices, leaves[2], problem.group_size)
    target = targets(problem)
    positive = target > 0
    push = normaliser.factor * (logit - normaliser.log_sum).exp()
    pull = normaliser.share * factors(loss, target, positive_weight)
    if loss == "decoupled_softmax":
        push = push.masked_fill(positive, 0.0)
        pull = pull * (normaliser.log_sum - logit).sigmoid()
    slope = scale * torch.where(positive, push - pull, push)
    return Gradients(scale * normaliser.loss, *torch.autograd.grad(logit, leaves, slope.detach()))


def logits_bound(problem: Problem) -> Tensor:
    """Return how far a float32 evaluation of the logits may be off, [label, batch]."""
    features, weight, bias = (
        value.double().abs() for value in (problem.features, problem.weight, problem.bias)
    )
    magnitude = logits(features, weight, problem.indices, bias, problem.group_size)
    return gamma(weight.shape[1] + 2) * magnitude + TINY


def contraction_bounds(problem: Problem, gradient: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds of feature, weight and bias gradients, from a logit gradient and its own error."""
    features, weight, bias = (
        value.double().abs().requires_grad_() for value in (problem.features, problem.weight, problem.bias)
    )
    logit = logits(features, weight, problem.indices, bias, problem.group_size)
    leaves = (features, weight, bias)
    carried = torch.autograd.grad(logit, leaves, error, retain_graph=True)
    magnitude = torch.autograd.grad(logit, leaves, gradient.abs() + error)
    columns = torch.from_numpy(problem.indices.numpy().astype(np.int64))
    columns = columns[torch.arange(weight.shape[0]) // problem.group_size]
    uses = torch.bincount(columns.flatten(), minlength=features.shape[0]).double()[:, None]
    batch = features.shape[1]
    roundings = (uses + 2, batch + 2, batch + 2)
    feature, connection, bias_bound = (
        of_error + gamma(count) * of_sum + TINY
        for of_error, of_sum, count in zip(carried, magnitude, roundings, strict=True)
    )
    return feature, connection, bias_bound


def gradient_bounds(
    problem: Problem,
    *,
    loss: str,
    scale: float,
    positive_weight: Tensor | None,
    share_positives: bool = False,
) -> Gradients:
    """Return how far a float32 evaluation of `gradients` may be off.

    The error of a logit passes through the loss (slope of the gradient: 2 for squared hinge, 1/4 for bce);
    scale, factor and the loss's own arithmetic add their roundings. The loss may be summed in float32
    over one label's or one instance's terms, beyond that in float64.
    """
    features, weight, bias = (value.double() for value in (problem.features, problem.weight, problem.bias))
    logit = logits(features, weight, problem.indices, bias, problem.group_size)
    target = targets(problem)
    factor = factors(loss, target, positive_weight, share_positives)
    off = logits_bound(problem)
    value = losses(loss, logit, target)
    if loss == "squared_hinge":
        slack = torch.clamp(1.0 - target * logit, min=0.0)
        off_margin = off + UNIT * (1.0 + logit.abs())
        off_slack = torch.where(1.0 - target * logit + off_margin > 0, off_margin, 0.0)
        off_value = (2.0 * slack + off_slack) * off_slack + gamma(4) * value
        gradient = factor * 2.0 * slack
        off_gradient = factor * 2.0 * off_slack + gamma(4) * gradient
    elif loss == "bce":
        slope = torch.sigmoid(-target * logit)
        off_value = softplus_bound(slope, off) + gamma(ELEMENTARY) * value
        gradient = factor * slope
        off_gradient = factor * sigmoid_bound(slope, off) + gamma(ELEMENTARY) * gradient
    else:
        off_value, gradient, off_gradient = _normalised_bounds(loss, logit, off, target, factor)
    terms = value + off_value > 0
    roundings = max(int(terms.sum(axis).max()) for axis in (0, 1))
    loss_bound = scale * ((factor * off_value).sum() + gamma(roundings) * (factor * value).sum()) + TINY
    return Gradients(loss_bound, *contraction_bounds(problem, scale * gradient, scale * off_gradient + TINY))


def softplus_bound(sigmoid: Tensor, off: Tensor) -> Tensor:
    """Return how far log(1 + exp(u)) may move with u, off by ``off``; its slope is sigmoid(u)."""
    return torch.minimum(off, sigmoid * off.exp() * off)


def sigmoid_bound(sigmoid: Tensor, off: Tensor) -> Tensor:
    """Return how far sigmoid(u) may move with u, off by ``off``."""
    return torch.minimum(off / 4, sigmoid * off.exp() * off)


def _normalised_bounds(
    loss: str, logit: Tensor, off: Tensor, target: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bound of a softmax loss [label, batch], its gradient and the bound of that.

    The gradient is A exp(z - S), S the `log_sum`, minus the pull w (or w sigmoid(S - z)) of a positive,
    where A is the sum of the instance's pulls. S is off with its logits, by the roundings of exp at
    arguments up to `FAR`, of a run of float32 additions, and its own; z - (S - log A) is rounded, too.
    """
    positive = target > 0
    total = log_sum(loss, logit, target)  # -inf without negatives
    in_sum = ~positive if loss == "decoupled_softmax" else torch.ones_like(positive)
    moved = torch.where(in_sum, logit + off, -torch.inf).logsumexp(0) - total
    off_total = (moved + gamma(ELEMENTARY + FAR + RUN) + UNIT * total.abs()).nan_to_num(0.0)
    above = total - logit
    off_above = off + off_total + UNIT * above.abs().clamp_max(100.0)  # exp(-100) is nothing
    if loss == "softmax":
        pull, off_pull = torch.ones_like(logit), torch.zeros_like(logit)
        off_value = off_above + gamma(ELEMENTARY) * above.abs()
    else:
        pull = torch.sigmoid(above)
        off_pull = sigmoid_bound(pull, off_above)
        value = torch.logaddexp(torch.zeros_like(above), above)
        off_value = softplus_bound(pull, off_above) + gamma(ELEMENTARY) * value
    weight = torch.where(positive, factor, 0.0)
    pull, off_pull = weight * pull, weight * off_pull
    strength = pull.sum(0)
    offset = total - strength.log()
    off_exponent = off + off_total + off_pull.sum(0) / strength
    off_exponent = off_exponent + UNIT * (offset.abs() + (logit - offset).abs())
    pushed = in_sum & (strength > 0)
    push = torch.where(pushed, (logit - offset).exp(), 0.0)
    off_push = torch.where(pushed, push * off_exponent.expm1(), 0.0)
    rounded = gamma(ELEMENTARY) * (push + pull) + (1.0 + weight) * FLUSHED
    return torch.where(positive, off_value, 0.0), push - pull, off_push + off_pull + rounded


class DenseOptimizer:
    """The layer's optimizer on weight [label, fan_in] and bias [label] of any dtype, by torch.optim.

    Weight decay is decoupled and spares the bias. ``label_adam``, which torch has not, is written out.
    """

    def __init__(
        self, optimizer: OptimizerConfig, rate: float, weight: Tensor, bias: Tensor, state: OptimizerState
    ) -> None:
        """Start from a state that earlier steps have left."""
        self.optimizer, self.rate, self.weight, self.bias = optimizer, rate, weight, bias
        self.state = {name: value.to(weight.dtype).clone() for name, value in state.tensors().items()}

    def step(self, weight_gradient: Tensor, bias_gradient: Tensor, step: int) -> None:
        """Update weight, bias and state in place; steps count from 1."""
        if self.optimizer.kind == "label_adam":
            self._label_adam(weight_gradient, bias_gradient, step)
            return
        for name, value, gradient in (
            ("weight", self.weight, weight_gradient),
            ("bias", self.bias, bias_gradient),
        ):
            decay = self.optimizer.weight_decay if name == "weight" else 0.0
            self._torch_step(name, value, gradient, decay, step)

    def _torch_step(self, name: str, value: Tensor, gradient: Tensor, decay: float, step: int) -> None:
        value.grad = gradient
        first, second = f"{name}_first", f"{name}_second"
        if self.optimizer.kind == "adam":
            adam = torch.optim.AdamW(
                [value],
                lr=self.rate,
                betas=(self.optimizer.beta1, self.optimizer.beta2),
                eps=self.optimizer.eps,
                weight_decay=decay,
            )
            adam.state[value] = {
                "step": torch.tensor(float(step - 1)),
                "exp_avg": self.state[first],
                "exp_avg_sq": self.state[second],
            }
            adam.step()
        elif self.optimizer.kind == "momentum":
            value.mul_(1.0 - self.rate * decay)  # torch's own decay of SGD would enter the velocity
            momentum = torch.optim.SGD([value], lr=self.rate, momentum=self.optimizer.momentum)
            momentum.state[value] = {"momentum_buffer": self.state[first]}
            momentum.step()
        else:
            torch.optim.SGD([value], lr=self.rate, weight_decay=decay).step()
        value.grad = None

    def _label_adam(self, weight_gradient: Tensor, bias_gradient: Tensor, step: int) -> None:
        """v <- beta2 v + (1 - beta2) mean(g^2), over the label's weights and its bias; no first moment."""
        beta2, eps = self.optimizer.beta2, self.optimizer.eps
        second = self.state["weight_second"]
        squares = (weight_gradient.square().sum(1) + bias_gradient.square()) / (weight_gradient.shape[1] + 1)
        second.mul_(beta2).add_((1.0 - beta2) * squares)
        root = second.sqrt() / (1.0 - beta2**step) ** 0.5 + eps
        self.weight.mul_(1.0 - self.rate * self.optimizer.weight_decay)
        self.weight.sub_(self.rate * weight_gradient / root[:, None])
        self.bias.sub_(self.rate * bias_gradient / root)


@dataclass(frozen=True)
class Update:
    """Weight, bias and state after a step; or, for each of their elements, the bound of its error."""

    weight: Tensor
    bias: Tensor
    state: dict[str, Tensor]


def exact_update(
    problem: Problem,
    gradient: Gradients,
    optimizer: OptimizerConfig,
    rate: float,
    state: OptimizerState,
    step: int,
) -> Update:
    """Return the exact step in the gradients' dtype."""
    dtype = gradient.weight.dtype
    dense_optimizer = DenseOptimizer(
        optimizer, rate, problem.weight.to(dtype).clone(), problem.bias.to(dtype).clone(), state
    )
    dense_optimizer.step(gradient.weight, gradient.bias, step)
    return Update(dense_optimizer.weight, dense_optimizer.bias, dense_optimizer.state)


def update_bounds(
    problem: Problem,
    gradient: Gradients,
    bound: Gradients,
    optimizer: OptimizerConfig,
    rate: float,
    state: OptimizerState,
    step: int,
) -> Update:
    """Return how far a float32 step may be off, by interval arithmetic on the update rule.

    A moment's interval comes from the gradient's; the update is monotone in each moment, so its extremes
    are at the interval's corners.
    """
    states: dict[str, Tensor] = {}
    before = {name: value.double() for name, value in state.tensors().items()}

    def moment(old: Tensor, new: Tensor, off_new: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        value = beta * old + (1.0 - beta) * new
        return value, (1.0 - beta) * off_new + gamma(6) * (beta * old.abs() + (1.0 - beta) * new.abs()) + TINY

    def adaptive(
        first: Tensor, off_first: Tensor, second: Tensor, off_second: Tensor
    ) -> tuple[Tensor, Tensor]:
        correction = (1.0 - optimizer.beta2**step) ** 0.5

        def ratio(numerator: Tensor, square: Tensor) -> Tensor:
            return numerator / (square.clamp_min(0.0).sqrt() / correction + optimizer.eps)

        centre = ratio(first, second)
        corners = [
            ratio(first + sign * off_first, second + other * off_second)
            for sign in (-1, 1)
            for other in (-1, 1)
        ]
        return centre, torch.stack([(corner - centre).abs() for corner in corners]).amax(0)

    def one(name: str, value: Tensor, g: Tensor, off: Tensor, decay: float) -> Tensor:
        if optimizer.kind == "sgd":
            move, off_move = g, off
        elif optimizer.kind == "momentum":
            old = before[f"{name}_first"]
            move = optimizer.momentum * old + g
            off_move = off + gamma(3) * (optimizer.momentum * old.abs() + g.abs()) + TINY
            states[f"{name}_first"] = off_move
        elif optimizer.kind == "adam":
            first, off_first = moment(before[f"{name}_first"], g, off, optimizer.beta1)
            square, off_square = g**2, (2.0 * g.abs() + off) * off
            second, off_second = moment(before[f"{name}_second"], square, off_square, optimizer.beta2)
            states[f"{name}_first"], states[f"{name}_second"] = off_first, off_second
            move, off_move = adaptive(first, off_first, second, off_second)
            correction = 1.0 - optimizer.beta1**step
            move, off_move = move / correction, off_move / correction
        else:
            fan_in = gradient.weight.shape[1]
            squares = gradient.weight.square().sum(1) + gradient.bias.square()
            off_squares = ((2.0 * gradient.weight.abs() + bound.weight) * bound.weight).sum(1)
            off_squares += (2.0 * gradient.bias.abs() + bound.bias) * bound.bias
            mean = squares / (fan_in + 1)
            off_mean = off_squares / (fan_in + 1) + gamma(fan_in + 4) * mean
            second, off_second = moment(before["weight_second"], mean, off_mean, optimizer.beta2)
            states["weight_second"] = off_second
            if name == "weight":
                second, off_second = second[:, None], off_second[:, None]
            move, off_move = adaptive(g, off, second, off_second)
        kept = (1.0 - rate * decay) * value.double()
        return rate * off_move + gamma(8) * (kept.abs() + rate * (move.abs() + off_move)) + TINY

    weight = one("weight", problem.weight, gradient.weight, bound.weight, optimizer.weight_decay)
    bias = one("bias", problem.bias, gradient.bias, bound.bias, 0.0)
    return Update(weight, bias, states)


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and labels [batch, k] of logits [label, batch] by a stable sort of each instance.

    What is NaN or -inf is never taken; the rest of k is (-inf, -1).
    """
    column = scores.T.numpy()  # [batch, label]
    key = np.where(column > -np.inf, -column, np.inf)
    order = np.argsort(key, axis=1, kind="stable")[:, :k]
    taken = np.take_along_axis(key, order, axis=1) < np.inf
    values = np.where(taken, np.take_along_axis(column, order, axis=1), -np.inf)
    return torch.from_numpy(values), torch.from_numpy(np.where(taken, order, -1))


def bfloat16_neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest bfloat16 not above and the smallest not below each float64, as float64.

    Infinite where the value is beyond the largest bfloat16.
    """
    nearest = value.to(torch.bfloat16)  # rounds to nearest; its error's sign says which neighbour it is
    other_low = _next_bfloat16(nearest, -1)
    other_high = _next_bfloat16(nearest, +1)
    low = torch.where(nearest.double() > value, other_low.double(), nearest.double())
    high = torch.where(nearest.double() < value, other_high.double(), nearest.double())
    return low, high


def _next_bfloat16(value: Tensor, direction: int) -> Tensor:
    """Return the next bfloat16 up or down, by the order of the sign-magnitude bit patterns."""
    bits = value.view(torch.int16).to(torch.int32)
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits) + direction
    return torch.where(ordered < 0, (-ordered) | -0x8000, ordered).to(torch.int16).view(torch.bfloat16)


def values_of_codes(dtype: torch.dtype) -> Tensor:
    """Return the value of each code 0 to 255 of a float8 as float64, from the format's definition alone."""
    mantissa_bits = 3 if dtype == torch.float8_e4m3fn else 2
    bias = 7 if dtype == torch.float8_e4m3fn else 15
    values = []
    for code in range(256):
        magnitude = code & 0x7F
        exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
        if dtype == torch.float8_e4m3fn and magnitude == 0x7F:
            value = math.nan
        elif dtype == torch.float8_e5m2 and exponent == 31:
            value = math.inf if mantissa == 0 else math.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1.0 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        values.append(-value if code & 0x80 else value)
    return torch.tensor(values, dtype=torch.float64)


def finite_values(dtype: torch.dtype) -> Tensor:
    """Return the distinct finite values of a float8, rising."""
    values = values_of_codes(dtype)
    return values[values.isfinite()].unique()


def neighbours(value: Tensor, dtype: torch.dtype, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the largest float8 not above and the smallest not below each value, saturated, as float64."""
    every = finite_values(dtype)
    unit = (value.double() / scale).clamp(float(every[0]), float(every[-1]))
    high = every[torch.searchsorted(every, unit)]
    low = every[torch.searchsorted(every, unit, right=True) - 1]
    return low * scale, high * scale


def assert_within(found: Tensor, exact: Tensor, bound: Tensor, what: str = "") -> None:
    """Require every element to be within its bound of the exact value."""
    error = (found.double() - exact).abs()
    worst = (error / bound).max() if error.numel() else torch.tensor(0.0)
    assert bool((error <= bound).all()), f"{what}: {float(worst):.3g} times the bound"


def assert_no_worse_than_plain(
    found: Tensor, exact: Tensor, plain: Tensor, slack: Tensor, what: str = ""
) -> None:
    """Require a root mean square error of at most twice the plain implementation's plus that of ``slack``."""

    def norm(value: Tensor) -> float:
        return float(value.double().square().mean().sqrt())

    error, own = norm(found.double() - exact), norm(plain.double() - exact)
    assert error <= 2.0 * own + norm(slack), f"{what}: error {error:.3g}, plain float32 {own:.3g}"


def assert_within_rounded(found: Tensor, exact: Tensor, bound: Tensor, what: str = "") -> None:
    """Require a bfloat16 to be a neighbour of some value within the bound of the exact one."""
    low, _ = bfloat16_neighbours(exact - bound)
    _, high = bfloat16_neighbours(exact + bound)
    value = found.double()
    assert bool(((low <= value) & (value <= high)).all()), f"{what}: not a neighbour in bfloat16"


def bits(value: Tensor) -> bytes:
    """Return a tensor's memory, so that equality means the same bits (and NaN equals NaN)."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


EMULATED = ("emulated-forward", "emulated-reverse", "emulated-random")
"""The CUDA kernels on the emulator, by the order in which it runs the threads of a block."""


@cache
def emulated_module() -> Any:
    """Return the module of the emulated CUDA kernels that `scripts/emulate` has built."""
    path = os.environ["XMLC_EMULATED"]
    spec = importlib.util.spec_from_file_location("xmlc._emulated", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the native ops with this instruction set, or with the emulated CUDA kernels."""
    if name not in EMULATED:
        with isa(name):
            yield
        return
    native.emulated = emulated_module()
    native.emulated.set_order(name.removeprefix("emulated-"))
    try:
        yield
    finally:
        native.emulated = None


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run the native ops with this instruction set."""
    former = native.cpu.isa()
    native.cpu.set_isa(name)
    try:
        yield
    finally:
        native.cpu.set_isa(former)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this number of threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)
