"""How the Hopper kernels of order-free attention are launched, and which problems they take; no bit depends on it."""

import torch

from isograd.devices.tma_launcher import Block, BlockLauncher
from isograd.devices.triton_launcher import Specification, kept
from isograd.flash_attention.order_free import gluon_backward, gluon_forward
from isograd.flash_attention.triton_problem import Problem, Strides

TILE = 64  # rows that a program keeps
WIDTHS = (64, 128)  # elements of rows of digits
_REGISTERS = 128  # a thread at the start, of eight warps: two programs fit a multiprocessor
_FREE = ("tiles", "batch", "heads", "group", "lq", "lk", "sequences", "together", "left", "right")


def supports(p: Problem, width: int, v_width: int, digits: int) -> bool:
    """Whether the kernels take a problem whose rows of digits have these elements, `digits` in all at most."""
    plain = not (p.bias or p.mask or p.segments or p.options.dropout_p > 0)
    return p.architecture == 90 and plain and width in WIDTHS and v_width in WIDTHS and digits < 1 << 31


def _digits(rows: int, width: int, tile: tuple[int, int]) -> Block:
    return Block((rows, width), (width, 1), tile)


@kept
def forward(
    p: Problem, sides: tuple[tuple[int, int], tuple[int, int]], strides: Strides, dtypes: tuple[torch.dtype, ...],
    widths: tuple[int, int, int], values: tuple[float, float, float],
) -> BlockLauncher:  # fmt: skip
    """The launcher of the forward pass.

    sides: rows of a head in scratch memory and all of them, of queries and of keys; widths: elements of a row of o, of
    digits, of those of v; values: the soft cap, the reach of scores and the factor of o.
    """
    (q_pitch, q_total), (k_pitch, k_total) = sides
    v_dim, width, v_width = widths
    per_head = p.programs_of(p.lq, TILE)
    left, right, *_ = p.numbers
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, q_pitch, k_pitch, p.sequences or 0)
    stages = 2 if max(width, v_width) <= 64 else 1
    flags = (*p.sides, p.options.softcap > 0, p.sequences is not None, p.sinks, p.cached)
    tail = (*shape, p.together(p.lk, p.heads), strides, left, right, *values, v_dim, width, v_width, *flags, stages)
    blocks = (
        _digits(q_total, 2 * width, (64, width)),
        _digits(k_total, 2 * width, (128, width)),
        _digits(k_total // k_pitch * 2 * v_width, k_pitch, (64, 128)),
    )
    specification = Specification(tail, per_head * p.heads * p.batch, 4, None, _REGISTERS, free=_FREE)
    return BlockLauncher(gluon_forward.order_free_forward_hopper, specification, blocks)


@kept
def backward(
    p: Problem, kind: int, sides: tuple[tuple[int, int], tuple[int, int]], strides: Strides, dtype: torch.dtype,
    widths: tuple[int, int, int], values: tuple[float, ...],
) -> BlockLauncher:  # fmt: skip
    """The launcher of a part of the backward pass: dq, dk or dv (0, 1, 2).

    sides: rows of a head in scratch memory and all of them, of the rows that are kept and of the others; widths:
    elements of a row of the result, of digits, of those of v and do; values: the factor of scores, the soft cap, the
    reach of scores, the factors of do and of the result.
    """
    (own_pitch, own_total), (other_pitch, other_total) = sides
    dim, width, v_width = widths
    own, other, heads = (p.lq, p.lk, p.heads) if kind == 0 else (p.lk, p.lq, p.heads // p.groups)
    per_head = p.programs_of(own, TILE)
    left, right, *_ = p.numbers
    shape = (per_head, p.batch, p.heads, p.groups, p.lq, p.lk, own_pitch, other_pitch, p.sequences or 0)
    flags = (*p.sides, p.options.softcap > 0, p.sequences is not None)
    slots = (1, 1, 1) if kind == 2 or max(width, v_width) > 64 else (2, 2, 2)
    tail = (*shape, p.together(other, heads), strides, left, right, *values, kind, dim, width, v_width, *flags, *slots)
    weighed = v_width if kind == 2 else width
    blocks = (
        _digits(own_total, 2 * width, (64, width)),
        _digits(own_total, 2 * v_width, (64, v_width)),
        _digits(other_total, 2 * width, (128 if kind == 2 else 64, width)),
        _digits(other_total, 2 * v_width, (64, v_width)),
        _digits(other_total // other_pitch * 2 * weighed, other_pitch, (64, 128)),
    )
    specification = Specification(tail, per_head * heads * p.batch, 4, None, _REGISTERS, free=_FREE)
    return BlockLauncher(gluon_backward.order_free_backward_hopper, specification, blocks)
