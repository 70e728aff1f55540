"""The error bounds of distillation_loss and its gradient.

u is half an ulp of 1 in the work type, q the quantum of a sum, n the classes, k the teacher's best ones; δ is what the
scaling by 1 / T, which is exact for powers of two, leaves of the logits: 3u |z|. η, half of the smallest subnormal, is
added for every product. Where a result or an intermediate term overflows, the bound is infinite.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, sum_error, ulp
from isograd.numerics.losses import divisor, reduced_error
from isograd.numerics.storage import compute_dtype
from isograd.ops.distillation_loss import reference as ref

Floats = NDArray[Any]
_WIDE = np.longdouble


def _delta(z: Floats, temperature: float, u: float, eta: float) -> Floats:
    """What the scaled logits are off by; nothing where the scaling is exact, unless they are subnormal."""
    exact = math.frexp(temperature)[0] == 0.5
    return np.where(np.isfinite(z), (0 if exact else 3 * u * np.abs(z)) + (0 if temperature == 1 else eta), 0)


def _mean(p: Floats, values: Floats) -> Floats:
    """The mean of finite values under a distribution, one a row."""
    return np.asarray(np.where(p > 0, p * values, 0).sum(-1, keepdims=True))


class _Rows:
    """Rows of scaled logits: the exact distribution and how far off its parts are."""

    def __init__(self, logits: Floats, temperature: float, dtype: str) -> None:
        u, bits, eta, largest = limits(dtype)
        n = logits.shape[-1]
        z = logits.astype(_WIDE) / _WIDE(temperature)
        self.log_p = ref._oracle_log_softmax(z)
        self.p = np.exp(self.log_p)
        delta = _delta(z, temperature, u, eta)
        m = np.abs(np.max(z, axis=-1, keepdims=True, initial=-np.inf))
        # Where a logit, or its distance from the largest, overflows.
        finite = np.isfinite(z)
        spread = np.max(np.where(finite, np.abs(z), 0), axis=-1, keepdims=True, initial=0)
        self.large = (2 * spread > largest)[..., 0]
        self.shift = delta + _mean(self.p, delta)  # of a log-probability, by the scaling
        self.log_error = self.shift + 2 * n * 2.0**-bits + u * (0.35 + 0.1 * math.log(max(n, 1))) + 8 * u * u * m
        # Half an ulp for the last rounding, 1.0 u for the exponential and 0.3 u for the sum.
        self.relative = 2.4 * u + n * 2.0**-bits + np.expm1(np.minimum(self.shift, 50))


def _row_terms(dtype: str, student: Floats, teacher: Floats, temperature: float) -> tuple[Floats, Floats]:
    u, _, eta, _ = limits(dtype)
    terms = ref.oracle_distillation_terms(student, teacher, None, temperature)
    s, t = _Rows(student, temperature, dtype), _Rows(teacher, temperature, dtype)
    d = np.where(t.p > 0, np.abs(t.log_p - s.log_p), 0)
    errors = t.p * (t.log_error + s.log_error + 1.1 * u * d) + d * (t.p * (t.relative + 1.1 * u) + 4 * eta) + 2 * eta
    return terms, np.where(np.isfinite(terms), errors, 0)


def _rest_error(log_p: Floats, dtype: str) -> Floats:
    """How far the teacher's rest is off."""
    u, bits, _, _ = limits(dtype)
    return np.asarray(2 * u * np.exp(log_p).sum(-1) + log_p.shape[-1] * 2.0 ** (1 - bits) + u)


def _rest_relative(dtype: str, n: int) -> float:
    """The relative error that quanta cause in the sum over the student's rest."""
    return float(2 * n * 2.0 ** (ref.REST_BITS - limits(dtype)[1]))


def _top_terms(dtype: str, student: Floats, teacher: Floats, indices: Any, temperature: float) -> tuple[Floats, Floats]:
    u, _, eta, _ = limits(dtype)
    terms = ref.oracle_distillation_terms(student, teacher, indices, temperature)
    log_p, log_q, p_rest, log_q_rest = ref.oracle_rest(student, teacher, indices, temperature)
    s, p = _Rows(student, temperature, dtype), np.exp(log_p)
    at = np.take_along_axis(np.broadcast_to(s.log_error, student.shape), indices.astype(np.int64), -1)
    d = np.where(p > 0, np.abs(log_p - log_q), 0)
    errors = p * (at + 1.1 * u * np.where(p > 0, np.abs(log_q), 0) + 4.3 * u * d) + d * 4 * eta + 2 * eta
    off = _rest_error(log_p, dtype)
    most = np.max(s.log_error, axis=-1, initial=0)
    about = np.abs(np.log(off)) + np.abs(log_q_rest) + 2
    rest = 2 * off * about + p_rest * (2 * most + _rest_relative(dtype, student.shape[-1]) + 6 * u * about)
    rest = np.where(log_q_rest == -np.inf, 0, rest)
    errors = np.concatenate([errors, rest[..., None]], axis=-1)
    return terms, np.where(np.isfinite(terms), errors, 0)


def distillation_loss(
    dtype: str,
    student: Floats,
    teacher: Floats,
    indices: Any = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """Of the loss."""
    u, _, _, _ = limits(dtype)
    with np.errstate(all="ignore"):
        if student.size == 0:
            losses = np.zeros(student.shape[:-1], _WIDE)
            return reduced_error(losses, losses, reduction, dtype)
        if indices is None:
            terms, errors = _row_terms(dtype, student, teacher, temperature)
            large = _Rows(student, temperature, dtype).large | _Rows(teacher, temperature, dtype).large
        else:
            terms, errors = _top_terms(dtype, student, teacher, indices, temperature)
            large = _Rows(student, temperature, dtype).large
        losses = _WIDE(temperature) ** 2 * terms.sum(-1)
        error = _WIDE(temperature) ** 2 * (errors.sum(-1) + sum_error(terms, compute_dtype(dtype), -1))
        exact = math.frexp(temperature)[0] == 0.5
        error = error + ulp(losses, compute_dtype(dtype)) / 2 + (0 if exact else 4.1 * u * np.abs(losses))
        return reduced_error(losses, np.where(np.isfinite(losses), np.where(large, np.inf, error), 0), reduction, dtype)


def distillation_loss_backward(
    dtype: str,
    dloss: Floats,
    student: Floats,
    teacher: Floats,
    indices: Any = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """Of dstudent."""
    u, _, eta, largest = limits(dtype)
    if student.size == 0:
        return student.astype(_WIDE)
    with np.errstate(all="ignore"):
        dx = ref.oracle_distillation_loss_backward(dloss, student, teacher, indices, temperature, reduction)
        count = 1 if reduction == "none" else divisor(reduction, student.shape[:-1])
        g = np.abs(np.broadcast_to(dloss, student.shape[:-1]).astype(_WIDE))[..., None] * _WIDE(temperature) / count
        s = _Rows(student, temperature, dtype)
        error, large = s.p * s.relative, s.large[..., None]
        if indices is None:
            t = _Rows(teacher, temperature, dtype)
            error, large = error + t.p * t.relative, large | t.large[..., None]
        else:
            log_p, _, p_rest, log_q_rest = ref.oracle_rest(student, teacher, indices, temperature)
            share = np.where(s.p > 0, np.exp(s.log_p - log_q_rest[..., None]), 0)
            relative = (4 + 4 * np.abs(s.log_p - log_q_rest[..., None])) * u + 2 * s.log_error
            relative = relative + _rest_relative(dtype, student.shape[-1])
            rest = share * (_rest_error(log_p, dtype)[..., None] + p_rest[..., None] * np.expm1(relative))
            rest = np.where(share > 0, rest, 0)
            where = indices.astype(np.int64)
            np.put_along_axis(rest, where, 3 * u * np.exp(log_p), -1)
            error = error + np.where(log_q_rest[..., None] == -np.inf, 0, rest)
            np.put_along_axis(error, where, np.take_along_axis(error, where, -1) + 3 * u * np.exp(log_p), -1)
        error = g * (error + 8 * eta) + 6 * u * np.abs(dx) + (2 + 2 * temperature) * eta + ulp(dx, dtype) / 2
        large = large | (g > largest) | (np.abs(dx) > LARGEST[dtype])
        return np.where(np.isfinite(dx) & large, np.inf, error)
