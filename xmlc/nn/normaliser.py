"""What a step under a softmax loss needs of the labels of all workers."""

from __future__ import annotations

import torch
from torch import Tensor

from xmlc.config import LossConfig
from xmlc.ops import LabelSums, Normaliser
from xmlc.parallel import Workers


def normaliser_of_all(
    own: LabelSums, loss: LossConfig, positive_weight: Tensor | None, workers: Workers
) -> Normaliser:
    """Bring the sums of all workers' labels together; in float64, [batch] numbers at a time.

    Takes 2 collectives. The loss is that of the own labels' positives: workers have to add it up.

    Args:
        own: Of this worker's labels and the batch of all workers.
        loss: A softmax loss.
        positive_weight: float32, of the own labels, or None for 1.
        workers: Each with its own labels and the same batch.
    """
    instance = own.instance.long()  # [pair]
    count = torch.bincount(instance, minlength=len(own.log_sum)).double()
    parts = workers.gather_rows(torch.stack([own.log_sum, count])[None], [1] * workers.size)
    log_sums, counts = parts.unbind(1)  # [worker, batch]
    log_sum = log_sums.logsumexp(0)  # -inf only where all workers sum nothing
    share = torch.ones_like(log_sum)
    if loss.reduction == "mean":
        share = 1.0 / counts.sum(0).clamp_min(1.0)
    weight = share[instance]
    if positive_weight is not None:
        weight = weight * positive_weight[own.label.long()]
    above = log_sum[instance] - own.logit
    if loss.kind == "softmax":
        value, slope = above, torch.ones_like(above)
    else:
        value, slope = torch.logaddexp(above, torch.zeros_like(above)), above.sigmoid()
    factor = torch.zeros_like(log_sum).index_add_(0, instance, weight * slope)
    return Normaliser(log_sum, workers.sum(factor), share, (weight * value).sum())
