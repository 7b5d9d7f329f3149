"""The nearest of many embeddings, nearly always, by inverted lists (the package faiss)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmlc.data.rows import CsrRows, Int64
from xmlc.errors import ConfigError
from xmlc.nn.nearest import nearest

KEYS_OF_A_LIST = 39
"""At least, on average; of fewer, k-means makes no good centres."""


@cache
def faiss() -> Any:
    """Import the package `faiss`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"approximate search: needs the package of the extra `search`, found none ({error}); install it "
            "with `pip install 'xmlc[search]'`, or search exactly"
        ) from None
    return faiss


class ApproximateIndex:
    """Keys in lists around the centres of a k-means; a query looks at the lists of its nearest centres only.

    There are ``4 * sqrt(keys)`` lists, so that with 32 ``probes`` a query meets 1.8 % of 200,000 keys, and
    their exact products. What lies in other lists is missed. The same keys give the same index.
    """

    def __init__(self, keys: Tensor, probes: int) -> None:
        """Make the lists of keys [key, d] of unit length; memory is a float32 copy of them.

        Raises:
            ConfigError: faiss is not installed.
        """
        self.keys = keys
        self.probes = probes
        count, units = keys.shape
        vectors = _vectors(keys)
        lists = max(1, min(round(4 * math.sqrt(count)), count // KEYS_OF_A_LIST))
        faiss().omp_set_num_threads(torch.get_num_threads())
        self._centres = faiss().IndexFlatIP(units)
        self._index = faiss().IndexIVFFlat(self._centres, units, lists, faiss().METRIC_INNER_PRODUCT)
        self._index.cp.spherical = True
        self._index.cp.min_points_per_centroid = 1  # it says so on stderr where there are fewer than 39
        self._index.train(vectors)
        self._index.add(vectors)
        self._index.nprobe = min(probes, lists)

    def search(self, queries: Tensor, k: int, excluded: CsrRows | None = None) -> tuple[Tensor, Tensor]:
        """Return k high products of queries and keys, and their keys, as `nearest` does.

        A query whose lists hold fewer than k keys that are not excluded is searched exactly.
        """
        out = np.zeros(len(queries), np.int64) if excluded is None else np.diff(excluded.offsets)
        asked = min(k + int(out.max(initial=0)), len(self.keys))
        found, numbers = self._index.search(_vectors(queries), asked)
        usable = numbers >= 0
        if excluded is not None:
            usable &= ~_among(numbers, excluded)
        # What is not usable goes behind what is, in the order of the products.
        order = np.argsort(~usable, axis=1, kind="stable")[:, :k]
        scores = torch.from_numpy(np.take_along_axis(found, order, 1)).to(queries)
        labels = torch.from_numpy(np.take_along_axis(numbers, order, 1)).to(queries.device)
        short = np.flatnonzero(usable.sum(1) < k)
        if len(short):
            rows = torch.from_numpy(short).to(queries.device)
            pairs = None if excluded is None else excluded.take(short)
            scores[rows], labels[rows] = nearest(queries[rows], self.keys, k, pairs)
        return scores, labels


def _vectors(embeddings: Tensor) -> Any:
    """Return embeddings as faiss takes them."""
    return np.ascontiguousarray(embeddings.detach().float().cpu().numpy())


def _among(numbers: Int64, pairs: CsrRows) -> Any:
    """Return which of the keys [query, asked] are paired with their query."""
    columns = pairs.columns
    rows = np.arange(len(numbers), dtype=np.int64)[:, None]
    known = pairs.entry_rows.astype(np.int64) * columns + pairs.indices
    return np.isin(rows * columns + numbers, known)
