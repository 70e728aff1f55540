"""Run under TRITON_INTERPRET=1: compare the gather family's Triton kernels with the reference in Triton's interpreter.

    python interpreted_kernels.py [--exhaustive] SUITE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

sys.path.insert(0, str(Path(__file__).parents[1]))
from choices import few, through
from interpreter_patches import MASKED, ORIGINAL, report

from isograd import IndexOutOfRangeError, check, debug
from isograd.gather import reference
from isograd.gather import triton_launch as launch
from isograd.reduction import cuda as reduction
from isograd.reduction import reference as reduction_reference

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}
INDEX = ("int64", "int32", "uint32")
Case = tuple[str, Any, Any]  # what it is, the kernel's result, the reference's


def to_torch(x: Any) -> torch.Tensor:
    if x.dtype.name == "uint32":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int32).copy()).view(torch.uint32)
    if x.dtype.name not in NUMPY:
        return torch.from_numpy(np.array(x))
    bits = torch.from_numpy(np.array(x, order="C").view(INTEGER[x.dtype.name]))
    return bits.view(getattr(torch, x.dtype.name))


def bits(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        integer = getattr(torch, np.dtype(INTEGER[str(t.dtype).removeprefix("torch.")]).name)
        return t.contiguous().view(integer).numpy()
    return np.ascontiguousarray(t).view(INTEGER[t.dtype.name])


def values(generator: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool = True) -> Any:
    """Terms of every magnitude and their negatives, with special values strewn in."""
    scales = [1e-4, 1, 100] if dtype == "float16" else [1e-30, 1e-9, 1, 1e10]
    if dtype == "float64":
        scales.append(1e-310)
    x = generator.standard_normal(shape) * generator.choice(scales, size=shape)
    flat = x.reshape(-1)
    if special and x.size > 12:
        for value in (np.inf, -np.inf, np.nan, -0.0, -0.0, 0.0, np.inf, 65504):
            flat[generator.integers(x.size)] = value
    for _ in range(x.size // 4):
        a, b = generator.integers(x.size, size=2)
        flat[a] = -flat[b]
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])


def places(
    generator: np.random.Generator, n: int, shape: tuple[int, ...], index: str, distinct: int | None = None
) -> Any:
    """Indices in [-n, n), few distinct ones so that many repeat; `distinct` is the axis along which none may."""
    if distinct is None:
        found = (
            generator.integers(0, max(n // 2, 1), shape)
            if generator.random() < 0.5
            else generator.integers(0, n, shape)
        )
    else:
        order = np.argsort(generator.random((*shape[:distinct], n, *shape[distinct + 1 :])), axis=distinct)
        found = np.take(order, range(shape[distinct]), axis=distinct)
    if index != "uint32":
        found = np.where(generator.random(shape) < 0.3, found - n, found)
    return found.astype(index)


# x's shape, sources, axis: rows and columns of several lengths, more sources than places, several outer axes
LINES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((3, 16), 8, 1),
    ((5, 7), 3, 1),
    ((3, 9), 20, 1),
    ((9, 5), 4, 0),
    ((4,), 1, 0),
    ((1, 1), 2, 0),
    ((2, 3, 5, 4), 5, 2),
    ((2, 3, 2, 2, 3), 2, 3),
    ((3, 0), 2, 0),
    ((2, 40), 0, 1),
)
ORDERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    lambda t: torch.stack([t, t], -1)[..., 0],
)


def lines(distinct: bool, dtypes: Any = NUMPY) -> Iterator[tuple[str, Any, Any, Any, int, Any]]:
    """(name, x, indices, values, axis, layout) of every case along an axis."""
    for dtype, (seed, (shape, k, axis)) in few(len(dtypes), list(dtypes), list(enumerate(LINES))):
        if distinct and k > shape[axis]:
            continue
        generator = np.random.default_rng(seed)
        index = INDEX[seed % 3]
        sources = (*shape[:axis], k, *shape[axis + 1 :])
        indices = places(generator, shape[axis], sources, index, axis if distinct else None)
        x, v = values(generator, shape, dtype), values(generator, sources, dtype)
        layout = ORDERS[seed % 3 if index != "uint32" else 0]
        yield f"{dtype} {shape} k {k} axis {axis} {index}", x, indices, v, axis, layout


def take() -> Iterator[Case]:
    for name, x, indices, v, axis, layout in lines(False):
        out = layout(to_torch(v))
        launch.take_along_axis(layout(to_torch(x)), layout(to_torch(indices)), out, axis)
        yield name, out, reference.take_along_axis(x, indices, axis)


def _scatter(distinct: bool, atomics: bool, dtypes: Any = NUMPY) -> Iterator[Case]:
    for name, x, indices, v, axis, layout in lines(distinct, dtypes):
        filled = launch.ScatterConfiguration("few", 4, 4, 4, True)
        configs = (None,) if atomics else (filled, None)
        tensors = layout(to_torch(indices)), layout(to_torch(v))
        for config, base in few(len(configs), configs, (None, x)):
            options = {"unique": distinct, "config": config, "atomics": atomics}
            expected = reference.scatter_sum(x.shape, indices, v, axis, base)
            out = layout(to_torch(x)).fill_(7)
            launch.scatter_sum(*tensors, out, axis, None if base is None else to_torch(base), **options)
            yield f"{name} {config} {base is not None}", out, expected
        out = layout(to_torch(x))
        launch.scatter_sum(*tensors, out, axis, out, **options)
        yield f"{name} in place", out, reference.scatter_sum(x.shape, indices, v, axis, x)


def scatter() -> Iterator[Case]:
    return _scatter(False, False)


def unique() -> Iterator[Case]:
    return _scatter(True, False)


def atomics() -> Iterator[Case]:
    """Integer atomics; sums that may be long have twice the words."""
    yield from _scatter(False, True)
    before, launch._SHORT_SUM = launch._SHORT_SUM, 4
    yield from _scatter(False, True, ("float32", "float64"))
    launch._SHORT_SUM = before


def select() -> Iterator[Case]:
    for dtype in NUMPY:
        for seed, (shape, indexed) in enumerate(
            [((9, 5), (3, 4)), ((4, 3, 2), (7,)), ((5,), ()), ((6, 40), (2, 1, 3))]
        ):
            generator = np.random.default_rng(seed)
            weight = values(generator, shape, dtype)
            indices = places(generator, shape[0], indexed, INDEX[seed % 3])
            expected = reference.index_select(weight, indices)
            out = to_torch(expected).fill_(7)
            launch.index_select(ORDERS[seed % 3](to_torch(weight)), to_torch(indices), out)
            yield f"{dtype} {shape} {indexed}", out, expected


def _sum(cases: Any, skips: Any, config: Any = None) -> Iterator[Case]:
    parts: Any = (list(NUMPY), list(enumerate(cases)))
    for dtype, (seed, (shape, count, concentrated)) in few(4, *parts) if len(cases) >= 4 else through(*parts):
        generator = np.random.default_rng(seed)
        indices = places(generator, shape[0], (count,), INDEX[seed % 3])
        indices[generator.random(count) < concentrated] = shape[0] - 1
        v, x = values(generator, (count, *shape[1:]), dtype), values(generator, shape, dtype)
        tensors = to_torch(indices), ORDERS[seed % 3](to_torch(v))
        for skipped, base in few(len(skips), skips, (None, x)):
            expected = reference.index_sum(shape, indices, v, base, skipped)
            out = to_torch(x).fill_(7)
            launch.index_sum(*tensors, out, None if base is None else to_torch(base), skipped, config=config)
            yield f"{dtype} {shape} count {count} skipped {skipped} {base is not None}", out, expected
        for skipped in skips:
            out = to_torch(x)
            launch.index_sum(*tensors, out, out, skipped, config=config)
            expected = reference.index_sum(shape, indices, v, x, skipped)
            yield f"{dtype} {shape} count {count} skipped {skipped} in place", out, expected


def sum_() -> Iterator[Case]:
    """Destinations with few sources, none, and up to 64."""
    cases = [((11, 6), 30, 0), ((5, 3, 2), 64, 0.3), ((7,), 50, 0), ((3, 40), 5, 0), ((1, 2), 3, 0), ((2, 3), 0, 0)]
    yield from _sum(cases, (None, 2))
    yield from _sum(cases[:1], (None,), launch.SumConfiguration(2, 4, 2, 4, 4, 2, 2, 1))


def two() -> Iterator[Case]:
    """Halfway cases that the quantum decides: below it the smaller term has bits that a plain addition would see."""
    for dtype, bits_, quantum in (("float32", 23, 44), ("float64", 52, 88)):
        large = 1 + np.arange(8) * 2.0**-bits_
        small = 2.0 ** -(bits_ + 1) * (1 + np.array([1, -1, 1, -1, 1, 2, 3, -1]) * 2.0 ** (bits_ - quantum - 1))
        v = np.stack([large, small, -large, -small]).astype(NUMPY[dtype])
        indices = np.array([0, 0, 1, 1])
        out = torch.empty(2, 8, dtype=getattr(torch, dtype))
        launch.index_sum(to_torch(indices), to_torch(v), out)
        expected = reference.index_sum((2, 8), indices, v)
        assert (expected[0] != v[0] + v[1]).any()
        yield dtype, out, expected


def hot() -> Iterator[Case]:
    """Destinations with more than 64 sources."""
    yield from _sum([((4, 3), 120, 0.8), ((3,), 240, 0)], (1,))
    before, launch._SHORT_SUM = launch._SHORT_SUM, 8
    yield from _sum([((10, 9), 120, 0.6)], (None,), launch.SumConfiguration(2, 4, 2, 4, 4, 4, 4, 1))
    launch._SHORT_SUM = before


def _fault(call: Callable[[], None], message: str) -> Case:
    """Whether a call leaves the fault to `check`, raises it at once under `debug`, and only once."""
    said = []
    call()
    for attempt in (check, check, call):
        with debug(attempt is call):
            try:
                attempt()
                said.append("nothing")
            except IndexOutOfRangeError as error:
                said.append(str(error))
    agrees = said == [message, "nothing", message]
    return str(said), np.float32([agrees]), np.float32([True])


def faults() -> Iterator[Case]:
    x, indices = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([[0, -4], [1, 4], [3, -5]])
    v, out = torch.full((3, 2), 7.0), torch.full((3, 4), 7.0)

    def taken() -> None:
        launch.take_along_axis(to_torch(x), to_torch(indices), v, 1)

    yield _fault(taken, "take_along_axis: indices has 4 at flat position 3; accepted: -4 to 3")
    yield "taken", v, np.float32([[0, 0], [5, np.nan], [11, np.nan]])
    # The flat position is that of the indices' shape, whatever the strides; a scatter leaves the source out.
    sources = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    columns = np.array([[0, 4, 3], [1, 1, 99]])

    for options in ({}, {"atomics": True}, {"config": launch.ScatterConfiguration("pairs", 2, 4, 4, True)}):

        def scattered(options: Any = options) -> None:
            launch.scatter_sum(to_torch(columns.T).T, to_torch(sources), out[:2], 1, **options)

        out.fill_(7)
        yield _fault(scattered, "scatter_sum: indices has 4 at flat position 1; accepted: -4 to 3")
        yield "scattered", out[:2], np.float32([[1, 0, 0, 3], [0, 9, 0, 0]])

    def selected() -> None:
        launch.index_select(to_torch(x), to_torch(np.uint32([2, 2**32 - 1])), out[:2], "embedding", "tokens", False)

    yield _fault(selected, "embedding: tokens has 4294967295 at flat position 1; accepted: 0 to 2")
    yield "selected", out[:2], np.stack([x[2], np.full(4, np.nan, np.float32)])

    def summed() -> None:
        launch.index_sum(to_torch(np.array([1, -7, -1, 1])), to_torch(x[[0, 1, 2, 0]]), out, skipped=-7, negative=False)

    yield _fault(summed, "index_sum: indices has -1 at flat position 2; accepted: 0 to 2")
    yield "summed", out, np.stack([0 * x[0], 2 * x[0], 0 * x[0]])


def reduce() -> Iterator[Case]:
    cases: list[tuple[tuple[int, ...], Any]] = [((5, 7), 1), ((5, 7), 0), ((6, 50), None), ((3, 4, 5), (0, 2))]
    cases += [((3, 4, 5), 1), ((300,), 0), ((40, 6), 0), ((), None), ((0, 3), 0), ((3, 5, 0), (1, 2)), ((0, 3), 1)]
    configurations = (None, reduction.Configuration(2, 4, 3, 4), reduction.Configuration(4, 8, 2, 4))
    before = reduction._SHORT_SUM
    for dtype, (seed, (shape, axis)), config, short in few(
        5, list(NUMPY), list(enumerate(cases)), configurations, (before, 8)
    ):
        generator = np.random.default_rng(seed)
        x = values(generator, shape, dtype, special=seed % 2 == 0)
        tensor = ORDERS[seed % 3](to_torch(x))
        reduction._SHORT_SUM = short
        operation, keepdims = ("sum", False) if short == before else ("mean", True)
        found = getattr(reduction, operation)(tensor, axis, keepdims, config=config)
        expected = np.asarray(getattr(reduction_reference, operation)(x, axis, keepdims))
        assert tuple(found.shape) == expected.shape
        yield f"{operation} {dtype} {shape} {axis} {config} {short}", found, expected
    reduction._SHORT_SUM = before


SUITES = {f.__name__.rstrip("_"): f for f in (take, scatter, unique, atomics, select, sum_, two, hot, faults, reduce)}


def compared(suite: Callable[[], Iterator[Case]]) -> Iterator[tuple[str, bool]]:
    with np.errstate(all="ignore"):
        for name, found, expected in suite():
            yield name, bits(found).tobytes() == bits(expected).tobytes()


def refused() -> Iterator[tuple[str, bool]]:
    """With the interpreter's own masked access."""
    with mock.patch.multiple(InterpreterBuilder, **{name: ORIGINAL[name] for name in MASKED}):
        try:
            yield from compared(scatter)
        except Exception as error:
            yield repr(error), False


if __name__ == "__main__":
    report({name: partial(compared, suite) for name, suite in SUITES.items()} | {"refused": refused})
