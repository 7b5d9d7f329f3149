"""Ranking metrics and propensities on the CPU; needs numpy and scipy only."""

from xmlc.metrics.propensity import inverse_propensity
from xmlc.metrics.ranking import DECILES, Report, evaluate, label_deciles, mask_pairs

__all__ = ["DECILES", "Report", "evaluate", "inverse_propensity", "label_deciles", "mask_pairs"]
