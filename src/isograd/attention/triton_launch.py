"""How the attention kernels in Triton are launched; see `docs/attention.md` for the algorithm."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from isograd import faults
from isograd.attention import triton_backward, triton_forward, triton_gradients, triton_rows
from isograd.attention import triton_tiles as tiles
from isograd.attention.descriptors import AttentionDeltaDescriptor, AttentionDescriptor
from isograd.attention.options import AttentionOptions
from isograd.reduction import cuda as reduction
from isograd.triton_launcher import Launcher, Specification, architecture, kept

Strides = tuple[int, ...]
Arguments = Mapping[str, torch.Tensor]
_LOG2E = math.log2(math.e)
_SHARED_CACHE = 16 << 20  # bytes of keys and values that programs which run together should share in the L2 cache


class _Problem(NamedTuple):
    """What fixes the kernels but for strides."""

    batch: int
    heads: int
    groups: int
    lq: int
    lk: int
    head_dim: int
    v_dim: int
    dtype: torch.dtype
    options: AttentionOptions
    sequences: int | None
    bias: bool
    mask: bool
    segments: bool
    sinks: bool
    architecture: int

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Head dimensions, and elements of the rows of tiles."""
        return self.head_dim, self.v_dim, tiles.width(self.head_dim), tiles.width(self.v_dim)

    @property
    def sides(self) -> tuple[bool, bool, bool]:
        """Whether the diagonal is aligned to the lower right, and whether the left and the right are bounded."""
        left, right = self.options.reach()
        return self.options.alignment == "lower_right", left is not None, right is not None

    @property
    def direct(self) -> bool:
        """Whether a score is a positive multiple of q·k."""
        return not self.bias and not self.options.softcap and (self.options.scale or 0) > 0

    @property
    def numbers(self) -> tuple[int, int, float, float, int, float]:
        """Left and right end of the window; two factors of the scores; threshold and factor of the dropout."""
        o, scale = self.options, self.options.scale or 0.0
        most = self.lq + self.lk  # wider windows see no more
        left, right = (0 if side is None else min(side, most) for side in o.reach())
        factors = (2 * _LOG2E * scale / o.softcap, o.softcap * _LOG2E) if o.softcap else (scale * _LOG2E, 0.0)
        return -left, right, *factors, o.dropout_threshold, float(o.dropout_factor)

    @property
    def scale(self) -> float:
        """The factor of dq and dk."""
        return float(self.options.scale or 0.0)

    @property
    def exact(self) -> bool:
        """Whether the backward pass takes lse in two parts: its rounding would be the largest error of P."""
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        """How matrix products of float32 are computed."""
        return "ieee" if self.dtype != torch.float32 or self.architecture < 80 else "bf16x6"

    def programs_of(self, length: int, block: int) -> int:
        """Tiles of `block` rows that cover the rows of one head, in every sequence."""
        if self.sequences is None:
            return -(-length // block)
        return length // block + self.sequences + 1

    def together(self, length: int, heads: int) -> int:
        """Heads that run at the same time."""
        size = max(length, 1) * (self.head_dim + self.v_dim) * self.dtype.itemsize
        return max(min(_SHARED_CACHE // size, self.batch * heads), 1)


def problem(d: AttentionDescriptor, q: torch.Tensor) -> _Problem:
    """What the launchers are kept for, but for strides."""
    return _Problem(
        d.batch,
        d.heads,
        d.groups,
        d.q_length,
        d.k_length,
        d.head_dim,
        d.v_dim,
        q.dtype,
        replace(d.options, seed=0),
        d.sequences,
        d.bias_shape is not None,
        d.mask_shape is not None,
        d.segments,
        d.sinks_dtype is not None,
        architecture(q),
    )


# --- operands --------------------------------------------------------------------------------------------------------
def _strides(t: torch.Tensor) -> Strides:
    """Strides of batch, head and row; that of an axis of one element is not used, and so a harmless one."""
    return tuple([t.shape[-1] if t.shape[i] == 1 else t.stride(i) for i in range(3)])


def _addressable(t: torch.Tensor) -> bool:
    """Whether tensor descriptors can address the rows: everything a multiple of 16 bytes, and rows apart."""
    strides, each = _strides(t), 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and strides[2] > 0 and not any(stride % each for stride in strides)


def _input(t: torch.Tensor) -> torch.Tensor:
    return t if _addressable(t) else t.clone(memory_format=torch.contiguous_format)


class Outputs:
    """Outputs as kernels can write them; `done` copies those that needed scratch."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        result = self._arguments[name]
        if not _addressable(result):
            scratch = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            self._copies.append((result, scratch))
            return scratch
        return result

    def done(self) -> None:
        """Copy what was written elsewhere."""
        for result, scratch in self._copies:
            result.copy_(scratch)


class _Extras(NamedTuple):
    """The optional inputs; where there is none, some tensor that is not read."""

    bias: torch.Tensor
    mask: torch.Tensor
    q_segments: torch.Tensor
    k_segments: torch.Tensor
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    bias_strides: Strides
    mask_strides: Strides


def _broadcast(t: torch.Tensor | None) -> Strides:
    return (0, 0, 0, 0) if t is None else tuple([0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


def _extras(a: Arguments) -> _Extras:
    none, mask = a["q"], a.get("mask")
    segments = [a[name].contiguous() if name in a else none for name in ("q_segment_ids", "k_segment_ids")]
    starts = [a[name].contiguous() if name in a else none for name in ("cu_seqlens_q", "cu_seqlens_k")]
    return _Extras(
        a.get("bias", none),
        none if mask is None else mask.view(torch.uint8),
        *segments,
        *starts,
        _broadcast(a.get("bias")),
        _broadcast(mask),
    )


def _seed(options: AttentionOptions) -> tuple[int, int]:
    """The two words of the seed as signed integers."""
    low, high = options.seed & 0xFFFFFFFF, options.seed >> 32
    return low - ((low & 1 << 31) << 1), high - ((high & 1 << 31) << 1)


@kept
def _starts(sequences: int, tokens: int, code: int) -> Launcher:
    return Launcher(triton_gradients.check_starts, Specification((sequences, tokens, code, 1024), 1))


def _check(p: _Problem, operation: str, x: _Extras) -> None:
    """Note starts of sequences that are not in order."""
    if p.sequences is not None:
        for name, starts, tokens in (("cu_seqlens_q", x.q_starts, p.lq), ("cu_seqlens_k", x.k_starts, p.lk)):
            code = faults.code(operation, name, False)
            _starts(p.sequences, tokens, code)(starts, faults.flag(starts.device))


# --- the forward pass ------------------------------------------------------------------------------------------------
@kept
def _forward(p: _Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile) -> Launcher:
    per_head = p.programs_of(p.lq, tile.queries)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.sequences or 0, p.together(p.lk, p.heads))
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None, p.sinks)
    fixed = (*p.widths, *flags, p.options.dropout_p > 0, *tile[:2], tile.stages, tile.overlap, p.precision)
    tail = (*shape, *strides, *p.numbers, *fixed)
    programs = per_head * p.heads * p.batch
    specification = Specification(tail, programs, tile.warps, tile.stages, tile.registers)
    return Launcher(triton_forward.attention_forward, specification)


def forward(d: AttentionDescriptor, a: Arguments, config: tiles.Tile | None = None) -> None:
    """Fill o and lse; `config` overrides the rule."""
    if a["lse"].numel() == 0:
        return
    p, outputs, x = problem(d, a["q"]), Outputs(a), _extras(a)
    q, k, v, o = _input(a["q"]), _input(a["k"]), _input(a["v"]), outputs["o"]
    lse = a["lse"] if a["lse"].is_contiguous() else torch.empty_like(a["lse"], memory_format=torch.contiguous_format)
    sinks = a["sinks"].contiguous() if p.sinks else q
    tile = config or tiles.forward(p.head_dim, p.v_dim, p.dtype.itemsize, p.architecture)
    strides = (*(_strides(t) for t in (q, k, v, o)), x.bias_strides, x.mask_strides)
    launcher = _forward(p, strides, (x.bias.dtype, sinks.dtype), tile)
    _check(p, d.operation, x)
    launcher(q, k, v, o, lse, *x[:6], sinks, numbers=_seed(d.options))
    outputs.done()
    if lse is not a["lse"]:
        a["lse"].copy_(lse)
    faults.after_launch(q.device)


# --- delta -----------------------------------------------------------------------------------------------------------
def _rows_at_once(width: int) -> int:
    return max(2048 // width, 1)


@kept
def _delta(d: AttentionDeltaDescriptor, strides: tuple[Strides, ...]) -> Launcher:
    block = tiles.width(d.v_dim)
    rows = _rows_at_once(block)
    per_head = -(-d.length // rows)
    tail = (per_head, d.heads, d.length, *strides, d.v_dim, block, rows)
    return Launcher(triton_rows.attention_delta, Specification(tail, per_head * d.heads * d.batch))


def delta(d: AttentionDeltaDescriptor, a: Arguments) -> None:
    """Fill delta."""
    if a["delta"].numel():
        o, do, out = a["o"], a["do"], a["delta"]
        _delta(d, (o.stride()[:3], do.stride()[:3], out.stride()))(o, do, out)


# --- the backward pass -----------------------------------------------------------------------------------------------
@kept
def _bounds(p: _Problem, strides: tuple[Strides, ...]) -> Launcher:
    heads, rows = p.heads // p.groups, 64
    per_head = p.programs_of(p.lk, rows)
    tail = (per_head, heads, p.lk, p.sequences or 0, *strides, *p.widths, p.sequences is not None, rows)
    return Launcher(triton_rows.attention_bounds, Specification(tail, per_head * heads * p.batch))


@kept
def _rows(p: _Problem, strides: tuple[Strides, ...], dlse: bool, fixed: bool) -> Launcher:
    _, v_dim, block, v_block = p.widths
    rows = _rows_at_once(v_block)
    per_head = p.programs_of(p.lq, rows)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.sequences or 0)
    flags = (v_dim, block, v_block, dlse, fixed, p.exact, p.sequences is not None, rows)
    tail = (*shape, *strides, float(p.options.dropout_factor), *flags)
    return Launcher(triton_rows.attention_rows, Specification(tail, per_head * p.heads * p.batch))


@kept
def _over_keys(
    p: _Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile, fixed: bool
) -> Launcher:
    heads, per_head = p.heads // p.groups, p.programs_of(p.lk, tile.keys)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.sequences or 0, p.together(p.lq, heads))
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None)
    native = p.architecture >= 80
    last = (fixed, native, *tile[:2], tile.stages, p.exact, p.precision)
    tail = (*shape, *strides, *p.numbers, p.scale, *p.widths, *flags, p.options.dropout_p > 0, *last)
    programs = per_head * heads * p.batch
    specification = Specification(tail, programs, tile.warps, tile.stages, tile.registers)
    return Launcher(triton_backward.attention_backward_keys, specification)


@kept
def _over_queries(
    p: _Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile
) -> Launcher:
    per_head = p.programs_of(p.lq, tile.queries)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.sequences or 0, p.together(p.lk, p.heads))
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None)
    last = (p.options.dropout_p > 0, *tile[:2], tile.stages, p.exact, p.precision)
    tail = (*shape, *strides, *p.numbers, p.scale, *p.widths, *flags, *last)
    specification = Specification(tail, per_head * p.heads * p.batch, tile.warps, tile.stages, tile.registers)
    return Launcher(triton_backward.attention_backward_queries, specification)


@kept
def _to_float(p: _Problem, strides: Strides) -> Launcher:
    head_dim, _, block, _ = p.widths
    rows = _rows_at_once(block)
    per_head = p.programs_of(p.lq, rows)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.sequences or 0)
    tail = (*shape, strides, p.scale, head_dim, block, p.sequences is not None, rows)
    return Launcher(triton_rows.fixed_to_float, Specification(tail, per_head * p.heads * p.batch))


@kept
def _bias(p: _Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], shape: Strides) -> Launcher:
    tile = tiles.bias(p.head_dim, p.v_dim, p.dtype.itemsize)
    over = (p.batch, p.heads, -(-p.lq // tile.queries), -(-p.lk // tile.keys))
    full = (p.batch, p.heads, p.lq, p.lk)
    counts = tuple([tiles_ if n != whole else 1 for n, whole, tiles_ in zip(shape, full, over, strict=True)])
    flags = (*p.sides, p.options.softcap > 0, p.mask, p.segments, p.options.dropout_p > 0, p.exact)
    summed = (shape[2] != p.lq, shape[3] != p.lk)
    tail = (counts, p.batch, p.heads, p.groups, p.lq, p.lk, *strides, *p.numbers, *p.widths, *flags, *summed)
    specification = Specification(
        (*tail, tile.queries, tile.keys, p.precision), math.prod(over) // math.prod(counts), tile.warps
    )
    return Launcher(triton_gradients.attention_backward_bias, specification)


@kept
def _sink_terms(count: int, heads: int, length: int, dtype: torch.dtype) -> Launcher:
    return Launcher(triton_gradients.sink_terms, Specification((count, heads, length, 1024), -(-count // 1024)))


class Rows(NamedTuple):
    """What the backward pass knows of every row beforehand, and the integers that it adds dQ up in.

    Where dQ is not added up as integers, the last two are some tensor.
    """

    values: torch.Tensor
    bounds: torch.Tensor
    integers: torch.Tensor

    @classmethod
    def before(cls, p: _Problem, a: Arguments, inputs: Arguments, fixed: bool) -> "Rows":
        """Make them; `inputs` are do, k, v and o as kernels can read them."""
        do, k, v, o = (inputs[name] for name in ("do", "k", "v", "o"))
        none, kinds = do, 3 if fixed or p.exact else 2
        values = torch.empty(kinds, p.batch, p.heads, p.lq, dtype=torch.float32, device=do.device)
        integers = bounds = none
        if fixed:
            integers = torch.zeros(p.batch, p.heads, p.lq, p.head_dim, dtype=torch.int32, device=do.device)
            count = p.batch if p.sequences is None else p.sequences + 1
            width = tiles.width(p.head_dim) + 1
            bounds = torch.zeros(count, p.heads // p.groups, width, dtype=torch.int32, device=do.device)
            if k.numel() and p.heads:
                starts = a["cu_seqlens_k"].contiguous() if "cu_seqlens_k" in a else none
                _bounds(p, (_strides(k), _strides(v)))(k, v, bounds, starts)
        if values.numel():
            lse, dlse = a["lse"].contiguous(), a["dlse"].contiguous() if "dlse" in a else none
            starts = a["cu_seqlens_q"].contiguous() if "cu_seqlens_q" in a else none
            launcher = _rows(p, (_strides(o), _strides(do)), "dlse" in a, fixed)
            launcher(o, do, lse, dlse, bounds, values, starts)
        return cls(values, bounds, integers)

    def write(self, p: _Problem, a: Arguments, dq: torch.Tensor) -> None:
        """Make dq of the integers."""
        if self.values.numel():
            starts = a["cu_seqlens_q"].contiguous() if "cu_seqlens_q" in a else self.values
            _to_float(p, _strides(dq))(self.integers, self.values, self.bounds, dq, starts)


def backward(d: Any, a: Arguments, config: tiles.BackwardTiles | None = None) -> None:
    """Fill dq, dk and dv, and dbias and dsinks where they are wanted; `config` overrides the rule."""
    p, outputs, x = problem(d, a["q"]), Outputs(a), _extras(a)
    given = {name: _input(a[name]) for name in ("do", "q", "k", "v", "o")}
    do, q, k, v = (given[name] for name in ("do", "q", "k", "v"))
    dq, dk, dv = outputs["dq"], outputs["dk"], outputs["dv"]
    over_keys, over_queries, fixed = config or tiles.backward(p.head_dim, p.v_dim, p.dtype.itemsize, p.architecture)
    _check(p, d.operation, x)
    rows, bounds, integers = made = Rows.before(p, a, given, fixed)
    numbers = _seed(d.options)
    inputs, extra = tuple(_strides(t) for t in (do, q, k, v)), (x.bias_strides, x.mask_strides)
    if k.numel() and p.heads:
        strides = (*inputs, _strides(dk), _strides(dv), *extra)
        launcher = _over_keys(p, strides, (x.bias.dtype,), over_keys, fixed)
        launcher(do, q, k, v, dk, dv, rows, integers, bounds, *x[:6], numbers=numbers)
    if rows.numel() and fixed:
        made.write(p, a, dq)
    elif rows.numel():
        launcher = _over_queries(p, (*inputs, _strides(dq), *extra), (x.bias.dtype,), over_queries)
        launcher(do, q, k, v, dq, rows, *x[:6], numbers=numbers)
    if "dbias" in a:
        dbias = a["dbias"]
        if p.batch * p.heads * p.lq * p.lk:
            strides = (*inputs, _broadcast(dbias), *extra)
            launcher = _bias(p, strides, (x.bias.dtype, dbias.dtype), tuple(dbias.shape))
            launcher(do, q, k, v, dbias, rows, *x[:4], numbers=numbers)
        else:
            dbias.zero_()
    if "dsinks" in a:
        lse = a["lse"].contiguous()
        terms = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
        if terms.numel():
            _sink_terms(terms.numel(), p.heads, p.lq, a["sinks"].dtype)(rows, lse, a["sinks"].contiguous(), terms)
        a["dsinks"].copy_(reduction.sum(terms, axis=(0, 2)))
    outputs.done()
    faults.after_launch(q.device)
