"""Contrastive losses between the embeddings of instances and of label texts."""

from xmlc.losses.gradient_cache import GradientCache
from xmlc.losses.multi_positive import KINDS, MultiPositive, multi_positive_loss

__all__ = ["KINDS", "GradientCache", "MultiPositive", "multi_positive_loss"]
