"""Label propensities: how likely a true label is to be recorded, by its training frequency."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from xmlc.errors import ConfigError, DataError


def inverse_propensity(
    train_counts: npt.NDArray[np.integer], instances: int, a: float, b: float
) -> npt.NDArray[np.float64]:
    """Return 1 / p of every label by the empirical model of Jain et al. 2016 (section 4).

    1 / p_l = 1 + C (N_l + b)^(-a)  with  C = max(ln N - 1, 0) (b + 1)^a

    where N is ``instances`` and N_l is ``train_counts[l]``. The model is meant for large N. For N < e,
    that is, one or two instances, ln N - 1 is negative and the published formula would give "probabilities"
    above 1 or below 0; C is then 0 and every label has propensity 1.

    Args:
        train_counts: Integer [label]; training instances that carry the label. Count the original training
            set: label texts added as instances would make rare labels look more frequent.
        instances: Instances in the training set, at least 1.
        a: Exponent A of the data set (Amazon 0.6, Wikipedia 0.5, otherwise 0.55).
        b: Offset B of the data set (Amazon 2.6, Wikipedia 0.4, otherwise 1.5), above 0.

    Returns:
        float64 [label], every value at least 1.

    Raises:
        DataError: ``train_counts`` is not an integer vector in [0, instances], or there is no instance.
        ConfigError: ``a`` is negative or ``b`` is not above 0, or one is not finite, or the result is not.
    """
    if not (math.isfinite(a) and math.isfinite(b) and a >= 0.0 and b > 0.0):
        raise ConfigError(
            f"propensity: a must be at least 0 and b above 0, both finite, found a = {a}, b = {b}; "
            "see the A and B of the data set's card"
        )
    if instances < 1:
        raise DataError(
            f"propensity: a training set must have at least 1 instance, found {instances}; "
            "pass the size of the original training set"
        )
    if train_counts.ndim != 1 or train_counts.dtype.kind not in "iu":
        raise DataError(
            f"propensity: train_counts must be integers [label], found {train_counts.dtype} "
            f"{list(train_counts.shape)}; count each label's training instances"
        )
    if train_counts.size and not 0 <= train_counts.min() <= train_counts.max() <= instances:
        raise DataError(
            f"propensity: train_counts must lie in [0, instances] = [0, {instances}], found "
            f"[{train_counts.min()}, {train_counts.max()}]; count each label's training instances once"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        scale = max(math.log(instances) - 1.0, 0.0) * np.float64(b + 1.0) ** a
        inverse = train_counts.astype(np.float64)  # in place from here: one vector of millions is enough
        inverse += b
        inverse **= -a
        inverse *= scale
        inverse += 1.0
    if not np.isfinite(inverse).all():
        raise ConfigError(
            f"propensity: a and b must give finite propensities, found a = {a}, b = {b}; "
            "see the A and B of the data set's card"
        )
    return inverse
