"""What an attention computes besides its operands: visibility, scaling and dropout, and how these are checked."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from isograd.core.checks import real_number
from isograd.errors import InvalidProblemError
from isograd.runtime.fenv import default_environment

# The least and the largest normal number of a work type.
_RANGES = {"float32": (2.0**-126, (2 - 2.0**-23) * 2.0**127), "float64": (2.0**-1022, math.ldexp(2 - 2.0**-52, 1023))}

# Of every head dimension there is: rounded when this module is loaded, not in whatever mode a call finds.
_SCALES = tuple([1 / math.sqrt(head_dim) for head_dim in range(1, 257)])

ALIGNMENTS = ("lower_right", "upper_left")
DROPOUT_WORD = 0x6174746E  # the last word of the counters of dropout: no other random stream uses it

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options that operands do not show. Positions count within a sequence.

    With `offset` = k length - q length for the alignment "lower_right" and 0 for "upper_left", query i sees key j only
    if all of these hold:

        causal          j <= i + offset
        window (l, r)   i + offset - l <= j <= i + offset + r; None leaves a side open

    scale: the factor of q·k, None for 1 / sqrt(head dimension). softcap: s becomes softcap · tanh(s / softcap), 0 for
    none. dropout_p: the probability of dropping, from 0 to below 1. seed: 64 bits, of the dropout.
    """

    causal: bool = False
    alignment: str = "lower_right"
    window: Window | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0

    def validated(self, operation: str, head_dim: int, work: str = "float64") -> Self:
        """Return the options with plain numbers and the scale filled in, or raise what is wrong with them.

        work: the type that scale and softcap have to fit. They may be symbols that stand for numbers.
        """
        least, most = _RANGES[work]
        if not isinstance(self.causal, (bool, np.bool_)):
            raise InvalidProblemError(f"{operation}: causal is {self.causal!r}; expected True or False")
        if self.alignment not in ALIGNMENTS:
            raise InvalidProblemError(
                f"{operation}: alignment is {self.alignment!r}; accepted: {', '.join(ALIGNMENTS)}"
            )
        softcap = real_number(operation, "softcap", self.softcap)
        if softcap != 0 and not least <= softcap <= most:
            raise InvalidProblemError(
                f"{operation}: softcap is {softcap}; expected 0 or a positive normal number of {work}"
            )
        dropout_p = real_number(operation, "dropout_p", self.dropout_p)
        if not 0 <= dropout_p < 1:
            raise InvalidProblemError(f"{operation}: dropout_p is {dropout_p}; accepted: from 0 to below 1")
        scale = default_scale(head_dim) if self.scale is None else real_number(operation, "scale", self.scale)
        if not -most <= scale <= most:
            raise InvalidProblemError(f"{operation}: scale is {scale}; expected a finite number of {work}")
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise InvalidProblemError(f"{operation}: seed is {seed!r}; accepted: integers from 0 to 2^64 - 1")
        window = None if self.window is None else _window(operation, self.window)
        return type(self)(bool(self.causal), self.alignment, window, scale, softcap, dropout_p, int(seed))

    def offset(self, q_length: int, k_length: int) -> int:
        """The key that query 0 is level with."""
        return k_length - q_length if self.alignment == "lower_right" else 0

    def reach(self) -> tuple[int | None, int | None]:
        """(left, right): query i sees the keys from i + offset - left to i + offset + right; None is unbounded."""
        left, right = (None, None) if self.window is None else self.window
        return left, 0 if self.causal else right

    @property
    def dropout_threshold(self) -> int:
        """A probability is dropped whose random word is smaller."""
        return min(round(self.dropout_p * 2.0**32), 0xFFFFFFFF)

    @property
    def dropout_factor(self) -> float:
        """What kept probabilities are multiplied by."""
        with default_environment():
            return 1 / (1 - self.dropout_p)


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head dimension), the same under any rounding mode."""
    return _SCALES[head_dim - 1] if head_dim <= len(_SCALES) else 1 / math.sqrt(head_dim)


def _window(operation: str, window: Any) -> Window:
    def side(value: Any) -> int | None:
        if value is None:
            return None
        number = operator.index(value)
        if number < 0:
            raise ValueError
        return number

    try:
        left, right = window
        return side(left), side(right)
    except (TypeError, ValueError):
        raise InvalidProblemError(
            f"{operation}: window is {window!r}; expected (left, right), each None or an integer from 0"
        ) from None
