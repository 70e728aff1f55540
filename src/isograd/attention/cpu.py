"""What the plans of the attention family run on the CPU: tables of problems, rows of the work type, kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd import parallel
from isograd.attention.descriptors import AttentionBackwardDescriptor, AttentionDeltaDescriptor, AttentionDescriptor
from isograd.errors import InvalidProblemError
from isograd.fenv import default_environment
from isograd.numerics import reference as ref
from isograd.numerics.storage import address, kernel_type
from isograd.reduction import api as reduction

Array = NDArray[Any]
Arguments = Mapping[str, Any]


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.attention import numba_backward, numba_kernels, numba_scores
    return numba_kernels, numba_backward, numba_scores


def _strides(x: Array) -> tuple[int, ...]:
    return tuple([stride // x.itemsize for stride in x.strides])


# --- rows of the work type -------------------------------------------------------------------------------------------
_SLACK = 16  # rows behind scratch that products may touch


class _Lines(NamedTuple):
    """Rows [B, H, L, D] of the work type whose elements are neighbours and whose length is whole vectors."""

    array: Array
    rows: Any


def _lines_of(array: Array) -> _Lines:
    batch, head, row, _ = _strides(array)
    return _Lines(array, _kernels()[2].Rows(address(array), batch, head, row))


def _line(size: int, work: Any) -> int:
    """The length of a row in whole vectors."""
    width: int = 64 // np.dtype(work).itemsize
    return -(-size // width) * width


def _scratch(shape: tuple[int, ...], work: Any) -> Array:
    """An array [B, H, L, line] with slack behind it."""
    batch, heads, length, size = shape
    line = _line(size, work)
    flat = np.empty((batch * heads * length + _SLACK) * line, work)
    flat[batch * heads * length * line :] = 0
    return flat[: batch * heads * length * line].reshape(batch, heads, length, line)


def _widened(x: Array, work: Any, factor: float | None = None) -> _Lines:
    """The rows of an array, themselves where they serve as they are."""
    if factor is None and x.dtype == work and x.strides[3] == x.itemsize and _line(x.shape[3], work) == x.shape[3]:
        return _lines_of(x)
    batch, heads, length, size = x.shape
    out = _scratch(x.shape, work)
    count = batch * heads * length
    if count:
        with default_environment():
            number = work.type(1 if factor is None else factor)
        arguments = (kernel_type(x.dtype), address(x), heads, length, _strides(x), size)
        rest = (address(out), out.shape[3], number)
        parallel.for_ranges(_kernels()[0].widen_rows, count, parallel.grain(count, 2 * size), *arguments, *rest)
    return _lines_of(out)


def _narrowed(lines: Array, out: Array, factor: float = 1.0) -> None:
    """Round scratch of the work type into an output."""
    batch, heads, length, size = out.shape
    count = batch * heads * length
    if count:
        with default_environment():
            number = lines.dtype.type(factor)
        arguments = (kernel_type(out.dtype), address(out), heads, length, _strides(out), size)
        rest = (address(lines), lines.shape[3], number)
        parallel.for_ranges(_kernels()[0].narrow_rows, count, parallel.grain(count, 2 * size), *arguments, *rest)


# --- problems --------------------------------------------------------------------------------------------------------
def _ends(operation: str, argument: str, given: Array, tokens: int) -> NDArray[np.int64]:
    """Checked cu_seqlens."""
    ends = given.astype(np.int64)
    if ends[0] != 0:
        raise InvalidProblemError(f"{operation}: {argument} starts at {ends[0]}; expected 0")
    falling = np.flatnonzero(np.diff(ends) < 0)
    if falling.size:
        n = int(falling[0])
        raise InvalidProblemError(
            f"{operation}: {argument} decreases from {ends[n]} to {ends[n + 1]} at {n + 1}; expected no decrease"
        )
    if ends[-1] > tokens:
        raise InvalidProblemError(f"{operation}: {argument} ends at {ends[-1]}; there are {tokens} tokens")
    return ends


def _tiles_before(lengths: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    tiles = -(-lengths // block)
    return np.cumsum(tiles) - tiles


class _Problems(NamedTuple):
    """The table that kernels read, and the tiles of queries and of keys of all problems, for one head."""

    table: NDArray[np.int64]
    q_tiles: int
    k_tiles: int


def _problems(p: AttentionDescriptor, a: Arguments) -> _Problems:
    scores = _kernels()[2]
    if p.sequences is None:
        zeros = np.zeros(p.batch, np.int64)
        batch, q_start, k_start = np.arange(p.batch), zeros, zeros
        q_length, k_length = zeros + p.q_length, zeros + p.k_length
    else:
        q_ends = _ends(p.operation, "cu_seqlens_q", a["cu_seqlens_q"], p.q_length)
        k_ends = _ends(p.operation, "cu_seqlens_k", a["cu_seqlens_k"], p.k_length)
        batch, q_start, k_start = np.zeros(p.sequences, np.int64), q_ends[:-1], k_ends[:-1]
        q_length, k_length = np.diff(q_ends), np.diff(k_ends)
    offset = k_length - q_length if p.options.alignment == "lower_right" else np.zeros_like(q_length)
    before = _tiles_before(q_length, scores.BLOCK_Q), _tiles_before(k_length, scores.BLOCK_K)
    table = np.stack([batch, q_start, q_length, k_start, k_length, offset, *before], axis=1)
    q_tiles, k_tiles = (
        int(np.sum(-(-x // block))) for x, block in ((q_length, scores.BLOCK_Q), (k_length, scores.BLOCK_K))
    )
    return _Problems(np.ascontiguousarray(table, np.int64), q_tiles, k_tiles)


class _Extras(NamedTuple):
    """The optional operands as kernels take them, and what keeps their memory alive."""

    hidden: Any
    dropout: Any
    bias_like: Any
    sinks: Array | None
    alive: tuple[Any, ...]


def _broadcast_strides(x: Array) -> tuple[int, ...]:
    return tuple([0 if n == 1 else s for s, n in zip(_strides(x), x.shape, strict=True)])


def _extras(p: AttentionDescriptor, a: Arguments, work: Any) -> _Extras:
    scores = _kernels()[2]
    left, right = (
        scores.UNBOUNDED if side is None else min(side, scores.UNBOUNDED) for side in p.options.reach()
    )  # fmt: skip
    bias, mask = a.get("bias"), a.get("mask")
    mask = None if mask is None else mask.view(np.uint8)
    ids = [np.ascontiguousarray(a[name]) for name in ("q_segment_ids", "k_segment_ids")] if p.segments else []
    sinks = a.get("sinks")
    sinks = None if sinks is None else np.ascontiguousarray(sinks.astype(work))
    nowhere = (0, 0, 0, 0)
    hidden = scores.Hidden(
        left,
        right,
        0 if bias is None else address(bias),
        nowhere if bias is None else _broadcast_strides(bias),
        0 if mask is None else address(mask),
        nowhere if mask is None else _broadcast_strides(mask),
        address(ids[0]) if ids else 0,
        address(ids[1]) if ids else 0,
        p.q_length,
        p.k_length,
    )
    options = p.options
    threshold = options.dropout_threshold if options.dropout_p else 0
    dropout = scores.Dropout(np.uint64(threshold), np.uint64(options.seed))
    bias_like = kernel_type(work if bias is None else bias.dtype)
    return _Extras(hidden, dropout, bias_like, sinks, (bias, mask, ids, sinks))


def _numbers(p: AttentionDescriptor, work: Any) -> tuple[Any, ...]:
    """Scale, softcap and the factor of kept probabilities in the work type."""
    with default_environment():
        return tuple([work.type(x) for x in (p.options.scale, p.options.softcap, p.options.dropout_factor)])


_ELEMENTS = 64  # multiply-adds that take about the time of one element of a row kernel


def _transposed(x: _Lines, size: int, heads: int, problems: _Problems) -> Array:
    """Tiles of keys, or of values, as products with queries, or with gradients, take them."""
    block = _kernels()[2].BLOCK_K
    count = problems.k_tiles * heads
    out = np.empty(count * block * size + 64, x.array.dtype)
    arguments = (x.array.dtype.type(0), x.rows, size, heads, address(out), problems.table)
    parallel.for_ranges(_kernels()[0].transpose_tiles, count, parallel.grain(count, 2 * block * size), *arguments)
    return out


def _work(p: AttentionDescriptor) -> Any:
    return np.dtype(p.work)


# --- forward ---------------------------------------------------------------------------------------------------------
def attention(p: AttentionDescriptor, a: Arguments) -> None:
    """O and lse of a checked problem."""
    kernels, _, scores = _kernels()
    problems = _problems(p, a)
    o, lse = a["o"], a["lse"]
    if p.sequences is not None:  # rows may belong to no sequence
        o[...], lse[...] = 0, -np.inf
    if lse.size == 0:
        return
    work = _work(p)
    q, k, v = (_widened(a[name], work) for name in ("q", "k", "v"))
    keys = _transposed(k, p.head_dim, p.kv_heads, problems)
    direct = o.dtype == work and o.strides[3] == o.itemsize
    lines = _lines_of(o) if direct else _lines_of(_scratch(o.shape, work))
    if not direct and p.sequences is not None:
        lines.array[...] = 0
    sums = lse if lse.flags.c_contiguous else np.full(lse.shape, -np.inf, work)
    extras = _extras(p, a, work)
    call = kernels.Forward(
        kernels.Sizes(p.heads, p.groups, p.head_dim, p.v_dim),
        q.rows,
        address(keys),
        v.rows,
        lines.rows,
        address(sums),
        0 if extras.sinks is None else address(extras.sinks),
        extras.hidden,
        extras.dropout,
    )
    count = problems.q_tiles * p.heads
    step = scores.BLOCK_Q * p.k_length * (p.head_dim + p.v_dim + 32) // _ELEMENTS
    arguments = (work.type(0), extras.bias_like, call, _numbers(p, work), problems.table)
    parallel.for_ranges(kernels.forward, count, parallel.grain(count, step), *arguments)
    if not direct:
        _narrowed(lines.array, o)
    if sums is not lse:
        lse[...] = sums


# --- backward --------------------------------------------------------------------------------------------------------
def _gradient_lines(out: Array, work: Any, packed: bool) -> _Lines:
    """Where a gradient is summed up: in the output, or in scratch that `_narrowed` rounds into it."""
    direct = out.dtype == work and out.strides[3] == out.itemsize
    lines = out if direct else _scratch(out.shape, work)
    if packed:  # rows may belong to no sequence
        lines[...] = 0
    return _lines_of(lines)


def attention_backward(p: AttentionBackwardDescriptor, a: Arguments) -> None:
    """The gradients of a checked problem."""
    kernels, backward, _ = _kernels()
    problems = _problems(p, a)
    work = _work(p)
    lse = np.ascontiguousarray(a["lse"])
    unseeing = np.isneginf(lse)
    q, do = _widened(a["q"], work, p.options.scale), _widened(_without(a["do"], unseeing), work, 1.0)
    k, v = _widened(a["k"], work), _widened(a["v"], work)
    delta = np.empty(p.lse_shape, work)
    _delta(a["o"], a["do"], delta)
    if p.dlse:
        with default_environment():
            delta -= a["dlse"]
    delta[unseeing] = 0  # its probabilities are 0, and 0 times an infinity would not be
    keys = _transposed(k, p.head_dim, p.kv_heads, problems)
    values = _transposed(v, p.v_dim, p.kv_heads, problems)
    gradients = {name: _gradient_lines(a[name], work, p.sequences is not None) for name in ("dq", "dk", "dv")}
    extras = _extras(p, a, work)
    call = backward.Backward(
        kernels.Sizes(p.heads, p.groups, p.head_dim, p.v_dim),
        *(q.rows, do.rows, k.rows, address(keys), address(values), address(lse), address(delta)),
        *(lines.rows for lines in gradients.values()),
        extras.hidden,
        extras.dropout,
    )
    arguments = (work.type(0), extras.bias_like, call, _numbers(p, work), problems.table)
    _run_backward(p, problems, arguments)
    for name, lines in gradients.items():
        if lines.array is not a[name]:
            _narrowed(lines.array, a[name])
    if p.dbias:
        _bias_gradient(p, a["dbias"], arguments)
    if p.dsinks and extras.sinks is not None:
        last = problems.table[-1] if len(problems.table) else np.zeros(3, np.int64)
        _sink_gradient(p, a["dsinks"], extras.sinks, lse, delta, int(last[1] + last[2]))


def _without(do: Array, rows: Array) -> Array:
    """Gradients without those of rows that see nothing, which may be anything."""
    if not rows.any():
        return do
    kept = do.copy()
    kept[rows] = 0
    return kept


def _run_backward(p: AttentionBackwardDescriptor, problems: _Problems, arguments: tuple[Any, ...]) -> None:
    """dq, dk and dv by the cheaper of the two ways, whose bits are the same."""
    _, backward, scores = _kernels()
    threads = parallel.get_num_threads()
    heads = len(problems.table) * p.kv_heads
    products = p.head_dim + p.v_dim + 32
    if 0 < 5 * -(-heads // threads) * threads <= 7 * heads:
        step = p.groups * p.q_length * p.k_length * 3 * products // _ELEMENTS // (p.sequences or 1)
        parallel.for_ranges(backward.backward_heads, heads, parallel.grain(heads, step), *arguments)
        return
    count = problems.k_tiles * p.kv_heads
    step = scores.BLOCK_K * p.groups * p.q_length * 2 * products // _ELEMENTS
    parallel.for_ranges(backward.backward_keys, count, parallel.grain(count, step), *arguments)
    count = problems.q_tiles * p.heads
    step = scores.BLOCK_Q * p.k_length * 2 * products // _ELEMENTS
    parallel.for_ranges(backward.backward_queries, count, parallel.grain(count, step), *arguments)


def _bias_gradient(p: AttentionBackwardDescriptor, dbias: Array, arguments: tuple[Any, ...]) -> None:
    _, backward, scores = _kernels()
    if dbias.size == 0:
        return
    if 0 in p.scores_shape:
        dbias[...] = 0
        return
    batch, heads, queries, keys = dbias.shape
    tiles = (-(-queries // scores.BLOCK_Q), -(-keys // scores.BLOCK_K))
    count = batch * heads * tiles[0] * tiles[1]
    bias = backward.Bias(address(dbias), _broadcast_strides(dbias), batch, heads, queries, keys)
    step = p.batch * p.heads * p.q_length * p.k_length // count * (p.head_dim + p.v_dim + 32) // _ELEMENTS
    parallel.for_ranges(backward.bias_gradient, count, parallel.grain(count, step), *arguments, bias)


def _sink_gradient(
    p: AttentionBackwardDescriptor, dsinks: Array, sinks: Array, lse: Array, delta: Array, end: int
) -> None:
    """The order-free sum of what the rows of a head add; rows from `end` on belong to no sequence."""
    terms = np.empty(p.lse_shape, lse.dtype)
    count = terms.size
    if count:
        rows = (p.heads, p.q_length, address(lse), address(delta), address(terms))
        function = _kernels()[1].sink_terms
        parallel.for_ranges(
            function, count, parallel.grain(count, 16), lse.dtype.type(0), address(sinks), *rows
        )  # fmt: skip
    terms[:, :, end:] = 0
    with default_environment():
        dsinks[...] = ref.narrow(reduction.sum(terms, (0, 2)), dsinks.dtype)


# --- delta -----------------------------------------------------------------------------------------------------------
def attention_delta(p: AttentionDeltaDescriptor, a: Arguments) -> None:
    """Delta of checked o and do."""
    _delta(a["o"], a["do"], a["delta"])


def _delta(o: Array, do: Array, out: Array) -> None:
    batch, heads, length, size = o.shape
    count = batch * heads * length
    if count:
        arguments = (kernel_type(o.dtype), address(o), address(do), heads, length, _strides(o), _strides(do), size)
        function = _kernels()[0].delta_rows
        parallel.for_ranges(
            function, count, parallel.grain(count, 4 * size), *arguments, address(out), _strides(out)
        )  # fmt: skip
