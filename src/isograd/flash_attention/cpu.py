"""What the plans of the attention family run on the CPU: tables of problems, rows of the work type, kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDeltaDescriptor,
    AttentionDescriptor,
    AttentionWithCacheDescriptor,
)
from isograd.numerics import reference as ref
from isograd.numerics.storage import address, kernel_type
from isograd.reduction import api as reduction
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment

Array = NDArray[Any]
Arguments = Mapping[str, Any]


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.flash_attention import numba_backward, numba_kernels, numba_rows, numba_scores
    return numba_kernels, numba_backward, numba_scores, numba_rows


def _strides(x: Array) -> tuple[int, ...]:
    return tuple([stride // x.itemsize for stride in x.strides])


def stored_as(dtype: str | None) -> int:
    """What kernels call a dtype."""
    rows = _kernels()[3]
    return int({"float16": rows.HALF, "bfloat16": rows.BFLOAT16}.get(dtype or "", rows.WORK))


def rows_of(array: Array) -> Any:
    """The rows of an array [B, H, L, D] as kernels take them."""
    return _kernels()[3].Rows(address(array), *_strides(array), stored_as(array.dtype.name))


# --- problems --------------------------------------------------------------------------------------------------------
def checked_ends(operation: str, argument: str, given: Array, tokens: int) -> NDArray[np.int64]:
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


def _checked_lengths(p: AttentionWithCacheDescriptor, given: Array) -> NDArray[np.int64]:
    """Checked cache_seqlens."""
    lengths = given.astype(np.int64)
    wrong = np.flatnonzero((lengths < 0) | (lengths > p.k_length))
    if wrong.size:
        n = int(wrong[0])
        raise InvalidProblemError(f"{p.operation}: cache_seqlens has {lengths[n]} at {n}; accepted: 0 to {p.k_length}")
    return lengths


def checked_table(p: AttentionWithCacheDescriptor, a: Arguments, sequences: NDArray[np.int64]) -> NDArray[np.int32]:
    """A checked copy of the block table; pages that are not used are 0."""
    table = np.array(a["block_table"], np.int32, order="C")
    lengths, size = sequences[:, 4:5], p.page_size or 1
    table[np.arange(table.shape[1]) >= -(-lengths // size)] = 0
    wrong = np.argwhere((table < 0) | (table >= max(p.pages, 1)))
    if not p.pages and lengths.any():
        wrong = np.argwhere(lengths)
    if len(wrong):
        n, page = map(int, wrong[0])
        raise IndexOutOfRangeError(
            f"{p.operation}: block_table has {table[n, page]} at {(n, page)}; accepted: 0 to {p.pages - 1} for the "
            f"{lengths[n, 0]} keys of sequence {n}"
        )
    return table


class _Problems(NamedTuple):
    """The table that kernels read, the blocks and tiles of keys of a head of k, and the pairs that make a block."""

    table: NDArray[np.int64]
    blocks: int
    k_tiles: int
    together: int


_TOGETHER = 4  # pairs of a block: more would convert a tile of keys less often, and take more memory for each thread


def _together(pairs: int, p: AttentionDescriptor, problems: int) -> int:
    """The pairs that make a block: a tile of queries and a query head each."""
    threads = parallel.get_num_threads()
    most = pairs // (8 * threads)  # blocks for each thread, so that all end together
    if p.q_length <= 16 and problems * p.kv_heads >= threads:  # converting a tile of keys takes longer than its use
        most = max(most, p.groups)
    return max(1, min(most, _TOGETHER))


def sequence_table(p: AttentionDescriptor, a: Arguments) -> NDArray[np.int64]:
    """Of each sequence: batch, first row and length of q, then of k, and the key that query 0 is level with."""
    if p.sequences is None:
        zeros = np.zeros(p.batch, np.int64)
        batch, q_start, k_start = np.arange(p.batch), zeros, zeros
        q_length, k_length = zeros + p.q_length, zeros + p.k_length
        if isinstance(p, AttentionWithCacheDescriptor):
            k_length = _checked_lengths(p, a["cache_seqlens"])
    else:
        q_ends = checked_ends(p.operation, "cu_seqlens_q", a["cu_seqlens_q"], p.q_length)
        k_ends = checked_ends(p.operation, "cu_seqlens_k", a["cu_seqlens_k"], p.k_length)
        batch, q_start, k_start = np.zeros(p.sequences, np.int64), q_ends[:-1], k_ends[:-1]
        q_length, k_length = np.diff(q_ends), np.diff(k_ends)
    offset = k_length - q_length if p.options.alignment == "lower_right" else np.zeros_like(q_length)
    return np.stack([batch, q_start, q_length, k_start, k_length, offset], axis=1)


def _problems(p: AttentionDescriptor, a: Arguments) -> _Problems:
    scores = _kernels()[2]
    sequences = sequence_table(p, a)
    q_length, k_length = sequences[:, 2], sequences[:, 4]
    pairs = -(-q_length // scores.BLOCK_Q) * p.groups
    together = _together(int(np.sum(pairs)) * p.kv_heads, p, len(sequences))
    blocks, k_tiles = -(-pairs // together), -(-k_length // scores.BLOCK_K)
    before = [np.cumsum(counts) - counts for counts in (blocks, k_tiles)]
    table = np.column_stack([sequences, *before])
    return _Problems(np.ascontiguousarray(table, np.int64), int(np.sum(blocks)), int(np.sum(k_tiles)), together)


class Extras(NamedTuple):
    """The optional operands as kernels take them, and what keeps their memory alive."""

    hidden: Any
    dropout: Any
    bias_like: Any
    sinks: Array | None
    alive: tuple[Any, ...]


def _broadcast_strides(x: Array) -> tuple[int, ...]:
    return tuple([0 if n == 1 else s for s, n in zip(_strides(x), x.shape, strict=True)])


def extras_of(p: AttentionDescriptor, a: Arguments, work: Any) -> Extras:
    """The optional operands of a problem, sinks in the work type."""
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
    return Extras(hidden, dropout, bias_like, sinks, (bias, mask, ids, sinks))


def _numbers(p: AttentionDescriptor, work: Any) -> tuple[Any, ...]:
    """Scale, softcap and the factor of kept probabilities in the work type."""
    with default_environment():
        return tuple([work.type(x) for x in (p.options.scale, p.options.softcap, p.options.dropout_factor)])


_ELEMENTS = 64  # multiply-adds that take about the time of one element of a row kernel


def _sizes(p: AttentionDescriptor, problems: _Problems) -> Any:
    return _kernels()[0].Sizes(p.heads, p.groups, p.head_dim, p.v_dim, problems.together)


def _work(p: AttentionDescriptor) -> Any:
    return np.dtype(p.work)


# --- forward ---------------------------------------------------------------------------------------------------------
def attention(p: AttentionDescriptor, a: Arguments) -> None:
    """O and lse of a checked problem."""
    kernels, _, scores, rows = _kernels()
    problems = _problems(p, a)
    pages = None
    if isinstance(p, AttentionWithCacheDescriptor) and p.page_size is not None:
        pages = checked_table(p, a, problems.table)
    o, lse = a["o"], a["lse"]
    if p.sequences is not None:  # rows may belong to no sequence
        o[...], lse[...] = 0, -np.inf
    if lse.size == 0:
        return
    work = _work(p)
    sums = lse if lse.flags.c_contiguous else np.full(lse.shape, -np.inf, work)
    extras = extras_of(p, a, work)
    call = kernels.Forward(
        _sizes(p, problems),
        *(rows_of(a[name]) for name in ("q", "k", "v", "o")),
        address(sums),
        0 if extras.sinks is None else address(extras.sinks),
        extras.hidden,
        extras.dropout,
        rows.NO_PAGES if pages is None else rows.Pages(address(pages), pages.shape[1], p.k_shape[2]),
    )
    count = problems.blocks * p.kv_heads
    step = problems.together * scores.BLOCK_Q * p.k_length * (p.head_dim + p.v_dim + 32) // _ELEMENTS
    arguments = (work.type(0), extras.bias_like, call, _numbers(p, work), problems.table)
    parallel.for_ranges(kernels.forward, count, parallel.grain(count, step), *arguments)
    if sums is not lse:
        lse[...] = sums


# --- backward --------------------------------------------------------------------------------------------------------
def attention_backward(p: AttentionBackwardDescriptor, a: Arguments) -> None:
    """The gradients of a checked problem."""
    backward = _kernels()[1]
    problems = _problems(p, a)
    work = _work(p)
    lse = np.ascontiguousarray(a["lse"])
    unseeing = np.isneginf(lse)
    do = _without(a["do"], unseeing)
    delta = np.empty(p.lse_shape, work)
    fill_delta(a["o"], a["do"], delta)
    if p.dlse:
        with default_environment():
            delta -= a["dlse"]
    delta[unseeing] = 0  # its probabilities are 0, and 0 times an infinity would not be
    gradients = [a[name] for name in ("dq", "dk", "dv")]
    if p.sequences is not None:  # rows may belong to no sequence
        for gradient in gradients:
            gradient[...] = 0
    extras = extras_of(p, a, work)
    call = backward.Backward(
        _sizes(p, problems),
        *(rows_of(x) for x in (a["q"], do, a["k"], a["v"])),
        *(address(lse), address(delta)),
        *(rows_of(x) for x in gradients),
        extras.hidden,
        extras.dropout,
    )
    arguments = (work.type(0), extras.bias_like, call, _numbers(p, work), problems.table)
    _run_backward(p, problems, arguments)
    if p.dbias:
        _bias_gradient(p, a["dbias"], arguments)
    if p.dsinks and extras.sinks is not None:
        last = problems.table[-1] if len(problems.table) else np.zeros(3, np.int64)
        sink_gradient(p, a["dsinks"], extras.sinks, lse, delta, int(last[1] + last[2]))


def _without(do: Array, rows: Array) -> Array:
    """Gradients without those of rows that see nothing, which may be anything."""
    if not rows.any():
        return do
    kept = do.copy()
    kept[rows] = 0
    return kept


def _run_backward(p: AttentionBackwardDescriptor, problems: _Problems, arguments: tuple[Any, ...]) -> None:
    """dq, dk and dv by the cheaper of the two ways, whose bits are the same."""
    _, backward, scores, _ = _kernels()
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
    count = problems.blocks * p.kv_heads
    step = problems.together * scores.BLOCK_Q * p.k_length * 2 * products // _ELEMENTS
    parallel.for_ranges(backward.backward_queries, count, parallel.grain(count, step), *arguments)


def _bias_gradient(p: AttentionBackwardDescriptor, dbias: Array, arguments: tuple[Any, ...]) -> None:
    _, backward, scores, _ = _kernels()
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


def sink_gradient(
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
    fill_delta(a["o"], a["do"], a["delta"])


def fill_delta(o: Array, do: Array, out: Array) -> None:
    """The order-free row sums of o · do."""
    batch, heads, length, size = o.shape
    count = batch * heads * length
    if count:
        arguments = (kernel_type(o.dtype), address(o), address(do), heads, length, _strides(o), _strides(do), size)
        function = _kernels()[0].delta_rows
        parallel.for_ranges(
            function, count, parallel.grain(count, 4 * size), *arguments, address(out), _strides(out)
        )  # fmt: skip
