# ruff: noqa: N803
"""Dropout in Triton, one element at a time in any layout; `reference.py` is the definition."""

from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept
from isograd.numerics import triton_memory as memory
from isograd.numerics.random import number_strides
from isograd.numerics.triton_random import number, philox
from isograd.ops.dropout.reference import LAST_WORD, factor, threshold
from isograd.rows import triton_elements as elements
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Strides, halves, words_of
from isograd.runtime.fenv import default_environment

_WORD = tl.constexpr(LAST_WORD)
_NUMBERS = (
    "factor_low",
    "factor_high",
    "limit_low",
    "limit_high",
    "seed_low",
    "seed_high",
    "offset_low",
    "offset_high",
)


@triton.jit
def _is_kept(word, limit_low, limit_high):
    """Whether a word is at least the limit, of which 2^32 is the largest."""
    return (word >= limit_low.to(tl.uint32, bitcast=True)) & (limit_high == 0)


@triton.jit
def _kept(index, limit_low, limit_high, seed_low, seed_high):
    """What is kept of numbers that int64 counts modulo 2^64, a block for each."""
    index = index.to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox(index >> 2, _WORD, seed_low, seed_high)
    odd, upper = (index & 1) == 1, (index & 2) == 2
    word = tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    return _is_kept(word, limit_low, limit_high)


@triton.jit
def _kept_of_blocks(index, limit_low, limit_high, seed_low, seed_high):
    """The same for whole blocks of numbers, of which the first ones are given."""
    w0, w1, w2, w3 = philox(index.to(tl.uint64, bitcast=True) >> 2, _WORD, seed_low, seed_high)
    k0, k1 = _is_kept(w0, limit_low, limit_high), _is_kept(w1, limit_low, limit_high)
    k2, k3 = _is_kept(w2, limit_low, limit_high), _is_kept(w3, limit_low, limit_high)
    return tl.reshape(tl.join(tl.join(k0, k2), tl.join(k1, k3)), (4 * index.shape[0],))


@triton.jit(do_not_specialize=list(_NUMBERS))
def dropped(
    x_ptr, y_ptr, factor_low, factor_high, limit_low, limit_high, seed_low, seed_high, offset_low, offset_high, n,
    shape, number_strides, x_strides, y_strides, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The result, which may be x. WHOLE: four elements that follow one another have the numbers of a block."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < n
    x = elements.load(x_ptr, position, shape, x_strides, mask)
    start = number(offset_low, offset_high)
    if WHOLE:
        first = tl.program_id(0).to(tl.int64) * BLOCK + 4 * tl.arange(0, BLOCK // 4)
        index = start + memory.element_offset(first, shape, number_strides)
        kept = _kept_of_blocks(index, limit_low, limit_high, seed_low, seed_high)
    else:
        index = start + memory.element_offset(position, shape, number_strides)
        kept = _kept(index, limit_low, limit_high, seed_low, seed_high)
    y = tl.where(kept, x * tiles.number(factor_low, factor_high, x.dtype), 0.0)
    elements.store(y_ptr, position, shape, y_strides, mask, y)


@kept
def _prepared(n: int, shape: Strides, strides: tuple[Strides, ...], blocks: bool, like: Any) -> Launcher:
    """The kernel of a layout; blocks: whether the first number starts a block."""
    sizes, numbers, *others = elements.layout(shape, strides)
    whole = blocks and numbers[-1] == 1 and all(step % 4 == 0 for step in (*numbers[:-1], *sizes[1:][-1:]))
    tail = (n, sizes, numbers, *others, whole, elements.TILE)
    return Launcher(dropped, Specification(tail, -(-n // elements.TILE)))


@launcher("dropout")
def dropout(problem: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y, which may be x."""
    if y.numel() == 0:
        return
    work = "float64" if y.dtype == torch.float64 else "float32"
    with default_environment():
        scale = words_of(factor(problem.p, work), work)
        limit = halves(threshold(problem.p))
    shape = tuple(y.shape)
    strides = (number_strides(shape, problem.batched), x.stride(), y.stride())
    launch = _prepared(y.numel(), shape, strides, problem.offset % 4 == 0, (y.dtype, architecture(y)))
    launch(x, y, numbers=(*scale, *limit, *halves(problem.seed), *halves(problem.offset)))
