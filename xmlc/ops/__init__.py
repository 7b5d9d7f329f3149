"""The native operations, one file each. Batch is the innermost axis: [label, batch], [input, batch]."""

from xmlc.ops.float8 import quantise, widen
from xmlc.ops.fused_step import LOSSES, Normaliser, OptimizerState, fused_step, pairs_by_label
from xmlc.ops.log_normaliser import LabelSums, log_normaliser
from xmlc.ops.logit_offsets import LogitOffsets
from xmlc.ops.redistribute import redistribute
from xmlc.ops.sparse_linear import dense_weight, sparse_linear, sparse_linear_reference
from xmlc.ops.top_labels import top_labels, top_labels_reference

__all__ = [
    "LOSSES",
    "LabelSums",
    "LogitOffsets",
    "Normaliser",
    "OptimizerState",
    "dense_weight",
    "fused_step",
    "log_normaliser",
    "pairs_by_label",
    "quantise",
    "redistribute",
    "sparse_linear",
    "sparse_linear_reference",
    "top_labels",
    "top_labels_reference",
    "widen",
]
