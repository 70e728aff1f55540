"""The definition of a sum of gradients (rule 17 of the contract): fixed point, integer sums, one division."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import narrow, widen, work_dtype
from isograd.runtime.fenv import default_environment

QUANTUM: Final = -48  # exponent of the default quantum
HEADROOM: Final = 62  # a range lies at most so many powers of two above its quantum: sums stay below 2^63


class Quanta(NamedTuple):
    """Elements as multiples of a quantum, and what their range is judged by.

    units: int64. peak: the bits of the largest magnitude in the work type, as an integer; a NaN is above infinity.
    """

    units: NDArray[np.int64]
    peak: int


def quanta(gradient: NDArray[Any], quantum: int, limit: int) -> Quanta:
    """Round every element to the nearest multiple of 2^quantum, ties to even; 0 where it is not below 2^limit."""
    with default_environment(), np.errstate(all="ignore"):
        x = widen(gradient)
        of = x.dtype.type
        magnitude = np.abs(x)
        bits = magnitude.view(np.int64 if x.dtype == np.float64 else np.int32)
        kept = np.where(magnitude < of(2.0**limit), x, of(0))
        return Quanta(np.rint(kept * of(2.0**-quantum)).astype(np.int64), int(bits.max(initial=0)))


def magnitude(peak: int, dtype: Any) -> float:
    """The largest magnitude that a peak stands for, of gradients of a storage type."""
    wide = work_dtype(dtype) is np.float64
    return float(np.int64(peak).view(np.float64) if wide else np.int32(peak).view(np.float32))


def fits(peaks: Sequence[float], units: int, limit: int) -> bool:
    """Whether RN(N m) lies below 2^limit, m the largest magnitude of N units."""
    with np.errstate(all="ignore"):
        return all(bool(np.float64(peak) * np.float64(units) < 2.0**limit) for peak in peaks)


def mean(total: NDArray[np.int64], units: int, quantum: int, dtype: Any) -> NDArray[Any]:
    """The total over the number of units: RN(RN(RN(S) / RN(N)) * 2^quantum) in the work type, rounded to the dtype."""
    with default_environment(), np.errstate(all="ignore"):
        of: Any = work_dtype(dtype)
        quotient = total.astype(of) / np.int64(units).astype(of)
        return narrow(quotient * of(2.0**quantum), dtype)


def gradient_sum(units: Sequence[NDArray[Any]], quantum: int = QUANTUM, limit: int | None = None) -> NDArray[Any]:
    """What `GradientSum` leaves in a parameter's gradient, from that of every unit of all ranks."""
    limit = quantum + HEADROOM if limit is None else limit
    dtype = units[0].dtype
    rounded = [quanta(unit, quantum, limit) for unit in units]
    if not fits([magnitude(one.peak, dtype) for one in rounded], len(units), limit):
        return np.full(units[0].shape, np.nan, dtype)
    total: NDArray[np.int64] = np.add.reduce([one.units for one in rounded])
    return mean(total, len(units), quantum, dtype)
