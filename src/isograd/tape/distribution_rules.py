"""The tape's operations on distributions: divergences, and samples and projections that lie on the simplex.

As in `rules.py`, each returns its value and, for every operand, the gradient function.
"""

from typing import Any

from isograd.losses import divergence_api, simplex_api
from isograd.tape.rules import Array, Gradient, Result


def kl_div(x: Array, target: Array, reduction: str, log_target: bool) -> Result:
    """The divergence of a target distribution from log-probabilities."""

    def gradient(wrt: str) -> Gradient:
        return lambda g: divergence_api.kl_div_backward(g, x, target, reduction, log_target, wrt)

    loss: Array = divergence_api.kl_div(x, target, reduction, log_target)
    return loss, (gradient("input"), gradient("target"))


def distillation_loss(student: Array, teacher: Array, temperature: float, indices: Any, reduction: str) -> Result:
    """The divergence of a teacher from a student."""
    arguments = (student, teacher, temperature, indices, reduction)
    loss: Array = divergence_api.distillation_loss(*arguments)
    return loss, (lambda g: divergence_api.distillation_loss_backward(g, *arguments),)


def gumbel_softmax(x: Array, tau: float, hard: bool, axis: int, seed: int, offset: int) -> Result:
    """A sample of the Gumbel-softmax distribution; a hard one has the gradient of the soft one."""
    y: Array = simplex_api.gumbel_softmax(x, tau, hard, axis, seed, offset)

    def gradient(g: Array) -> Array:
        soft = simplex_api.gumbel_softmax(x, tau, False, axis, seed, offset) if hard else y
        result: Array = simplex_api.gumbel_softmax_backward(g, soft, tau, axis)
        return result

    return y, (gradient,)


def sparsemax(x: Array, axis: int) -> Result:
    """The point of the probability simplex nearest to each row."""
    y: Array = simplex_api.sparsemax(x, axis)
    return y, (lambda g: simplex_api.sparsemax_backward(g, y, axis),)
