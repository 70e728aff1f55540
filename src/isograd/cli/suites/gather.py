"""The cases of the gather family, and what must not change their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Arrays, Case, Change, Suite, normal, store
from isograd.core.descriptor import Descriptor
from isograd.gather import reference as ref
from isograd.gather.plans import (
    IndexSelectDescriptor,
    IndexSelectPlan,
    IndexSumDescriptor,
    IndexSumPlan,
    ScatterSumDescriptor,
    ScatterSumPlan,
    TakeAlongAxisBackwardDescriptor,
    TakeAlongAxisBackwardPlan,
    TakeAlongAxisDescriptor,
    TakeAlongAxisPlan,
)
from isograd.numerics import random

_BIG = {"float16": 65504.0, "bfloat16": 3.0e38, "float32": 3.0e38, "float64": 1.7e308}
_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}


def _places(shape: tuple[int, ...], size: int, stream: int, dtype: str = "int64", low: int = 0) -> Array:
    """Indices from `low` to size - 1, a quarter of them the middle one."""
    u = random.uniform(shape, seed=2025, stream=stream, dtype=np.float64)
    v = random.uniform(shape, seed=2025, stream=stream + 1000, dtype=np.float64)
    return np.where(v < 0.25, size // 2, np.floor(u * (size - low)).astype(np.int64) + low).astype(dtype)


def _distinct(lines: int, k: int, size: int) -> Array:
    return np.stack([random.permutation(size, seed=2025 + line)[:k] for line in range(lines)])


def _cancelling(shape: tuple[int, ...], stream: int) -> Array:
    """Terms along the first axis that come in pairs of opposite sign, but for a millionth."""
    half = normal((shape[0] // 2, *shape[1:]), stream)
    return np.concatenate([1e3 * half, -1e3 * half * (1 + 2.0**-20)])


def _special(shape: tuple[int, ...], stream: int) -> Array:
    x = normal(shape, stream).copy()
    flat = x.reshape(-1)
    for place, value in enumerate((np.nan, np.inf, -np.inf, np.inf, 0.0, -0.0, -0.0)):
        flat[place :: 7 * (place + 3)] = value
    return x


# --- along an axis ---------------------------------------------------------------------------------------------------
def _lines(dtype: str) -> Iterator[tuple[str, Array, Array, Array, int]]:
    """Name, x, indices, values and axis of every problem."""
    big, tiny = _BIG[dtype], _TINY[dtype]

    def problem(
        name: str, n: int, k: int, lines: int, stream: int, values: Array | None = None, indices: Array | None = None
    ) -> tuple[str, Array, Array, Array, int]:
        x, v = normal((lines, n), stream), normal((lines, k), stream + 100) if values is None else values
        return name, store(x, dtype), _places((lines, k), n, stream) if indices is None else indices, store(v, dtype), 1

    yield problem("8 of 256", 256, 8, 24, 0)
    yield problem("one source", 7, 1, 5, 1)
    yield problem("no source", 7, 0, 3, 2)
    yield problem("64 of 1000", 1000, 64, 4, 3)
    yield problem("as many sources as elements", 90, 90, 6, 4)
    yield problem("more sources than elements", 9, 400, 4, 5)
    yield problem("all onto one element", 50, 2000, 2, 6, indices=np.full((2, 2000), 17))
    yield problem("distinct", 60, 20, 5, 7, indices=_distinct(5, 20, 60))
    yield problem("cancellation", 5, 400, 3, 8, _cancelling((400, 3), 8).T)
    far = np.where(_places((4, 60), 10, 9) % 2 == 0, normal((4, 60), 9), 1e-12 * normal((4, 60), 9))
    yield problem("sources 1e-12 of another's", 10, 60, 4, 9, far)
    yield problem("NaN and inf", 12, 60, 4, 10, _special((4, 60), 10))
    yield problem("NaN and inf, few sources", 300, 60, 4, 11, _special((4, 60), 11))
    yield problem("subnormal", 12, 60, 4, 12, tiny * np.rint(200 * normal((4, 60), 12)))
    yield problem("sum overflows", 12, 60, 4, 13, big * np.where(normal((4, 60), 13) > 0.3, -0.9, 0.9))
    yield problem("negative indices", 30, 40, 4, 14, indices=_places((4, 40), 30, 14, "int32", -30))
    first = _places((50, 14), 40, 15, "uint32")
    yield "first axis", store(normal((40, 14), 15), dtype), first, store(normal((50, 14), 115), dtype), 0
    x, v = normal((4, 9, 5, 6), 16), normal((4, 12, 5, 6), 116)
    order = (2, 0, 3, 1)
    yield ("four dimensions, permuted", store(x, dtype).transpose(order),
           _places((4, 12, 5, 6), 9, 16, "int32").transpose(order), store(v, dtype).transpose(order), 3)  # fmt: skip
    one = np.broadcast_to(_places((70, 1), 20, 17), (70, 40))
    yield "one index for a row", store(normal((20, 40), 17), dtype), one, store(normal((70, 40), 117), dtype), 0


def _take_cases(dtype: str) -> Iterator[Case]:
    for name, x, indices, _, axis in _lines(dtype):
        yield Case(name, {"x": x, "indices": indices}, {"axis": axis})


def _backward_cases(dtype: str) -> Iterator[Case]:
    for name, x, indices, values, axis in _lines(dtype):
        options: dict[str, Any] = {"shape": x.shape, "axis": axis}
        yield Case(name, {"indices": indices, "dv": values}, options)
        if name == "distinct":
            yield Case("distinct, as promised", {"indices": indices, "dv": values}, options | {"unique_indices": True})


def _scatter_cases(dtype: str) -> Iterator[Case]:
    for name, x, indices, values, axis in _lines(dtype):
        yield Case(name, {"indices": indices, "values": values, "x": x}, {"axis": axis})


# --- whole rows ------------------------------------------------------------------------------------------------------
def _row_problems(dtype: str) -> Iterator[tuple[str, tuple[int, ...], Array, Array]]:
    """Name, shape of the table, indices and rows of every problem."""
    big, tiny = _BIG[dtype], _TINY[dtype]

    def problem(name: str, num: int, indices: Array, values: Array) -> tuple[str, tuple[int, ...], Array, Array]:
        return name, (num, *values.shape[indices.ndim :]), indices, store(values, dtype)

    yield problem("a quarter on one row", 60, _places((200,), 60, 30), normal((200, 24), 30))
    yield problem("no row", 5, np.zeros(0, np.int64), normal((0, 24), 31))
    yield problem("one column", 60, _places((300,), 60, 32), normal((300,), 32))
    yield problem("few columns", 20, _places((100,), 20, 33, "int32"), normal((100, 5), 33))
    yield problem("many columns", 6, _places((20,), 6, 34), normal((20, 1100), 34))
    yield problem("indices of three dimensions", 15, _places((3, 4, 5), 15, 35, "uint32"), normal((3, 4, 5, 2, 9), 35))
    yield problem("cancellation", 3, np.arange(400) // 2 % 3, _cancelling((400, 10), 36))
    far = np.where(np.arange(100)[:, None] % 2 == 0, normal((100, 10), 37), 1e-12 * normal((100, 10), 37))
    yield problem("sources 1e-12 of another's", 2, np.arange(100) % 2, far)
    yield problem("NaN and inf", 12, _places((60,), 12, 38), _special((60, 11), 38))
    yield problem("subnormal", 12, _places((60,), 12, 39), tiny * np.rint(200 * normal((60, 11), 39)))
    yield problem("sum overflows", 12, _places((60,), 12, 40), big * np.where(normal((60, 11), 40) > 0.3, -0.9, 0.9))
    yield problem("negative indices", 12, _places((60,), 12, 41, "int64", -12), normal((60, 11), 41))
    name, shape, indices, values = problem("reversed", 12, _places((60,), 12, 42), normal((60, 11), 42))
    yield name, shape, indices[::-1], values[::-1, ::-1]


def _select_cases(dtype: str) -> Iterator[Case]:
    for stream, (name, shape, indices, _) in enumerate(_row_problems(dtype)):
        yield Case(name, {"weight": store(normal(shape, 60 + stream), dtype), "indices": indices})


def _sum_cases(dtype: str) -> Iterator[Case]:
    for stream, (name, shape, indices, values) in enumerate(_row_problems(dtype)):
        yield Case(name, {"indices": indices, "values": values}, {"shape": shape})
        x = store(normal(shape, 80 + stream), dtype)
        yield Case(f"{name}, onto x", {"indices": indices, "values": values, "x": x}, {"shape": shape})
        if name in ("a quarter on one row", "one column"):
            yield Case(f"{name}, left out", {"indices": indices, "values": values}, {"shape": shape, "skipped": 30})


# --- invariances -----------------------------------------------------------------------------------------------------
def _reordered(case: Case, source: str, axis: int, change: Callable[[Array], Array]) -> Case:
    """The sources, that is the indices and the array beside them, changed along an axis."""
    changed = {key: change(np.moveaxis(case.inputs[key], axis, 0)) for key in ("indices", source)}
    return Case(
        case.name, {**case.inputs, **{key: np.moveaxis(a, 0, axis) for key, a in changed.items()}}, case.options
    )


def _source(case: Case) -> str:
    return "dv" if "dv" in case.inputs else "values"


def _order(case: Case) -> Iterator[Change]:
    """The sources in another order: the result is the same."""
    axis = case.options.get("axis", 0)
    count = case.inputs["indices"].shape[axis]
    for order in (np.arange(count)[::-1], random.permutation(count, seed=count)):
        yield Change(_reordered(case, _source(case), axis, lambda a, order=order: a[order]))  # type: ignore[misc]


def _padding(case: Case) -> Iterator[Change]:
    """Every source once more, with the value 0, which adds nothing."""
    axis = case.options.get("axis", 0)
    if case.options.get("unique_indices"):
        return
    source = _source(case)
    indices, values = case.inputs["indices"], case.inputs[source]
    changed = {
        "indices": np.concatenate([indices, indices], axis),
        source: np.concatenate([values, np.zeros_like(values)], axis),
    }
    yield Change(Case(case.name, {**case.inputs, **changed}, case.options))


def _chosen_order(case: Case) -> Iterator[Change]:
    """The indices in another order: the values follow."""
    axis = case.options.get("axis", 0)
    indices = case.inputs["indices"]
    count = indices.shape[axis]
    for order in (np.arange(count)[::-1], random.permutation(count, seed=count)):

        def moved(results: Arrays, order: Array = order) -> Arrays:
            return tuple(np.take(r, order, axis) for r in results)

        changed = {**case.inputs, "indices": np.take(indices, order, axis)}
        yield Change(Case(case.name, changed, case.options), moved)


def _layout(case: Case) -> Iterator[Change]:
    """The same values in Fortran's order, and in reversed memory."""

    def backwards(a: Array) -> Array:
        step = (slice(None, None, -1),) * a.ndim
        return np.ascontiguousarray(a[step])[step]

    for change in (np.asfortranarray, backwards):
        yield Change(Case(case.name, {key: change(a) for key, a in case.inputs.items()}, case.options))


def _line_batch(case: Case) -> Iterator[Change]:
    """Each half of the lines, and the first one alone, along the largest other dimension."""
    axis = case.options["axis"]
    shape = case.inputs["indices"].shape
    largest = max((d for d in range(len(shape)) if d != axis), key=lambda d: shape[d])
    middle = shape[largest] // 2
    for part in (slice(0, 1), slice(0, middle), slice(middle, None)):

        def cut(a: Array, part: slice = part) -> Array:
            return a[(slice(None),) * largest + (part,)]

        options = dict(case.options)
        if "shape" in options:
            size = cut(np.empty(shape[: largest + 1])).shape[largest]
            options["shape"] = (*options["shape"][:largest], size, *options["shape"][largest + 1 :])
        changed = Case(case.name, {key: cut(a) for key, a in case.inputs.items()}, options)
        yield Change(changed, lambda results, cut=cut: tuple(cut(r) for r in results))  # type: ignore[misc]


def _column_batch(case: Case) -> Iterator[Change]:
    """Each half of the columns."""
    table = case.inputs["weight"].shape if "weight" in case.inputs else case.options["shape"]
    if len(table) == 1:
        return
    middle = table[-1] // 2
    for part in (slice(0, middle), slice(middle, None)):

        def cut(a: Array, part: slice = part) -> Array:
            return a[..., part]

        options = dict(case.options)
        if "shape" in options:
            options["shape"] = (*table[:-1], len(range(table[-1])[part]))
        inputs = {key: a if key == "indices" else cut(a) for key, a in case.inputs.items()}
        yield Change(Case(case.name, inputs, options), lambda results, cut=cut: tuple(cut(r) for r in results))  # type: ignore[misc]


# --- suites ----------------------------------------------------------------------------------------------------------
def _take_descriptor(case: Case, dtype: str) -> Descriptor:
    x, indices = case.inputs["x"], case.inputs["indices"]
    return TakeAlongAxisDescriptor(x.shape, indices.shape, dtype, indices.dtype.name, case.options["axis"])


def _backward_descriptor(case: Case, dtype: str) -> Descriptor:
    indices, options = case.inputs["indices"], case.options
    return TakeAlongAxisBackwardDescriptor(
        options["shape"],
        indices.shape,
        dtype,
        indices.dtype.name,
        options["axis"],
        options.get("unique_indices", False),
    )


def _scatter_descriptor(case: Case, dtype: str) -> Descriptor:
    x, indices = case.inputs["x"], case.inputs["indices"]
    return ScatterSumDescriptor(x.shape, indices.shape, dtype, indices.dtype.name, case.options["axis"])


def _select_descriptor(case: Case, dtype: str) -> Descriptor:
    indices = case.inputs["indices"]
    return IndexSelectDescriptor(case.inputs["weight"].shape, indices.shape, dtype, indices.dtype.name)


def _sum_descriptor(case: Case, dtype: str) -> Descriptor:
    indices, options = case.inputs["indices"], case.options
    adds = "x" in case.inputs
    return IndexSumDescriptor(
        options["shape"], indices.shape, dtype, indices.dtype.name, True, adds, options.get("skipped")
    )


def _backward_of(function: Callable[..., Array]) -> Callable[..., Array]:
    # Distinct indices have no other arithmetic.
    return lambda indices, dv, shape, axis, unique_indices=False: function(dv, indices, shape, axis)


def _scatter_of(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda indices, values, x, axis: function(x.shape, indices, values, axis, x)


SUITES: dict[str, Suite] = {
    "take_along_axis": Suite(
        TakeAlongAxisPlan, _take_descriptor, ref.take_along_axis, ref.oracle_take_along_axis, _take_cases,
        {"batch": _line_batch, "order": _chosen_order, "layout": _layout},
    ),
    "take_along_axis_backward": Suite(
        TakeAlongAxisBackwardPlan, _backward_descriptor, _backward_of(ref.take_along_axis_backward),
        _backward_of(ref.oracle_take_along_axis_backward), _backward_cases,
        {"batch": _line_batch, "order": _order, "layout": _layout, "padding": _padding},
    ),
    "scatter_sum": Suite(
        ScatterSumPlan, _scatter_descriptor, _scatter_of(ref.scatter_sum), _scatter_of(ref.oracle_scatter_sum),
        _scatter_cases, {"batch": _line_batch, "order": _order, "layout": _layout, "padding": _padding},
    ),
    "index_select": Suite(
        IndexSelectPlan, _select_descriptor, ref.index_select, ref.oracle_index_select, _select_cases,
        {"batch": _column_batch, "order": _chosen_order, "layout": _layout},
    ),
    "index_sum": Suite(
        IndexSumPlan, _sum_descriptor, ref.index_sum, ref.oracle_index_sum, _sum_cases,
        {"batch": _column_batch, "order": _order, "layout": _layout, "padding": _padding},
    ),
}  # fmt: skip
