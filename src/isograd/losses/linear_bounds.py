"""The error bounds of linear_cross_entropy: those of cross entropy at the exact logits, and what the products add.

With E_j the bound of a logit and E its maximum over a row, and with the notation of `cross_entropy_bounds.py`:

    loss        that of cross entropy + 2 D E + 2z E (|lse| + E)
    gradient G of the logits
                that of cross entropy + |g| (|a| p (e^2E - 1) + 2z E p e^2E) + 2 ulp(G) of the storage type
    dhidden     B_G @ |weight| + the product's own, likewise dweight; dbias  Σ B_G + its sum's own

Gradients may come from logits that were computed twice, in products of different shapes: both are within E_j, and the
gradient takes the lesser of a logit and its row's maximum, so that p is off by a factor of at most e^2E either way.

An order-free product's own bound is rule 10's. A library's, with K the contracted length and sums in binary32, is
(K 2^-22 + s) Σ_k |a_k b_k| + K η + ulp/2, s being 2^-7 where partial sums may be 16 bits wide and 0 else; the sum of
dbias then has n 2^-22 Σ |G| + ulp/2 in place of n 2^-44 Σ |G| + ulp/2. In float64 it is 2^-51 in place of 2^-22, and
2^-88 in place of 2^-44. Where 16-bit operands are widened, the logits and their gradient are float32, and their
bounds with them. Where Σ_k |a_k b_k| of one of the products overflows, the bound is infinite, for a logit in its whole
row.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from isograd.core.descriptor import ErrorBound
from isograd.losses import cross_entropy_bounds as bounds
from isograd.losses import cross_entropy_reference as reference
from isograd.losses.cross_entropy_reference import IGNORE_INDEX, Floats
from isograd.numerics.bounds import LARGEST, ulp

_WIDE = np.longdouble
Product = Callable[[Floats, Floats, str], Floats]


def order_free(a: Floats, b: Floats, dtype: str) -> Floats:
    """How far the order-free product of a [R, K] and b [K, C] may be from the exact one; given in a wide type."""
    last = ulp(a @ b, dtype) * 0.51
    a, b = np.abs(a), np.abs(b)
    rows, columns = np.max(a, axis=1, initial=0)[:, None], np.max(b, axis=0, initial=0)[None]
    if dtype in ("float16", "bfloat16"):
        # The scale of a row is at most 2.008 times its largest.
        sums = rows * b.sum(axis=0) + columns * a.sum(axis=1)[:, None]
        return np.asarray(2.01 * 2.0**-16 * sums + 4.04 * (a.shape[1] * 2.0**-32 + 2.0**-23) * rows * columns + last)
    level = _WIDE(2.0) ** (-67 if dtype == "float64" else -50)
    return np.asarray(a.shape[1] * level * rows * columns + last)


def accumulated(a: Floats, b: Floats, dtype: str) -> Floats:
    """The same for a product that a library adds up in any order and in parts, 16-bit operands in 16 bits perhaps."""
    short = _WIDE(2.0) ** -7 if dtype in ("float16", "bfloat16") else 0
    return np.asarray(widened(a, b, dtype) + short * (np.abs(a) @ np.abs(b)))


def widened(a: Floats, b: Floats, dtype: str) -> Floats:
    """The same with all sums in binary32, for float64 in binary64."""
    level = a.shape[1] * _WIDE(2.0) ** (-51 if dtype == "float64" else -22)
    eta = np.ldexp(_WIDE(1), -1075 if dtype == "float64" else -150)
    return np.asarray(level * (np.abs(a) @ np.abs(b)) + a.shape[1] * eta + ulp(a @ b, dtype) * 0.51)


def _overflows(sizes: Floats, dtype: str) -> Any:
    """Where a sum of absolute values, given in a wide type, may not fit a dtype or is no number."""
    return ~(sizes * (1 + 2.0**-7) < LARGEST[dtype])


def _evaluate(
    product: Product,
    gradient: bool,
    hidden: Floats,
    weight: Floats,
    targets: Floats,
    dlosses: Floats | None = None,
    bias: Floats | None = None,
    class_weight: Floats | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Any:
    name = hidden.dtype.name
    inner = "float32" if product is widened and name != "float64" else name
    h, w = hidden.astype(_WIDE), weight.astype(_WIDE)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    with np.errstate(all="ignore"):
        logits, of_logits = h @ w.T, product(h, w.T, inner)
        if bias is not None:
            logits = logits + bias.astype(_WIDE)
            of_logits = of_logits + ulp(logits, inner)
        sizes = np.abs(h) @ np.abs(w.T) + (0 if bias is None else np.abs(bias.astype(_WIDE)))
        large = (np.isfinite(sizes) & _overflows(sizes, inner)).any(axis=1)
        error = of_logits.max(axis=1)
        parts = reference.exact(logits, targets, class_weight, 1, ignore_index, label_smoothing)
        total, lse = np.abs(parts.q).sum(axis=1), np.abs(parts.lse)
        of_losses = bounds.losses_bound(logits, targets, class_weight, **options, dtype=inner)[0]
        of_losses = of_losses + 2 * total * error + 2 * z_loss * error * (lse + error)
        of_losses = np.where(parts.kept, np.where(large, np.inf, of_losses), 0)
        if not gradient or dlosses is None:
            return of_losses
        g, p = np.abs(dlosses.astype(_WIDE))[:, None], np.exp(parts.lp)
        a, growth = total[:, None] + 2 * z_loss * lse[:, None], np.exp(2 * error)[:, None]
        exact = reference.oracle_cross_entropy_backward(dlosses, logits, targets, None, class_weight, **options)
        of_g = bounds.gradient_bound(dlosses, logits, targets, None, class_weight, **options, dtype=inner)
        of_g = of_g + g * p * (a * (growth - 1) + 2 * z_loss * error[:, None] * growth) + 2 * ulp(exact, inner)
        of_g = np.where(np.isnan(of_g) & np.isfinite(exact) | large[:, None], np.inf, of_g)
        of_g = np.where(parts.kept[:, None], of_g, 0)
        absolute = np.abs(exact) + of_g

        def through(error: Floats, sizes: Floats, factor: Floats) -> Floats:
            carried = error @ factor + product(sizes, factor, name)
            return np.where(_overflows(sizes @ factor, name) | np.isnan(carried), np.inf, carried)

        result = (
            of_losses,
            through(of_g, absolute, np.abs(w)),
            through(of_g.T, absolute.T, np.abs(h)),
        )
        if bias is None:
            return result
        summed = absolute.sum(axis=0)
        bits = (88, 44) if product is order_free else (51, 22)
        quanta = len(h) * _WIDE(2.0) ** -bits[name != "float64"]
        of_bias = of_g.sum(axis=0) + quanta * summed + ulp(summed, name)
        return (*result, np.where(_overflows(summed, name) | np.isnan(of_bias), np.inf, of_bias))


def error_bound(operation: str, product: Product) -> ErrorBound:
    """The bound of an operation; call it with the operation's inputs and options."""
    gradient = operation.endswith("gradient")
    formula = "cross entropy's + 2·D·E + 2z·E·(|lse| + E), E the bound of a row's logits"
    if gradient:
        formula += "; gradients: cross entropy's and what E adds, through the products"
    return ErrorBound(formula, functools.partial(_evaluate, product, gradient))
