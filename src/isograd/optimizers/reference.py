"""The updates in NumPy: what every kernel returns bit for bit.

Each operation is one of rule 2 in the work type, rounded once, in the order in which it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import narrow
from isograd.optimizers.numbers import ADAM, COUPLED, DECOUPLED, SGD, Update

Floats = NDArray[Any]


def updated(
    update: Update, w: Floats, g: Floats, states: Sequence[Floats], numbers: Floats
) -> tuple[Floats, list[Floats]]:
    """(parameter, states) after a step, everything in the work type; `numbers` are `NUMBERS`."""
    decay, lr, keep_1, take_1, keep_2, take_2, rest_1, rest_2, eps = numbers
    with np.errstate(all="ignore"):
        if update.maximize:
            g = -g
        if update.decay == COUPLED:
            g = g + decay * w
        elif update.decay == DECOUPLED:
            w = w * decay
        if update.rule == ADAM:
            m, v = states
            m, v = m * keep_1 + take_1 * g, v * keep_2 + take_2 * (g * g)
            after = [m, v]
            change = lr * (m / rest_1) / (np.sqrt(v / rest_2) + eps)
        elif update.rule == SGD:
            after = [g if update.first else keep_1 * b + take_1 * g for b in states]
            for b in after:
                g = g + keep_1 * b if update.nesterov else b
            change = lr * g
        else:
            (m,) = states
            c = m * keep_1 + take_1 * g
            after = [m * keep_2 + take_2 * g]
            change = np.where(c > 0, lr, np.where(c < 0, -lr, c - c))
        # Every NaN that is written is the canonical one.
        return np.asarray(w - change), [narrow(np.asarray(x), x.dtype) for x in after]
