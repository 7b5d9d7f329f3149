"""The model's layers. torch modules where autograd does the work, plain classes where it does not."""

from xmlc.nn.embeddings import EncodedTexts, TextEncoder, open_embeddings
from xmlc.nn.model import Model, Problem, weight_shapes
from xmlc.nn.similarity import Similarity
from xmlc.nn.two_tower import TwoTower, make_model

__all__ = [
    "EncodedTexts",
    "Model",
    "Problem",
    "Similarity",
    "TextEncoder",
    "TwoTower",
    "make_model",
    "open_embeddings",
    "weight_shapes",
]
