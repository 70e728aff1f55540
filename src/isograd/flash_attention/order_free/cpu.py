"""What the plans of order-free attention run on the CPU: operands cut into integers, a table of problems, kernels."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.flash_attention.cpu import (
    Arguments,
    Array,
    checked_table,
    extras_of,
    fill_delta,
    rows_of,
    sequence_table,
    sink_gradient,
    stored_as,
)
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDescriptor,
    AttentionWithCacheDescriptor,
)
from isograd.flash_attention.order_free import reference
from isograd.numerics import numba_dot
from isograd.numerics.storage import address, kernel_type
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment

_F = np.float32
_WORK = 40  # what a term of a tile's products costs beside an element of a row, inverted


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.flash_attention.order_free import numba_backward, numba_forward, numba_tiles
    return numba_tiles, numba_forward, numba_backward


@functools.cache
def engine_names() -> tuple[str, ...]:
    """What can multiply here, the fastest first."""
    return (*[engine.name for engine in numba_dot.engines()], numba_dot.PORTABLE.name)


def _engine(name: str | None) -> numba_dot.Engine:
    known = (*numba_dot.ENGINES, numba_dot.PORTABLE)
    return next(engine for engine in known if engine.name == (name or engine_names()[0]))


class _Cut:
    """The integers, scales and exponents of the rows of an operand [B, H, L, size]."""

    def __init__(self, x: Array) -> None:
        tiles = _kernels()[0]
        batch, heads, length, size = x.shape
        rows = batch * heads * length
        # Panels read lines beyond the last row, whose results nobody uses.
        self.integers = np.zeros((rows + tiles.ROOM, size), np.int16)
        self.scale, self.exponent = np.empty(rows, _F), np.empty(rows, _F)
        where = (address(self.integers), address(self.scale), address(self.exponent), heads, length, size)
        self.call = tiles.Cut(*where)
        strides = tuple([stride // x.itemsize for stride in x.strides])
        arguments = (kernel_type(x.dtype), address(x), strides, self.call)
        parallel.for_ranges(tiles.cut_rows, rows, parallel.grain(rows, 8 * size), *arguments)


def _factors(scale: Array, number: Any) -> Array:
    """Rows' factors in products: their scale times a number and what scales leave."""
    with default_environment(), np.errstate(all="ignore"):
        return np.asarray(scale * (number * _F(reference.TINY)))


class _Table(NamedTuple):
    table: NDArray[np.int64]
    q_blocks: int
    k_blocks: int


def _table(p: AttentionDescriptor, a: Arguments) -> _Table:
    sequences = sequence_table(p, a)
    counts = [-(-sequences[:, column] // reference.BLOCK) for column in (2, 4)]
    before = [np.cumsum(count) - count for count in counts]
    table = np.ascontiguousarray(np.column_stack([sequences, *before]), np.int64)
    return _Table(table, *(int(count.sum()) for count in counts))


def _step(p: AttentionDescriptor, keys: int, products: int) -> int:
    """The work of a block of queries: products are those of head_dim, and of v_dim as well."""
    return reference.BLOCK * keys * (products * (p.head_dim + p.v_dim) + _WORK) // _WORK


class _Operands(NamedTuple):
    q: _Cut
    k: _Cut
    v: _Cut
    q_scale: Array
    k_scale: Array


def _operands(p: AttentionDescriptor, a: Arguments, factor: Any) -> _Operands:
    q, k, v = (_Cut(a[name]) for name in ("q", "k", "v"))
    # A key is as good as its value: one that is not finite makes the scores NaN.
    k_scale = np.where(np.isnan(v.scale), _F(np.nan), k.scale)
    return _Operands(q, k, v, _factors(q.scale, factor), k_scale)


def _used(p: AttentionWithCacheDescriptor, a: Arguments, sequences: NDArray[np.int64]) -> Arguments:
    """The arguments with k and v [B, Hkv, L, size] as long as the longest sequence, from a cache of any kind."""
    longest = int(sequences[:, 4].max(initial=0))
    if p.page_size is None:
        return {**a, **{name: a[name][:, :, :longest] for name in ("k", "v")}}
    pages = checked_table(p, a, sequences)[:, : -(-longest // p.page_size)]
    found = {}
    for name in ("k", "v"):
        rows = a[name][pages].swapaxes(1, 2)  # [B, Hkv, pages, page_size, size]
        found[name] = rows.reshape(*rows.shape[:2], pages.shape[1] * p.page_size, rows.shape[4])
    return {**a, **found}


def attention(p: AttentionDescriptor, a: Arguments, engine: str | None = None) -> None:
    """O and lse of a checked problem. engine: one of `engine_names()`, by default the first; the bits are the same."""
    _, kernels, _ = _kernels()
    table = _table(p, a)
    if isinstance(p, AttentionWithCacheDescriptor):
        a = _used(p, a, table.table)
    o, lse = a["o"], a["lse"]
    if p.sequences is not None:  # rows may belong to no sequence
        o[...], lse[...] = 0, -np.inf
    if lse.size == 0:
        return
    numbers, multiply = reference.numbers_of(p.options), _engine(engine)
    operands, extras = _operands(p, a, numbers.factor), extras_of(p, a, np.dtype(_F))
    sums = lse if lse.flags.c_contiguous else np.full(lse.shape, -np.inf, _F)
    call = kernels.Forward(
        p.heads,
        p.groups,
        *(x.call for x in operands[:3]),
        *(address(x) for x in operands[3:]),
        rows_of(o),
        address(sums),
        0 if extras.sinks is None else address(extras.sinks),
        extras.hidden,
        stored_as(p.bias_dtype),
        extras.dropout,
        kernels.Numbers(numbers.cap, numbers.kept),
    )
    count = table.q_blocks * p.heads
    arguments = (multiply.like, multiply.element, call, table.table)
    parallel.for_ranges(kernels.forward, count, parallel.grain(count, _step(p, p.k_length, 1)), *arguments)
    if sums is not lse:
        lse[...] = sums


def attention_backward(p: AttentionBackwardDescriptor, a: Arguments, engine: str | None = None) -> None:
    """The gradients of a checked problem, without one of a bias."""
    _, _, kernels = _kernels()
    table = _table(p, a)
    lse = np.ascontiguousarray(a["lse"])
    delta = np.empty(p.lse_shape, _F)
    fill_delta(a["o"], a["do"], delta)
    if p.dlse:
        with default_environment(), np.errstate(all="ignore"):
            delta -= a["dlse"]
    delta[np.isneginf(lse)] = 0
    gradients = [a[name] for name in ("dq", "dk", "dv")]
    if p.sequences is not None:  # rows may belong to no sequence
        for gradient in gradients:
            gradient[...] = 0
    numbers, multiply = reference.numbers_of(p.options), _engine(engine)
    operands, extras = _operands(p, a, numbers.factor), extras_of(p, a, np.dtype(_F))
    do = _Cut(a["do"])
    do_scale = _factors(do.scale, numbers.kept)
    call = kernels.Backward(
        p.heads,
        p.groups,
        *(x.call for x in (*operands[:3], do)),
        *(address(x) for x in (*operands[3:], do_scale, lse, delta)),
        *(rows_of(x) for x in gradients),
        extras.hidden,
        stored_as(p.bias_dtype),
        extras.dropout,
        kernels.Factors(numbers.cap, numbers.scale, numbers.kept),
    )
    arguments = (multiply.like, multiply.element, call, table.table)
    count = table.q_blocks * p.heads
    step = _step(p, p.k_length, 2)
    parallel.for_ranges(kernels.query_gradients, count, parallel.grain(count, step), *arguments)
    count = table.k_blocks * p.kv_heads
    step = _step(p, p.q_length * p.groups, 2)
    parallel.for_ranges(kernels.key_gradients, count, parallel.grain(count, step), *arguments)
    if p.dsinks and extras.sinks is not None:
        last = table.table[-1] if len(table.table) else np.zeros(3, np.int64)
        sink_gradient(p, a["dsinks"], extras.sinks, lse, delta, int(last[1] + last[2]))
