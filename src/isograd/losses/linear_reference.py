"""linear_cross_entropy in NumPy: the order-free product of rule 10 and cross entropy, one after the other.

    logits = hidden @ weight^T [+ bias]     the product rounded to the storage type, then the sum
    dhidden = dlogits @ weight, dweight = dlogits^T @ hidden, dbias = Σ over rows of dlogits

Every product and sum over rows is taken in one piece and rounded once.
"""

from typing import Any

import numpy as np

from isograd.losses import cross_entropy_reference as reference
from isograd.losses.cross_entropy_reference import IGNORE_INDEX
from isograd.numerics import reference as ref
from isograd.numerics.matmul import DEFINITION, matmul
from isograd.reduction import reference as reduction
from isograd.runtime.fenv import default_environment

Floats = reference.Floats


def logits_of(hidden: Floats, weight: Floats, bias: Floats | None, engine: str | None = None) -> Floats:
    """The logits of some rows for some classes; engine as for `matmul`."""
    logits = matmul(hidden, weight.T, engine=engine)
    if bias is None:
        return logits
    with default_environment(), np.errstate(all="ignore"):
        return ref.narrow(ref.widen(logits) + ref.widen(bias), logits.dtype)


def linear_cross_entropy(
    hidden: Floats,
    weight: Floats,
    targets: Floats,
    bias: Floats | None = None,
    class_weight: Floats | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Floats:
    """The bits of the losses of the rows."""
    rest = (class_weight, 1, ignore_index, label_smoothing, z_loss)
    return reference.cross_entropy(logits_of(hidden, weight, bias, DEFINITION), targets, *rest)[0]


def linear_cross_entropy_gradient(
    dlosses: Floats,
    hidden: Floats,
    weight: Floats,
    targets: Floats,
    bias: Floats | None = None,
    class_weight: Floats | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Any, ...]:
    """The bits of the losses and of the gradients of hidden, weight and, if there is one, bias."""
    rest = (class_weight, 1, ignore_index, label_smoothing, z_loss)
    losses, dlogits = reference.cross_entropy_gradient(
        dlosses, logits_of(hidden, weight, bias, DEFINITION), targets, *rest
    )
    dhidden, dweight = (matmul(g, x, engine=DEFINITION) for g, x in ((dlogits, weight), (dlogits.T, hidden)))
    gradients = (losses, dhidden, dweight)
    return gradients if bias is None else (*gradients, reduction.sum(dlogits, 0))


# --- the oracle ------------------------------------------------------------------------------------------------------
_WIDE = np.longdouble


def oracle_linear_cross_entropy_gradient(
    dlosses: Floats,
    hidden: Floats,
    weight: Floats,
    targets: Floats,
    bias: Floats | None = None,
    class_weight: Floats | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Any, ...]:
    """The exact results, but for the rounding of the wide type."""
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    h, w = hidden.astype(_WIDE), weight.astype(_WIDE)
    logits = h @ w.T if bias is None else h @ w.T + bias.astype(_WIDE)
    losses, _ = reference.oracle_cross_entropy(logits, targets, class_weight, **options)
    dlogits = reference.oracle_cross_entropy_backward(dlosses, logits, targets, None, class_weight, **options)
    gradients = (losses, dlogits @ w, dlogits.T @ h)
    return gradients if bias is None else (*gradients, dlogits.sum(axis=0))


def oracle_linear_cross_entropy(
    hidden: Floats, weight: Floats, targets: Floats, bias: Floats | None = None, *rest: Any, **options: Any
) -> Floats:
    """The exact losses, but for the rounding of the wide type."""
    nothing = np.zeros(len(hidden), _WIDE)
    losses: Floats = oracle_linear_cross_entropy_gradient(
        nothing, hidden, weight, targets, bias, *rest, **options
    )[0]  # fmt: skip
    return losses
