"""Contrastive losses between the embeddings of instances and of label texts."""

from xmlc.losses.gradient_cache import GradientCache
from xmlc.losses.multi_positive import KINDS, MultiPositive, multi_positive_loss
from xmlc.losses.pool import LabelPool, label_pool

__all__ = ["KINDS", "GradientCache", "LabelPool", "MultiPositive", "label_pool", "multi_positive_loss"]
