"""The scores of a sparse output layer and of two towers, added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.data.batches import Batch, BatchStream, Column, holdout, take
from xmlc.data.dataset import Features
from xmlc.data.rows import CsrRows, Int64
from xmlc.errors import ConfigError
from xmlc.evaluation.evaluator import evaluate_model
from xmlc.evaluation.predict import Predictor
from xmlc.nn import Model, Problem, TwoTower
from xmlc.nn.output_layer import SparseOutput
from xmlc.ops import LogitOffsets

NEAREST = 100
"""Labels of an instance to whose logits something is added."""
WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Among which the hold-out chooses."""


Search = Callable[[Batch], tuple[Tensor, Tensor]]
"""Cosines and labels [batch, NEAREST] of a batch's instances, best first."""


@dataclass(frozen=True)
class Hybrid:
    """Ranks the labels nearest to an instance by ``logit + weight * (cosine - floor)``, others by the logit.

    ``floor`` is the cosine of the instance's 100th nearest label, so that nothing jumps at the border.
    """

    head: Model
    search: Search
    weight: float

    @property
    def problem(self) -> Problem:
        """The head's."""
        return self.head.problem

    @property
    def config(self) -> Config:
        """The head's."""
        return self.head.config

    def top_labels(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k] of the batch's instances, best first, on the CPU."""
        return self.head.top_labels(batch, k, self._offsets(batch))

    def _offsets(self, batch: Batch) -> LogitOffsets:
        scores, labels = self.search(batch)
        value = (self.weight * (scores - scores[:, -1:])).cpu().flatten()
        instance = torch.arange(len(scores), dtype=torch.int32).repeat_interleave(scores.shape[1])
        label = labels.cpu().flatten().int()
        order = label.argsort(stable=True)
        return LogitOffsets.of(label[order], instance[order], value[order])


def join(head: Predictor, tower: Predictor, features: Features | Column, weight: float) -> Hybrid:
    """Add a tower to a head.

    Args:
        head: A run of ``model.output = sparse``.
        tower: One of ``two_tower``, of the same labels.
        features: What the tower reads of the instances to rank.
        weight: Of the cosines.

    Raises:
        ConfigError: The runs are not of these kinds, or not of the same labels.
    """
    model, towers = head.model, tower.model
    if not isinstance(model, Model) or not isinstance(model.output, SparseOutput):
        raise ConfigError(
            f"hybrid: the run must be of model.output = sparse, found {model.config.model.output}; "
            "name another, or no tower"
        )
    if not isinstance(towers, TwoTower):
        raise ConfigError(
            "hybrid: the tower must be a run of model.output = two_tower, found "
            f"{towers.config.model.output}; train one"
        )
    if towers.problem.label_count != model.problem.label_count:
        raise ConfigError(
            f"hybrid: both runs must know the same labels, found {model.problem.label_count} and "
            f"{towers.problem.label_count}; train both on one data set"
        )

    @torch.no_grad()
    def search(batch: Batch) -> tuple[Tensor, Tensor]:
        embeddings = towers.embed(take(features, batch.instances))
        return towers.search(embeddings, min(NEAREST, towers.problem.label_count))

    return Hybrid(model, search, weight)


def best_weight(joined: Hybrid, stream: BatchStream, filter_pairs: CsrRows | None) -> float:
    """Return the weight of the best ranking by the head's ``training.metric``; of equal ones the lowest.

    The nearest labels are searched once, and kept for all weights: 12 bytes for each of an instance's.

    Args:
        joined: Of any weight.
        stream: Of the head, over the instances that both runs held out.
        filter_pairs: To mask, [instance of the stream, label], or None.
    """
    metric = joined.head.config.training.metric
    rank = int(metric.partition("@")[2])
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def search(batch: Batch) -> tuple[Tensor, Tensor]:
        first = int(batch.instances[0])  # in evaluation an instance is in one batch, the same for all weights
        if first not in found:
            found[first] = joined.search(batch)
        return found[first]

    def quality(weight: float) -> float:
        ranker = replace(joined, search=search, weight=weight)
        return evaluate_model(ranker, stream, rank, filter_pairs).values[metric]

    return max(WEIGHTS, key=quality)


def held_out(head: Predictor, tower: Predictor, dataset: Dataset) -> Int64:
    """Return the training instances that neither run was trained on, rising.

    Raises:
        ConfigError: The runs have not held out the same ones, or those of other data.
    """
    prints = {each.metadata["data"]["fingerprint"] for each in (head, tower)}
    configs = [each.model.config for each in (head, tower)]
    shares = [config.data.validation_fraction for config in configs]
    seeds = [config.training.seed for config in configs]
    same = len(set(shares)) == len(set(seeds)) == 1 and prints == {dataset.fingerprint}
    if not same or not shares[0] or any(config.training.paper_protocol for config in configs):
        raise ConfigError(
            "hybrid: to choose the weight, both runs must have held out the same instances of "
            f"{dataset.name}, found data.validation_fraction {shares}, training.seed {seeds} and "
            f"{'the same' if prints == {dataset.fingerprint} else 'other'} data; give the weight"
        )
    return holdout(dataset.train.instances, shares[0], seeds[0])[1]
