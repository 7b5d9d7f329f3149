"""Direct connections from labels to sparse features, against the dense formula."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.data.rows import CsrRows
from xmlc.nn.direct import DirectConnections, DirectLogits

LABEL, FEATURE, FAN_IN, BATCH = 7, 11, 4, 5


def layer(kind: str = "adam") -> DirectConnections:
    """Return connections with random weights; label 0 has none, and every other label at least one."""
    generator = np.random.default_rng(0)
    direct = DirectConnections(LABEL, FEATURE, FAN_IN, OptimizerConfig(kind=kind))  # type: ignore[arg-type]
    indices = np.stack([generator.permutation(FEATURE)[:FAN_IN] for _ in range(LABEL)]).astype(np.int32)
    indices[0] = -1
    indices[1, 2:] = -1
    weight = generator.standard_normal((LABEL, FAN_IN)).astype(np.float32)
    direct.connect(indices, np.where(indices < 0, 0.0, weight).astype(np.float32))
    return direct


def batch(seed: int = 0, with_values: bool = True) -> CsrRows:
    """Draw a batch [instance, feature]; its last instance has no features."""
    matrix = scipy.sparse.random_array(
        (BATCH, FEATURE), density=0.3, format="lil", rng=seed, dtype=np.float32
    )
    matrix[BATCH - 1] = 0.0
    rows = CsrRows.from_scipy(matrix.tocsr(), "batch")
    return rows if with_values else CsrRows(rows.offsets, rows.indices, None, FEATURE)


def dense_weight(direct: DirectConnections) -> Tensor:
    """Return the weights as [label, feature], float64."""
    dense = torch.zeros(LABEL, FEATURE + 1, dtype=torch.float64)
    indices = direct.indices.long().where(direct.indices >= 0, torch.tensor(FEATURE))
    return dense.scatter_add(1, indices, direct.weight.double())[:, :FEATURE]


def dense_logits(logits: DirectLogits) -> Tensor:
    """Return the sums of the entries, [label, instance]."""
    offsets = logits.offsets
    places = (offsets.label.long(), offsets.instance.long())
    dense = torch.zeros(LABEL, BATCH, dtype=torch.float64)
    return dense.index_put(places, offsets.value.double(), accumulate=True)


def test_connections_are_not_copied() -> None:
    direct = layer()
    direct.logits(batch())
    indices = np.full((LABEL, FAN_IN), -1, np.int32)
    indices[:, 0] = FEATURE - 1
    weight = np.where(indices >= 0, 0.5, 0.0).astype(np.float32)
    direct.connect(indices, weight)

    logits = direct.logits(CsrRows(np.array([0, 1]), np.array([FEATURE - 1], np.int32), None, FEATURE))
    assert logits.offsets.value.tolist() == [0.5] * LABEL, "not by the features of the connections before"
    logits.offsets.gradient.fill_(1.0)
    direct.update(logits, 0.1, 1)
    assert np.array_equal(weight, direct.weight.numpy())
    assert (weight[:, 0] < 0.5).all()


@pytest.mark.parametrize("with_values", [True, False])
def test_logits_are_the_sparse_product(with_values: bool) -> None:
    direct, features = layer(), batch(with_values=with_values)
    logits = direct.logits(features)
    expected = dense_weight(direct) @ torch.from_numpy(features.to_scipy().toarray().astype(np.float64)).T
    torch.testing.assert_close(dense_logits(logits), expected, rtol=1e-6, atol=1e-6)
    assert (logits.offsets.label.diff() >= 0).all()


def test_a_batch_without_features_has_no_entries_and_updates_nothing() -> None:
    direct = layer()
    before = direct.weight.clone()
    logits = direct.logits(CsrRows(np.zeros(4, np.int64), np.empty(0, np.int32), None, FEATURE))
    assert len(logits.offsets.value) == 0
    direct.update(logits, 0.1, 1)
    assert (direct.weight == before).all()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_updates_are_those_of_torch_on_the_touched_weights(kind: str) -> None:
    """SparseAdam moves a row that its sparse gradient names; so does this each connection."""
    direct = layer(kind)
    parameter = torch.nn.Parameter(direct.weight.double().view(-1, 1).clone())
    expected: torch.optim.Optimizer = (
        torch.optim.SparseAdam([parameter], lr=0.1)
        if kind == "adam"
        else torch.optim.SGD([parameter], lr=0.1)
    )
    for step in range(1, 5):
        features = batch(seed=step)
        logits = direct.logits(features)
        logit_gradient = torch.randn(LABEL, BATCH, generator=torch.Generator().manual_seed(step))
        places = (logits.offsets.label.long(), logits.offsets.instance.long())
        logits.offsets.gradient.copy_(logit_gradient[places])
        direct.update(logits, 0.1, step)

        by_feature = logit_gradient.double() @ torch.from_numpy(features.to_scipy().toarray()).double()
        flat = direct.indices.view(-1).long()
        touched = torch.from_numpy(logits.connections)
        values = by_feature[touched // FAN_IN, flat[touched]].view(-1, 1)
        parameter.grad = torch.sparse_coo_tensor(
            touched[None], values, (LABEL * FAN_IN, 1), check_invariants=True
        )
        expected.step()
    torch.testing.assert_close(direct.weight.double().view(-1, 1), parameter.detach(), rtol=1e-4, atol=1e-5)
    assert (direct.weight[0] == 0.0).all()


def test_state_exists_only_where_the_optimizer_keeps_some() -> None:
    assert set(layer("adam").tensors()) == {"indices", "weight", "state.first", "state.second"}
    assert set(layer("sgd").tensors()) == {"indices", "weight"}


def test_new_connections_take_effect() -> None:
    direct, features = layer(), batch()
    direct.logits(features)
    generator = np.random.default_rng(1)
    indices = np.stack([generator.permutation(FEATURE)[:FAN_IN] for _ in range(LABEL)]).astype(np.int32)
    direct.connect(indices, np.ones((LABEL, FAN_IN), np.float32))
    expected = dense_weight(direct) @ torch.from_numpy(features.to_scipy().toarray().astype(np.float64)).T
    torch.testing.assert_close(dense_logits(direct.logits(features)), expected, rtol=1e-6, atol=1e-6)
