"""Output layers: features [input, batch] to labels. Each owns its weights and its optimizer's state."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from xmlc.config import LossConfig, ModelConfig, OptimizerConfig, RedistributionConfig
from xmlc.data.rows import CsrRows
from xmlc.nn.dense import BlockedLinear, BlockOptimizer
from xmlc.ops import LOSSES, OptimizerState, fused_step, redistribute, top_labels
from xmlc.sparsity import random_connectivity


class OutputLayer(Protocol):
    """What training and evaluation need of an output layer."""

    label: int

    def step(
        self, features: Tensor, positives: CsrRows, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        """Update the weights from one batch; return loss [] and feature gradient [input, batch]."""

    def top_labels(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k], best first; ties go to the lowest label."""

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, sharing memory."""


def loss_scale(loss: LossConfig, batch: int, label: int) -> float:
    """Return the factor on the summed loss of a batch: mean over the batch, sum or mean over labels."""
    return 1.0 / batch if loss.reduction == "sum" else 1.0 / (batch * label)


def positive_tensors(positives: CsrRows) -> tuple[Tensor, Tensor]:
    """Return offsets int64 [batch + 1] and labels int32 [pair] as tensors."""
    return torch.from_numpy(positives.offsets), torch.from_numpy(positives.indices)


class SparseOutput:
    """Uniform fan-in: every label keeps exactly ``fan_in`` inputs; trained by the fused step."""

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
    ) -> None:
        self.label = label
        self.input = model.width
        self.group_size = model.group_size
        self.loss = loss
        self.optimizer = optimizer
        self.seed = seed
        self.indices = random_connectivity(label, model.width, model.fan_in, model.group_size, seed)
        self.weight = _initial_weight(label, model, generator)
        self.bias = bias
        self.positive_weight = positive_weight
        self.state = OptimizerState.zeros(optimizer.kind, label, model.fan_in)

    def step(
        self, features: Tensor, positives: CsrRows, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.step`."""
        offsets, labels = positive_tensors(positives)
        return fused_step(
            features,
            offsets,
            labels,
            self.weight,
            self.indices,
            self.bias,
            loss=self.loss.kind,
            optimizer=self.optimizer,
            learning_rate=learning_rate,
            state=self.state,
            step=step,
            seed=self.seed,
            scale=loss_scale(self.loss, features.shape[1], self.label),
            group_size=self.group_size,
            positive_weight=self.positive_weight,
        )

    def top_labels(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.top_labels`."""
        return top_labels(features, self.weight, self.indices, self.bias, k, self.group_size)

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
        )

    def tensors(self) -> dict[str, Tensor]:
        """See `OutputLayer.tensors`."""
        tensors = {"indices": self.indices, "weight": self.weight, "bias": self.bias}
        return tensors | {f"state.{name}": value for name, value in self.state.tensors().items()}


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
    ) -> None:
        self.label = label
        self.loss = loss
        self.positive_weight = positive_weight
        bound = 1.0 / math.sqrt(input)
        self.linear = BlockedLinear(
            torch.empty(label, input).uniform_(-bound, bound, generator=generator), bias
        )
        self.block_optimizer: BlockOptimizer | None = None  # set by training

    def step(
        self, features: Tensor, positives: CsrRows, learning_rate: float, step: int
    ) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.step`."""
        assert self.block_optimizer is not None, "training gives the dense output its optimizer"
        offsets, labels = positive_tensors(positives)
        batch = features.shape[1]
        instances = torch.arange(batch).repeat_interleave(offsets.diff())
        labels, order = labels.long().sort(stable=True)
        instances = instances[order]
        scale = loss_scale(self.loss, batch, self.label)
        loss_sum = torch.zeros((), dtype=torch.float64)
        feature_gradient = torch.zeros_like(features)
        for block in self.linear.blocks:
            logits = torch.addmm(block.bias[:, None], block.weight, features).requires_grad_()
            first, last = torch.searchsorted(
                labels, torch.tensor([block.rows.start, block.rows.stop])
            ).tolist()
            rows, columns = labels[first:last] - block.rows.start, instances[first:last]
            target = torch.full_like(logits, -1.0)
            target[rows, columns] = 1.0
            values = LOSSES[self.loss.kind](logits, target)
            if self.positive_weight is not None:
                factor = torch.where(target > 0, self.positive_weight[block.rows][:, None], 1.0)
                values = values * factor
            loss = scale * values.sum()
            (gradient,) = torch.autograd.grad(loss, logits)
            loss_sum += loss.detach()
            feature_gradient.addmm_(block.weight.T, gradient)
            block.update(gradient @ features.T, gradient.sum(1), self.block_optimizer)
        return loss_sum, feature_gradient

    def top_labels(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `OutputLayer.top_labels`."""
        batch = features.shape[1]
        scores = torch.empty(batch, 0)
        labels = torch.empty(batch, 0, dtype=torch.int64)
        for block in self.linear.blocks:
            logits = torch.addmm(block.bias[:, None], block.weight, features).T  # [batch, block]
            # Earlier blocks stand first and the sort is stable: ties go to the lowest label.
            numbers = torch.arange(block.rows.start, block.rows.stop).expand(batch, -1)
            scores, order = torch.cat([scores, logits], 1).sort(dim=1, descending=True, stable=True)
            labels = torch.cat([labels, numbers], 1).gather(1, order)[:, :k]
            scores = scores[:, :k]
        return scores, labels

    def tensors(self) -> dict[str, Tensor]:
        """See `OutputLayer.tensors`."""
        return {"weight": self.linear.weight, "bias": self.linear.bias}


def _initial_weight(label: int, model: ModelConfig, generator: torch.Generator) -> Tensor:
    bounds = {
        "zero": 0.0,
        "fan_in": 1.0 / math.sqrt(model.fan_in),
        "glorot_flat": math.sqrt(3.0 / (label * model.fan_in)),
    }
    bound = bounds[model.weight_init]
    weight = torch.empty(label, model.fan_in).uniform_(-bound, bound, generator=generator)
    return weight.to(getattr(torch, model.weight_dtype))
