"""What published digests of steps and clipping are computed from: inputs that are the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.core.cases import normal, store
from isograd.core.checks import DTYPES
from isograd.numerics.reference import narrow, widen
from isograd.optimizers import norm_reference
from isograd.optimizers.numbers import ADAM, COUPLED, DECOUPLED, LION, NO_DECAY, SGD, Update, numbers, rates
from isograd.optimizers.reference import updated

_ADAMW = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
_MOMENTUM = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01, "nesterov": False}
_NESTEROV = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True, "maximize": True}
_LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
# The optimizer's name and options in torch's spelling, and the update that they are.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Update]] = {
    "AdamW": ("AdamW", _ADAMW, Update(ADAM, DECOUPLED)),
    "SGD with momentum": ("SGD", _MOMENTUM, Update(SGD, COUPLED, momentum=True)),
    "SGD nesterov": ("SGD", _NESTEROV, Update(SGD, NO_DECAY, momentum=True, nesterov=True, maximize=True)),
    "Lion": ("Lion", _LION, Update(LION, DECOUPLED)),
}
MAX_NORM = 0.5
_SHAPE, _STEPS, _STREAM = (37, 501), 3, 4000


class Case(NamedTuple):
    """A training of a few steps, each with its gradient clipped first."""

    optimizer: str
    dtype: str
    weights: NDArray[Any]
    gradients: list[NDArray[Any]]

    @property
    def name(self) -> str:
        """The name of its digest."""
        return f"{self.optimizer}, {self.dtype}"

    def expected(self) -> tuple[NDArray[Any], ...]:
        """Parameter, states and last norm by the reference."""
        _, options, update = OPTIMIZERS[self.optimizer]
        of, weights = rates(update, options), self.weights
        work = widen(weights).dtype
        states = [np.zeros(weights.shape, work) for _ in update.states]
        norm = work.type(0)
        for step, given in enumerate(self.gradients, 1):
            norm = norm_reference.total_norm([given])
            g = norm_reference.clipped(given, norm_reference.clip_factor(norm, MAX_NORM))
            this = update._replace(first=update.momentum and step == 1)
            after, states = updated(
                this, widen(weights), widen(g), states, numbers(this, of, options["lr"], step, work)
            )
            weights = narrow(after, weights.dtype)
        return weights, *states, np.asarray(norm)


def cases() -> Iterator[Case]:
    """Every optimizer in every dtype."""
    for optimizer in OPTIMIZERS:
        for dtype in DTYPES:
            drawn = [store(normal(_SHAPE, _STREAM + i), dtype) for i in range(1 + _STEPS)]
            yield Case(optimizer, dtype, drawn[0], drawn[1:])
