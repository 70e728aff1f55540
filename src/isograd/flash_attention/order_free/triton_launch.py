"""How the Triton kernels of order-free attention are launched: what they read is cut first, then each runs once."""

import math
from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import Launcher, Specification, kept, power_of_two
from isograd.flash_attention.descriptors import AttentionDescriptor
from isograd.flash_attention.order_free import gluon_launch, reference, triton_backward, triton_cut, triton_forward
from isograd.flash_attention.triton_launch import note_starts, used_keys
from isograd.flash_attention.triton_problem import (
    PAD,
    Arguments,
    Extras,
    Outputs,
    Problem,
    Strides,
    extras,
    problem_of,
    row_strides,
    seed_words,
)
from isograd.reduction import cuda as reduction

_CUT_WARPS = 8
# Lengths and what follows from them, or is no matter of memory: nothing is compiled for their values.
_FREE = ("tiles", "batch", "heads", "group", "lq", "lk", "sequences", "together", "left", "right", "threshold")
_CUT_FREE = ("blocks", "heads", "length", "sequences")


class Tile(NamedTuple):
    """Rows that a program keeps, a divisor of 128; warps, and stages of the pipeline."""

    rows: int
    warps: int
    stages: int


class BackwardTiles(NamedTuple):
    """The tiles of the kernel over keys and of the one over queries; turns: 2 for dv first and then dk."""

    over_keys: Tile
    over_queries: Tile
    turns: int = 1


def forward_tile(p: Problem) -> Tile:
    """The tile of the forward pass; it leaves no trace in results."""
    wide = max(_widths(p)[2:])
    if p.architecture < 90:
        return Tile(64, 4, 1)
    return Tile(64, 4, 2) if wide <= 64 else Tile(128, 8, 2 if wide <= 128 else 1)


def backward_tiles(p: Problem) -> BackwardTiles:
    """Those of the backward pass."""
    # Two programs of four warps on a multiprocessor: one multiplies while the other one waits for its operands. Where
    # pairs may be hidden, dv and dk in turn spill half as much, which pays for a second product.
    hides = any(p.sides[1:]) and max(_widths(p)[2:]) > 64
    return BackwardTiles(Tile(64, 4, 1), Tile(64, 4, 1), 2 if hides else 1)


def _widths(p: Problem) -> tuple[int, int, int, int]:
    """Head dimensions, and elements of rows of digits."""
    return p.head_dim, p.v_dim, max(power_of_two(p.head_dim), 32), max(power_of_two(p.v_dim), 32)


class _Side(NamedTuple):
    """The rows of queries or of keys in scratch memory: heads of an element of the batch, rows of a head, all rows."""

    heads: int
    length: int
    pitch: int
    total: int

    @property
    def blocks(self) -> int:
        return self.pitch // PAD


def _side(p: Problem, length: int, heads: int) -> _Side:
    pitch = p.programs_of(length, PAD) * PAD
    return _Side(heads, length, pitch, pitch * heads * p.batch)


def _queries(p: Problem) -> _Side:
    return _side(p, p.lq, p.heads)


def _keys(p: Problem) -> _Side:
    return _side(p, p.lk, p.heads // p.groups)


def _numbers(p: Problem) -> tuple[reference.Numbers, float, float]:
    """The numbers of the options, the soft cap in base 2, and `reach` of `triton_scores.is_careful`."""
    n = reference.numbers_of(p.options)
    largest = 2.0**22 * 1.01 * _widths(p)[2]
    return n, float(n.cap), abs(float(n.factor)) * reference.TINY * largest / reference.REACH


def _scratch(p: Problem, side: _Side, bytes_of_row: int, numbers: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Digits, and numbers with one more for each block."""
    digits = torch.empty(side.total * bytes_of_row, dtype=torch.int8, device=like.device)
    shape = side.total * numbers + side.total // PAD
    return digits, torch.empty(shape, dtype=torch.float32, device=like.device)


def _cut(p: Problem, side: _Side, kernel: Any, tail: tuple[Any, ...]) -> Launcher:
    first = (side.blocks, side.heads, side.length, p.sequences or 0, side.pitch, side.total)
    programs = side.blocks * side.heads * p.batch
    return Launcher(kernel, Specification((*first, *tail), programs, _CUT_WARPS, free=_CUT_FREE))


def _limits(p: Problem) -> tuple[int, int]:
    """Left and right end of the window."""
    left, right, *_ = p.numbers
    return left, right


def _flags(p: Problem) -> tuple[bool, ...]:
    return (*p.sides, p.options.softcap > 0, p.bias, p.mask, p.segments, p.sequences is not None)


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)


# --- the forward pass ------------------------------------------------------------------------------------------------
@kept
def _cut_queries(p: Problem, strides: Strides) -> Launcher:
    d, _, bd, _ = _widths(p)
    tail = (strides, float(_numbers(p)[0].factor), d, bd, p.sequences is not None)
    return _cut(p, _queries(p), triton_cut.cut_queries, tail)


@kept
def _cut_keys(p: Problem, strides: tuple[Strides, Strides], twice: bool) -> Launcher:
    kernel = triton_cut.cut_keys_twice if twice else triton_cut.cut_keys
    return _cut(p, _keys(p), kernel, (*strides, *_widths(p), p.sequences is not None))


@kept
def _cut_cached_keys(p: Problem, strides: tuple[Strides, Strides]) -> Launcher:
    side = _keys(p)
    tail = (side.blocks, side.heads, side.length, p.pages, side.pitch, side.total, *strides, *_widths(p), p.page_size)
    programs = side.blocks * side.heads * p.batch
    specification = Specification(tail, programs, _CUT_WARPS, free=("blocks", "heads", "length", "pages"))
    return Launcher(triton_cut.cut_cached_keys, specification)


@kept
def _forward(p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: Tile) -> Launcher:
    per_head, (_, *widths) = p.programs_of(p.lq, tile.rows), _widths(p)
    numbers, cap, reach = _numbers(p)
    pitches = (_queries(p).pitch, _keys(p).pitch)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, *pitches, p.sequences or 0, p.together(p.lk, p.heads))
    values = (*_limits(p), cap, reach, p.options.dropout_threshold, float(numbers.kept))
    fixed = (*widths, *_flags(p), p.sinks, p.options.dropout_p > 0, p.cached, tile.rows, tile.stages)
    specification = Specification(
        (*shape, *strides, *values, *fixed), per_head * p.heads * p.batch, tile.warps, tile.stages, free=_FREE
    )
    return Launcher(triton_forward.order_free_forward, specification)


def forward(d: AttentionDescriptor, a: Arguments, tile: Tile | None = None) -> None:
    """Fill o and lse; `tile` overrides the rule."""
    if a["lse"].numel() == 0:
        return
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    q, k, v, o, lse = a["q"], a["k"], a["v"], outputs["o"], _contiguous(a["lse"])
    sinks = a["sinks"].contiguous() if p.sinks else q
    note_starts(p, d.operation, x)
    _, _, bd, bdv = _widths(p)
    q_digits, q_numbers = _scratch(p, _queries(p), 2 * bd, 1, q)
    k_digits, k_numbers = _scratch(p, _keys(p), 2 * bd + 2 * bdv, 3, q)
    _cut_queries(p, row_strides(q))(q, q_digits, q_numbers, x.q_starts)
    used, pages = used_keys(p, d.operation, a)
    if not k.numel() or not p.lk:
        pass
    elif p.cached:
        _cut_cached_keys(p, (row_strides(k), row_strides(v)))(k, v, k_digits, k_numbers, used, pages)
    else:
        _cut_keys(p, (row_strides(k), row_strides(v)), False)(k, v, k_digits, k_numbers, x.k_starts)
    if tile is None and gluon_launch.supports(p, bd, bdv, max(q.numel(), k_digits.numel())) and k.numel() and p.lk:
        numbers, cap, reach = _numbers(p)
        sides = [(s.pitch, s.total) for s in (_queries(p), _keys(p))]
        values = (cap, reach, float(numbers.kept))
        hopper = gluon_launch.forward(p, (*sides,), row_strides(o), (o.dtype, sinks.dtype), (p.v_dim, bd, bdv), values)
        v_digits = k_digits[_keys(p).total * 2 * bd :]
        hopper(q_digits, k_digits, v_digits, q_numbers, k_numbers, o, lse, x.q_starts, x.k_starts, sinks, used)
    else:
        strides = (row_strides(o), x.bias_strides, x.mask_strides)
        launcher = _forward(p, strides, (o.dtype, x.bias.dtype, sinks.dtype), tile or forward_tile(p))
        launcher(q_digits, k_digits, q_numbers, k_numbers, o, lse, *x[:6], sinks, used, numbers=seed_words(d.options))
    outputs.done()
    if lse is not a["lse"]:
        a["lse"].copy_(lse)
    faults.after_launch(q.device)


# --- the backward pass -----------------------------------------------------------------------------------------------
@kept
def _cut_queries_twice(p: Problem, strides: tuple[Strides, ...], dlse: bool) -> Launcher:
    tail = (*strides, *_widths(p), dlse, p.sequences is not None)
    return _cut(p, _queries(p), triton_cut.cut_queries_twice, tail)


@kept
def _over_keys(
    p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: Tile, turns: int
) -> Launcher:
    heads, per_head = p.heads // p.groups, p.programs_of(p.lk, tile.rows)
    numbers, cap, reach = _numbers(p)
    pitches = (_queries(p).pitch, _keys(p).pitch)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, *pitches, p.sequences or 0, p.together(p.lq, heads))
    values = (*_limits(p), float(numbers.factor), cap, reach, p.options.dropout_threshold)
    factors = (float(numbers.scale), float(numbers.kept))
    fixed = (*_widths(p), *_flags(p), p.options.dropout_p > 0, tile.rows, tile.stages, turns)
    specification = Specification(
        (*shape, *strides, *values, *factors, *fixed),
        per_head * heads * p.batch,
        tile.warps,
        tile.stages,
        free=_FREE,
    )
    return Launcher(triton_backward.order_free_backward_keys, specification)


@kept
def _over_queries(p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: Tile) -> Launcher:
    per_head, (d, _, *widths) = p.programs_of(p.lq, tile.rows), _widths(p)
    numbers, cap, reach = _numbers(p)
    pitches = (_queries(p).pitch, _keys(p).pitch)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, *pitches, p.sequences or 0, p.together(p.lk, p.heads))
    values = (*_limits(p), float(numbers.factor), cap, reach, p.options.dropout_threshold)
    factors = (float(numbers.scale), float(numbers.kept))
    fixed = (d, *widths, *_flags(p), p.options.dropout_p > 0, tile.rows, tile.stages)
    specification = Specification(
        (*shape, *strides, *values, *factors, *fixed),
        per_head * p.heads * p.batch,
        tile.warps,
        tile.stages,
        free=_FREE,
    )
    return Launcher(triton_backward.order_free_backward_queries, specification)


@kept
def _sink_terms(p: Problem, dtype: torch.dtype) -> Launcher:
    return _cut(p, _queries(p), triton_cut.sink_terms, (p.sequences is not None,))


def backward(d: Any, a: Arguments, config: BackwardTiles | None = None) -> None:
    """Fill dq, dk and dv, and dsinks where they are wanted; `config` overrides the rule."""
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    do, q, k, v, o, lse = (a[name] for name in ("do", "q", "k", "v", "o", "lse"))
    dq, dk, dv = outputs["dq"], outputs["dk"], outputs["dv"]
    tiles, lse = config or backward_tiles(p), lse.contiguous()
    dlse = a["dlse"].contiguous() if "dlse" in a else lse
    note_starts(p, d.operation, x)
    _, _, bd, bdv = _widths(p)
    q_digits, q_numbers = _scratch(p, _queries(p), 4 * bd + 4 * bdv, 5, q)
    k_digits, k_numbers = _scratch(p, _keys(p), 4 * bd + 2 * bdv, 2, q)
    if q.numel():
        inputs = (row_strides(q), row_strides(do), row_strides(o))
        _cut_queries_twice(p, inputs, "dlse" in a)(q, do, o, lse, dlse, q_digits, q_numbers, x.q_starts)
    if k.numel():
        _cut_keys(p, (row_strides(k), row_strides(v)), True)(k, v, k_digits, k_numbers, x.k_starts)
    cut, more, dtypes = (q_digits, k_digits, q_numbers, k_numbers), (x.bias_strides, x.mask_strides), (x.bias.dtype,)
    numbers = seed_words(d.options)
    if config is None and q.numel() and k.numel() and gluon_launch.supports(p, bd, bdv, q_digits.numel()):
        _hopper_backward(p, cut, (dq, dk, dv), x)
        if "dsinks" in a:
            _fill_dsinks(p, q_numbers, lse, a["sinks"].contiguous(), a["dsinks"], x)
        outputs.done()
        faults.after_launch(q.device)
        return
    if k.numel() and p.heads:
        strides = (row_strides(dk), row_strides(dv), *more)
        launcher = _over_keys(p, strides, (dk.dtype, *dtypes), tiles.over_keys, tiles.turns)
        launcher(*cut, dk, dv, *x[:6], numbers=numbers)
    if q.numel():
        launcher = _over_queries(p, (row_strides(dq), *more), (dq.dtype, *dtypes), tiles.over_queries)
        launcher(*cut, dq, *x[:6], numbers=numbers)
    if "dsinks" in a:
        _fill_dsinks(p, q_numbers, lse, a["sinks"].contiguous(), a["dsinks"], x)
    outputs.done()
    faults.after_launch(q.device)


def _hopper_backward(p: Problem, cut: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], x: Extras) -> None:
    q_digits, k_digits, q_numbers, k_numbers = cut
    d, dv, bd, bdv = _widths(p)
    queries, keys = _queries(p), _keys(p)
    q_columns, do_rows = q_digits[2 * bd * queries.total :], q_digits[4 * bd * queries.total :]
    do_columns = do_rows[2 * bdv * queries.total :]
    k_columns, v_rows = k_digits[2 * bd * keys.total :], k_digits[4 * bd * keys.total :]
    of_q, of_k = (queries.pitch, queries.total), (keys.pitch, keys.total)
    n, cap, reach = _numbers(p)
    values = (float(n.factor), cap, reach, float(n.kept))
    own, other = (q_digits, do_rows), (k_digits, v_rows)
    parts = (
        (0, (of_q, of_k), (*own, *other, k_columns), d, float(n.scale)),
        (1, (of_k, of_q), (*other, *own, q_columns), d, float(n.scale)),
        (2, (of_k, of_q), (*other, *own, do_columns), dv, float(n.kept)),
    )
    for (kind, sides, digits, width, scale), result in zip(parts, results, strict=True):
        widths = (width, bd, bdv)
        launcher = gluon_launch.backward(p, kind, sides, row_strides(result), result.dtype, widths, (*values, scale))
        launcher(*digits, q_numbers, k_numbers, result, x.q_starts, x.k_starts)


def _fill_dsinks(
    p: Problem, numbers: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, dsinks: torch.Tensor, x: Extras
) -> None:
    terms = torch.empty_like(lse)
    if terms.numel():
        _sink_terms(p, sinks.dtype)(numbers, lse, sinks, terms, x.q_starts)
    dsinks.copy_(reduction.sum(terms, axis=(0, 2)))
    dsinks.masked_fill_(dsinks.isnan(), math.nan)  # GPUs write another one where they round to 16 bits
