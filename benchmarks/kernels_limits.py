"""What an op must at least move and compute, how fast this machine can, and the time that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from kernels_problem import ActiveShares, Problem, make_problem, tile_width

from xmlc.ops import sparse_linear

SGEMM_SIZE = 2048
BAGS = 1 << 17  # of the gather probe by torch
GATHER_LABELS = 1 << 15  # of the gather probe by xmlc
ROOF_TABLE = (4096, 64)  # 1 MiB in long rows: the most that a second-level cache gives


@dataclass(frozen=True)
class Cost:
    """Lower bounds: every byte and every operation counted once."""

    gather_bytes: float = 0.0
    """Feature rows and feature-gradient rows read or written in cache."""
    memory_bytes: float = 0.0
    """Weights, connections, optimizer state, features and results, from and to memory."""
    flop: float = 0.0


@dataclass(frozen=True)
class Limits:
    """The best rates of this machine, in units per second."""

    gather_bytes: float
    memory_bytes: float
    flop: float

    def seconds(self, cost: Cost) -> float:
        """Return the roofline time: that of the resource which needs the most."""
        return max(
            cost.gather_bytes / self.gather_bytes,
            cost.memory_bytes / self.memory_bytes,
            cost.flop / self.flop,
        )


def forward_cost(problem: Problem, logits_written: bool) -> Cost:
    """Gather every input of every group once for each instance; read the layer."""
    connections = problem.labels * problem.fan_in
    return Cost(
        gather_bytes=4.0 * problem.batch * problem.indices.numel(),
        memory_bytes=connections * problem.weight.element_size()
        + problem.indices.nbytes
        + problem.features.nbytes
        + 4.0 * problem.labels * problem.batch * logits_written,
        flop=2.0 * problem.batch * connections,
    )


def fused_cost(problem: Problem, loss: str, optimizer: str, shares: ActiveShares) -> Cost:
    """Add to the forward pass what the active part needs: 8 of 12 bytes, 4 of 6 FLOP for each product.

    The feature row of the weight gradient is still in the first-level cache and costs nothing. The softmax
    losses take one more forward pass. Adam reads and writes its two moments of every label.
    """
    forward = forward_cost(problem, logits_written=False)
    passes = 2 if loss in ("softmax", "decoupled_softmax") else 1
    connections = problem.labels * problem.fan_in
    return Cost(
        gather_bytes=forward.gather_bytes * (passes + 2.0 * shares.tiles),
        memory_bytes=forward.memory_bytes * passes
        + problem.features.nbytes
        + connections
        * (
            problem.weight.element_size() * (1.0 if optimizer == "adam" else shares.labels)
            + (16 if optimizer == "adam" else 0)
        ),
        flop=forward.flop * (passes + 2.0 * shares.tiles),
    )


def redistribute_cost(problem: Problem) -> Cost:
    """Read weights and connections once, to find the weakest."""
    return Cost(memory_bytes=float(problem.weight.nbytes + problem.indices.nbytes))


def probes(inputs: int, batch: int, fan_in: int, memory_mib: int) -> Iterable[tuple[str, Cost, Callable]]:
    """Yield name, cost and call of each probe of the machine; the arrays live until the last one.

    ``gather_rows`` sums rows of a batch tile's table by torch's embedding_bag, ``gather_roof`` long rows that
    surely fit the second-level cache, and ``gather_forward`` is xmlc's own forward pass: whichever is fastest
    becomes the limit, so that no op is measured against a limit that a program has already beaten.
    """
    source = torch.ones(memory_mib * (1 << 20) // 4)
    target = torch.zeros_like(source)
    yield "read", Cost(memory_bytes=source.nbytes), source.sum
    yield "copy", Cost(memory_bytes=2 * source.nbytes), lambda: target.copy_(source)
    yield "update", Cost(memory_bytes=2 * source.nbytes), lambda: target.add_(1.0)

    left, right = torch.randn(SGEMM_SIZE, SGEMM_SIZE), torch.randn(SGEMM_SIZE, SGEMM_SIZE)
    product = torch.empty_like(left)
    yield "sgemm", Cost(flop=2.0 * SGEMM_SIZE**3), lambda: torch.mm(left, right, out=product)

    width = tile_width(batch, inputs)
    for name, rows, columns in (("gather_rows", inputs, width), ("gather_roof", *ROOF_TABLE)):
        table = torch.randn(rows, columns)
        at = torch.randint(rows, (BAGS, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)

        def sum_rows(at: torch.Tensor = at, table: torch.Tensor = table) -> torch.Tensor:
            return functional.embedding_bag(at, table, mode="sum")

        yield name, Cost(gather_bytes=4.0 * columns * at.numel()), sum_rows

    problem = make_problem(GATHER_LABELS, inputs, batch, fan_in)
    layer = (problem.features, problem.weight, problem.indices, problem.bias)
    cost = Cost(gather_bytes=forward_cost(problem, logits_written=True).gather_bytes)
    yield "gather_forward", cost, lambda: sparse_linear(*layer)


def limits_from(best_seconds: Mapping[str, float], costs: Mapping[str, Cost]) -> Limits:
    """Take the best rate of each resource over all probes."""

    def best(resource: str) -> float:
        return max(getattr(costs[name], resource) / seconds for name, seconds in best_seconds.items())

    return Limits(best("gather_bytes"), best("memory_bytes"), best("flop"))
