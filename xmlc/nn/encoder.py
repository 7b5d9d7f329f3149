"""Encoders: from an instance's features to hidden [batch, hidden]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from xmlc.data.batches import Batch, Rows
from xmlc.data.rows import CsrRows, TokenRows, unit_length
from xmlc.errors import DataError


class BagOfWords(nn.Module):
    """Sum of embeddings: ``hidden[b] = sum_f features[b, f] * embedding[f]``, for sparse features.

    An instance without features gets zeros. The gradient of the embedding is sparse: only the batch's rows.
    """

    def __init__(
        self, feature_count: int, hidden: int, scale_to_unit_length: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.scale_to_unit_length = scale_to_unit_length
        # Small, so that training shapes the embedding: with unit variance, the random directions of the
        # start dominate and a model of 1,836 features (bibtex) memorises instead.
        self.embedding = nn.Parameter(
            torch.empty(feature_count, hidden).normal_(0.0, 0.1, generator=generator)
        )

    def forward(self, batch: Batch, dropout: float, generator: torch.Generator) -> Tensor:
        """Return hidden [batch, hidden]; ``dropout`` removes features and scales the others up."""
        features = self.rows(batch)
        values = _values(features)
        return functional.embedding_bag(
            torch.from_numpy(np.asarray(features.indices)).long().to(self.embedding.device),
            self.embedding,
            torch.from_numpy(np.asarray(features.offsets)).to(self.embedding.device),
            mode="sum",
            sparse=True,
            per_sample_weights=drop(values, dropout, generator).to(self.embedding.device),
            include_last_offset=True,
        )

    def rows(self, batch: Batch) -> CsrRows:
        """Return the batch's features [batch, feature] as the encoder sees them, before dropout."""
        features = batch.features
        if not isinstance(features, CsrRows):
            raise DataError(f"encoder: features must be sparse, found {_described(features)}")
        return unit_length(features) if self.scale_to_unit_length else features


class DenseFeatures(nn.Module):
    """Precomputed features: hidden is what the data set holds."""

    place: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.register_buffer("place", torch.empty(0), persistent=False)  # goes where the model goes

    def forward(self, batch: Batch, dropout: float, generator: torch.Generator) -> Tensor:
        """Return the batch's features [batch, hidden], after dropout."""
        features = batch.features
        if not isinstance(features, np.ndarray):
            raise DataError(
                f"encoder: features must be dense [instance, {self.hidden}], found {_described(features)}"
            )
        values = torch.from_numpy(np.array(features, dtype=np.float32))
        return drop(values, dropout, generator).to(self.place.device)


def _described(features: Rows) -> str:
    if isinstance(features, CsrRows):
        return "sparse ones"
    return "tokens" if isinstance(features, TokenRows) else f"dense {list(features.shape)}"


def drop_features(features: CsrRows, probability: float, generator: torch.Generator) -> CsrRows:
    """Return the features after dropout."""
    return replace(features, values=drop(_values(features), probability, generator).numpy())


def _values(features: CsrRows) -> Tensor:
    if features.values is None:
        return torch.ones(len(features.indices))
    return torch.from_numpy(np.asarray(features.values))


def drop(values: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Zero each value with this probability and scale the others by ``1 / (1 - probability)``.

    The generator is the CPU's, so that every device drops the same.
    """
    if probability == 0.0:
        return values
    kept = torch.empty(values.shape).bernoulli_(1.0 - probability, generator=generator).to(values.device)
    return values * kept / (1.0 - probability)
