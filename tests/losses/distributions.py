"""What the tests of divergences, gumbel_softmax and sparsemax share: the operations, layouts, and awkward values."""

from typing import Any

import ml_dtypes
import numpy as np

from isograd.ops.distillation_loss import reference as divergence_reference
from isograd.ops.gumbel_softmax import reference as gumbel_reference
from isograd.ops.kl_div import reference as kl_reference
from isograd.ops.softmax import reference as softmax_reference
from isograd.ops.sparsemax import reference as sparsemax_reference

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
NAMES = {np.dtype(d): np.dtype(d).name for d in DTYPES}
REDUCTIONS = ("none", "sum", "mean", "batchmean")


def raw(x):
    x = np.asarray(x)
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def work(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def reference(operation: str) -> Any:
    for module in (divergence_reference, gumbel_reference, kl_reference, sparsemax_reference):
        if hasattr(module, operation):
            return getattr(module, operation)
    raise AssertionError(operation)


def values(rng, flavour, shape, dtype):
    """Logits, gradients: ordinary, far from zero, of every magnitude, the largest, special, or masked."""
    x = np.asarray(rng.standard_normal(shape) * 2)
    if flavour == "offset":
        x = x + rng.choice([1e4, -300, 255.9])
    elif flavour == "spread":
        x = x * np.exp2(rng.uniform(-160, 140, shape))
    elif flavour == "largest":
        x = x * float(ml_dtypes.finfo(dtype).max) / 10
    elif flavour == "special":
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, tiny, -3 * tiny, 3e38, -3e38, 6e4, -6e4])
        x = np.where(rng.random(shape) < 0.15, rng.choice(pool, shape), x)
    elif flavour == "masked":
        x = np.where(rng.random(shape) < 0.6, -np.inf, x)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def softmax(x, axis=-1):
    with np.errstate(all="ignore"):
        return softmax_reference.softmax(x, axis) if x.size else x


def log_softmax(x, axis=-1):
    with np.errstate(all="ignore"):
        return softmax_reference.log_softmax(x, axis) if x.size else x


def named(rng, logits, k, index=np.int64, dtype=None):
    """(log-probabilities, indices) of k distinct classes a row, the likely ones first half of the time."""
    with np.errstate(all="ignore"):
        wide = log_softmax(logits.astype(work(logits.dtype)))
    scores = wide if rng.random() < 0.5 else rng.random(wide.shape)
    indices = np.argsort(-np.nan_to_num(scores.astype(np.float64)), axis=-1, kind="stable")[..., :k]
    kept = np.take_along_axis(wide, indices, -1)
    return kept.astype(logits.dtype if dtype is None else dtype), indices.astype(index)


class Stored:
    """An array of `shape` whose dimensions are stored in any order, forwards or backwards, with gaps."""

    def __init__(self, shape, dtype, order, steps):
        self.base = np.full([shape[d] * abs(steps[d]) for d in order], np.array(7, dtype))
        cut = tuple(slice(None, None, steps[d]) for d in order)
        self.view = self.base[cut].transpose(np.argsort(order))
        inside = np.zeros(self.base.shape, bool)
        inside[cut] = True
        self._outside = ~inside
        assert self.view.shape == tuple(shape)

    def gaps_untouched(self):
        return bool(np.all(self.base[self._outside] == np.array(7, self.base.dtype)))


def laid_out(rng, x):
    """The same values in a random layout: dimensions in any order, backwards, with gaps."""
    if x.ndim == 0:
        return x
    stored = Stored(x.shape, x.dtype, rng.permutation(x.ndim), rng.choice([1, 1, 1, 2, -1, -2, 3], x.ndim))
    stored.view[...] = x
    return stored.view


def expanded(rng, x):
    """The first element repeated with stride 0 along a random axis."""
    if x.ndim == 0 or x.size == 0:
        return x
    axis = int(rng.integers(x.ndim))
    return np.broadcast_to(np.take(x, [0], axis), x.shape)
