"""Numbers added to single logits, in the fused step and in top-k, against float64 truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import LOSSES, LogitOffsets, OptimizerState, fused_step, sparse_linear_reference, top_labels

SHAPES = {
    "awkward": {},
    "one instance": {"batch": 1, "label": 7, "fan_in": 3, "input": 9},
    "wide tiles": {"batch": 130, "label": 70, "fan_in": 5, "input": 20},
    "by_strips": {"batch": 70, "label": 90, "fan_in": 8, "input": 17_000},
    "grouped": {"group_size": 16, "label": 50},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def random_offsets(label: int, batch: int, entry: int) -> LogitOffsets:
    """Draw entries over the first half of the labels; a pair may repeat."""
    generator = np.random.default_rng([label, batch, entry])
    labels = np.sort(generator.integers(0, max(1, label // 2), entry)).astype(np.int32)
    return LogitOffsets.of(
        torch.from_numpy(labels),
        torch.from_numpy(generator.integers(0, batch, entry).astype(np.int32)),
        torch.from_numpy(generator.standard_normal(entry).astype(np.float32)),
    )


def dense(offsets: LogitOffsets, value: Tensor, label: int, batch: int) -> Tensor:
    """Return the sums of all entries, [label, batch]."""
    places = (offsets.label.long(), offsets.instance.long())
    return torch.zeros(label, batch, dtype=value.dtype).index_put(places, value, accumulate=True)


def step(
    problem: oracles.Problem, offsets: LogitOffsets | None, loss: str, cutoff: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Run one step of plain SGD on the problem's own tensors."""
    return fused_step(
        *problem.of_step,
        loss=loss,
        optimizer=OptimizerConfig(kind="sgd"),
        learning_rate=0.5,
        state=OptimizerState(),
        step=1,
        gradient_cutoff=cutoff,
        group_size=problem.group_size,
        offsets=offsets,
    )


@shapes
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_with_offsets_is_that_of_the_dense_formula(
    backend: str, shape: dict[str, int], loss: str
) -> None:
    problem = oracles.make_problem(**shape)
    label, batch = len(problem.weight), problem.features.shape[1]
    offsets = random_offsets(label, batch, 3 * label)
    features = problem.features.double().requires_grad_()
    weight = problem.weight.double().requires_grad_()
    value = offsets.value.double().requires_grad_()
    logits = sparse_linear_reference(
        features, weight, problem.indices, problem.bias.double(), problem.group_size
    ) + dense(offsets, value, label, batch)
    positive = torch.zeros(label, batch, dtype=torch.bool)
    positive[problem.labels, torch.arange(batch).repeat_interleave(problem.offsets.diff())] = True
    expected = LOSSES[loss](logits, positive, torch.ones_like(logits)).sum()
    expected.backward()

    loss_sum, feature_gradient = step(problem, offsets, loss)

    close = {"rtol": 2e-4, "atol": 2e-5}
    torch.testing.assert_close(loss_sum, expected.detach(), **close)
    torch.testing.assert_close(offsets.gradient.double(), value.grad, **close)
    torch.testing.assert_close(feature_gradient.double(), features.grad, **close)
    torch.testing.assert_close(problem.weight.double(), weight.detach() - 0.5 * weight.grad, **close)


@shapes
def test_top_labels_rank_logits_with_their_offsets(backend: str, shape: dict[str, int]) -> None:
    problem = oracles.make_problem(**shape)
    label, batch = len(problem.weight), problem.features.shape[1]
    offsets = random_offsets(label, batch, 3 * label)
    logits = sparse_linear_reference(
        problem.features.double(),
        problem.weight.double(),
        problem.indices,
        problem.bias.double(),
        problem.group_size,
    ) + dense(offsets, offsets.value.double(), label, batch)
    expected, ranked = logits.T.sort(dim=1, descending=True, stable=True)
    layer = (problem.features, problem.weight, problem.indices, problem.bias)
    scores, labels = top_labels(*layer, 5, problem.group_size, offsets)
    torch.testing.assert_close(scores.double(), expected[:, :5], rtol=1e-5, atol=1e-5)
    assert (labels == ranked[:, :5]).all()
    assert not (labels == top_labels(*layer, 5, problem.group_size)[1]).all()


def test_no_offsets_leave_the_bits_of_a_step(backend: str) -> None:
    with_none, without = oracles.make_problem(), oracles.make_problem()
    none = LogitOffsets.of(
        *(torch.empty(0, dtype=kind) for kind in (torch.int32, torch.int32, torch.float32))
    )
    loss, gradient = step(with_none, none, "bce")
    expected, expected_gradient = step(without, None, "bce")
    assert loss == expected
    assert oracles.bits(gradient) == oracles.bits(expected_gradient)
    assert oracles.bits(with_none.weight) == oracles.bits(without.weight)


def test_a_label_below_the_cutoff_gives_its_offsets_no_gradient(backend: str) -> None:
    problem = oracles.make_problem(label=40, batch=16)
    problem.bias.fill_(-30.0)
    problem = replace(
        problem, offsets=torch.zeros(17, dtype=torch.int64), labels=torch.empty(0, dtype=torch.int64)
    )
    offsets = random_offsets(40, 16, 60)
    step(problem, offsets, "bce", cutoff=1e-3)
    assert (offsets.gradient == 0.0).all()
    step(problem, offsets, "bce")
    assert (offsets.gradient > 0.0).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(backend: str, threads: int) -> None:
    def run(count: int) -> tuple[bytes, bytes, bytes]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            problem = oracles.make_problem(label=700, fan_in=16, input=200, batch=150)
            offsets = random_offsets(700, 150, 4000)
            _, gradient = step(problem, offsets, "softmax")
        finally:
            torch.set_num_threads(before)
        return oracles.bits(gradient), oracles.bits(offsets.gradient), oracles.bits(problem.weight)

    assert run(threads) == run(1)


@pytest.mark.parametrize(
    ("label", "instance", "value", "found"),
    [
        ([0, 65], [0, 0], [1.0, 1.0], "offsets.label must lie in [0, 65), got values from 0 to 65"),
        ([-1, 0], [0, 0], [1.0, 1.0], "offsets.label must lie in [0, 65), got values from -1 to 0"),
        ([0, 1], [0, 33], [1.0, 1.0], "offsets.instance must lie in [0, 33), got values from 0 to 33"),
        ([1, 0], [0, 0], [1.0, 1.0], "offsets.label must rise, got falling labels"),
        ([0, 1], [0], [1.0, 1.0], "offsets.instance must be int32 [entry] = [2], got int32 [1]"),
        ([0, 1], [0, 0], [1.0], "offsets.value must be float32 [entry] = [2], got float32 [1]"),
    ],
)
def test_wrong_offsets_are_refused(
    label: list[int], instance: list[int], value: list[float], found: str
) -> None:
    problem = oracles.make_problem()
    offsets = LogitOffsets.of(
        torch.tensor(label, dtype=torch.int32), torch.tensor(instance, dtype=torch.int32), torch.tensor(value)
    )
    for call in (
        lambda: step(problem, offsets, "bce"),
        lambda: top_labels(*problem.layer[:4], 5, 1, offsets),
    ):
        with pytest.raises(NativeError) as raised:
            call()
        assert found in str(raised.value)


def test_merged_offsets_rise_and_know_where_the_first_ones_are() -> None:
    def offsets(labels: list[int], start: float) -> LogitOffsets:
        count = len(labels)
        return LogitOffsets.of(
            torch.tensor(labels, dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            start + torch.arange(float(count)),
        )

    first, second = offsets([0, 2, 2, 5], 10.0), offsets([0, 1, 2, 6], 20.0)
    merged, places = first.merged(second)
    assert merged.label.tolist() == [0, 0, 1, 2, 2, 2, 5, 6]
    assert merged.value.tolist() == [10.0, 20.0, 21.0, 11.0, 12.0, 22.0, 13.0, 23.0]
    assert merged.value[places].tolist() == first.value.tolist()
    assert merged.instance[places].tolist() == first.instance.tolist()
