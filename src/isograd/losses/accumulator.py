"""A loss over micro-batches with the bits of the whole batch, however it was split (rule 9 of `docs/arithmetic.md`)."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from isograd import arrays, encoder
from isograd.errors import InvalidProblemError
from isograd.fenv import default_environment
from isograd.losses.reductions import checked_count, divided, number, plain
from isograd.numerics.reference import FORMATS, round_integer

# The quantum is 2**-40 for float32 losses and 2**-84 for float64 ones: 16 and 31 bits below the last place of a 1.
QUANTUM_BITS: Final = {"float32": 40, "float64": 84}
_MOST_WAITING: Final = 1 << 22  # losses that are kept on a GPU until somebody asks


class LossAccumulator:
    """The exact sum of losses, each rounded to a multiple of a fixed quantum; an integer, so order leaves no trace.

        total = LossAccumulator("float32")
        for logits, targets in micro_batches:
            total.add(isograd.cross_entropy(logits, targets, reduction="none"))
        loss = total.mean(tokens)

    dtype: of the losses, "float32" (quantum 2^-40) or "float64" (2^-84). Each loss adds an error of at most half a
    quantum, and the result is rounded once; it never overflows before that. Losses may be NumPy arrays or tensors of
    any shape; those of a GPU are added there, without waiting, and fetched when the total is asked for. Losses that are
    not finite give what IEEE addition gives in any order.
    """

    def __init__(self, dtype: str = "float32") -> None:
        if not isinstance(dtype, str) or dtype not in QUANTUM_BITS:
            raise InvalidProblemError(f"LossAccumulator: dtype is {dtype!r}; accepted: {', '.join(QUANTUM_BITS)}")
        self.dtype = dtype
        self._units = 0
        self._special = 0  # bit 0: +inf occurred, bit 1: -inf, bit 2: NaN
        self._waiting: list[Any] = []  # losses on a GPU

    def add(self, losses: Any) -> None:
        """Add losses of the accumulator's dtype, an array or tensor of any shape.

        Raises InvalidProblemError for another dtype and for anything that is no array.
        """
        losses = encoder.unwrapped(losses)
        if not arrays.is_tensor(losses):
            losses, _ = arrays.to_numpy(losses, "LossAccumulator.add", "losses")
        _, dtype = arrays.describe(losses, "LossAccumulator.add", "losses")
        if dtype != self.dtype:
            raise InvalidProblemError(f"LossAccumulator.add: losses have dtype {dtype}; expected {self.dtype}")
        if arrays.is_tensor(losses) and not losses.is_cpu:
            self._waiting.append(losses.detach().clone())
            if sum(tensor.numel() for tensor in self._waiting) > _MOST_WAITING:
                self._fetch()
            return
        self._add(plain(losses).reshape(-1))

    def merge(self, other: LossAccumulator) -> None:
        """Add what another accumulator of the same dtype holds, as of another process."""
        if not isinstance(other, LossAccumulator) or other.dtype != self.dtype:
            given = f"of dtype {other.dtype}" if isinstance(other, LossAccumulator) else type(other).__name__
            raise InvalidProblemError(f"LossAccumulator.merge: other is {given}; expected one of dtype {self.dtype}")
        self._fetch()
        other._fetch()
        self._units += other._units
        self._special |= other._special

    def total(self) -> Any:
        """The sum, rounded to the dtype once: a NumPy scalar. Without losses it is +0."""
        self._fetch()
        if self._special:
            value = np.nan if self._special not in (1, 2) else np.inf if self._special == 1 else -np.inf
            return np.dtype(self.dtype).type(value)
        with default_environment(), np.errstate(all="ignore"):
            form = FORMATS[np.dtype(self.dtype)]
            return round_integer(self._units, -QUANTUM_BITS[self.dtype], form)

    def mean(self, count: Any) -> Any:
        """The sum over the count of all micro-batches (or over their weights): RN(total / RN(count)).

        count: a number, or an array or tensor of one without dimensions.
        """
        name = "LossAccumulator.mean"
        if arrays.is_tensor(count):
            count = count.detach().cpu()  # as the losses are fetched
        given = number(name, "count", checked_count(name, count, None))
        with default_environment(), np.errstate(over="ignore"):
            divisor = np.dtype(self.dtype).type(given)
        return divided(self.total(), divisor)[()]

    def __getstate__(self) -> dict[str, Any]:
        self._fetch()
        return dict(self.__dict__)

    def _fetch(self) -> None:
        waiting, self._waiting = self._waiting, []
        for tensor in waiting:
            self._add(arrays.numpy_view(tensor.cpu()).reshape(-1))

    def _add(self, x: Any) -> None:
        with default_environment(), np.errstate(all="ignore"):
            finite = np.isfinite(x)
            if not finite.all():
                found = ((x == np.inf).any(), (x == -np.inf).any(), np.isnan(x).any())
                self._special |= sum(bool(flag) << bit for bit, flag in enumerate(found))
                x = x[finite]
            bits = QUANTUM_BITS[self.dtype]
            large = np.abs(x) >= 2.0**60
            if large.any():  # integers, which Python adds
                self._units += sum(int(value) for value in x[large]) << bits
                x = x[~large]
            # binary64 holds the scaled value, and what lies before and after its point: toward zero, no digit is lost.
            half = bits // 2
            units = x.astype(np.float64) * 2.0**half
            whole = np.trunc(units)
            self._units += (_exact_sum(whole) << half) + _exact_sum(np.rint((units - whole) * 2.0**half))


def _exact_sum(whole: Any) -> int:
    """The sum of integers that binary64 holds."""
    small = np.abs(whole) < 2.0**62
    words = whole[small].astype(np.int64)
    low = words & ((1 << 32) - 1)
    return (int((words >> 32).sum()) << 32) + int(low.sum()) + sum(int(value) for value in whole[~small])
