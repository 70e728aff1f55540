"""What the plans of the router family run on the CPU: checks of indices, then the compiled kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.numerics.index_flag import IndexFlag
from isograd.numerics.storage import address, kernel_type
from isograd.router import descriptors as d
from isograd.router import loss_descriptors
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.runtime.layout import plan_walk

Array = NDArray[Any]
Arguments = Mapping[str, Any]


# --- what the CPU kernels have in common -----------------------------------------------------------------------------
@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.router import numba_losses, numba_permutation, numba_router
    return numba_router, numba_permutation, numba_losses


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
    bad = _kernels()[1].first_outside(_index_type(flat), address(flat), flat.size, bound)
    if bad >= 0:
        _refuse_outside(operation, "experts", experts, bad, bound)
    return flat


# --- rows ------------------------------------------------------------------------------------------------------------
def _top_k(p: d.TopKDescriptor, a: Arguments) -> None:
    x, values, indices = a["x"], a["values"], a["indices"]
    if values.size == 0:
        return
    count, outer, strides = _rows(p.axis, x, values, indices)
    n = p.shape[p.axis]
    arguments = (kernel_type(x.dtype), address(x), address(values), address(indices), *outer, n, p.k, *strides)
    parallel.for_ranges(_kernels()[0].top_k_rows, count, parallel.grain(count, 4 * n), *arguments)


def _renormalize(p: d.RenormalizeDescriptor, a: Arguments) -> None:
    operands = [a[operand.name] for operand in p.operands()]
    if operands[-1].size == 0:
        return
    count, outer, strides = _rows(p.axis, *operands)
    n = p.shape[p.axis]
    function = getattr(_kernels()[0], f"{p.operation}_rows")
    arguments = (kernel_type(operands[-1].dtype), *map(address, operands), *outer, n, *strides)
    parallel.for_ranges(function, count, parallel.grain(count, 8 * n), *arguments)


def _moe_router(p: d.MoeRouterDescriptor, a: Arguments) -> None:
    logits, weights, experts = a["logits"], a["weights"], a["experts"]
    if weights.size == 0:
        return
    bias = logits  # whose place nothing takes without one
    if p.bias:
        bias = a["bias"] if a["bias"].strides[-1] == weights.itemsize else np.ascontiguousarray(a["bias"])
        bias = np.broadcast_to(bias, p.shape)
    count, outer, strides = _rows(len(p.shape) - 1, logits, bias, weights, experts)
    n = p.shape[-1]
    with default_environment():
        scale = weights.dtype.type(p.scale)
    parallel.for_ranges(
        _kernels()[0].router_rows,
        count,
        parallel.grain(count, 8 * n),
        kernel_type(logits.dtype),
        *map(address, (logits, weights, experts)),
        *outer,
        n,
        p.k,
        *strides,
        address(bias) if p.bias else 0,
        p.scoring == "softmax",
        p.renormalize,
        p.groups,
        p.group_k,
        scale,
    )


def _moe_router_backward(p: d.MoeRouterBackwardDescriptor, a: Arguments) -> None:
    dweights, logits, experts, dlogits = a["dweights"], a["logits"], a["experts"], a["dlogits"]
    _require_experts(p.operation, experts, p.shape[-1])
    if dlogits.size == 0:
        return
    count, outer, strides = _rows(len(p.shape) - 1, logits, dweights, experts, dlogits)
    n = p.shape[-1]
    with default_environment():
        scale = dweights.dtype.type(p.scale)
    flag = IndexFlag()
    parallel.for_ranges(
        _kernels()[0].router_backward_rows,
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
    parallel.for_ranges(_kernels()[1].count_experts, blocks, 1, *arguments)
    bad = found[found >= 0]
    if bad.size:
        _refuse_outside(operation, "experts", experts, int(bad[0]), num_experts)
    return flat, counts, block


def _expert_counts(p: d.ExpertCountsDescriptor, a: Arguments) -> None:
    a["counts"][...] = _counted(p.operation, a["experts"], p.num_experts)[1].sum(axis=0)


def _expert_permutation(p: d.ExpertPermutationDescriptor, a: Arguments) -> None:
    flat, counts, block = _counted(p.operation, a["experts"], p.num_experts)
    ends = np.cumsum(counts.sum(axis=0))
    a["offsets"][0], a["offsets"][1:] = 0, ends
    # A block goes on with an expert where the blocks before it end.
    before = np.cumsum(counts, axis=0) - counts
    places = before + (ends - counts.sum(axis=0))
    order = _Output(a["order"])
    flag = IndexFlag()
    arguments = (_index_type(flat), address(flat), flat.size, p.num_experts, block, places, order.filled, flag.address)
    parallel.for_ranges(_kernels()[1].place_entries, len(counts), 1, *arguments)
    flag.require_unset(p.operation, "experts")
    order.done()


def _inverse(operation: str, order: Array) -> Array:
    """Where every entry went; raises unless `order` is a permutation."""
    flat = _flat(order)
    positions = np.full(flat.size, -1, np.int64)
    bad = _kernels()[1].invert(flat, positions, flat.size)
    if bad >= 0:
        if 0 <= flat[bad] < flat.size:
            raise InvalidProblemError(
                f"{operation}: order[{bad}] is {flat[bad]}, as another element; expected a permutation"
            )
        _refuse_outside(operation, "order", order, bad, flat.size)
    return positions


def _moe_permute(p: d.MoePermuteDescriptor, a: Arguments) -> None:
    x, order, y = np.ascontiguousarray(a["x"]), _flat(a["order"]), _Output(a["y"])
    bad = _kernels()[1].first_outside(_index_type(order), address(order), order.size, order.size)
    if bad >= 0:
        _refuse_outside(p.operation, "order", a["order"], bad, order.size)
    flag = IndexFlag()
    arguments = (kernel_type(x.dtype), address(x), address(y.filled), order, p.k, p.width, flag.address)
    count = order.size
    parallel.for_ranges(_kernels()[1].copy_rows, count, parallel.grain(count, p.width), *arguments)
    flag.require_unset(p.operation, "order")
    y.done()


def _combine(p: d.MoePermuteDescriptor, x: Array, weights: Array | None, order: Array, out: Array) -> None:
    positions = _inverse(p.operation, order)
    x, y = np.ascontiguousarray(x), _Output(out)
    w = None if weights is None else np.ascontiguousarray(weights)
    addresses = (address(x), 0 if w is None else address(w), address(y.filled))
    arguments = (kernel_type(x.dtype), *addresses, positions, p.k, p.width, w is not None)
    work = 4 * p.k * p.width
    parallel.for_ranges(_kernels()[1].combine_rows, p.tokens, parallel.grain(p.tokens, work), *arguments)
    y.done()


def _moe_permute_backward(p: d.MoePermuteBackwardDescriptor, a: Arguments) -> None:
    _combine(p, a["dy"], None, a["order"], a["dx"])


def _moe_combine(p: d.MoeCombineDescriptor, a: Arguments) -> None:
    _combine(p, a["expert_out"], a["weights"], a["order"], a["y"])


def _moe_combine_backward(p: d.MoeCombineBackwardDescriptor, a: Arguments) -> None:
    positions = _inverse(p.operation, a["order"])
    inputs = [np.ascontiguousarray(a[name]) for name in ("dy", "expert_out", "weights")]
    outputs = [_Output(a[name]) for name in ("d_expert_out", "dweights")]
    addresses = [address(x) for x in (*inputs, *(output.filled for output in outputs))]
    arguments = (kernel_type(inputs[0].dtype), *addresses, positions, p.k, p.width)
    work = 4 * p.k * max(p.width, 1)
    function = _kernels()[1].combine_backward_rows
    parallel.for_ranges(function, p.tokens, parallel.grain(p.tokens, work), *arguments)
    for output in outputs:
        output.done()


# --- auxiliary losses ------------------------------------------------------------------------------------------------
_LEAST_TOKENS = 256  # rows of a block that sums columns


def _lines(x: Array, p: Any) -> Array:
    """A contiguous array as (problems, tokens, what a token has)."""
    tokens = math.prod(p.shape[int(p.batched) : -1])
    return np.ascontiguousarray(x).reshape(p.shape[0] if p.batched else 1, tokens, x.shape[-1])


def _shares(p: loss_descriptors.LoadBalancingLossDescriptor, experts: Array, of: Any) -> Array:
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
    losses, like = _kernels()[2], kernel_type(x.dtype)
    tokens, n = x.shape
    zero = like if x.dtype == np.float64 else np.float32(0)
    block = max(-(-tokens // (4 * parallel.get_num_threads())), _LEAST_TOKENS)
    blocks = max(-(-tokens // block), 1)
    part = np.zeros((blocks, n), np.int64 if x.dtype == np.float64 else np.int32)
    arguments = (like, address(x), tokens, n, block)
    parallel.for_ranges(losses.column_magnitudes, blocks, 1, *arguments, part)
    keys = part.max(axis=0)
    hi, lo, special = (np.zeros((blocks, n), t) for t in (np.int64, np.uint64, np.int64))
    parallel.for_ranges(losses.column_terms, blocks, 1, *arguments, keys, hi, lo, special)
    means = np.empty(n, type(zero))
    with default_environment():
        losses.column_means(zero, keys, hi, lo, special, type(zero)(tokens), means)
    return means


def _sums(terms: Array, divisor: Any) -> Array:
    """The order-free sums of the rows of a contiguous 2-D array of the work type, divided."""
    from isograd.reduction import numba_kernels

    totals = np.empty(len(terms), terms.dtype)
    n = terms.shape[1]
    arguments = (kernel_type(terms.dtype), address(terms), address(totals), n, terms.dtype.type(divisor))
    parallel.for_ranges(numba_kernels.sum_rows, len(terms), parallel.grain(len(terms), n), *arguments)
    return totals


def _load_balancing_loss(p: loss_descriptors.LoadBalancingLossDescriptor, a: Arguments) -> None:
    x, of = _lines(a["probabilities"], p), a["loss"].dtype.type
    shares = _shares(p, a["experts"], of)
    size, tokens, n = x.shape
    # The columns of all problems side by side.
    means = _column_means(np.ascontiguousarray(x.swapaxes(0, 1)).reshape(tokens, size * n)).reshape(size, n)
    with default_environment(), np.errstate(all="ignore"):
        terms = shares * means
    totals = _sums(terms, 1)
    with default_environment(), np.errstate(all="ignore"):
        losses = of(n) * totals
    a["loss"][...] = np.where(np.isnan(losses), of(np.nan), losses).reshape(a["loss"].shape)


def _load_balancing_loss_backward(p: loss_descriptors.LoadBalancingLossBackwardDescriptor, a: Arguments) -> None:
    of, n = a["dloss"].dtype.type, p.shape[-1]
    shares = _shares(p, a["experts"], of)
    y = _Output(a["dprobabilities"])
    _, tokens, _ = _lines(y.filled, p).shape
    with default_environment(), np.errstate(all="ignore"):
        rows = ((a["dloss"].reshape(-1, 1) * of(n)) * shares) / of(tokens)
    count = len(shares) * tokens
    arguments = (kernel_type(y.filled.dtype), address(rows), rows[:1].nbytes, address(y.filled), n, tokens)
    parallel.for_ranges(_kernels()[2].fill_rows, count, parallel.grain(count, n), *arguments)
    y.done()


def _router_z_loss(p: loss_descriptors.RouterZLossDescriptor, a: Arguments) -> None:
    x = _lines(a["logits"], p)
    size, tokens, n = x.shape
    squares = np.empty((size, tokens), a["loss"].dtype)
    arguments = (kernel_type(x.dtype), address(x), address(squares), n)
    function = _kernels()[2].square_logsumexp_rows
    parallel.for_ranges(function, squares.size, parallel.grain(squares.size, 8 * n), *arguments)
    a["loss"][...] = _sums(squares, tokens).reshape(a["loss"].shape)


def _router_z_loss_backward(p: loss_descriptors.RouterZLossBackwardDescriptor, a: Arguments) -> None:
    x, y = _lines(a["logits"], p), _Output(a["dlogits"])
    size, tokens, n = x.shape
    dloss = np.ascontiguousarray(a["dloss"]).reshape(-1)
    arguments = (kernel_type(x.dtype), address(x), address(y.filled), n, dloss, tokens, dloss.dtype.type(tokens))
    function = _kernels()[2].z_loss_backward_rows
    parallel.for_ranges(function, size * tokens, parallel.grain(size * tokens, 8 * n), *arguments)
    y.done()


LAUNCH: dict[str, Callable[[Any, Arguments], None]] = {
    "top_k": _top_k,
    "renormalize": _renormalize,
    "renormalize_backward": _renormalize,
    "moe_router": _moe_router,
    "moe_router_backward": _moe_router_backward,
    "expert_counts": _expert_counts,
    "expert_permutation": _expert_permutation,
    "moe_permute": _moe_permute,
    "moe_permute_backward": _moe_permute_backward,
    "moe_combine": _moe_combine,
    "moe_combine_backward": _moe_combine_backward,
    "load_balancing_loss": _load_balancing_loss,
    "load_balancing_loss_backward": _load_balancing_loss_backward,
    "router_z_loss": _router_z_loss,
    "router_z_loss_backward": _router_z_loss_backward,
}
