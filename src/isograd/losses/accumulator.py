"""A loss over micro-batches with the bits of the whole batch, however it was split (rule 9 of `docs/arithmetic.md`)."""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import numpy as np

from isograd.core import arrays, encoder
from isograd.core.checks import real_number
from isograd.errors import InvalidProblemError
from isograd.losses.reductions import checked_count, divided, plain
from isograd.numerics.reference import FORMATS, round_integer
from isograd.runtime.fenv import default_environment

# The quantum is 2**-40 for float32 losses and 2**-84 for float64 ones: 16 and 31 bits below the last place of a 1.
QUANTUM_BITS: Final = {"float32": 40, "float64": 84}
_MOST_WAITING: Final = 1 << 22  # losses that are kept on a GPU until somebody asks
_MOST_PARTS: Final = 1 << 10  # calls whose losses are kept apart


class _Part(NamedTuple):
    """The sum of some losses.

    units: of the finite ones, in quanta. special: bit 0: +inf occurred, bit 1: -inf, bit 2: NaN.
    """

    units: int
    special: int


class LossAccumulator:
    """The exact sum of losses, each rounded to a multiple of a fixed quantum; an integer, so order leaves no trace.

        total = LossAccumulator("float32")
        for logits, targets in micro_batches:
            total.add(isograd.cross_entropy(logits, targets, reduction="none"))
        loss = total.mean(tokens)

    dtype: of the losses, "float32" (quantum 2^-40) or "float64" (2^-84). Each loss adds an error of at most half a
    quantum, and the result is rounded once; it never overflows before that. Losses may be NumPy arrays or tensors of
    any shape; those of a GPU are kept there, without waiting, and fetched when the total is asked for. Losses that are
    not finite give what IEEE addition gives in any order.

    Threads and signal handlers may share an accumulator. A call that an exception ends has added its losses or not.
    """

    def __init__(self, dtype: str = "float32") -> None:
        if not isinstance(dtype, str) or dtype not in QUANTUM_BITS:
            raise InvalidProblemError(f"LossAccumulator: dtype is {dtype!r}; accepted: {', '.join(QUANTUM_BITS)}")
        self.dtype = dtype
        # Parts, and losses on a GPU. They are added by one `append`, which nothing interrupts, and put together by one
        # assignment, so that there is no lock that an interrupt or a signal handler could find taken.
        self._parts: list[Any] = []
        self._folding = threading.Lock()

    def add(self, losses: Any) -> None:
        """Add losses of the accumulator's dtype, an array or tensor of any shape.

        Raises InvalidProblemError for another dtype and for anything that is no array.
        """
        encoder.refuse("LossAccumulator.add", "losses are added at once")
        losses = encoder.unwrapped(losses)
        if not arrays.is_tensor(losses):
            losses, _ = arrays.to_numpy(losses, "LossAccumulator.add", "losses")
        _, dtype = arrays.describe(losses, "LossAccumulator.add", "losses")
        if dtype != self.dtype:
            raise InvalidProblemError(f"LossAccumulator.add: losses have dtype {dtype}; expected {self.dtype}")
        on_gpu = arrays.is_tensor(losses) and not losses.is_cpu
        self._parts.append(losses.detach().clone() if on_gpu else self._part(plain(losses)))
        if len(self._parts) > _MOST_PARTS or (on_gpu and _waiting(self._parts[:]) > _MOST_WAITING):
            self._fold()

    def merge(self, other: LossAccumulator) -> None:
        """Add what another accumulator of the same dtype holds, as of another process."""
        if not isinstance(other, LossAccumulator) or other.dtype != self.dtype:
            given = f"of dtype {other.dtype}" if isinstance(other, LossAccumulator) else type(other).__name__
            raise InvalidProblemError(f"LossAccumulator.merge: other is {given}; expected one of dtype {self.dtype}")
        self._parts.append(other._sum(other._parts[:]))

    def total(self) -> float:
        """The sum, rounded to the dtype once, as a Python number. Without losses it is +0."""
        units, special = self._fold()
        if special:
            return np.nan if special not in (1, 2) else np.inf if special == 1 else -np.inf
        with default_environment(), np.errstate(all="ignore"):
            form = FORMATS[np.dtype(self.dtype)]
            return float(round_integer(units, -QUANTUM_BITS[self.dtype], form))

    def mean(self, count: Any) -> float:
        """The sum over the count of all micro-batches (or over their weights): RN(total / RN(count)), NaN for 0 / 0.

        A number of the dtype as a Python number. count: a number, or an array or tensor of one without dimensions.
        """
        name = "LossAccumulator.mean"
        if arrays.is_tensor(count):
            count = count.detach().cpu()  # as the losses are fetched
        if arrays.is_tensor(count) or isinstance(count, np.ndarray):
            count = checked_count(name, count, None)
        given = real_number(name, "count", count)
        with default_environment(), np.errstate(over="ignore"):
            work = np.dtype(self.dtype).type
            return float(divided(work(self.total()), work(given)))

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "sum": tuple(self._fold())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dtype"])  # type: ignore[misc]
        self._parts.append(_Part(*state["sum"]))

    def _fold(self) -> _Part:
        """The sum of all parts, which takes their place unless another call is at that.

        An exception may leave the lock taken: parts are kept from then on, and the sum stays what it is.
        """
        alone = self._folding.acquire(blocking=False)
        try:
            parts = self._parts[:]
            folded = self._sum(parts)
            if alone:
                self._parts[: len(parts)] = [folded]
        finally:
            if alone:
                self._folding.release()
        return folded

    def _sum(self, parts: list[Any]) -> _Part:
        units, special = 0, 0
        for part in parts:
            some = part if isinstance(part, _Part) else self._part(arrays.numpy_view(part.cpu()))
            units, special = units + some.units, special | some.special
        return _Part(units, special)

    def _part(self, losses: Any) -> _Part:
        x = losses.reshape(-1)
        units, special = 0, 0
        with default_environment(), np.errstate(all="ignore"):
            finite = np.isfinite(x)
            if not finite.all():
                found = ((x == np.inf).any(), (x == -np.inf).any(), np.isnan(x).any())
                special = sum(bool(flag) << bit for bit, flag in enumerate(found))
                x = x[finite]
            bits = QUANTUM_BITS[self.dtype]
            large = np.abs(x) >= 2.0**60
            if large.any():  # integers, which Python adds
                units = sum(int(value) for value in x[large]) << bits
                x = x[~large]
            # binary64 holds the scaled value, and what lies before and after its point: toward zero, no digit is lost.
            half = bits // 2
            scaled = x.astype(np.float64) * 2.0**half
            whole = np.trunc(scaled)
            units += (_exact_sum(whole) << half) + _exact_sum(np.rint((scaled - whole) * 2.0**half))
        return _Part(units, special)


def _waiting(parts: list[Any]) -> int:
    """How many losses are kept on a GPU."""
    return sum(part.numel() for part in parts if not isinstance(part, _Part))


def _exact_sum(whole: Any) -> int:
    """The sum of integers that binary64 holds."""
    small = np.abs(whole) < 2.0**62
    words = whole[small].astype(np.int64)
    low = words & ((1 << 32) - 1)
    return (int((words >> 32).sum()) << 32) + int(low.sum()) + sum(int(value) for value in whole[~small])
