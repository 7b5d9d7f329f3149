#!/usr/bin/env python3
"""Measure the native ops, the fastest ways by torch's own means, and the limits of the machine, in one run.

    OMP_WAIT_POLICY=PASSIVE benchmarks/kernels.py --repeats 7
    OMP_WAIT_POLICY=PASSIVE benchmarks/kernels.py --shapes 65536:256:64
    OMP_WAIT_POLICY=PASSIVE benchmarks/kernels.py --labels 100000 670091 3000000 --isas avx512 --peers

Appends one row for every repeat to results/kernels.csv and prints medians. xmlc's ways take turns, so that a
slow moment of the machine hits all; then each peer takes turns with the same op of xmlc, so that its ratio
compares neighbours in time (`beside` names such a round). The first of --isas and of --threads get every
loss, optimizer and dtype, the others the most important ways; the peers run on the first of --threads.

Weights start as random numbers of unit logits and move by a learning rate of 1e-6, so that no repeat finds
other work than the one before. `roofline_seconds` is the least time by the best rates found in this run
(kernels_limits.py); `scratch_bytes` is how far the process's memory rises during a call, results included.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels_limits import Cost, Limits, forward_cost, fused_cost, limits_from, probes, redistribute_cost
from kernels_peers import DENSE_STEPS, SPARSE_STEPS, Step, check, check_step, forwards, rankings
from kernels_problem import (
    ALL_ACTIVE,
    ActiveShares,
    Problem,
    make_problem,
    squared_hinge_shares,
    with_active_share,
)
from kernels_recorder import COLUMNS, Recorder, Way, describe_machine, table_line

from xmlc import native
from xmlc.config import OptimizerConfig
from xmlc.ops import OptimizerState, fused_step, redistribute, sparse_linear, top_labels
from xmlc.ops.checks import name_of

ROOT = Path(__file__).resolve().parent.parent
K = 5
GROUP_SIZE = 16
DENSE_INPUTS = 768
LEARNING_RATE = 1e-6
PEERS = ("forward", "ranking", "sparse", "dense")


@dataclass(frozen=True)
class Case:
    """A problem, the share of active (label, tile) pairs asked for, and the shares found."""

    problem: Problem
    wanted_active: float | str = ""
    shares: ActiveShares = ALL_ACTIVE


def main() -> None:
    """Check the peers, measure the machine, and then every layer asked for."""
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")
    chosen = parse_arguments()
    recorder = Recorder(chosen.out, chosen.repeats, describe_machine(ROOT))
    print(", ".join(f"{name} {value}" for name, value in recorder.machine.items()), flush=True)
    torch.set_num_threads(chosen.threads[0])
    native.cpu.set_isa(chosen.isas[0])
    check(chosen.threads[0])
    print("all peers agree with xmlc on small problems", table_line(*COLUMNS), sep="\n", flush=True)
    for layer in chosen.shapes:
        limits = {
            threads: measure_limits(recorder, threads, chosen.isas[0], layer, chosen.memory_mib)
            for threads in {*chosen.threads, 1}  # one instance is always ranked on one thread
        }
        for labels in chosen.labels:
            problem = make_problem(labels, *layer)
            with_limits = replace(recorder, limits=limits)
            with_limits.measure(list(xmlc_ways(problem, chosen)))
            gc.collect()
            if labels <= chosen.peer_labels:
                measure_peers(with_limits, chosen, problem)
            else:
                print(f"{labels} labels: no peers, --peer-labels is {chosen.peer_labels}", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; defaults depend on the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add, isas = parser.add_argument, native.cpu.available_isas()
    add("--labels", type=int, nargs="+", default=[670_091])
    add("--shapes", type=shape, nargs="+", default=[(16_384, 128, 32)], help="inputs:batch:fan_in")
    add("--active", type=float, nargs="+", default=[0.01, 1.0], help="active (label, batch tile) pairs")
    add("--isas", nargs="+", choices=isas, default=isas[::-1], help="the first is measured in full")
    add("--threads", type=int, nargs="+", default=[2, 1], help="the first is measured in full")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="none without a name")
    add("--peer-labels", type=int, default=1_000_000, help="no peers beyond: they take many GB")
    add("--repeats", type=int, default=7)
    add("--memory-mib", type=int, default=1024, help="size of the arrays that measure memory bandwidth")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels.csv")
    chosen = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:
        parser.error("OMP_WAIT_POLICY must be set, to PASSIVE, or torch's idle threads disturb every row")
    return chosen


def shape(text: str) -> tuple[int, int, int]:
    """Read inputs:batch:fan_in."""
    inputs, batch, fan_in = (int(part) for part in text.split(":"))
    return inputs, batch, fan_in


def measure_limits(
    recorder: Recorder, threads: int, isa: str, layer: tuple[int, int, int], memory_mib: int
) -> Limits:
    """Run the probes one after the other and take the best rates."""
    facts = dict(zip(("inputs", "batch", "fan_in"), layer, strict=True))
    best_seconds: dict[str, float] = {}
    costs: dict[str, Cost] = {}
    for name, cost, call in probes(*layer, memory_mib):
        way = Way(name, "limit", call, threads, isa if name == "gather_forward" else "", cost, facts)
        seconds = recorder.measure([way])
        best_seconds[name], costs[name] = min(seconds[0]), cost
    limits = limits_from(best_seconds, costs)
    rates = ", ".join(f"{name} {rate / 1e9:.1f} G/s" for name, rate in vars(limits).items())
    print(f"limits of {threads} threads, best of all probes: {rates}", flush=True)
    return limits


def xmlc_ways(problem: Problem, chosen: argparse.Namespace) -> Iterator[Way]:
    """Yield xmlc's ways; they share weights and optimizer state wherever shapes allow."""
    grouped = replace(
        make_problem(problem.labels, problem.inputs, problem.batch, problem.fan_in, GROUP_SIZE),
        features=problem.features,
        weight=problem.weight,
    )
    rounded = replace(problem, weight=problem.weight.bfloat16(), bias=problem.bias.clone())
    hinges = [hinge_case(problem, share) for share in chosen.active]
    states = {kind: OptimizerState.zeros(kind, problem.labels, problem.fan_in) for kind in ("sgd", "adam")}
    fused = partial(fused_way, states)
    for (at, isa), (rank, threads) in itertools.product(enumerate(chosen.isas), enumerate(chosen.threads)):
        yield from layer_ways(fused, problem, hinges[0], isa, threads)
        yield top_labels_way(problem, isa, threads)
        if rank == 0:
            one = replace(problem, features=problem.features[:, :1].contiguous())
            yield top_labels_way(one, isa, threads=1)
        if at or rank:
            continue
        for case in hinges[1:]:
            yield fused(case, "squared_hinge", "sgd", isa, threads)
        for case in hinges:
            yield fused(case, "squared_hinge", "adam", isa, threads)
        yield fused(Case(problem), "bce", "adam", isa, threads)
        for loss, kind in itertools.product(("softmax", "decoupled_softmax"), ("sgd", "adam")):
            yield fused(Case(problem), loss, kind, isa, threads)
        for other in (grouped, rounded):
            yield from layer_ways(fused, other, hinge_case(other, chosen.active[0]), isa, threads)
            yield fused(Case(other), "bce", "adam", isa, threads)
        yield top_labels_way(grouped, isa, threads)
        yield redistribute_way(problem, isa, threads)


def layer_ways(
    fused: Callable[..., Way], problem: Problem, hinge: Case, isa: str, threads: int
) -> Iterator[Way]:
    """Yield the most important ways of one layer."""
    yield fused(hinge, "squared_hinge", "sgd", isa, threads)
    yield fused(Case(problem), "bce", "sgd", isa, threads)
    yield forward_way(problem, isa, threads)


def hinge_case(problem: Problem, share: float) -> Case:
    """Choose the bias for a share of active pairs, and look up the shares that follow."""
    biased = with_active_share(problem, share)
    return Case(biased, share, squared_hinge_shares(biased))


def fused_way(
    states: Mapping[str, OptimizerState], case: Case, loss: str, kind: str, isa: str, threads: int
) -> Way:
    """Return the whole training step."""
    problem = case.problem
    call = partial(
        fused_step,
        *(problem.features, problem.positive_offsets, problem.positive_labels),
        *(problem.weight, problem.indices, problem.bias),
        loss=loss,
        optimizer=OptimizerConfig.model_validate({"kind": kind}),
        learning_rate=LEARNING_RATE,
        state=states[kind],
        step=1,
        scale=1.0 / problem.batch,
        group_size=problem.group_size,
    )
    facts = facts_of(problem) | {"loss": loss, "optimizer": kind, "wanted_active": case.wanted_active}
    facts |= {"active_logits": round(case.shares.logits, 6), "active_tiles": round(case.shares.tiles, 6)}
    cost = fused_cost(problem, loss, kind, case.shares)
    return Way("xmlc", "fused_step", call, threads, isa, cost, facts)


def forward_way(problem: Problem, isa: str, threads: int) -> Way:
    """Return the logits of everything."""
    layer = (problem.features, problem.weight, problem.indices, problem.bias, problem.group_size)
    cost = forward_cost(problem, logits_written=True)
    call = torch.no_grad()(lambda: sparse_linear(*layer))
    return Way("xmlc", "forward", call, threads, isa, cost, facts_of(problem))


def top_labels_way(problem: Problem, isa: str, threads: int) -> Way:
    """Return the ranking of the best K labels."""
    layer = (problem.features, problem.weight, problem.indices, problem.bias, K, problem.group_size)
    cost = forward_cost(problem, logits_written=False)
    return Way("xmlc", "top_labels", lambda: top_labels(*layer), threads, isa, cost, facts_of(problem))


def redistribute_way(problem: Problem, isa: str, threads: int) -> Way:
    """Return the move of a tenth of the connections, on copies; weights stay, so repeats have equal work."""
    weight, indices, steps = problem.weight.clone(), problem.indices.clone(), itertools.count()

    def call() -> object:
        return redistribute(weight, indices, problem.inputs, fraction=0.1, new_value="keep", step=next(steps))

    cost = redistribute_cost(problem)
    return Way("xmlc", "redistribute", call, threads, isa, cost, facts_of(problem))


def measure_peers(recorder: Recorder, chosen: argparse.Namespace, problem: Problem) -> None:
    """Measure the peers in turn with xmlc; those that hold much memory one after the other."""
    threads, isa = chosen.threads[0], chosen.isas[0]
    if "forward" in chosen.peers:
        calls = forwards(problem)
        recorder.measure(versus(forward_way(problem, isa, threads), calls), "forwards")
        calls.clear()
    if "ranking" in chosen.peers:
        for batch, ranking_threads in ((problem.batch, threads), (1, 1)):
            some = replace(problem, features=problem.features[:, :batch].contiguous())
            calls = rankings(some, K)
            recorder.measure(
                versus(top_labels_way(some, isa, ranking_threads), calls), f"rankings of {batch}"
            )
            calls.clear()
    ours = fused_way({"sgd": OptimizerState()}, Case(problem), "bce", "sgd", isa, threads)
    if "sparse" in chosen.peers:
        for name, make_peer in SPARSE_STEPS.items():
            torch.set_num_threads(threads)
            peer: Step = make_peer(problem, threads)
            try:
                check_step(name, peer, problem, learning_rate=0.0)
            except AssertionError as error:  # torch's own products go wrong at some sizes
                print(f"{name}: left out, its result is wrong: {error}", flush=True)
                continue
            recorder.measure(versus(ours, {name: partial(peer.step, LEARNING_RATE)}), name)
            del peer
            gc.collect()
    if "dense" in chosen.peers:
        generator = torch.Generator().manual_seed(0)
        dense = replace(problem, features=torch.randn(DENSE_INPUTS, problem.batch, generator=generator))
        weight = torch.randn(problem.labels, DENSE_INPUTS, generator=generator).div_(DENSE_INPUTS**0.5)
        facts = {"inputs": DENSE_INPUTS, "fan_in": DENSE_INPUTS, "index_dtype": ""}
        for name, make_dense in DENSE_STEPS.items():
            peer = make_dense(dense, weight)
            recorder.measure(versus(ours, {name: partial(peer.step, LEARNING_RATE)}, facts), name)
            del peer
            gc.collect()


def versus(
    ours: Way, calls: Mapping[str, Callable[[], object]], facts: Mapping[str, Any] | None = None
) -> list[Way]:
    """Return our way first and then the peers' ways to the same, some facts of which may differ."""
    merged = {**ours.facts, **(facts or {})}
    return [ours, *(Way(name, ours.op, call, ours.threads, facts=merged) for name, call in calls.items())]


def facts_of(problem: Problem) -> dict[str, Any]:
    """Return what a row says of a problem."""
    names = ("labels", "inputs", "batch", "fan_in", "group_size")
    dtypes = {"weight_dtype": name_of(problem.weight.dtype), "index_dtype": name_of(problem.indices.dtype)}
    return {name: getattr(problem, name) for name in names} | dtypes


if __name__ == "__main__":
    main()
