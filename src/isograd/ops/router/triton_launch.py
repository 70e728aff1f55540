"""How the router family's Triton kernels are configured and launched.

Configurations follow written rules from shape, dtype and architecture; nothing is timed at run time, and no choice
changes a bit. Leading dimensions are merged; where strides do not allow that, a copy is made.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from isograd.core import faults
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, power_of_two
from isograd.ops.router import triton_kernels, triton_moe
from isograd.runtime.fenv import default_environment

_TILE, _FAST_K = 1024, 128  # elements of a row that top_k holds, and how many of them it takes


class Tile(NamedTuple):
    """Rows and columns of a program, columns of a thread and of an access, warps."""

    block: int
    rows: int
    group: int
    vector: int
    warps: int

    @property
    def fixed(self) -> tuple[int, int, int, int]:
        """The tile as kernels take it."""
        return self.block, self.rows, self.group, self.vector


def tile(n: int, itemsize: int, least: int = 1) -> Tile:
    """The tile for rows of n elements, each held by `least` or more threads of a warp, long ones by several warps.

    What is done for a row as a whole is done by every one of its threads, so few of them cost the fewest instructions.
    """
    block = power_of_two(n)
    if block <= 1024:
        threads = min(max(block // (16 if itemsize < 8 else 8), least, 4), 32, block)
        group = block // threads
        slots = 128 // threads  # rows that four warps hold at a time
        return Tile(block, min(slots * max(8 // group, 1), 256), group, min(16 // itemsize, group), 4)
    return Tile(block, 1, 16, 16 // itemsize, block // 512)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A tensor with its leading dimensions as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Result:
    """An output as a matrix: a view of it or, where its strides allow none, a new one that `done` copies back."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out
        shape = (math.prod(out.shape[:-1]), out.shape[-1])
        try:
            self.matrix = out.view(shape)
        except RuntimeError:
            self.matrix = torch.empty(shape, dtype=out.dtype, device=out.device)
        self._viewed = self.matrix.data_ptr() == out.data_ptr()

    def done(self) -> None:
        """Copy the results where they belong."""
        if not self._viewed:
            self._out.copy_(self.matrix.view(self._out.shape))


def native_pairs(x: torch.Tensor) -> bool:
    """Whether the packed conversions of NVIDIA's kernels apply: they want pairs of neighbours."""
    return architecture(x) >= 90 and x.shape[1] > 1


def programs_of(count: int, size: int) -> int:
    """Programs of `size` that cover a count."""
    return -(-count // size)


def _scale(scale: float, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether there is one, and the factor in the work type."""
    with default_environment():
        return scale != 1, scale if dtype == torch.float64 else float(np.float32(scale))


# --- the router ------------------------------------------------------------------------------------------------------
class RouterConfiguration(NamedTuple):
    """The tile of a router, its kernel, and what registers a thread has.

    kernel: "separated", a short cut for softmax scores of logits that are apart; "lanes", which has the chosen experts
    and the groups one in a lane; or "tile", which serves everything.
    """

    tile: Tile
    kernel: str
    registers: int | None = None


def router_configuration(n: int, k: int, itemsize: int, plain: bool, groups: int = 1) -> RouterConfiguration:
    """The rule; plain: softmax scores without bias and groups."""
    block = power_of_two(n)
    lanes = max(power_of_two(k + 1 if plain else k), power_of_two(groups))
    if itemsize == 8 or block > 1024 or lanes > 32 or lanes > block:
        return RouterConfiguration(tile(n, itemsize), "tile")
    chosen = tile(n, itemsize, lanes)
    if plain and block >= 64 and k < n and chosen.group >= 4:
        if chosen.group == 16:
            # A warp waits for no other, and 24 of them find room.
            return RouterConfiguration(_of_one_warp(chosen), "separated", 80)
        return RouterConfiguration(chosen, "separated")
    return RouterConfiguration(_of_one_warp(chosen), "lanes")


def _of_one_warp(t: Tile) -> Tile:
    return t._replace(rows=max(t.rows // t.warps, 1), warps=1)


class _Router(NamedTuple):
    tokens: int
    n: int
    k: int
    groups: int
    group_k: int
    strides: tuple[int, ...]  # of logits, weights and experts
    bias_strides: tuple[int, int]
    dtype: torch.dtype
    softmax: bool
    has_bias: bool
    bias_rows: bool
    renormalize: bool
    scale: tuple[bool, float]
    native: bool
    config: RouterConfiguration


def _exact(dtype: torch.dtype, low: int) -> bool:
    """Whether a logit is known without the last `low` bits of its binary32 key."""
    return low <= {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@kept
def _router(p: _Router) -> Launcher:
    t = p.config.tile
    fixed = (p.renormalize, *p.scale, *t.fixed, p.native)
    programs = programs_of(p.tokens, t.rows)
    if p.config.kernel == "separated":
        low = t.block.bit_length() - 1
        tail = (p.tokens, p.n, *p.strides, p.k, power_of_two(p.k), low, _exact(p.dtype, low), *fixed)
        registers = p.config.registers if p.native else None
        return Launcher(triton_kernels.router_separated, Specification(tail, programs, t.warps, registers=registers))
    if p.config.kernel == "lanes":
        strides = (*p.strides[:2], *p.bias_strides, *p.strides[2:])
        chosen = (p.k, p.n // p.groups, p.groups, p.group_k, p.softmax, p.has_bias, p.bias_rows)
        tail = (p.tokens, p.n, *strides, *chosen, *fixed)
        return Launcher(triton_kernels.router_lanes, Specification(tail, programs, t.warps))
    sizes = (p.tokens, p.n, p.k, p.groups, p.group_k, *p.strides[:2], *p.bias_strides, *p.strides[2:])
    flags = (power_of_two(p.k), power_of_two(p.groups) if p.groups > 1 else 1, p.softmax, p.has_bias, p.bias_rows)
    return Launcher(triton_kernels.router_tile, Specification((*sizes, *flags, *fixed), programs, t.warps))


def moe_router(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    softmax: bool = True,
    renormalize: bool = False,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
    config: RouterConfiguration | None = None,
) -> None:
    """Fill weights and experts; `config` overrides the rule."""
    if weights.numel() == 0:
        return
    x, w, i = matrix(logits), Result(weights), Result(experts)
    n, k = x.shape[1], weights.shape[-1]
    rows = bias is not None and bias.dim() > 1
    bias = bias if bias is None or not rows else matrix(bias)
    if config is None:
        plain = softmax and bias is None and groups == 1
        config = router_configuration(n, k, x.element_size(), plain, groups)
    problem = _Router(
        len(x),
        n,
        k,
        groups,
        group_k,
        (*x.stride(), *w.matrix.stride(), *i.matrix.stride()),
        (0, 0) if bias is None else (bias.stride(0) if rows else 0, bias.stride(-1)),
        x.dtype,
        softmax,
        bias is not None,
        rows,
        renormalize,
        _scale(scale, weights.dtype),
        native_pairs(x),
        config,
    )
    launcher = _router(problem)
    if config.kernel == "separated":
        launcher(x, w.matrix, i.matrix)
    else:
        launcher(x, x if bias is None else bias, w.matrix, i.matrix)
    w.done()
    i.done()


class _Backward(NamedTuple):
    tokens: int
    n: int
    k: int
    code: int
    strides: tuple[int, ...]  # of dweights, logits, experts and dlogits
    dtypes: tuple[torch.dtype, ...]
    softmax: bool
    renormalize: bool
    scale: tuple[bool, float]
    native: bool
    tile: Tile


@kept
def _router_backward(p: _Backward) -> Launcher:
    # As many lanes as the tile has threads a row, where they suffice: both then have the same threads.
    lanes = max(power_of_two(p.k), p.tile.block // p.tile.group)
    flags = (lanes, p.softmax, p.renormalize, *p.scale, *p.tile.fixed, p.native)
    tail = (p.tokens, p.n, p.k, p.code, *p.strides, *flags)
    specification = Specification(tail, programs_of(p.tokens, p.tile.rows), p.tile.warps)
    return Launcher(triton_kernels.router_backward, specification)


def moe_router_backward(
    dweights: torch.Tensor,
    logits: torch.Tensor,
    experts: torch.Tensor,
    dlogits: torch.Tensor,
    *,
    softmax: bool = True,
    renormalize: bool = False,
    scale: float = 1.0,
    config: Tile | None = None,
) -> None:
    """Fill dlogits, which may be the logits; `config` overrides the rule."""
    if dlogits.numel() == 0:
        return
    g, x, i, out = matrix(dweights), matrix(logits), matrix(experts), Result(dlogits)
    problem = _Backward(
        len(x),
        x.shape[1],
        i.shape[1],
        faults.code("moe_router_backward", "experts", False),
        (*g.stride(), *x.stride(), *i.stride(), *out.matrix.stride()),
        (x.dtype, i.dtype),
        softmax,
        renormalize,
        _scale(scale, dweights.dtype),
        native_pairs(x),
        tile(x.shape[1], x.element_size()) if config is None else config,
    )
    _router_backward(problem)(g, x, i, out.matrix, faults.flag(x.device))
    out.done()
    faults.after_launch(x.device)


# --- top_k and renormalize -------------------------------------------------------------------------------------------
@kept
def _top_k(tokens: int, n: int, k: int, strides: tuple[int, ...], dtype: torch.dtype, native: bool) -> Launcher:
    t = tile(n, dtype.itemsize)
    tail = (tokens, n, k, *strides, power_of_two(k), *t.fixed, native)
    return Launcher(triton_kernels.top_k_tile, Specification(tail, programs_of(tokens, t.rows), t.warps))


@kept
def _descending_keys(count: int, dtype: torch.dtype) -> Launcher:
    return Launcher(
        triton_kernels.descending_keys, Specification((count, 1024), programs_of(count, 1024), free=("count",))
    )


def top_k(x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, axis: int) -> None:
    """Fill values and indices; long rows and many elements of one go by way of a stable sort."""
    if values.numel() == 0:
        return
    rows = matrix(x.movedim(axis, -1))
    v, i = Result(values.movedim(axis, -1)), Result(indices.movedim(axis, -1))
    n, k = rows.shape[1], values.shape[axis]
    if power_of_two(n) <= _TILE and k <= _FAST_K:
        strides = (*rows.stride(), *v.matrix.stride(), *i.matrix.stride())
        _top_k(len(rows), n, k, strides, x.dtype, native_pairs(rows))(rows, v.matrix, i.matrix)
    else:
        rows = rows.contiguous()
        keys = torch.empty(rows.shape, dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device)
        _descending_keys(rows.numel(), x.dtype)(rows, keys)
        order = torch.sort(keys, dim=1, stable=True).indices[:, :k]
        i.matrix.copy_(order)
        # Through integers, so that every bit is kept.
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        v.matrix.view(integer).copy_(rows.view(integer).gather(1, order))
    v.done()
    i.done()


@kept
def _renormalize(tokens: int, n: int, strides: tuple[int, ...], dtype: torch.dtype, backward: bool) -> Launcher:
    block = power_of_two(n)
    rows = max(min(1024 // block, 128), 1)
    warps = min(max(block * rows // 256, 1), 16)
    tail = (tokens, n, *strides, backward, block, rows)
    return Launcher(triton_kernels.renormalize_tile, Specification(tail, programs_of(tokens, rows), warps))


def renormalize(w: torch.Tensor, out: torch.Tensor, axis: int, dt: torch.Tensor | None = None) -> None:
    """Fill out, which may be w or dt, with the renormalized w or, where dt is given, the gradient."""
    if out.numel() == 0:
        return
    rows, result = matrix(w.movedim(axis, -1)), Result(out.movedim(axis, -1))
    g = rows if dt is None else matrix(dt.movedim(axis, -1))
    strides = (*g.stride(), *rows.stride(), *result.matrix.stride())
    _renormalize(len(rows), rows.shape[1], strides, w.dtype, dt is not None)(g, rows, result.matrix)
    result.done()


# --- permutation -----------------------------------------------------------------------------------------------------
_BLOCK = 128  # entries of a block of the counting sort
_STRETCH = 128  # blocks of a stretch


@kept
def _rank(count: int, bound: int, code: int, dtype: torch.dtype) -> Launcher:
    return Launcher(
        triton_moe.rank_entries,
        Specification((count, bound, code, _BLOCK), programs_of(count, _BLOCK), free=("count",)),
    )


@kept
def _scan_blocks(blocks: int, stretch: int, bins: int, dtype: torch.dtype) -> Launcher:
    programs = programs_of(blocks, stretch) * programs_of(bins, 16)
    specification = Specification((blocks, stretch, bins, 128, 16), programs, free=("blocks", "stretch"))
    return Launcher(triton_moe.scan_blocks, specification)


@kept
def _scan_experts(bins: int, stride: int) -> Launcher:
    return Launcher(triton_moe.scan_experts, Specification((bins, stride, min(power_of_two(bins), 1024)), 1))


@kept
def _place(count: int, bound: int, stride: int, dtype: torch.dtype) -> Launcher:
    return Launcher(
        triton_moe.place_entries,
        Specification((count, bound, stride, _BLOCK, _STRETCH), programs_of(count, _BLOCK), free=("count",)),
    )


class _Counted(NamedTuple):
    experts: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor  # [blocks, bound + 1] int32, of the blocks before in the stretch
    stretches: torch.Tensor  # [stretches, bound + 1] int64, of the stretches before
    totals: torch.Tensor  # [bound + 1] int64, the last of them entries out of range


def count_entries(operation: str, experts: torch.Tensor, bound: int) -> _Counted:
    """The rank of every entry among those of its expert, and how many each expert has."""
    flat, device, count = experts.reshape(-1).contiguous(), experts.device, experts.numel()
    blocks = max(programs_of(count, _BLOCK), 1)
    stretches = torch.empty(programs_of(blocks, _STRETCH), bound + 1, dtype=torch.int64, device=device)
    ranks = torch.empty(count, dtype=torch.int32, device=device)
    counts = torch.zeros(blocks, bound + 1, dtype=torch.int32, device=device)
    totals = torch.empty(bound + 1, dtype=torch.int64, device=device)
    if count:
        code = faults.code(operation, "experts", False)
        _rank(count, bound, code, flat.dtype)(flat, ranks, counts, faults.flag(device))
    _scan_blocks(blocks, _STRETCH, bound + 1, counts.dtype)(counts, stretches)
    _scan_blocks(len(stretches), len(stretches), bound + 1, stretches.dtype)(stretches, totals)
    return _Counted(flat, ranks, counts, stretches, totals)


def expert_counts(experts: torch.Tensor, counts: torch.Tensor) -> None:
    """Fill counts."""
    counts.copy_(count_entries("expert_counts", experts, counts.numel()).totals[:-1])
    faults.after_launch(experts.device)


def expert_permutation(experts: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> None:
    """Fill order and offsets; entries out of range come last."""
    bound = offsets.numel() - 1
    counted = count_entries("expert_permutation", experts, bound)
    starts = torch.empty(bound + 1, dtype=torch.int64, device=experts.device)
    _scan_experts(bound + 1, offsets.stride(0))(counted.totals, starts, offsets)
    if order.numel():
        place = _place(order.numel(), bound, order.stride(0), counted.experts.dtype)
        place(counted.experts, counted.ranks, counted.counts, counted.stretches, starts, order)
    faults.after_launch(experts.device)


@kept
def _permute(count: int, k: int, width: int, code: int, strides: tuple[int, ...], dtype: torch.dtype) -> Launcher:
    block = min(power_of_two(width), 4096 // dtype.itemsize)
    rows = max(16384 // dtype.itemsize // block, 1)
    tail = (count, k, width, code, *strides, rows, block, count < 2**31)
    return Launcher(
        triton_moe.permute_rows,
        Specification(tail, programs_of(count, rows) * programs_of(width, block), free=("count",)),
    )


def moe_permute(x: torch.Tensor, order: torch.Tensor, y: torch.Tensor, k: int) -> None:
    """Fill y with the tokens' rows."""
    if y.numel():
        code = faults.code("moe_permute", "order", False)
        strides = (*x.stride(), order.stride(0), *y.stride())
        _permute(order.numel(), k, x.shape[1], code, strides, x.dtype)(x, order, y, faults.flag(x.device))
        faults.after_launch(x.device)


@kept
def _invert(count: int, code: int, stride: int) -> Launcher:
    return Launcher(
        triton_moe.invert_order, Specification((count, code, stride, 256), programs_of(count, 256), free=("count",))
    )


def _inverse(operation: str, order: torch.Tensor) -> torch.Tensor:
    positions = torch.full((order.numel(),), -1, dtype=torch.int64, device=order.device)
    code = faults.code(operation, "order", False)
    _invert(order.numel(), code, order.stride(0))(order, positions, faults.flag(order.device))
    return positions


@kept
def _combine(tokens: int, k: int, width: int, strides: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> Launcher:
    kb = min(power_of_two(k), 16)
    block = min(power_of_two(width), max((2048 if dtype.itemsize == 8 or kb > 8 else 4096) // kb, 1))
    # As many threads as a row has accesses of 16 bytes: each has all of its columns' terms, and no sum crosses threads.
    warps = min(max(block * dtype.itemsize // 512, 1), 4)
    tail = (k, width, *strides, kb, block, k <= kb, weighted)
    return Launcher(triton_moe.combine_rows, Specification(tail, tokens * programs_of(width, block), warps))


def moe_combine(
    operation: str, rows: torch.Tensor, weights: torch.Tensor | None, order: torch.Tensor, y: torch.Tensor
) -> None:
    """Fill y with the sums of the tokens' rows, weighted where there are weights."""
    if y.numel() == 0:
        return
    tokens, width = y.shape
    positions, w = _inverse(operation, order), rows if weights is None else weights
    strides = (*rows.stride(), *w.stride(), *y.stride())
    launcher = _combine(tokens, order.numel() // tokens, width, strides, rows.dtype, weights is not None)
    launcher(rows, w, positions, y)
    faults.after_launch(rows.device)


@kept
def _combine_backward(entries: int, k: int, width: int, strides: tuple[int, ...], dtype: torch.dtype) -> Launcher:
    block = min(power_of_two(width), 4096)
    tail = (k, width, *strides, block, min(16 // dtype.itemsize, block), width <= block)
    return Launcher(triton_moe.combine_backward, Specification(tail, entries, min(max(block // 512, 1), 4)))


def moe_combine_backward(
    dy: torch.Tensor,
    expert_out: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    d_expert_out: torch.Tensor,
    dweights: torch.Tensor,
) -> None:
    """Fill d_expert_out, which may be expert_out, and dweights."""
    if order.numel() == 0:
        return
    positions = _inverse("moe_combine_backward", order)
    strides = tuple(s for t in (dy, expert_out, weights, d_expert_out, dweights) for s in t.stride())
    launcher = _combine_backward(order.numel(), weights.shape[1], dy.shape[1], strides, expert_out.dtype)
    launcher(dy, expert_out, weights, positions, d_expert_out, dweights)
    faults.after_launch(dy.device)
