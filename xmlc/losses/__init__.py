"""Contrastive losses between the embeddings of instances and of label texts."""

from xmlc.losses.multi_positive import KINDS, MultiPositive, multi_positive_loss

__all__ = ["KINDS", "MultiPositive", "multi_positive_loss"]
