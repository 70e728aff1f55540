"""How the passes over rows before and after the backward pass of attention are launched."""

import torch

from isograd.devices.triton_launcher import Launcher, Specification, kept
from isograd.flash_attention import triton_rows
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionDeltaDescriptor
from isograd.flash_attention.triton_problem import PAD, Arguments, Extras, Problem, Strides, row_strides


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


@kept
def _bounds(p: Problem, strides: tuple[Strides, ...]) -> Launcher:
    heads, rows = p.heads // p.groups, 64
    per_head = p.programs_of(p.lk, rows)
    tail = (per_head, heads, p.lk, p.sequences or 0, *strides, *p.widths, p.sequences is not None, rows)
    return Launcher(triton_rows.attention_bounds, Specification(tail, per_head * heads * p.batch))


def fill_bounds(p: Problem, k: torch.Tensor, v: torch.Tensor, x: Extras) -> torch.Tensor:
    """What the fixed point of dQ knows of keys and values: see `triton_rows.attention_bounds`."""
    count = p.batch if p.sequences is None else p.sequences + 1
    shape = (count, p.heads // p.groups, tiles.width(p.head_dim) + 1)
    bounds = torch.zeros(shape, dtype=torch.int32, device=k.device)
    if k.numel():
        _bounds(p, (row_strides(k), row_strides(v)))(k, v, bounds, x.k_starts)
    return bounds


@kept
def _rows(p: Problem, strides: tuple[Strides, ...], dlse: bool, fixed: bool) -> Launcher:
    rows = min(2 * _rows_at_once(p.widths[-1]), PAD)
    shape = (p.batch, p.heads, p.groups, p.lq, p.pitch, p.sequences or 0)
    flags = (*p.widths, dlse, fixed, p.exact, p.sequences is not None, rows)
    tail = (*shape, *strides, float(p.options.dropout_factor), *flags)
    return Launcher(triton_rows.attention_rows, Specification(tail, p.pitch // rows * p.heads * p.batch))


def fill_rows(
    p: Problem,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    x: Extras,
    fixed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rows [2 or 3, B, H, pitch] of `triton_rows.attention_rows`.

    With fixed, the bounds of `fill_bounds` and room for the integers of dq, also those of the fixed point.
    """
    count = 2 if fixed is None and not p.exact else 3
    rows = torch.empty(count, p.batch, p.heads, p.pitch, dtype=torch.float32, device=o.device)
    if rows.numel():
        lse, gradient = lse.contiguous(), lse if dlse is None else dlse.contiguous()
        launcher = _rows(p, (row_strides(o), row_strides(do)), dlse is not None, fixed is not None)
        bounds, integers = (lse, lse) if fixed is None else fixed
        launcher(o, do, lse, gradient, bounds, rows, integers, x.q_starts)
    return rows


@kept
def _to_float(p: Problem, strides: Strides) -> Launcher:
    head_dim, _, block, _ = p.widths
    rows = _rows_at_once(block)
    per_head = p.programs_of(p.lq, rows)
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.pitch, p.sequences or 0)
    tail = (*shape, strides, p.scale, head_dim, block, p.sequences is not None, rows)
    return Launcher(triton_rows.fixed_to_float, Specification(tail, per_head * p.heads * p.batch))


def fixed_to_float(
    p: Problem, integers: torch.Tensor, rows: torch.Tensor, bounds: torch.Tensor, dq: torch.Tensor, x: Extras
) -> None:
    """Fill dq from integers [B, H, L, D] in the fixed point of rows and bounds."""
    if dq.numel():
        _to_float(p, row_strides(dq))(integers, rows, bounds, dq, x.q_starts)
