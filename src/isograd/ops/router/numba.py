"""The router family on the CPU: checks of indices, then the compiled kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core.kernel import launcher
from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.numerics.index_flag import IndexFlag
from isograd.numerics.storage import address, kernel_type
from isograd.ops.router import numba_losses, numba_permutation, numba_router
from isograd.reduction.numba_kernels import sum_rows
from isograd.rows.walk import for_rows
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.runtime.layout import plan_walk

Array = NDArray[Any]


# --- what the CPU kernels have in common -----------------------------------------------------------------------------
@functools.lru_cache(maxsize=4096)
def _walk(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], axis: int) -> tuple[int, tuple[Any, ...], Any]:
    """Rows along an axis, the dimensions around it and their strides in elements, the strides along it."""
    walk = plan_walk((*shape[:axis], 1, *shape[axis + 1 :]), strides, axis)
    outer = (np.array(walk.shape, np.int64), *(np.array(s, np.int64) for s in walk.strides))
    return int(np.prod(walk.shape, dtype=np.int64)), outer, walk.axis_strides


def _rows(axis: int, *operands: Array) -> tuple[int, tuple[Any, ...], Any]:
    strides = tuple([tuple([s // a.itemsize for s in a.strides]) for a in operands])
    return _walk(operands[0].shape, strides, axis)


def _index_type(indices: Array) -> Any:
    return indices.dtype.type(0)


def _flat(x: Array) -> Array:
    """A contiguous array with the elements of x in their order."""
    return np.ascontiguousarray(x).reshape(-1)


class _Output:
    """A contiguous array to be filled, which is then copied where the result has to be, if that is another one."""

    def __init__(self, out: Array) -> None:
        self.out = out
        self.filled = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)

    def done(self) -> None:
        if self.filled is not self.out:
            self.out[...] = self.filled


def _refuse_outside(operation: str, argument: str, indices: Array, position: int, bound: int) -> None:
    """Raise for the index at a flat position."""
    where = ", ".join(str(i) for i in np.unravel_index(position, indices.shape))
    value = int(indices[np.unravel_index(position, indices.shape)])
    raise IndexOutOfRangeError(f"{operation}: {argument}[{where}] is {value}; accepted: 0 to {bound - 1}")


def _require_experts(operation: str, experts: Array, bound: int) -> Array:
    """The experts one after the other, all of them within range(bound)."""
    flat = _flat(experts)
    bad = numba_permutation.first_outside(_index_type(flat), address(flat), flat.size, bound)
    if bad >= 0:
        _refuse_outside(operation, "experts", experts, bad, bound)
    return flat


# --- rows ------------------------------------------------------------------------------------------------------------
@launcher("top_k")
def top_k(p: Any, x: Array, values: Array, indices: Array) -> None:
    """Fill values and indices."""
    if values.size == 0:
        return
    count, outer, strides = _rows(p.axis, x, values, indices)
    n = p.shape[p.axis]
    arguments = (kernel_type(x.dtype), address(x), address(values), address(indices), *outer, n, p.k, *strides)
    parallel.for_ranges(numba_router.top_k_rows, count, parallel.grain(count, 4 * n), *arguments)


@launcher("renormalize")
def renormalize(p: Any, w: Array, t: Array) -> None:
    """Fill t."""
    if t.size:
        for_rows(numba_router.renormalize_rows, p.axis, (w, t))


@launcher("renormalize_backward")
def renormalize_backward(p: Any, dt: Array, w: Array, dw: Array) -> None:
    """Fill dw."""
    if dw.size:
        for_rows(numba_router.renormalize_backward_rows, p.axis, (dt, w, dw))


@launcher("moe_router")
def moe_router(p: Any, logits: Array, weights: Array, experts: Array, bias: Array | None = None) -> None:
    """Fill weights and experts."""
    if weights.size == 0:
        return
    spread = logits  # whose place nothing takes without one
    if bias is not None:
        bias = bias if bias.strides[-1] == weights.itemsize else np.ascontiguousarray(bias)
        spread = np.broadcast_to(bias, p.shape)
    count, outer, strides = _rows(len(p.shape) - 1, logits, spread, weights, experts)
    n = p.shape[-1]
    with default_environment():
        scale = weights.dtype.type(p.scale)
    parallel.for_ranges(
        numba_router.router_rows,
        count,
        parallel.grain(count, 8 * n),
        kernel_type(logits.dtype),
        *map(address, (logits, weights, experts)),
        *outer,
        n,
        p.k,
        *strides,
        0 if bias is None else address(bias),
        p.scoring == "softmax",
        p.renormalize,
        p.groups,
        p.group_k,
        scale,
    )


@launcher("moe_router_backward")
def moe_router_backward(p: Any, dweights: Array, logits: Array, experts: Array, dlogits: Array) -> None:
    """Fill dlogits."""
    _require_experts(p.operation, experts, p.shape[-1])
    if dlogits.size == 0:
        return
    count, outer, strides = _rows(len(p.shape) - 1, logits, dweights, experts, dlogits)
    n = p.shape[-1]
    with default_environment():
        scale = dweights.dtype.type(p.scale)
    flag = IndexFlag()
    parallel.for_ranges(
        numba_router.router_backward_rows,
        count,
        parallel.grain(count, 8 * n),
        kernel_type(logits.dtype),
        _index_type(experts),
        *map(address, (logits, dweights, experts, dlogits)),
        *outer,
        n,
        p.k,
        *strides,
        p.scoring == "softmax",
        p.renormalize,
        scale,
        flag.address,
    )
    flag.require_unset(p.operation, "experts")


# --- permutation -----------------------------------------------------------------------------------------------------
_LEAST_BLOCK = 1 << 14  # entries that a thread counts at a time


def _counted(operation: str, experts: Array, num_experts: int) -> tuple[Array, Array, int]:
    """(flat experts, counts a block, entries a block)."""
    flat = _flat(experts)
    block = max(-(-flat.size // parallel.get_num_threads()), _LEAST_BLOCK, num_experts)
    blocks = max(-(-flat.size // block), 1)
    counts, found = np.zeros((blocks, num_experts), np.int64), np.empty(blocks, np.int64)
    arguments = (_index_type(flat), address(flat), flat.size, num_experts, block, counts, found)
    parallel.for_ranges(numba_permutation.count_experts, blocks, 1, *arguments)
    bad = found[found >= 0]
    if bad.size:
        _refuse_outside(operation, "experts", experts, int(bad[0]), num_experts)
    return flat, counts, block


@launcher("expert_counts")
def expert_counts(p: Any, experts: Array, counts: Array) -> None:
    """Fill counts."""
    counts[...] = _counted(p.operation, experts, p.num_experts)[1].sum(axis=0)


@launcher("expert_permutation")
def expert_permutation(p: Any, experts: Array, order: Array, offsets: Array) -> None:
    """Fill order and offsets."""
    flat, counts, block = _counted(p.operation, experts, p.num_experts)
    ends = np.cumsum(counts.sum(axis=0))
    offsets[0], offsets[1:] = 0, ends
    # A block goes on with an expert where the blocks before it end.
    before = np.cumsum(counts, axis=0) - counts
    places = before + (ends - counts.sum(axis=0))
    out = _Output(order)
    flag = IndexFlag()
    arguments = (_index_type(flat), address(flat), flat.size, p.num_experts, block, places, out.filled, flag.address)
    parallel.for_ranges(numba_permutation.place_entries, len(counts), 1, *arguments)
    flag.require_unset(p.operation, "experts")
    out.done()


def _inverse(operation: str, order: Array) -> Array:
    """Where every entry went; raises unless `order` is a permutation."""
    flat = _flat(order)
    positions = np.full(flat.size, -1, np.int64)
    bad = numba_permutation.invert(flat, positions, flat.size)
    if bad >= 0:
        if 0 <= flat[bad] < flat.size:
            raise InvalidProblemError(
                f"{operation}: order[{bad}] is {flat[bad]}, as another element; expected a permutation"
            )
        _refuse_outside(operation, "order", order, bad, flat.size)
    return positions


@launcher("moe_permute")
def moe_permute(p: Any, x: Array, order: Array, y: Array) -> None:
    """Fill y."""
    x, order, out = np.ascontiguousarray(x), _flat(order), _Output(y)
    bad = numba_permutation.first_outside(_index_type(order), address(order), order.size, order.size)
    if bad >= 0:
        _refuse_outside(p.operation, "order", order, bad, order.size)
    flag = IndexFlag()
    arguments = (kernel_type(x.dtype), address(x), address(out.filled), order, p.k, p.width, flag.address)
    count = order.size
    parallel.for_ranges(numba_permutation.copy_rows, count, parallel.grain(count, p.width), *arguments)
    flag.require_unset(p.operation, "order")
    out.done()


def _combine(p: Any, x: Array, weights: Array | None, order: Array, out: Array) -> None:
    positions = _inverse(p.operation, order)
    x, y = np.ascontiguousarray(x), _Output(out)
    w = None if weights is None else np.ascontiguousarray(weights)
    addresses = (address(x), 0 if w is None else address(w), address(y.filled))
    arguments = (kernel_type(x.dtype), *addresses, positions, p.k, p.width, w is not None)
    work = 4 * p.k * p.width
    parallel.for_ranges(numba_permutation.combine_rows, p.tokens, parallel.grain(p.tokens, work), *arguments)
    y.done()


@launcher("moe_permute_backward")
def moe_permute_backward(p: Any, dy: Array, order: Array, dx: Array) -> None:
    """Fill dx."""
    _combine(p, dy, None, order, dx)


@launcher("moe_combine")
def moe_combine(p: Any, expert_out: Array, weights: Array, order: Array, y: Array) -> None:
    """Fill y."""
    _combine(p, expert_out, weights, order, y)


@launcher("moe_combine_backward")
def moe_combine_backward(
    p: Any, dy: Array, expert_out: Array, weights: Array, order: Array, d_expert_out: Array, dweights: Array
) -> None:
    """Fill d_expert_out and dweights."""
    positions = _inverse(p.operation, order)
    inputs = [np.ascontiguousarray(a) for a in (dy, expert_out, weights)]
    outputs = [_Output(a) for a in (d_expert_out, dweights)]
    addresses = [address(x) for x in (*inputs, *(output.filled for output in outputs))]
    arguments = (kernel_type(inputs[0].dtype), *addresses, positions, p.k, p.width)
    work = 4 * p.k * max(p.width, 1)
    function = numba_permutation.combine_backward_rows
    parallel.for_ranges(function, p.tokens, parallel.grain(p.tokens, work), *arguments)
    for output in outputs:
        output.done()


# --- auxiliary losses ------------------------------------------------------------------------------------------------
_LEAST_TOKENS = 256  # rows of a block that sums columns


def _lines(x: Array, p: Any) -> Array:
    """A contiguous array as (problems, tokens, what a token has)."""
    tokens = math.prod(p.shape[int(p.batched) : -1])
    return np.ascontiguousarray(x).reshape(p.shape[0] if p.batched else 1, tokens, x.shape[-1])


def _shares(p: Any, experts: Array, of: Any) -> Array:
    """The share of each problem's entries that every expert has."""
    entries, n = _lines(experts, p), p.shape[-1]
    size = len(entries)
    if size > 1:  # with experts of its own for each
        _require_experts(p.operation, experts, n)
        entries = entries.astype(np.int64) + n * np.arange(size).reshape(-1, 1, 1)
        counts = _counted(p.operation, entries, size * n)[1].sum(axis=0).reshape(size, n)
    else:
        counts = _counted(p.operation, experts, n)[1].sum(axis=0).reshape(1, n)
    with default_environment(), np.errstate(all="ignore"):
        shares: Array = counts.astype(of) / of(entries[:1].size)
    return shares


def _column_means(x: Array) -> Array:
    """The mean of every column of a contiguous 2-D array, in the work type."""
    like = kernel_type(x.dtype)
    tokens, n = x.shape
    zero = like if x.dtype == np.float64 else np.float32(0)
    block = max(-(-tokens // (4 * parallel.get_num_threads())), _LEAST_TOKENS)
    blocks = max(-(-tokens // block), 1)
    part = np.zeros((blocks, n), np.int64 if x.dtype == np.float64 else np.int32)
    arguments = (like, address(x), tokens, n, block)
    parallel.for_ranges(numba_losses.column_magnitudes, blocks, 1, *arguments, part)
    keys = part.max(axis=0)
    hi, lo, special = (np.zeros((blocks, n), t) for t in (np.int64, np.uint64, np.int64))
    parallel.for_ranges(numba_losses.column_terms, blocks, 1, *arguments, keys, hi, lo, special)
    means = np.empty(n, type(zero))
    with default_environment():
        numba_losses.column_means(zero, keys, hi, lo, special, type(zero)(tokens), means)
    return means


def _sums(terms: Array, divisor: Any) -> Array:
    """The order-free sums of the rows of a contiguous 2-D array of the work type, divided."""
    totals = np.empty(len(terms), terms.dtype)
    n = terms.shape[1]
    arguments = (kernel_type(terms.dtype), address(terms), address(totals), n, terms.dtype.type(divisor))
    parallel.for_ranges(sum_rows, len(terms), parallel.grain(len(terms), n), *arguments)
    return totals


@launcher("load_balancing_loss")
def load_balancing_loss(p: Any, probabilities: Array, experts: Array, loss: Array) -> None:
    """Fill loss."""
    x, of = _lines(probabilities, p), loss.dtype.type
    shares = _shares(p, experts, of)
    size, tokens, n = x.shape
    # The columns of all problems side by side.
    means = _column_means(np.ascontiguousarray(x.swapaxes(0, 1)).reshape(tokens, size * n)).reshape(size, n)
    with default_environment(), np.errstate(all="ignore"):
        terms = shares * means
    totals = _sums(terms, 1)
    with default_environment(), np.errstate(all="ignore"):
        losses = of(n) * totals
    loss[...] = np.where(np.isnan(losses), of(np.nan), losses).reshape(loss.shape)


@launcher("load_balancing_loss_backward")
def load_balancing_loss_backward(p: Any, dloss: Array, experts: Array, dprobabilities: Array) -> None:
    """Fill dprobabilities."""
    of, n = dloss.dtype.type, p.shape[-1]
    shares = _shares(p, experts, of)
    y = _Output(dprobabilities)
    _, tokens, _ = _lines(y.filled, p).shape
    with default_environment(), np.errstate(all="ignore"):
        rows = ((dloss.reshape(-1, 1) * of(n)) * shares) / of(tokens)
    count = len(shares) * tokens
    arguments = (kernel_type(y.filled.dtype), address(rows), rows[:1].nbytes, address(y.filled), n, tokens)
    parallel.for_ranges(numba_losses.fill_rows, count, parallel.grain(count, n), *arguments)
    y.done()


@launcher("router_z_loss")
def router_z_loss(p: Any, logits: Array, loss: Array) -> None:
    """Fill loss."""
    x = _lines(logits, p)
    size, tokens, n = x.shape
    squares = np.empty((size, tokens), loss.dtype)
    arguments = (kernel_type(x.dtype), address(x), address(squares), n)
    function = numba_losses.square_logsumexp_rows
    parallel.for_ranges(function, squares.size, parallel.grain(squares.size, 8 * n), *arguments)
    loss[...] = _sums(squares, tokens).reshape(loss.shape)


@launcher("router_z_loss_backward")
def router_z_loss_backward(p: Any, dloss: Array, logits: Array, dlogits: Array) -> None:
    """Fill dlogits."""
    x, y = _lines(logits, p), _Output(dlogits)
    size, tokens, n = x.shape
    dloss = np.ascontiguousarray(dloss).reshape(-1)
    arguments = (kernel_type(x.dtype), address(x), address(y.filled), n, dloss, tokens, dloss.dtype.type(tokens))
    function = numba_losses.z_loss_backward_rows
    parallel.for_ranges(function, size * tokens, parallel.grain(size * tokens, 8 * n), *arguments)
    y.done()
