"""Losses on the tape, and what they are made of, as `rules.py` has the other operations.

Targets, teachers, indices and weights of classes get no gradient, but for the target of kl_div.
"""

from typing import Any

import numpy as np

from isograd.errors import InvalidProblemError
from isograd.losses import cross_entropy as steps
from isograd.losses import linear_cross_entropy as linear
from isograd.tape.rules import Array, Result


def _constant(operation: str, argument: str, value: Any) -> Any:
    """A copy of an array that gets no gradient: the caller may overwrite the original before gradients are due."""
    if value is None or isinstance(value, np.ndarray):
        return None if value is None else value.copy()
    raise InvalidProblemError(f"{operation}: {argument} is {type(value).__name__}; expected a NumPy array")


def cross_entropy(x: Array, *, targets: Any, weight: Any, options: steps.Options) -> Result:
    """Cross entropy, reduced; the state of the rows is kept for the gradient."""
    targets, weight = (_constant("cross_entropy", n, v) for n, v in (("targets", targets), ("weight", weight)))
    given = steps.problem("cross_entropy", x, targets, weight, options)
    losses, state = steps.forward(given)
    value: Array = steps.reduced(given, losses)
    return value, (lambda g: steps.backward(given, steps.row_gradients(given, g), state),)


def linear_cross_entropy(
    hidden: Array, weight: Array, *bias: Array, targets: Any, class_weight: Any, options: linear.LinearOptions
) -> Result:
    """Cross entropy of a linear layer, reduced; its gradients are computed together when the first one is due."""
    name = "linear_cross_entropy"
    targets, class_weight = (
        _constant(name, n, v) for n, v in (("targets", targets), ("class_weight", class_weight))
    )  # fmt: skip
    given = linear.problem(name, hidden, weight, targets, bias[0] if bias else None, class_weight, options)
    value: Array = linear.reduced(given, linear.forward(given))
    latest: list[tuple[Array, tuple[Array, ...]]] = []

    def gradients(g: Array) -> tuple[Array, ...]:
        if not latest or latest[0][0] is not g:
            _, dhidden, *rest = linear.gradient(given, linear.row_gradients(given, g))
            latest[:] = [(g, (dhidden.reshape(hidden.shape), *rest))]
        return latest[0][1]

    return value, tuple(lambda g, i=i: gradients(g)[i] for i in range(2 + len(bias)))
