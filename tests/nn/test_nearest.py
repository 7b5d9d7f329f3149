"""The nearest embeddings, block by block, equal a sort of all scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xmlc.data.rows import CsrRows
from xmlc.nn import nearest as module
from xmlc.nn.nearest import nearest


@pytest.mark.parametrize("block", [1, 4, 7, 100])
@pytest.mark.parametrize("k", [1, 3, 23])
def test_it_equals_a_stable_sort_of_all_scores(block: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_AT_ONCE", block)
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers: many ties, and no rounding.
    queries = torch.randint(-1, 2, (6, 3), generator=generator).double()
    keys = torch.randint(-1, 2, (23, 3), generator=generator).double()
    queries[2] = 0.0
    out = np.random.default_rng(0).random((6, 23)) < 0.2
    excluded = CsrRows(np.r_[0, np.cumsum(out.sum(1))], np.nonzero(out)[1].astype(np.int32), None, columns=23)
    for pairs in (None, excluded):
        scores = queries @ keys.T
        if pairs is not None:
            scores[torch.from_numpy(out)] = -torch.inf
        best, order = scores.sort(dim=1, descending=True, stable=True)
        found, labels = nearest(queries, keys, k, pairs)
        assert torch.equal(found, best[:, :k])
        assert torch.equal(labels, order[:, :k])
