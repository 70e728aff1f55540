# ruff: noqa: N803, SIM108
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
def _words(index, seed_low, seed_high):
    """The words of numbers that int64 counts modulo 2^64, a block for each."""
    index = index.to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox(index >> 2, _WORD, seed_low, seed_high)
    odd, upper = (index & 1) == 1, (index & 2) == 2
    return tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))


@triton.jit
def _words_of_neighbours(index, seed_low, seed_high, BLOCK: tl.constexpr):
    """The same for neighbouring numbers, whole blocks of them: a block is made once."""
    blocks = tl.reshape(index.to(tl.uint64, bitcast=True) >> 2, (BLOCK // 4, 4)).to(tl.int64, bitcast=True)
    first = tl.min(blocks, axis=1)  # beyond the last element numbers may go on elsewhere
    w0, w1, w2, w3 = philox(first.to(tl.uint64, bitcast=True), _WORD, seed_low, seed_high)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit(do_not_specialize=list(_NUMBERS))
def dropped(
    x_ptr, y_ptr, factor_low, factor_high, limit_low, limit_high, seed_low, seed_high, offset_low, offset_high, n,
    shape, number_strides, x_strides, y_strides, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The result, which may be x. WHOLE: four elements that follow one another have the numbers of a block."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < n
    x = elements.load(x_ptr, position, shape, x_strides, mask)
    index = number(offset_low, offset_high) + memory.element_offset(position, shape, number_strides)
    if WHOLE:
        word = _words_of_neighbours(index, seed_low, seed_high, BLOCK)
    else:
        word = _words(index, seed_low, seed_high)
    kept = word.to(tl.int64) >= number(limit_low, limit_high)
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
