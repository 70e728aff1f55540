"""How an operation is verified: its cases, what must not change their bits, and the inputs that cases are made of.

The inputs come from `isograd.numerics.random` and from exact operations only, so they are the same on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.core.attributes import Measured, Word
from isograd.core.checks import DTYPES
from isograd.core.descriptor import Descriptor
from isograd.core.operands import Array as Operand
from isograd.core.operation import Operation
from isograd.core.plan import Plan
from isograd.numerics import random
from isograd.numerics import reference as ref

_MASKS = 400  # the stream that masks come from
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
    case's inputs and options; a tuple where there are several results; None, or a function that returns None, where no
    kernel promises bits. oracle: the same formula in the widest float, None for a result that is compared by its bits
    alone. cases: the inputs in a dtype. changes: for an invariance, what must not change a bit. dtypes: the types it is
    registered for.
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


def logits(dtype: str, stream: int) -> Iterator[tuple[str, Array, Array]]:
    """Name, student, teacher: rows of logits that hurt."""
    far = -6e4 if dtype == "float16" else -1e7

    def pair(shape: tuple[int, ...], scale: float = 2.0) -> tuple[Array, Array]:
        nonlocal stream
        stream += 2
        return scale * normal(shape, stream), scale * normal(shape, stream + 1)

    for shape in ((6, 1), (5, 31), (40, 256), (3, 5000)):
        x, t = pair(shape)
        yield f"{shape[0]} x {shape[1]}", store(x, dtype), store(t, dtype)
    x, t = pair((60, 2))
    yield "two classes", store(x, dtype), store(t, dtype)
    x, t = pair((4, 300), 60.0)
    yield "wide spread", store(x, dtype), store(t, dtype)
    x, t = pair((4, 300))
    yield "close", store(x, dtype), store(x + t * 2.0**-10, dtype)
    yield "far away", store(x + far, dtype), store(t + far, dtype)
    masked = np.where(normal((4, 300), _MASKS) > 0.3, -np.inf, 0.0)
    masked[2] = -np.inf
    yield "masked", store(x + masked, dtype), store(t + masked, dtype)
    peak = np.where(np.arange(300) == 17, 60.0, 0.0)
    yield "sure student", store(x + peak, dtype), store(t, dtype)
    yield "sure teacher", store(x, dtype), store(t + peak, dtype)
    special = x.copy()
    special[0, 3], special[1, 299], special[2, 0] = np.nan, np.inf, -np.inf
    yield "NaN and inf", store(special, dtype), store(t, dtype)


# --- what must not change a bit --------------------------------------------------------------------------------------
def each(case: Case, change: Callable[[Array], Array], **options: Any) -> Case:
    """The case with a change of every input."""
    return Case(case.name, {k: change(a) for k, a in case.inputs.items()}, {**case.options, **options})


def every(change: Callable[[Array], Array]) -> Callable[[Arrays], Arrays]:
    """The change of every result."""
    return lambda results: tuple(change(r) for r in results)


def layout(case: Case) -> Iterator[Change]:
    """The same values in Fortran order and in reversed memory."""

    def backwards(a: Array) -> Array:
        step: Any = (..., *(slice(None, None, -1),) * a.ndim)
        reversed_memory: Array = np.array(a[step], order="C")[step]
        return reversed_memory

    def transposed(a: Array) -> Array:
        return np.array(a, order="F")

    for change in (transposed, backwards):
        yield Change(each(case, change))


# --- operations ------------------------------------------------------------------------------------------------------
class _Rows:
    """What must not change a bit of an operation on rows, as its declaration says what each array is."""

    def __init__(self, op: Operation) -> None:
        self._op = op

    def _like(self, case: Case) -> Array:
        """What has the problem's shape."""
        if self._op.shaped:
            return np.broadcast_to(np.zeros(()), case.options["shape"])
        return case.inputs[self._op.problem]

    def _moved(self, case: Case, along: Callable[[Array, int], Array], across: Callable[[Array, int], Array]) -> Change:
        """A change of the axis (`along`) and of the first other axis (`across`) in whatever has them."""
        like = self._like(case)
        settings = {"reduction": self._op.reduction(case.options)}
        axis = int(case.options.get("axis", -1)) % like.ndim
        dim = 0 if axis else 1

        def moved(array: Array, kind: Operand) -> Array:
            if (place := kind.place(axis, axis, settings)) is not None:
                array = along(array, place)
            place = kind.place(axis, dim, settings)
            return array if place is None or like.ndim == 1 else across(array, place)

        kinds = [a for key, a in self._op.outputs.items() if not a.optional or case.options.get(key)]
        inputs = {key: moved(array, self._op.inputs[key]) for key, array in case.inputs.items()}
        return Change(
            Case(case.name, inputs, case.options),
            lambda results: tuple([moved(r, kind) for r, kind in zip(results, kinds, strict=True)]),
        )

    def order(self, case: Case) -> Iterator[Change]:
        """The elements of every row in another order, and the rows."""

        def shuffled(array: Array, axis: int) -> Array:
            return np.take(array, random.permutation(array.shape[axis], seed=5), axis)

        yield self._moved(case, shuffled, _kept)
        yield self._moved(case, _kept, shuffled)

    def batch(self, case: Case) -> Iterator[Change]:
        """The first row, the first rows and the last ones alone, where no result is a sum over rows."""
        if not self._op.has_parts(case.options):
            return

        def one(array: Array, axis: int) -> Array:
            return np.take(array, range(min(array.shape[axis], 1)), axis)

        def first(array: Array, axis: int) -> Array:
            return np.take(array, range(array.shape[axis] // 2), axis)

        def last(array: Array, axis: int) -> Array:
            return np.take(array, range(array.shape[axis] // 2, array.shape[axis]), axis)

        like = self._like(case)
        if self._op.ordered and int(case.options.get("axis", -1)) % like.ndim == 0:
            return  # what would be cut is not a part that follows another
        counts = [key for key, a in self._op.attributes.items() if isinstance(a, Word) and a.counts]
        skipped = (like.shape[0] // 2) * (like.size // max(like.shape[0], 1))
        for part, before in ((one, 0), (first, 0), (last, skipped)):
            change = self._moved(case, _kept, part)
            options = {key: case.options.get(key, 0) + before for key in counts}
            yield change._replace(case=replace(change.case, options={**case.options, **options}))

    def padding(self, case: Case) -> Iterator[Change]:
        """Rows made longer with what leaves their results as they are."""

        def longer(array: Array, axis: int) -> Array:
            width = [(0, 37 if d == axis else 0) for d in range(array.ndim)]
            return np.pad(array, width, constant_values=np.array(self._op.padding, array.dtype))

        *_, like = case.inputs.values()
        n = like.shape[int(case.options.get("axis", -1))]

        def shorter(array: Array, axis: int) -> Array:
            return np.take(array, range(n), axis)

        yield self._moved(case, longer, _kept)._replace(
            expected=unchanged, seen=self._moved(case, shorter, _kept).expected
        )


def _kept(array: Array, axis: int) -> Array:
    return array


def suite(
    op: Operation, cases: Callable[[str], Iterator[Case]], own: Mapping[str, Callable[[Case], Iterator[Change]]]
) -> Suite:
    """How an operation is verified, from its declaration and its cases.

    own: changes of its own for an invariance, where inputs name places of others.
    """
    rows = _Rows(op)
    make: Callable[..., Descriptor] = op.descriptor_type

    def descriptor(case: Case, dtype: str) -> Descriptor:
        given: dict[str, Any] = {key: key in case.inputs for key in op.optional if key in op.inputs}
        for key, a in op.attributes.items():
            if isinstance(a, Measured):
                given[key] = a.measure(op.name, case.inputs.get(a.of))
        given |= case.options
        if op.shape_of is not None:
            shape = op.shape_of(op.name, case.inputs, given)
            return make(dtype=dtype, **dict(zip(op.sizes, shape, strict=True)), **given)
        shape = () if op.shaped else case.inputs[op.problem].shape
        return make(**{"shape": shape, "dtype": dtype, **given})

    changes: dict[str, Callable[[Case], Iterator[Change]]] = {"batch": rows.batch, "layout": layout}
    if not op.ordered:
        changes["order"] = rows.order
    if op.padding is not None:
        changes["padding"] = rows.padding
    changes |= own
    return Suite(op.plan_type, descriptor, op.reference, op.oracle, cases, changes, op.dtypes)
