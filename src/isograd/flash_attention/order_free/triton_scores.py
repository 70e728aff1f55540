# mypy: ignore-errors
# ruff: noqa: N803
"""Scores of order-free attention in Triton: rule 23 of `docs/arithmetic.md`, for tiles of either orientation.

Where the scales of two blocks leave no score out of reach, and all in them is finite, nothing is looked at a second
time. `careful` says that they may: then a score is held within its reach, +inf is a NaN, and -inf is hidden.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.numerics import triton_ops as ops

REACH = tl.constexpr(2097152.0)  # 2**21
HIDDEN = tl.constexpr(-4194304.0)  # stands for hidden scores: 2**HIDDEN is nothing beside what is visible


@triton.jit
def is_careful(worst, other, reach):
    """Whether a score may be out of reach; `reach` is a bound of scores for scales of 1, by REACH."""
    bound = worst * other * reach
    return (bound <= 1.0) == 0


@triton.jit
def _held(t):
    """Scores within their reach, NaN for +inf as well."""
    held = tl.where(t > REACH, REACH, tl.where(t < -REACH, -REACH, t))
    return tl.where(t == float("inf"), float("nan"), held)


@triton.jit
def scores(
    total, factor, i, j, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment,
    k_segment, careful,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SEGMENTS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(scores in base 2, HIDDEN where hidden; the slope of the soft cap) of exact sums; positions hide some: PARTIAL.

    i and j: queries and keys of the tile's rows and columns, as index tensors that broadcast.
    """
    t = total.to(tl.float32) * factor
    slope = t
    if SOFTCAP:
        h = ops.tanh_32(t)
        t, slope = h * cap, tl.fma(ops.negate(h), h, 1.0)
    if BIAS or MASK:
        inside = (i < lq) & (j < lk)
    if BIAS:
        at = bias_base + i.to(tl.int64) * bias_strides[2] + j.to(tl.int64) * bias_strides[3]
        bias = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        t = t + bias * masks.LOG2E
    if careful:
        t = _held(t)
    if BIAS:
        t = tl.where(bias == float("-inf"), HIDDEN, t)
    if MASK:
        at = mask_base + i.to(tl.int64) * mask_strides[2] + j.to(tl.int64) * mask_strides[3]
        t = tl.where(tl.load(at, mask=inside, other=0) != 0, t, HIDDEN)
    if SEGMENTS:
        t = tl.where(q_segment == k_segment, t, HIDDEN)
    if PARTIAL:
        seen = j < lk
        if LEFT:
            seen = seen & (j >= i + left)
        if RIGHT:
            seen = seen & (j <= i + right)
        t = tl.where(seen, t, HIDDEN)
    return t, slope
