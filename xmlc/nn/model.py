"""The whole model: encoder, penultimate layer, output layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.config import Config
from xmlc.data.batches import Batch
from xmlc.metrics import inverse_propensity
from xmlc.nn.encoder import BagOfWords, DenseFeatures, drop
from xmlc.nn.output_layer import DenseOutput, OutputLayer, SparseOutput
from xmlc.nn.penultimate import PenultimateLayer


@dataclass(frozen=True)
class Problem:
    """What a model must know of its data set."""

    dense_features: bool
    feature_count: int
    label_count: int
    instances: int
    """Training instances."""
    propensity_a: float
    propensity_b: float
    label_instances: NDArray[np.int64]
    """Training instances of each label, before any are held out. [label]"""

    @cached_property
    def inverse_propensity(self) -> NDArray[np.float64]:
        """1 / p of every label (Jain et al. 2016). [label]"""
        return inverse_propensity(self.label_instances, self.instances, self.propensity_a, self.propensity_b)

    def facts(self) -> dict[str, int | float | bool]:
        """Return the plain values, all but ``label_instances``."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


class Model:
    """Encoder -> penultimate layer -> output layer; without a penultimate layer for ``output = "dense"``."""

    def __init__(self, config: Config, problem: Problem) -> None:
        self.config = config
        self.problem = problem
        model = config.model
        generator = torch.Generator().manual_seed(config.training.seed)
        self.encoder: BagOfWords | DenseFeatures = (
            DenseFeatures(problem.feature_count)
            if problem.dense_features
            else BagOfWords(problem.feature_count, model.hidden, config.data.unit_length, generator)
        )
        hidden = self.encoder.hidden
        width = {"sparse": model.width, "bottleneck": model.bottleneck, "dense": 0}[model.output]
        self.penultimate = (
            PenultimateLayer(hidden, width, model.penultimate_init, generator) if width else None
        )
        bias = _initial_bias(config, problem)
        weight = _positive_weight(config, problem)
        self.output: OutputLayer
        if model.output == "sparse":
            self.output = SparseOutput(
                problem.label_count,
                model,
                config.loss,
                config.output_optimizer,
                bias,
                weight,
                config.training.seed,
                generator,
            )
        else:
            self.output = DenseOutput(
                problem.label_count, width or hidden, config.loss, bias, weight, generator
            )

    def move(self, device: torch.device) -> None:
        """Move all weights and the output layer's state to a device; optimizers are made after that."""
        self.encoder.to(device)
        if self.penultimate is not None:
            self.penultimate.linear.move(device)
        self.output.move(device)

    def hidden(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Return hidden [batch, hidden] on the autograd graph; with a generator, after dropout."""
        model = self.config.model
        train = generator is not None
        generator = generator or torch.Generator()
        hidden = self.encoder(batch, model.input_dropout if train else 0.0, generator)
        if model.hidden_activation == "relu":
            hidden = hidden.relu()
        return drop(hidden, model.hidden_dropout if train else 0.0, generator)

    def features(self, hidden: Tensor) -> Tensor:
        """Return the output layer's input, [input, batch] contiguous."""
        return hidden.T.contiguous() if self.penultimate is None else self.penultimate(hidden)

    def top_labels(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k] of the batch's instances, best first, on the CPU."""
        with torch.no_grad():
            scores, labels = self.output.top_labels(self.features(self.hidden(batch)), k)
        return scores.cpu(), labels.cpu()

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight and the output layer's optimizer state by name, sharing memory."""
        tensors = {f"encoder.{name}": value.data for name, value in self.encoder.named_parameters()}
        if self.penultimate is not None:
            linear = self.penultimate.linear
            tensors |= {"penultimate.weight": linear.weight, "penultimate.bias": linear.bias}
        return tensors | {f"output.{name}": value for name, value in self.output.tensors().items()}


def _initial_bias(config: Config, problem: Problem) -> Tensor:
    given = config.model.bias_init
    if given != "auto":
        return torch.full((problem.label_count,), float(given))
    if config.loss.kind == "squared_hinge":
        return torch.full((problem.label_count,), -1.0)
    share = (torch.from_numpy(problem.label_instances) + 0.5) / (problem.instances + 1.0)
    return share.logit().float()


def _positive_weight(config: Config, problem: Problem) -> Tensor | None:
    loss = config.loss
    if loss.positive_weight == 1.0 and not loss.positive_weight_propensity:
        return None
    weight = np.full(problem.label_count, loss.positive_weight)
    if loss.positive_weight_propensity:
        weight = weight * problem.inverse_propensity
    return torch.from_numpy(weight.astype(np.float32))
