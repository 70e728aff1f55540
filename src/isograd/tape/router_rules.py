"""The router family's operations on plain arrays, as `rules.py` has the others.

What was chosen (indices, experts, their order) is given to a rule and has no gradient.
"""

from typing import Any

import numpy as np

from isograd.numerics.reference import narrow
from isograd.router import api as router
from isograd.tape.rules import Array, Result


def top_k(x: Array, indices: Array, values: Array, axis: int) -> Result:
    """The values of top_k, whose gradient is scattered into zeros; a -0 becomes +0, as in a sum."""
    shape = x.shape

    def gradient(g: Array) -> Array:
        dx = np.zeros(shape, g.dtype)
        np.put_along_axis(dx, indices, narrow(g + g.dtype.type(0), g.dtype), axis)
        return dx

    return values, (gradient,)


def renormalize(w: Array, axis: int) -> Result:
    """Elements divided by their sum."""
    t: Array = router.renormalize(w, axis)
    return t, (lambda g: router.renormalize_backward(g, w, axis),)


def moe_router(logits: Array, experts: Array, weights: Array, options: dict[str, Any]) -> Result:
    """The weights of the chosen experts."""
    return weights, (lambda g: router.moe_router_backward(g, logits, experts, **options),)


def moe_permute(x: Array, order: Array, k: int) -> Result:
    """Rows of tokens in the order of the experts."""
    y: Array = router.moe_permute(x, order, k)
    return y, (lambda g: router.moe_permute_backward(g, order, k),)


def moe_combine(expert_out: Array, weights: Array, order: Array) -> Result:
    """Weighted sums of the experts' rows."""
    y: Array = router.moe_combine(expert_out, weights, order)

    def gradient(which: int) -> Any:
        return lambda g: router.moe_combine_backward(g, expert_out, weights, order)[which]

    return y, (gradient(0), gradient(1))


def load_balancing_loss(probabilities: Array, experts: Array, num_experts: int | None) -> Result:
    """The load-balancing loss."""
    loss: Array = router.load_balancing_loss(probabilities, experts, num_experts)
    shape: tuple[int, ...] = probabilities.shape
    dtype: Any = probabilities.dtype.name
    return loss, (lambda g: router.load_balancing_loss_backward(g, experts, shape, dtype),)


def router_z_loss(logits: Array) -> Result:
    """The mean of the squared logsumexp."""
    loss: Array = router.router_z_loss(logits)
    return loss, (lambda g: router.router_z_loss_backward(g, logits),)
