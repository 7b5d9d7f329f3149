"""Output layers: features [input, batch] to labels. Each owns its weights and its optimizer's state."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from xmlc.config import LossConfig, ModelConfig, OptimizerConfig, RedistributionConfig, StateDtype
from xmlc.data.rows import CsrRows, Float32, Int64
from xmlc.nn.dense import BLOCK_BYTES, Block, BlockedLinear, BlockOptimizer
from xmlc.nn.direct import DirectConnections, DirectLogits
from xmlc.nn.normaliser import normaliser_of_all
from xmlc.nn.scratch import Zeros, in_memory
from xmlc.ops import (
    LOSSES,
    LogitOffsets,
    OptimizerState,
    fused_step,
    log_normaliser,
    pairs_by_label,
    quantise,
    redistribute,
    sparse_linear,
    top_labels,
)
from xmlc.ops.checks import groups
from xmlc.ops.float8 import SCALE_LABELS, new_scale, scales
from xmlc.ops.fused_step import NORMALISED
from xmlc.parallel import ALONE, Workers
from xmlc.sparsity import draw_connections, index_dtype

LABELS_DRAWN_AT_ONCE = 1 << 16
"""Labels whose initial weights are drawn in float32 before they are kept in another type; whole scales."""

LOGITS_SORTED_AT_ONCE = 1 << 18
"""Of the dense output: sorting takes some 30 bytes for each."""
LOGITS_LOOKED_AT_ONCE = 1 << 18
"""Where active gradients are counted."""
_LABELS_OF_A_BLOCK = SCALE_LABELS  # and whole groups of any size
_SKIPPED_LOGIT = -1e9
_SEEDS_APART = 0x9E3779B97F4A7C15
"""Between the seeds of a layer's parts, by their first labels."""


class OutputLayer(Protocol):
    """What training and evaluation need of an output layer."""

    label: int

    def step(
        self,
        features: Tensor,
        positives: CsrRows,
        learning_rate: float,
        step: int,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update the weights from one batch; return loss [] and feature gradient [input, batch].

        ``direct`` [batch, feature] is what direct connections see, where the layer has some; ``skipped``
        [batch, label] are no positives, and are not to count as negatives either.
        """

    def top_labels(
        self,
        features: Tensor,
        k: int,
        direct: CsrRows | None = None,
        offsets: LogitOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k], best first; ties go to the lowest label.

        ``offsets`` are added to the logits, where the layer can do that.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, sharing memory."""

    def move(self, device: torch.device) -> None:
        """Move weights and state to a device."""


def loss_scale(loss: LossConfig, batch: int, label: int) -> float:
    """Return the factor on the summed loss of a batch: mean over the batch, sum or mean over labels.

    The softmax losses sum over positives, of which the loss itself takes the mean.
    """
    return 1.0 / (batch * label) if loss.reduction == "mean" and not normalised(loss) else 1.0 / batch


def normalised(loss: LossConfig) -> bool:
    """Return whether the loss needs the sum over all labels of an instance."""
    return loss.kind in NORMALISED


def positive_tensors(positives: CsrRows) -> tuple[Tensor, Tensor]:
    """Return offsets int64 [batch + 1] and labels int32 [pair] as tensors."""
    return torch.from_numpy(positives.offsets), torch.from_numpy(positives.indices)


_NO_UPDATE = OptimizerConfig(kind="sgd", learning_rate=0.0)
_BEYOND_ANY_GRADIENT = 1e30  # the cutoff below which a label skips its backward work


class SparseOutput:
    """Uniform fan-in: every label keeps exactly ``fan_in`` inputs; trained by the fused step."""

    workers: Workers = ALONE
    """Who have all labels together: of a part, all take steps and losses at the same time."""

    def __init__(
        self,
        label: int,
        model: ModelConfig,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        bias: Tensor,
        positive_weight: Tensor | None,
        seed: int,
        generator: torch.Generator,
        direct: DirectConnections | None = None,
        zeros: Zeros = in_memory,
        own: Int64 | None = None,
        state_dtype: StateDtype = "float32",
    ) -> None:
        """Make weights, connections and state, where ``zeros`` puts them, and draw the first two.

        With ``own``, rising labels of whole groups and scales, the layer is this part of one of all labels:
        it starts with their rows of that layer, and its losses are their share of that layer's.
        """
        self.all_labels, drawn_with = label, seed
        if own is not None:
            bias = bias[own]
            positive_weight = None if positive_weight is None else positive_weight[own]
            # The ops count a part's labels from 0; two parts must not draw the same numbers.
            seed = (seed + int(own[0]) * _SEEDS_APART) % (1 << 63)
            label = len(own)
        self.label = label
        self.zeros = zeros  # kept: its end would be that of the thread that looks after its files
        self.direct = direct
        self.input = model.width
        self.group_size = model.group_size
        self.feature_dtype: torch.dtype = getattr(torch, model.feature_dtype)
        self.loss = loss
        self.optimizer = optimizer
        self.seed = seed
        dtype: torch.dtype = getattr(torch, model.weight_dtype)
        self.weight = zeros((label, model.fan_in), dtype)
        self.weight_scale = new_scale(label, dtype)
        self.indices = zeros((groups(label, model.group_size), model.fan_in), index_dtype(model.width))
        own_groups = None if own is None else own[own % model.group_size == 0] // model.group_size
        draw_connections(
            self.indices, model.width, drawn_with, own_groups, groups(self.all_labels, model.group_size)
        )
        _draw_weight(self.weight, self.weight_scale, model, generator, self.all_labels, own)
        self.bias = bias
        self.positive_weight = positive_weight
        self.state = _state_of(optimizer.kind, label, model.fan_in, state_dtype, zeros)

    def step(
        self,
        features: Tensor,
        positives: CsrRows,
        learning_rate: float,
        step: int,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.step`."""
        logits = self._direct_logits(direct)
        logit_offsets, places = _all_offsets(logits, skipped)
        if logit_offsets is not None:
            logit_offsets = logit_offsets.to(features.device)
        result = self._fused_step(
            features,
            positives,
            self.weight,
            self.bias,
            optimizer=self.optimizer,
            learning_rate=learning_rate,
            state=self.state,
            step=step,
            gradient_cutoff=self.loss.gradient_cutoff,
            added=logit_offsets,
            weight_scale=self.weight_scale,
        )
        if self.direct is not None and logits is not None and logit_offsets is not None:
            logits.offsets.gradient.copy_(logit_offsets.gradient.cpu()[places])
            self.direct.update(logits, learning_rate, step)
        return result

    def evaluate(self, features: Tensor, positives: CsrRows, gradient: bool) -> tuple[Tensor, Tensor]:
        """Return loss [] and feature gradient [input, batch] as `step` would, and update nothing.

        Without ``gradient`` the second is zeros, and the backward half of the work is spared. For layers
        without direct connections.
        """
        assert self.direct is None, "their offsets are part of `step` alone"
        return self._fused_step(
            features,
            positives,
            # A rate of 0 changes no weight; through .data, so that autograd counts no change either.
            self.weight.data,
            self.bias.data,
            optimizer=_NO_UPDATE,
            learning_rate=0.0,
            state=OptimizerState(),
            step=1,
            gradient_cutoff=self.loss.gradient_cutoff if gradient else _BEYOND_ANY_GRADIENT,
            weight_scale=None if self.weight_scale is None else self.weight_scale.data,
        )

    def _fused_step(
        self,
        features: Tensor,
        positives: CsrRows,
        weight: Tensor,
        bias: Tensor,
        *,
        weight_scale: Tensor | None,
        added: LogitOffsets | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        offsets, labels = positive_tensors(positives)
        batch = (features.to(self.feature_dtype), offsets, labels, weight, self.indices, bias)
        layer: dict[str, Any] = {
            "loss": self.loss.kind,
            "group_size": self.group_size,
            "offsets": added,
            "weight_scale": weight_scale,
        }
        if normalised(self.loss) and self.workers.size > 1:
            own = log_normaliser(*batch, **layer)
            options["normaliser"] = normaliser_of_all(own, self.loss, self.positive_weight, self.workers)
        return fused_step(
            *batch,
            seed=self.seed,
            scale=loss_scale(self.loss, features.shape[1], self.all_labels),
            share_positives=self.loss.reduction == "mean",
            positive_weight=self.positive_weight,
            **{**layer, **options},
        )

    def top_labels(
        self,
        features: Tensor,
        k: int,
        direct: CsrRows | None = None,
        offsets: LogitOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.top_labels`."""
        logits = self._direct_logits(direct)
        if logits is not None:
            offsets = logits.offsets.and_also(offsets)
        return top_labels(
            features.to(self.feature_dtype),
            self.weight,
            self.indices,
            self.bias,
            k,
            self.group_size,
            None if offsets is None else offsets.to(features.device),
            self.weight_scale,
        )

    def _direct_logits(self, features: CsrRows | None) -> DirectLogits | None:
        if self.direct is None:
            return None
        assert features is not None, "the model passes what its direct connections see"
        return self.direct.logits(features)

    def active_share(
        self,
        features: Tensor,
        positives: CsrRows,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> float:
        """Return the share of a batch's (label, instance) pairs whose logit gradient is beyond the cutoff.

        Arguments as of `step`; for the losses of each logit on its own, not the normalised ones.
        """
        assert not normalised(self.loss), "their gradients need all labels at once"
        offsets = _all_offsets(self._direct_logits(direct), skipped)[0]
        if offsets is not None:
            offsets = offsets.to(features.device)
        label, instance = (
            each.to(features.device)
            for each in pairs_by_label(*positive_tensors(positives), positives.rows, self.label)
        )
        batch = features.shape[1]
        size = max(1, LOGITS_LOOKED_AT_ONCE // (_LABELS_OF_A_BLOCK * batch)) * _LABELS_OF_A_BLOCK
        active = 0
        for first in range(0, self.label, size):
            logits = self._logits(features, slice(first, first + size))
            if offsets is not None:
                _add_offsets(logits, offsets, first)
            positive = torch.zeros_like(logits, dtype=torch.bool)
            inside = (label >= first) & (label < first + len(logits))
            positive[label[inside].long() - first, instance[inside].long()] = True
            factor = logits.new_ones(1)
            if self.positive_weight is not None:
                factor = self.positive_weight[first : first + size, None]
            logits.requires_grad_()
            with torch.enable_grad():
                LOSSES[self.loss.kind](logits, positive, factor).sum().backward()
            assert logits.grad is not None
            active += int((logits.grad.abs() > self.loss.gradient_cutoff).sum())
        return active / (self.label * batch)

    def _logits(self, features: Tensor, labels: slice) -> Tensor:
        """Return the logits [label, batch] of a run of labels, of whole groups and scales."""
        whole = slice(labels.start // self.group_size, -(-labels.stop // self.group_size))
        scale = self.weight_scale
        return sparse_linear(
            features.to(self.feature_dtype),
            self.weight[labels],
            self.indices[whole],
            self.bias[labels],
            self.group_size,
            None if scale is None else scale[scales(labels.start) : scales(labels.stop)],
        )

    def connect_direct(self, indices: NDArray[np.int32], weight: Float32) -> None:
        """Start direct connections, where there are some, by arrays [label, fan_in] that the layer keeps."""
        if self.direct is not None:
            self.direct.connect(indices, weight)

    def redistribute(self, config: RedistributionConfig, strength: float, step: int) -> int:
        """Move weak connections; ``strength`` scales the configured fraction or threshold."""
        by_fraction = config.mode == "fraction"
        return redistribute(
            self.weight,
            self.indices,
            self.input,
            fraction=config.fraction * strength if by_fraction else None,
            threshold=None if by_fraction else config.threshold * strength,
            scope=config.scope,
            new_value=config.new_value,
            new_value_bound=config.new_value_bound,
            states=self.state.by_connection(),
            group_size=self.group_size,
            step=step,
            seed=self.seed,
            weight_scale=self.weight_scale,
        )

    def tensors(self) -> dict[str, Tensor]:
        """See `OutputLayer.tensors`."""
        tensors = {"indices": self.indices, "weight": self.weight, "bias": self.bias}
        if self.weight_scale is not None:
            tensors["weight_scale"] = self.weight_scale
        tensors |= {f"state.{name}": value for name, value in self.state.tensors().items()}
        if self.direct is not None:
            tensors |= {f"direct.{name}": value for name, value in self.direct.tensors().items()}
        return tensors

    def move(self, device: torch.device) -> None:
        """See `OutputLayer.move`. Direct connections stay on the CPU."""
        self.indices, self.weight, self.bias = (
            value.to(device) for value in (self.indices, self.weight, self.bias)
        )
        if self.weight_scale is not None:
            self.weight_scale = self.weight_scale.to(device)
        self.state = OptimizerState(
            **{name: value.to(device) for name, value in self.state.tensors().items()}
        )
        if self.positive_weight is not None:
            self.positive_weight = self.positive_weight.to(device)


def _all_offsets(
    logits: DirectLogits | None, skipped: CsrRows | None
) -> tuple[LogitOffsets | None, Tensor | slice]:
    """Return what is added to the logits, and which of the entries are those of the direct connections.

    A pair that is skipped gets a logit so low that as a negative it has loss 0 and gradient 0, exactly.
    """
    if skipped is None:
        return (None if logits is None else logits.offsets), slice(None)
    label, instance = pairs_by_label(*positive_tensors(skipped), skipped.rows, skipped.columns)
    masked = LogitOffsets.of(label, instance, torch.full((label.numel(),), _SKIPPED_LOGIT))
    return (masked, slice(0)) if logits is None else logits.offsets.merged(masked)


def _add_offsets(logits: Tensor, offsets: LogitOffsets, first: int) -> None:
    """Add the offsets of the labels from ``first`` on to their logits [label, batch], in place."""
    inside = (offsets.label >= first) & (offsets.label < first + len(logits))
    places = (offsets.label[inside].long() - first, offsets.instance[inside].long())
    logits.index_put_(places, offsets.value[inside], accumulate=True)


class DenseOutput:
    """Every label sees every input: the layer to compare with, trained label block by label block."""

    def __init__(
        self,
        label: int,
        input: int,
        loss: LossConfig,
        bias: Tensor,
        positive_weight: Tensor | None,
        generator: torch.Generator,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.label = label
        self.loss = loss
        self.positive_weight = positive_weight
        bound = 1.0 / math.sqrt(input)
        self.linear = BlockedLinear(
            torch.empty(label, input).uniform_(-bound, bound, generator=generator), bias, block_bytes
        )
        self.block_optimizer: BlockOptimizer | None = None  # set by training

    def step(
        self,
        features: Tensor,
        positives: CsrRows,
        learning_rate: float,
        step: int,
        direct: CsrRows | None = None,
        skipped: CsrRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.step`; it has no direct connections and skips nothing."""
        assert self.block_optimizer is not None, "training gives the dense output its optimizer"
        batch = features.shape[1]
        positives_of = _BlockPositives(positives, batch, self.label, self.positive_weight, features.device)
        gradient_of = (
            _NormalisedLoss(self.linear, features, self.loss, positives_of)
            if normalised(self.loss)
            else _PointwiseLoss(self.loss, positives_of, loss_scale(self.loss, batch, self.label))
        )
        feature_gradient = torch.zeros_like(features)
        for block in self.linear.blocks:
            gradient = gradient_of(block, block(features))
            feature_gradient.addmm_(block.weight.T, gradient)
            block.update(gradient @ features.T, gradient.sum(1), self.block_optimizer)
        return gradient_of.loss, feature_gradient

    def top_labels(
        self,
        features: Tensor,
        k: int,
        direct: CsrRows | None = None,
        offsets: LogitOffsets | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.top_labels`; it adds nothing to logits."""
        batch = features.shape[1]
        scores = features.new_empty(batch, 0)
        labels = features.new_empty(batch, 0, dtype=torch.int64)
        for block in self.linear.blocks:
            first = block.rows.start
            for logits in block(features).split(max(1, LOGITS_SORTED_AT_ONCE // batch)):
                # Earlier labels stand first and the sort is stable: ties go to the lowest label.
                numbers = torch.arange(first, first + len(logits), device=features.device).expand(batch, -1)
                scores, order = torch.cat([scores, logits.T], 1).sort(dim=1, descending=True, stable=True)
                labels = torch.cat([labels, numbers], 1).gather(1, order[:, :k])
                scores = scores[:, :k].clone()  # a view would keep them all
                first += len(logits)
        return scores, labels

    def tensors(self) -> dict[str, Tensor]:
        """See `OutputLayer.tensors`."""
        return {"weight": self.linear.weight, "bias": self.linear.bias}

    def move(self, device: torch.device) -> None:
        """See `OutputLayer.move`."""
        self.linear.move(device)
        if self.positive_weight is not None:
            self.positive_weight = self.positive_weight.to(device)


class _BlockPositives:
    """The positives of a batch, each once, with their weights; by rising label, so that a block has a run."""

    def __init__(
        self, positives: CsrRows, batch: int, label: int, weight: Tensor | None, device: torch.device
    ) -> None:
        pairs = pairs_by_label(*positive_tensors(positives), batch, label)
        self.labels, self.instances = (pair.long().to(device) for pair in pairs)  # [pair]
        self.weight = (
            torch.ones(self.labels.numel(), device=device) if weight is None else weight[self.labels]
        )  # [pair]

    def __call__(self, rows: slice) -> tuple[slice, Tensor, Tensor]:
        """Return the pairs of a block of labels, their rows within it, and their instances."""
        bounds = torch.tensor([rows.start, rows.stop], device=self.labels.device)
        first, last = torch.searchsorted(self.labels, bounds).tolist()
        return slice(first, last), self.labels[first:last] - rows.start, self.instances[first:last]


class _PointwiseLoss:
    """Gradient of a loss of single logits, block by block."""

    def __init__(self, loss: LossConfig, positives: _BlockPositives, scale: float) -> None:
        self.function = LOSSES[loss.kind]
        self.positives = positives
        self.scale = scale
        self.loss = torch.zeros((), dtype=torch.float64, device=positives.labels.device)

    def __call__(self, block: Block, logits: Tensor) -> Tensor:
        """Return d loss / d logits [block, batch], and add the block to the loss."""
        pairs, rows, columns = self.positives(block.rows)
        positive = torch.zeros_like(logits, dtype=torch.bool)
        positive[rows, columns] = True
        factor = torch.ones_like(logits)
        factor[rows, columns] = self.positives.weight[pairs]
        logits.requires_grad_()
        loss = self.scale * self.function(logits, positive, factor).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        self.loss += loss.detach()
        return gradient


class _NormalisedLoss:
    """Gradient of a softmax loss, block by block, after a pass for the sum over all labels.

    With S = log sum exp(z) (over the negatives, if decoupled), the loss is a function of S and of the
    positives' logits; a block's gradient is dS * exp(z - S), and the direct one at the positives.
    """

    def __init__(
        self, linear: BlockedLinear, features: Tensor, loss: LossConfig, positives: _BlockPositives
    ) -> None:
        self.positives = positives
        self.decoupled = loss.kind == "decoupled_softmax"
        batch = features.shape[1]
        log_sum = features.new_full((batch,), -math.inf)
        logit = features.new_empty(positives.labels.numel())  # [pair]
        for block in linear.blocks:
            pairs, rows, columns = positives(block.rows)
            logits = block(features)
            logit[pairs] = logits[rows, columns]
            if self.decoupled:
                logits[rows, columns] = -math.inf
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(0))
        share = features.new_ones(batch)
        if loss.reduction == "mean":
            share = 1.0 / torch.bincount(positives.instances, minlength=batch).clamp_min(1)
        log_sum.requires_grad_()
        logit.requires_grad_()
        above = log_sum[positives.instances] - logit
        values = functional.softplus(above) if self.decoupled else above
        total = ((positives.weight * share[positives.instances]).double() * values).sum() / batch
        self.sum_gradient, self.logit_gradient = torch.autograd.grad(total, (log_sum, logit))
        self.log_sum = log_sum.detach()
        self.loss = total.detach()

    def __call__(self, block: Block, logits: Tensor) -> Tensor:
        """Return d loss / d logits [block, batch]."""
        pairs, rows, columns = self.positives(block.rows)
        gradient = self.sum_gradient * (logits - self.log_sum).exp()
        if self.decoupled:
            gradient[rows, columns] = 0.0
        gradient[rows, columns] += self.logit_gradient[pairs]
        return gradient


def absent_state(kind: str, label: int, fan_in: int, dtype: StateDtype) -> OptimizerState:
    """Return the optimizer's state on the meta device: its shapes and dtypes alone."""
    with torch.device("meta"):
        return OptimizerState.zeros(kind, label, fan_in, getattr(torch, dtype))


def _state_of(kind: str, label: int, fan_in: int, dtype: StateDtype, zeros: Zeros) -> OptimizerState:
    """Return the optimizer's state before the first step, where ``zeros`` puts it."""
    absent = absent_state(kind, label, fan_in, dtype).tensors()
    return OptimizerState(**{name: zeros(tuple(like.shape), like.dtype) for name, like in absent.items()})


def _draw_weight(
    weight: Tensor,
    weight_scale: Tensor | None,
    model: ModelConfig,
    generator: torch.Generator,
    label: int,
    own: Int64 | None,
) -> None:
    """Draw the initial weights into zeros; in float32, whatever they are kept in.

    The weights are those of a layer of so many labels, or of its ``own`` ones.
    """
    if model.weight_init == "zero":
        return
    fan_in = model.fan_in
    bound = 1.0 / math.sqrt(fan_in) if model.weight_init == "fan_in" else math.sqrt(3.0 / (label * fan_in))
    place = 0
    for first in range(0, label, LABELS_DRAWN_AT_ONCE):
        count = min(LABELS_DRAWN_AT_ONCE, label - first)
        drawn = torch.empty(count, fan_in).uniform_(-bound, bound, generator=generator)
        if own is not None:
            rows = own[slice(*np.searchsorted(own, (first, first + count)))] - first
            drawn = drawn[torch.from_numpy(rows)]
        block = weight[place : place + len(drawn)]
        if weight_scale is None:
            block.copy_(drawn)
        else:
            _keep_in_float8(drawn, block, weight_scale[scales(place) :])
        place += len(drawn)


def _keep_in_float8(drawn: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    """Quantise weights by 64 scales at a time, which needs no second copy of them all."""
    labels = 64 * SCALE_LABELS
    for first in range(0, len(drawn), labels):
        rows = slice(first, first + labels)
        codes, scale = quantise(drawn[rows], weight.dtype)
        weight[rows] = codes
        weight_scale[scales(first) :][: len(scale)] = scale
