"""What a step needs besides arrays: which update it is, and its numbers, from fixed operations in binary64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ADAM, SGD, LION = range(3)
# What weight decay does: nothing, it is added to the gradient, or it shrinks the parameter.
NO_DECAY, COUPLED, DECOUPLED = range(3)
# The numbers of a tensor, one after the other, in the work type.
NUMBERS: Final = ("decay", "lr", "keep_1", "take_1", "keep_2", "take_2", "rest_1", "rest_2", "eps")


class Update(NamedTuple):
    """An update; the fields after `decay` but the last are SGD's. first: the momentum begins with this step."""

    rule: int
    decay: int
    momentum: bool = False
    first: bool = False
    nesterov: bool = False
    maximize: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the arrays that are kept for a parameter, which are torch's."""
        if self.rule == SGD:
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq") if self.rule == ADAM else ("exp_avg",)


class Rates(NamedTuple):
    """An optimizer's options but the learning rate: what `NUMBERS` are made of."""

    decay: float = 0.0
    beta_1: float = 0.0
    take_1: float = 1.0
    beta_2: float = 0.0
    eps: float = 0.0


def power(base: float, exponent: int) -> float:
    """The power by squaring, from the exponent's highest bit down: pow of a C library differs between machines."""
    result = 1.0
    for bit in format(exponent, "b"):
        result *= result
        if bit == "1":
            result *= base
    return result


def numbers(update: Update, rates: Rates, lr: float, step: int, work: Any) -> NDArray[Any]:
    """`NUMBERS` of a tensor that makes its step number `step`: in binary64, each rounded to the work type once."""
    decay = 1.0 - lr * rates.decay if update.decay == DECOUPLED else rates.decay
    rest = [1.0 - power(beta, step) if update.rule == ADAM else 1.0 for beta in (rates.beta_1, rates.beta_2)]
    with np.errstate(over="ignore"):
        return np.array(
            [decay, lr, rates.beta_1, rates.take_1, rates.beta_2, 1.0 - rates.beta_2, *rest, rates.eps], work
        )


def rates(update: Update, options: Mapping[str, Any]) -> Rates:
    """The rates from an optimizer's options, spelled as torch's."""
    decay = float(options["weight_decay"])
    if update.rule == SGD:
        return Rates(decay, float(options["momentum"]), 1.0 - float(options["dampening"]))
    beta_1, beta_2 = (float(beta) for beta in options["betas"])
    return Rates(decay, beta_1, 1.0 - beta_1, beta_2, float(options.get("eps", 0.0)))
