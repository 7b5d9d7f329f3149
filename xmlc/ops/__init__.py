"""The native operations, one file each. Batch is the innermost axis: [label, batch], [input, batch]."""

from xmlc.ops.fused_step import LOSSES, OptimizerState, binary_cross_entropy, fused_step, squared_hinge
from xmlc.ops.redistribute import redistribute
from xmlc.ops.sparse_linear import dense_weight, sparse_linear, sparse_linear_reference
from xmlc.ops.top_labels import top_labels, top_labels_reference

__all__ = [
    "LOSSES",
    "OptimizerState",
    "binary_cross_entropy",
    "dense_weight",
    "fused_step",
    "redistribute",
    "sparse_linear",
    "sparse_linear_reference",
    "squared_hinge",
    "top_labels",
    "top_labels_reference",
]
