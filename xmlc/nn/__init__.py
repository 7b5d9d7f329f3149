"""The model's layers. torch modules where autograd does the work, plain classes where it does not."""

from xmlc.nn.model import Model, Problem, weight_shapes
from xmlc.nn.similarity import Similarity

__all__ = ["Model", "Problem", "Similarity", "weight_shapes"]
