"""What `isograd verify` knows about an operation, and the inputs that suites are made of.

The inputs come from `isograd.numerics.random` and from exact operations only, so they are the same on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import random
from isograd.numerics import reference as ref
from isograd.plan import DTYPES, Descriptor, Plan

Array = NDArray[Any]
Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Case:
    """One problem: its name, its inputs by the names of the operands, and the operation's other arguments."""

    name: str
    inputs: Mapping[str, Array]
    options: Mapping[str, Any] = field(default_factory=dict)


def unchanged(results: Arrays) -> Arrays:
    """The results as they are."""
    return results


class Change(NamedTuple):
    """A case that is changed without a change of what matters in its results.

    expected: made from the results of the original case. seen: the part of the changed case's results that must have
    the same bits.
    """

    case: Case
    expected: Callable[[Arrays], Arrays] = unchanged
    seen: Callable[[Arrays], Arrays] = unchanged


@dataclass(frozen=True)
class Suite:
    """How one operation is verified.

    plan, descriptor: what runs it; `descriptor(case, dtype)`. reference: its definition, bit for bit, called with a
    case's inputs and options; a tuple where there are several results; None where no bits are promised. oracle: the
    same formula in the widest float, None for a result that is compared by its bits alone. cases: the inputs in a
    dtype. changes: for an invariance, what must not change a bit. dtypes: the types it is registered for.
    """

    plan: type[Plan]
    descriptor: Callable[[Case, str], Descriptor]
    reference: Callable[..., Any] | None
    oracle: Callable[..., Any]
    cases: Callable[[str], Iterator[Case]]
    changes: Mapping[str, Callable[[Case], Iterator[Change]]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES


def store(wide: Array, dtype: str) -> Array:
    """Round float64 values to a dtype; to 16 bits by way of float32, as not every version of every library does."""
    with np.errstate(all="ignore"):
        narrow = wide if dtype == "float64" else wide.astype(np.float32)
        return narrow.astype(ref.BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))


@functools.lru_cache(maxsize=64)
def normal(shape: tuple[int, ...], stream: int) -> Array:
    """Standard normal float64 values; a stream is a sequence of its own."""
    values = random.normal(shape, seed=2024, stream=stream, dtype=np.float64)
    values.setflags(write=False)
    return values
