"""The output layer's step by the means of torch and SciPy, with BCE and SGD; each checked against xmlc.

None of them is handicapped: connections are converted and sorted beforehand, BCE is done in place on blocks
of logits that stay in cache, the factor 1 / batch is folded into the learning rate, and SciPy's products,
which use one thread, are spread over threads by hand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import scipy.sparse
import torch
import torch.nn.functional as functional
from kernels_problem import Problem, make_problem
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.ops import OptimizerState, dense_weight, fused_step, sparse_linear, top_labels

BCE_BLOCK_FLOATS = 1 << 20  # 4 MiB of logits
STEP_BLOCK_LABELS = 1 << 15
DENSE_BLOCK_LABELS = 1 << 13
TOLERANCE = 1e-4  # relative to the largest value; sums of float32 in another order


class Step(Protocol):
    """One way to do the whole step, with parameters of its own."""

    bias: Tensor

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Update the parameters in place; return the mean loss of an instance and the feature gradient."""
        ...

    def dense(self) -> Tensor:
        """Return the weights as [label, input]."""
        ...


def sorted_connections(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return copies of inputs, int32, and weights, both [label, fan_in], by rising input within a label."""
    order = torch.from_numpy(problem.indices.numpy().argsort(axis=1))
    columns = problem.indices.to(torch.int32).gather(1, order)
    return columns, problem.weight.gather(1, order)


def csr_parts(columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row offsets, columns and values of a CSR matrix that shares memory with [label, fan_in]."""
    labels, fan_in = columns.shape
    return torch.arange(labels + 1, dtype=torch.int32) * fan_in, columns.flatten(), values.flatten()


def bce_in_place(logits: Tensor, bias: Tensor, labels: Tensor, instances: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits without bias [label, batch] into their gradients, for a loss summed over everything.

    Returns:
        The loss, float64 [], and the gradient of the bias, [label].
    """
    loss = -(logits[labels, instances] + bias[labels]).sum(dtype=torch.float64)
    bias_gradient = torch.empty_like(bias)
    block = max(1, BCE_BLOCK_FLOATS // logits.shape[1])
    for values, added, total in zip(
        logits.split(block), bias.split(block), bias_gradient.split(block), strict=True
    ):
        values += added[:, None]
        loss += functional.softplus(values).sum()
        torch.sum(values.sigmoid_(), 1, out=total)
    logits[labels, instances] -= 1.0
    bias_gradient.index_add_(0, labels, torch.full(labels.shape, -1.0))
    return loss, bias_gradient


class EmbeddingBag:
    """The features are the table of embeddings, a label is a bag of weighted rows; autograd."""

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem, self.scale = problem, 1.0 / problem.batch
        self.columns, weight = sorted_connections(problem)
        self.weight = weight.requires_grad_()
        self.bias = problem.bias.clone()
        self.features = problem.features.clone().requires_grad_()
        self.positives = (problem.positive_labels, problem.positive_instances)

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """See `Step`."""
        logits = functional.embedding_bag(
            self.columns, self.features, per_sample_weights=self.weight, mode="sum"
        )
        gradient = logits.detach()
        loss, bias_gradient = bce_in_place(gradient, self.bias, *self.positives)
        feature_gradient, weight_gradient = torch.autograd.grad(
            logits, (self.features, self.weight), gradient
        )
        self.weight.detach().add_(weight_gradient, alpha=-learning_rate * self.scale)
        self.bias.add_(bias_gradient, alpha=-learning_rate * self.scale)
        return loss * self.scale, feature_gradient.mul_(self.scale)

    def dense(self) -> Tensor:
        """See `Step`."""
        return dense_weight(self.weight.detach(), self.columns, 1, self.problem.inputs)


class SparseMatrixProduct:
    """``torch.sparse.mm(..., reduce="sum")`` on CSR: the one that has a sparse gradient; autograd."""

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem, self.scale = problem, 1.0 / problem.batch
        parts = csr_parts(*sorted_connections(problem))
        shape = (problem.labels, problem.inputs)
        self.weight = torch.sparse_csr_tensor(*parts, shape, check_invariants=False).requires_grad_()
        self.bias = problem.bias.clone()
        self.features = problem.features.clone().requires_grad_()
        self.positives = (problem.positive_labels, problem.positive_instances)

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """See `Step`."""
        logits = torch.sparse.mm(self.weight, self.features, reduce="sum")
        gradient = logits.detach()
        loss, bias_gradient = bce_in_place(gradient, self.bias, *self.positives)
        feature_gradient, weight_gradient = torch.autograd.grad(
            logits, (self.features, self.weight), gradient
        )
        self.weight.detach().values().add_(weight_gradient.values(), alpha=-learning_rate * self.scale)
        self.bias.add_(bias_gradient, alpha=-learning_rate * self.scale)
        return loss * self.scale, feature_gradient.mul_(self.scale)

    def dense(self) -> Tensor:
        """See `Step`."""
        return self.weight.detach().to_dense()


class Assembled:
    """The best part of each library, all labels at once; no autograd.

    embedding_bag for the logits, SciPy's transposed CSR product for the feature gradient, and
    sampled_addmm for the weight gradient, which it can add to the weights without storing it.
    """

    block_labels = 1 << 62

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem, self.scale = problem, 1.0 / problem.batch
        self.columns, self.weight = sorted_connections(problem)
        self.bias = problem.bias.clone()
        self.pool = ThreadPoolExecutor(threads)
        self.blocks = []
        for first in range(0, problem.labels, self.block_labels):
            rows = slice(first, min(first + self.block_labels, problem.labels))
            inside = (problem.positive_labels >= first) & (problem.positive_labels < rows.stop)
            positives = problem.positive_labels[inside] - first, problem.positive_instances[inside]
            columns, weight = self.columns[rows], self.weight[rows]
            shape = (len(columns), problem.inputs)
            csr = torch.sparse_csr_tensor(*csr_parts(columns, weight), shape, check_invariants=False)
            part = -(-len(columns) // threads)
            transposed = [
                scipy_csr(*both, problem.inputs).T
                for both in zip(columns.split(part), weight.split(part), strict=True)
            ]
            self.blocks.append((columns, weight, self.bias[rows], positives, csr, part, transposed))

    @torch.no_grad()
    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """See `Step`."""
        features = self.problem.features
        rate = -learning_rate * self.scale
        losses, feature_gradient = [], torch.zeros_like(features)
        for columns, weight, bias, positives, csr, part, transposed in self.blocks:
            gradient = functional.embedding_bag(columns, features, per_sample_weights=weight, mode="sum")
            loss, bias_gradient = bce_in_place(gradient, bias, *positives)
            split = [rows.numpy() for rows in gradient.split(part)]
            for partial in self.pool.map(operator.matmul, transposed, split):
                feature_gradient += torch.from_numpy(partial)
            torch.sparse.sampled_addmm(csr, gradient, features.T, beta=1.0, alpha=rate, out=csr)
            bias.add_(bias_gradient, alpha=rate)
            losses.append(loss)
        return torch.stack(losses).sum() * self.scale, feature_gradient.mul_(self.scale)

    def dense(self) -> Tensor:
        """See `Step`."""
        return dense_weight(self.weight, self.columns, 1, self.problem.inputs)


class AssembledInBlocks(Assembled):
    """The same on one block of labels after the other, so that the logits stay small."""

    block_labels = STEP_BLOCK_LABELS


class Dense:
    """A dense layer by ``functional.linear``, torch's BCE and autograd; SGD in place."""

    def __init__(self, problem: Problem, weight: Tensor) -> None:
        """Take features, bias and positives of the problem, and weights [label, input], which it updates."""
        self.scale = 1.0 / problem.batch
        self.weight = weight.detach().requires_grad_()
        self.bias = problem.bias.clone().requires_grad_()
        self.features = problem.features.T.contiguous().requires_grad_()
        self.target = torch.zeros(problem.batch, problem.labels)
        self.target[problem.positive_instances, problem.positive_labels] = 1.0

    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """See `Step`."""
        logits = functional.linear(self.features, self.weight, self.bias)
        loss = self.scale * functional.binary_cross_entropy_with_logits(logits, self.target, reduction="sum")
        parameters = (self.features, self.weight, self.bias)
        feature_gradient, weight_gradient, bias_gradient = torch.autograd.grad(loss, parameters)
        self.weight.detach().add_(weight_gradient, alpha=-learning_rate)
        self.bias.detach().add_(bias_gradient, alpha=-learning_rate)
        return loss.detach(), feature_gradient.T

    def dense(self) -> Tensor:
        """See `Step`."""
        return self.weight.detach()


class DenseInBlocks:
    """A dense layer on one block of labels after the other, every product in place; no autograd."""

    def __init__(self, problem: Problem, weight: Tensor) -> None:
        """Take features, bias and positives of the problem, and weights [label, input], which it updates."""
        self.problem, self.scale = problem, 1.0 / problem.batch
        self.weight, self.bias = weight, problem.bias.clone()
        labels, instances = problem.positive_labels, problem.positive_instances
        blocks = labels // DENSE_BLOCK_LABELS
        self.positives = [
            (labels[blocks == block] - block * DENSE_BLOCK_LABELS, instances[blocks == block])
            for block in range(-(-problem.labels // DENSE_BLOCK_LABELS))
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """See `Step`."""
        features = self.problem.features
        rate = -learning_rate * self.scale
        losses, feature_gradient = [], torch.zeros_like(features)
        for weight, bias, positives in zip(
            self.weight.split(DENSE_BLOCK_LABELS),
            self.bias.split(DENSE_BLOCK_LABELS),
            self.positives,
            strict=True,
        ):
            gradient = weight @ features
            loss, bias_gradient = bce_in_place(gradient, bias, *positives)
            feature_gradient.addmm_(weight.T, gradient)
            weight.addmm_(gradient, features.T, alpha=rate)
            bias.add_(bias_gradient, alpha=rate)
            losses.append(loss)
        return torch.stack(losses).sum() * self.scale, feature_gradient.mul_(self.scale)

    def dense(self) -> Tensor:
        """See `Step`."""
        return self.weight


SPARSE_STEPS: dict[str, Callable[[Problem, int], Step]] = {
    "torch embedding_bag": EmbeddingBag,
    "torch sparse.mm reduce": SparseMatrixProduct,
    "assembled": Assembled,
    "assembled in blocks": AssembledInBlocks,
}
DENSE_STEPS: dict[str, Callable[[Problem, Tensor], Step]] = {
    "torch dense": Dense,
    "torch dense in blocks": DenseInBlocks,
}


def scipy_csr(columns: Tensor, weight: Tensor, inputs: int) -> scipy.sparse.csr_array:
    """Return the CSR matrix [label, input] that shares the weights' memory."""
    offsets, flat_columns, values = csr_parts(columns, weight)
    parts = (values.numpy(), flat_columns.numpy(), offsets.numpy())
    return scipy.sparse.csr_array(parts, shape=(len(columns), inputs))


def forwards(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to all logits, [label, batch]; they share one copy of the layer."""
    columns, weight = sorted_connections(problem)
    shape = (problem.labels, problem.inputs)
    csr = torch.sparse_csr_tensor(*csr_parts(columns, weight), shape, check_invariants=False)
    features, bias = problem.features, problem.bias[:, None]
    return {
        "torch embedding_bag": lambda: functional.embedding_bag(
            columns, features, per_sample_weights=weight, mode="sum"
        ).add_(bias),
        "torch sparse.mm reduce": lambda: torch.sparse.mm(csr, features, reduce="sum").add_(bias),
        "torch CSR product (MKL)": lambda: (csr @ features).add_(bias),
    }


def rankings(problem: Problem, k: int) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to the k best labels of each instance, [batch, k]."""
    columns, weight = sorted_connections(problem)
    features, bias = problem.features, problem.bias

    def in_blocks() -> Tensor:
        scores, labels = [], []
        for first in range(0, problem.labels, STEP_BLOCK_LABELS):
            rows = slice(first, first + STEP_BLOCK_LABELS)
            logits = functional.embedding_bag(
                columns[rows], features, per_sample_weights=weight[rows], mode="sum"
            ).add_(bias[rows, None])
            best = logits.topk(min(k, len(logits)), dim=0)
            scores.append(best.values)
            labels.append(best.indices + first)
        best = torch.cat(scores).topk(k, dim=0)
        return torch.cat(labels).gather(0, best.indices).T

    if problem.batch > 1:
        return {"torch embedding_bag and topk, in blocks": in_blocks}
    matrix = scipy_csr(columns, weight, problem.inputs)
    shape = (problem.labels, problem.inputs)
    csr = torch.sparse_csr_tensor(*csr_parts(columns, weight), shape, check_invariants=False)
    vector = features[:, 0].contiguous()
    return {
        "torch CSR product (MKL) and topk": lambda: (csr @ vector).add_(bias).topk(k).indices[None],
        "SciPy CSR product and torch topk": lambda: (
            torch.from_numpy(matrix @ vector.numpy()).add_(bias).topk(k).indices[None]
        ),
    }


def xmlc_step(problem: Problem, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Do the same step by xmlc: BCE, SGD, mean over the batch."""
    return fused_step(
        problem.features,
        problem.positive_offsets,
        problem.positive_labels,
        problem.weight,
        problem.indices,
        problem.bias,
        loss="bce",
        optimizer=OptimizerConfig(kind="sgd"),
        learning_rate=learning_rate,
        state=OptimizerState(),
        step=1,
        scale=1.0 / problem.batch,
        group_size=problem.group_size,
    )


def require_close(name: str, what: str, found: Tensor, wanted: Tensor) -> None:
    """Require that no difference is above TOLERANCE of the largest wanted value."""
    difference = float((found.double() - wanted.double()).abs().max())
    largest = float(wanted.abs().max())
    assert difference <= TOLERANCE * largest, f"{name}: {what} differs by {difference} of {largest}"


def check(threads: int) -> None:
    """Compare every peer with xmlc on small problems: results, and parameters after a large step."""
    problem = replace(make_problem(700, 300, 24, 8), bias=torch.linspace(-1.0, 1.0, 700))
    for name, peer in SPARSE_STEPS.items():
        check_parameters(name, peer(problem, threads), problem)
    full = make_problem(700, 32, 24, 32)
    for name, dense_peer in DENSE_STEPS.items():
        check_parameters(name, dense_peer(full, dense_weight(full.weight, full.indices, 1, 32)), full)
    layer = (problem.weight, problem.indices, problem.bias)
    for name, forward in forwards(problem).items():
        require_close(name, "logits", forward(), sparse_linear(problem.features, *layer))
    for batch in (problem.batch, 1):
        some = replace(problem, features=problem.features[:, :batch].contiguous())
        wanted = top_labels(some.features, *layer, 5)[1]
        for name, ranking in rankings(some, 5).items():
            assert torch.equal(ranking(), wanted), f"{name}: another ranking than xmlc's"


def check_step(name: str, peer: Step, problem: Problem, learning_rate: float) -> None:
    """Compare loss and feature gradient of one peer, made of the problem, with xmlc's; both do a step."""
    loss, feature_gradient = peer.step(learning_rate)
    wanted_loss, wanted_gradient = xmlc_step(problem, learning_rate)
    require_close(name, "loss", loss, wanted_loss)
    require_close(name, "feature gradient", feature_gradient, wanted_gradient)


def check_parameters(name: str, peer: Step, problem: Problem) -> None:
    """Do a large step by the peer and by xmlc, on a copy of the problem, and compare what it changed."""
    copy = replace(problem, weight=problem.weight.clone(), bias=problem.bias.clone())
    check_step(name, peer, copy, learning_rate=0.5 * problem.batch)
    require_close(name, "bias", peer.bias.detach(), copy.bias)
    wanted = dense_weight(copy.weight, copy.indices, 1, problem.inputs)
    require_close(name, "weight", peer.dense(), wanted)
