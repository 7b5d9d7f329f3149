"""The split of the multi-positive loss over workers: equal to one process, and what it communicates."""

from __future__ import annotations

import multiprocessing
import os
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from contrastive import dense_loss, lists, problem
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import TIMEOUT, in_workers, shared_import_path

from xmlc.errors import WorkerError
from xmlc.losses import KINDS, MultiPositive, multi_positive_loss
from xmlc.parallel import Workers

QUERIES, KEYS, D = 13, 17, 5


def parts(total: int, size: int) -> list[slice]:
    """Cut rows unevenly: worker r gets a share proportional to r + 1, so that of few rows some have none."""
    weights = list(range(1, size + 1))
    bounds = [total * part // sum(weights) for part in accumulate(weights, initial=0)]
    return [slice(*bound) for bound in pairwise(bounds)]


IGNORED = (torch.arange(QUERIES)[:, None] + torch.arange(KEYS)) % 6 == 0


class Towers(nn.Module):
    """Two linear encoders and a loss with parameters, seen by DDP as one module."""

    def __init__(self, kind: Any, layout: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.query, self.key = nn.Linear(D, 4).double(), nn.Linear(D, 4).double()
        learn = kind == "sigmoid"
        self.loss = MultiPositive(
            kind, temperature=0.6, learn_scale=True, learn_bias=learn, layout=layout, tile=3
        ).double()

    def forward(self, queries: Tensor, keys: Tensor, *pairs: list[list[int]]) -> Tensor:
        return self.loss(self.query(queries), self.key(keys), *pairs)


def one_process(kind: str, ignored: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    queries, keys, positive = problem(QUERIES, KEYS, D)
    towers = Towers(kind, "auto")
    loss = dense_loss(
        towers.query(queries),
        towers.key(keys),
        positive,
        kind,
        towers.loss.log_scale.exp(),
        towers.loss.bias,
        ignored,
    )
    return loss.detach(), stepped(towers, loss)


def stepped(towers: Towers, loss: Tensor) -> list[Tensor]:
    """Take a step of an optimizer; return all gradients and what they make of the parameters."""
    loss.backward()
    learnt = [value for value in towers.parameters() if value.grad is not None]
    torch.optim.SGD(learnt, lr=0.5, momentum=0.9).step()
    return [value.grad for value in learnt if value.grad is not None] + [value.detach() for value in learnt]


def check_split(rank: int, size: int) -> list[str]:
    """Compare every kind and layout with one process; return what differs."""
    queries, keys, positive = problem(QUERIES, KEYS, D)
    own, own_keys = parts(QUERIES, size)[rank], parts(KEYS, size)[rank]
    wrong = []
    for kind, ignored in product(KINDS, (None, IGNORED)):
        loss_truth, truth = one_process(kind, ignored)
        others = [] if ignored is None else [lists(ignored[own])]
        for layout in ("row", "column", "auto"):
            towers = Towers(kind, layout)
            copy = DistributedDataParallel(towers)
            loss = copy(queries[own], keys[own_keys], lists(positive[own]), *others)
            found = stepped(towers, loss)
            close = len(found) == len(truth) and all(
                torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
                for ours, theirs in zip(found, truth, strict=True)
            )
            if not close or not torch.allclose(loss, loss_truth, rtol=1e-12):
                wrong.append(f"{kind} {layout} {ignored is None}")
    return wrong


def count_collectives(rank: int, size: int) -> dict[str, dict[str, int]]:
    queries, keys, positive = problem(QUERIES, KEYS, D)
    own, own_keys = parts(QUERIES, size)[rank], parts(KEYS, size)[rank]
    calls = {}
    for layout in ("row", "column"):
        for kind in KINDS:
            workers = Workers()
            mine = queries[own].requires_grad_(), keys[own_keys].requires_grad_()
            multi_positive_loss(
                *mine,
                lists(positive[own]),
                kind=kind,
                layout=layout,
                workers=workers,
                tile=2,  # type: ignore[arg-type]
            ).backward()
            calls[f"{layout} {kind}"] = workers.calls
    return calls


def check_all(rank: int, size: int) -> tuple[list[str], dict[str, dict[str, int]]]:
    return check_split(rank, size), count_collectives(rank, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_after_ddps_mean_equal_one_process(size: int, tmp_path: Path) -> None:
    for wrong, calls in in_workers(size, check_all, tmp_path):
        assert wrong == []
        if size == 1:
            assert not any(calls.values())
            continue
        for kind in KINDS:
            # Sizes and keys; the mean; the keys' gradient. However many tiles there are.
            assert calls[f"row {kind}"] == {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 1}
        # Sizes, number of positives, positives of each row, positives, queries; then the rows' sums.
        reduces = {"sigmoid": 1, "softmax": 3, "decoupled_softmax": 3}
        for kind, reduce in reduces.items():
            assert calls[f"column {kind}"] == {"all_gather": 5, "all_reduce": reduce, "reduce_scatter": 1}


def be_killed_or_report(rank: int, size: int, folder: str) -> None:
    """Kill worker 1 before the loss; the others write down how they ended."""
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    distributed.barrier()
    if rank == 1:
        os._exit(9)
    try:
        multi_positive_loss(torch.randn(2, 3), torch.randn(2, 3), [[0], [1]])
        message = "no error"
    except WorkerError as error:
        message = str(error)
    Path(folder, f"survivor-{rank}").write_text(message)
    os._exit(0)  # the group has lost a member and cannot be taken down in order


def test_the_other_workers_stop_with_a_message_when_one_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=be_killed_or_report, args=(rank, 3, str(tmp_path))) for rank in range(3)
    ]
    with shared_import_path():
        for worker in workers:
            worker.start()
    try:
        for worker in workers:
            worker.join(timeout=90)
        assert [worker.exitcode for worker in workers] == [0, 9, 0]
    finally:
        for worker in workers:
            worker.kill()
    for rank in (0, 2):
        message = (tmp_path / f"survivor-{rank}").read_text()
        assert f"all_gather needs all 3 workers, worker {rank} found" in message
        assert "another worker has stopped or failed" in message
