"""The cases of matrix products, and what must not change their bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from isograd.core.cases import Array, Case, Change, Suite, layout, normal, store
from isograd.core.descriptor import Descriptor
from isograd.numerics import random
from isograd.numerics.matmul import DEFINITION, matmul, special_products, with_special
from isograd.products.plans import INT16_DTYPES, MatmulDescriptor, MatmulPlan, balanced

_STREAM = 1500
_M, _K, _N = 17, 130, 35


def _pair(a_shape: tuple[int, ...], b_shape: tuple[int, ...], stream: int) -> tuple[Array, Array]:
    return normal(a_shape, _STREAM + stream), normal(b_shape, _STREAM + stream + 1)


def _transposed(x: Array) -> Array:
    """The same values, columns side by side in memory."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def _case(name: str, a: Array, b: Array, dtype: str, balance: str = "") -> Case:
    return Case(name, {"a": store(a, dtype), "b": store(b, dtype)}, {"balance": balance} if balance else {})


def _largest(dtype: str) -> float:
    """A number whose integer is the largest that the type can give: 127 · 256 and what bits there are of 127."""
    bits = {"float16": 11, "bfloat16": 8}.get(dtype, 15)
    return math.ldexp(32639 >> (15 - bits), -bits)


def _common(dtype: str) -> Iterator[Case]:
    """The cases of both precisions."""
    a, b = _pair((_M, _K), (_K, _N), 0)
    left, right = store(a, dtype), store(b, dtype)
    for i, rows in enumerate((left, _transposed(left))):
        for j, columns in enumerate((right, _transposed(right))):
            yield Case("NT"[i] + "NT"[j], {"a": rows, "b": columns})
    yield _case("batch", *_pair((2, 1, 9, 140), (3, 140, 20), 2), dtype)
    yield _case("one row", *_pair((1, 150), (150, 8), 4), dtype)
    yield _case("one term", *_pair((5, 1), (1, 7), 6), dtype)
    yield _case("no terms", np.zeros((3, 0)), np.zeros((0, 4)), dtype)
    x, y = (np.array(t) for t in _pair((6, 150), (150, 5), 8))
    x[1], x[3], y[:, 2] = 0.0, -0.0, 0.0
    x[:, 7:90], y[100:] = 0.0, -0.0
    yield _case("zero rows", x, y, dtype)
    x, y = (np.array(t) for t in _pair((7, 140), (140, 6), 10))
    x[0, 3], x[1, 139], x[2, 0], x[3, 5:7] = np.nan, np.inf, -np.inf, (np.inf, -np.inf)
    x[4, 20], y[20, 0], y[8, 1], y[30:32, 2] = 0.0, np.inf, np.nan, (np.inf, -np.inf)
    yield _case("NaN and inf", x, y, dtype)
    lowest, highest = {"float16": (-24, 6), "float64": (-500, 400)}.get(dtype, (-140, 55))
    x, y = _pair((9, 140), (140, 8), 12)
    exponents = random.uniform((17, 140), seed=2024, stream=_STREAM + 14, dtype=np.float64)
    steps = np.floor(lowest + (highest - lowest) * exponents).astype(np.int64)
    yield _case("many exponents", np.ldexp(x, steps[:9]), np.ldexp(y, steps[9:].T), dtype)


def _int16_cases(dtype: str) -> Iterator[Case]:
    yield from _common(dtype)
    top = _largest(dtype)
    digits = np.array([top, -top, 253 * 2.0**-8, -253 * 2.0**-8])  # the last two have digits 127 and -128
    k = (1 << 16) + 64
    rows = np.stack([np.full(k, top), np.full(k, digits[2]), np.where(np.arange(k) % 2, top, -top)])
    columns = np.stack([np.full(k, top), np.full(k, -top), np.resize(digits, k)], axis=1)
    yield _case("long, extreme digits", rows, columns, dtype)
    x, w = (np.array(t) for t in _pair((12, 140), (140, 20), 16))
    x[:, 5], w[5], w[9], w[11:14] = 300 * x[:, 5], w[5] / 300, 0.0, 2.0**-9 * w[11:14]
    yield _case("weight", x, w, dtype, "other")
    x, g = (np.array(t) for t in _pair((20, 150), (150, 12), 18))
    x[:, 3], g[7], x[:, 50], g[60], g[100] = 256 * x[:, 3], 128 * g[7], 0.0, 0.0, 2.0**-10 * g[100]
    yield _case("tokens", x, g, dtype, "tokens")


def _wide_cases(dtype: str) -> Iterator[Case]:
    yield from _common(dtype)
    k = (1 << 16) + 64  # two pieces
    rows = np.stack([np.full(k, 1 - 2.0**-11), np.where(np.arange(k) % 2, 1.0, -1.0)])
    yield _case("long", rows, rows.T * (1 - 2.0**-10), dtype)


def _descriptor(precision: str, case: Case, dtype: str) -> Descriptor:
    shapes = case.inputs["a"].shape, case.inputs["b"].shape
    return MatmulDescriptor(*shapes, dtype, precision, case.options.get("balance", ""))


def _reference(precision: str, a: Array, b: Array, balance: str = "") -> Array:
    engine = DEFINITION if precision == "int16" else None
    return matmul(a, b, precision, balanced(balance, a, b), engine)


def _unit(x: Array, axis: int) -> tuple[Array, Array]:
    """Finite values divided by a power of two a line, as binary64, and its exponents; others are 0."""
    wide = np.where(np.isfinite(x), x.astype(np.float64), 0.0)
    exponent = np.frexp(np.abs(wide).max(axis=axis, keepdims=True, initial=0.0))[1].astype(np.int64)
    half = (-exponent) >> 1
    return np.ldexp(np.ldexp(wide, half.astype(np.int32)), (-exponent - half).astype(np.int32)), exponent


def _halves(x: Array) -> Array:
    """Two parts of each element whose products with others' are exact, or off by less than 2^-79 [2, ...]."""
    head = np.rint(x * 2.0**26) * 2.0**-26
    return np.stack([head, x - head])


def _oracle(a: Array, b: Array, balance: str = "") -> Array:
    """The exact product, rounded to the widest float; where an operand is not finite, what IEEE addition gives."""
    left, e = _unit(a, -1)
    right, f = _unit(b, -2)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    left = np.broadcast_to(left, shape[:-2] + left.shape[-2:])
    right = np.broadcast_to(right, shape[:-2] + right.shape[-2:])
    total = np.zeros(shape, np.longdouble)
    for at in np.ndindex(shape):
        x, y = _halves(left[at[:-1]]), _halves(right[(*at[:-2], slice(None), at[-1])])
        terms = (x[:, None] * y).ravel().tolist()
        first = math.fsum(terms)
        total[at] = np.longdouble(first) + np.longdouble(math.fsum([*terms, -first]))
    with np.errstate(all="ignore"):
        total = np.ldexp(total, np.broadcast_to(e + f, shape).astype(np.int32))
        if np.isfinite(a).all() and np.isfinite(b).all():
            return total
        return with_special(special_products(a.astype(np.float64), b.astype(np.float64)), total)


# --- what must not change a bit --------------------------------------------------------------------------------------
def _changed(case: Case, a: Array, b: Array, part: tuple[Any, ...] = ()) -> Change:
    """The case with other operands, whose result is a part of what it was."""
    return Change(Case(case.name, {"a": a, "b": b}, case.options), lambda results: (results[0][(..., *part)],))


def _batch(case: Case) -> Iterator[Change]:
    """Some rows, some columns and the last of a batch alone, where the balance does not come from what is cut."""
    a, b, balance = case.inputs["a"], case.inputs["b"], case.options.get("balance", "")
    everything = slice(None)
    if balance == "tokens":
        return
    for rows in (slice(0, 1), slice(a.shape[-2] // 2, None)):
        yield _changed(case, a[..., rows, :], b, (rows, everything))
    if not balance:
        yield _changed(case, a, b[..., 1:], (slice(1, None),))
    if b.ndim > 2:
        yield _changed(case, a, b[-1:], (slice(-1, None), everything, everything))


def _order(case: Case) -> Iterator[Change]:
    a, b = case.inputs["a"], case.inputs["b"]
    order = random.permutation(a.shape[-1], seed=7)
    yield _changed(case, a[..., order], b[..., order, :])


def _padding(case: Case) -> Iterator[Change]:
    """Terms that are zero."""
    a, b = case.inputs["a"], case.inputs["b"]
    more = [(0, 0)] * (a.ndim - 1) + [(0, 37)], [(0, 0)] * (b.ndim - 2) + [(0, 37), (0, 0)]
    yield _changed(case, np.pad(a, more[0]), np.pad(b, more[1]))


_CHANGES: Mapping[str, Callable[[Case], Iterator[Change]]] = {
    "batch": _batch,
    "order": _order,
    "layout": layout,
    "padding": _padding,
}


def _suite(precision: str, cases: Callable[[str], Iterator[Case]], **more: tuple[str, ...]) -> Suite:
    descriptor, reference = partial(_descriptor, precision), partial(_reference, precision)
    return Suite(MatmulPlan, descriptor, reference, _oracle, cases, _CHANGES, **more)


SUITES: dict[str, Suite] = {
    "matmul": _suite("int16", _int16_cases, dtypes=INT16_DTYPES),
    "matmul_wide": _suite("wide", _wide_cases),
}
