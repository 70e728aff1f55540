"""How the attention kernels in Triton are launched; see `docs/attention.md` for the algorithm."""

import math
from typing import Any

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import Launcher, Specification, kept
from isograd.flash_attention import triton_backward, triton_cache, triton_forward, triton_gradients
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionDescriptor
from isograd.flash_attention.triton_problem import (
    Arguments,
    Extras,
    Outputs,
    Problem,
    Strides,
    broadcast_strides,
    extras,
    pages_or_readable,
    problem_of,
    readable,
    row_strides,
    seed_words,
)
from isograd.flash_attention.triton_rows_launch import delta, fill_rows
from isograd.reduction import cuda as reduction

__all__ = ["backward", "delta", "fill_dsinks", "forward", "note_starts", "used_keys"]


@kept
def _starts(sequences: int, tokens: int, code: int) -> Launcher:
    return Launcher(triton_gradients.check_starts, Specification((sequences, tokens, code, 1024), 1))


def note_starts(p: Problem, operation: str, x: Extras) -> None:
    """Note starts of sequences that are not in order."""
    if p.sequences is not None:
        for name, starts, tokens in (("cu_seqlens_q", x.q_starts, p.lq), ("cu_seqlens_k", x.k_starts, p.lk)):
            code = faults.code(operation, name, False)
            _starts(p.sequences, tokens, code)(starts, faults.flag(starts.device))


@kept
def _cache(p: Problem, pages: int, lengths_code: int, table_code: int) -> Launcher:
    tail = (p.lk, pages, p.pages, lengths_code, table_code, p.page_size, 128)
    return Launcher(triton_cache.check_cache, Specification(tail, p.batch, 1, free=("most", "pages", "each")))


def used_keys(p: Problem, operation: str, a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys of each sequence of a cache, -1 where something is wrong; its block table); else what is not read."""
    if not p.cached:
        return a["q"], a["q"]
    lengths = a["cache_seqlens"].contiguous()
    table = a["block_table"].contiguous() if p.page_size else lengths
    used = torch.empty_like(lengths)
    codes = [faults.code(operation, name, False) for name in ("cache_seqlens", "block_table")]
    _cache(p, a["k"].shape[0], *codes)(lengths, table, used, faults.flag(lengths.device))
    return used, table


# --- the forward pass ------------------------------------------------------------------------------------------------
@kept
def _forward(p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile) -> Launcher:
    per_head = p.programs_of(p.lq, tile.queries)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.sequences or 0, p.together(p.lk, p.heads), p.pages)
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None, p.sinks)
    last = (p.options.dropout_p > 0, p.cached, p.page_size)
    fixed = (*p.widths, *flags, *last, *tile[:2], tile.stages, p.precision)
    tail = (*shape, *strides, *p.numbers, *fixed)
    programs = per_head * p.heads * p.batch
    free = ("batch", "together", "pages") if p.cached else ()  # which vary from one step of decoding to the next
    specification = Specification(tail, programs, tile.warps, tile.stages, free=free)
    return Launcher(triton_forward.attention_forward, specification)


def forward(d: AttentionDescriptor, a: Arguments, config: tiles.Tile | None = None) -> None:
    """Fill o and lse; `config` overrides the rule."""
    if a["lse"].numel() == 0:
        return
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    q, k, v, o = readable(a["q"]), pages_or_readable(p, a["k"]), pages_or_readable(p, a["v"]), outputs["o"]
    lse = a["lse"] if a["lse"].is_contiguous() else torch.empty_like(a["lse"], memory_format=torch.contiguous_format)
    sinks = a["sinks"].contiguous() if p.sinks else q
    tile = config or tiles.forward(p.head_dim, p.v_dim, p.dtype.itemsize, p.architecture)
    strides = (*(row_strides(t) for t in (q, k, v, o)), x.bias_strides, x.mask_strides)
    launcher = _forward(p, strides, (x.bias.dtype, sinks.dtype), tile)
    note_starts(p, d.operation, x)
    cached = used_keys(p, d.operation, a)
    launcher(q, k, v, o, lse, *x[:6], sinks, *cached, numbers=seed_words(d.options))
    outputs.done()
    if lse is not a["lse"]:
        a["lse"].copy_(lse)
    faults.after_launch(q.device)


# --- the backward pass -----------------------------------------------------------------------------------------------
@kept
def _over_keys(p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile) -> Launcher:
    heads, per_head = p.heads // p.groups, p.programs_of(p.lk, tile.keys)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.pitch, p.sequences or 0, p.together(p.lq, heads))
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None)
    last = (p.options.dropout_p > 0, *tile[:2], tile.stages, p.exact, p.precision)
    tail = (*shape, *strides, *p.numbers, p.scale, *p.widths, *flags, *last)
    specification = Specification(tail, per_head * heads * p.batch, tile.warps, tile.stages)
    return Launcher(triton_backward.attention_backward_keys, specification)


@kept
def _over_queries(
    p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], tile: tiles.Tile
) -> Launcher:
    per_head = p.programs_of(p.lq, tile.queries)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, p.pitch, p.sequences or 0, p.together(p.lk, p.heads))
    flags = (*p.sides, p.options.softcap > 0, p.direct, p.bias, p.mask, p.segments, p.sequences is not None)
    last = (p.options.dropout_p > 0, *tile[:2], tile.stages, p.exact, p.precision)
    tail = (*shape, *strides, *p.numbers, p.scale, *p.widths, *flags, *last)
    specification = Specification(tail, per_head * p.heads * p.batch, tile.warps, tile.stages)
    return Launcher(triton_backward.attention_backward_queries, specification)


@kept
def _bias(p: Problem, strides: tuple[Strides, ...], dtypes: tuple[torch.dtype, ...], shape: Strides) -> Launcher:
    tile = tiles.bias(p.head_dim, p.v_dim, p.dtype.itemsize)
    over = (p.batch, p.heads, -(-p.lq // tile.queries), -(-p.lk // tile.keys))
    full = (p.batch, p.heads, p.lq, p.lk)
    counts = tuple([tiles_ if n != whole else 1 for n, whole, tiles_ in zip(shape, full, over, strict=True)])
    flags = (*p.sides, p.options.softcap > 0, p.mask, p.segments, p.options.dropout_p > 0, p.exact)
    summed = (shape[2] != p.lq, shape[3] != p.lk)
    tail = (counts, p.batch, p.heads, p.groups, p.lq, p.lk, p.pitch, *strides, *p.numbers, *p.widths, *flags, *summed)
    specification = Specification(
        (*tail, tile.queries, tile.keys, p.precision), math.prod(over) // math.prod(counts), tile.warps
    )
    return Launcher(triton_gradients.attention_backward_bias, specification)


@kept
def _sink_terms(p: Problem, dtype: torch.dtype) -> Launcher:
    count = p.batch * p.heads * p.pitch
    tail = (count, p.heads, p.pitch, p.exact, 1024)
    return Launcher(triton_gradients.sink_terms, Specification(tail, -(-count // 1024)))


def fill_dsinks(p: Problem, a: Arguments, rows: torch.Tensor) -> None:
    """Fill dsinks from the rows of `triton_rows.attention_rows`."""
    terms = torch.empty(rows.shape[1:], dtype=torch.float32, device=rows.device)
    if terms.numel():
        _sink_terms(p, a["sinks"].dtype)(rows, a["sinks"].contiguous(), terms)
    a["dsinks"].copy_(reduction.sum(terms, axis=(0, 2)))


def backward(d: Any, a: Arguments, config: tiles.BackwardTiles | None = None) -> None:
    """Fill dq, dk and dv, and dbias and dsinks where they are wanted; `config` overrides the rule."""
    p, outputs, x = problem_of(d, a["q"]), Outputs(a), extras(a)
    do, q, k, v, o = (readable(a[name]) for name in ("do", "q", "k", "v", "o"))
    dq, dk, dv = outputs["dq"], outputs["dk"], outputs["dv"]
    over_keys, over_queries = config or tiles.backward(p.head_dim, p.v_dim, p.dtype.itemsize, p.architecture)
    note_starts(p, d.operation, x)
    rows = fill_rows(p, o, do, a["lse"], a.get("dlse"), x)
    numbers, inputs, extra = (
        seed_words(d.options),
        tuple(row_strides(t) for t in (do, q, k, v)),
        (x.bias_strides, x.mask_strides),
    )
    if k.numel() and p.heads:
        launcher = _over_keys(p, (*inputs, row_strides(dk), row_strides(dv), *extra), (x.bias.dtype,), over_keys)
        launcher(do, q, k, v, dk, dv, rows, *x[:6], numbers=numbers)
    if q.numel():
        launcher = _over_queries(p, (*inputs, row_strides(dq), *extra), (x.bias.dtype,), over_queries)
        launcher(do, q, k, v, dq, rows, *x[:6], numbers=numbers)
    if "dbias" in a:
        _fill_dbias(p, (do, q, k, v), a["dbias"], rows, x, numbers)
    if "dsinks" in a:
        fill_dsinks(p, a, rows)
    outputs.done()
    faults.after_launch(q.device)


def _fill_dbias(
    p: Problem, inputs: tuple[torch.Tensor, ...], dbias: torch.Tensor, rows: torch.Tensor, x: Extras, numbers: Any
) -> None:
    if not p.batch * p.heads * p.lq * p.lk:
        dbias.zero_()
        return
    strides = (*(row_strides(t) for t in inputs), broadcast_strides(dbias), x.bias_strides, x.mask_strides)
    launcher = _bias(p, strides, (x.bias.dtype, dbias.dtype), tuple(dbias.shape))
    launcher(*inputs, dbias, rows, *x[:4], numbers=numbers)
