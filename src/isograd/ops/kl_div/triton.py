# ruff: noqa: N803, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""kl_div in Triton, one element at a time in any layout; `reference.py` is the definition.

A reduction takes two passes over the terms, which are computed anew: `kl_keys` finds the largest of every chunk,
`kl_parts` adds up integer terms. `isograd.reduction` adds up the chunks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, processors
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.losses import divisor
from isograd.numerics.triton_memory import element_offset, wide_int
from isograd.reduction.triton_kernels import sum_finish
from isograd.rows import triton_elements as elements

Strides = tuple[int, ...]
_MOST_CHUNKS = 512
_SHORT_SUM = 1 << 17  # terms whose integer parts add up in one word each


@triton.jit
def _known(p, x, value):
    """The value where there is a probability; 0 where it is 0, whatever the input is, unless that is no number."""
    return tl.where(p != 0.0, value, tl.where(x == x, 0.0, x))


@triton.jit
def _terms(x_ptr, t_ptr, index, shape, x_strides, t_strides, mask, LOG: tl.constexpr):
    x, t = elements.load(x_ptr, index, shape, x_strides, mask), elements.load(t_ptr, index, shape, t_strides, mask)
    if LOG:
        p = ops.exp(t)
        term = p * (t - x)
    else:
        p = t
        term = p * (ops.log(t) - x)
    return tl.where(mask, _known(p, x, term), 0.0)


@triton.jit
def kl_terms(
    x_ptr, t_ptr, out_ptr, n, shape, x_strides, t_strides, out_strides, LOG: tl.constexpr, BLOCK: tl.constexpr
):
    """Every term by itself."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    p = _terms(x_ptr, t_ptr, index, shape, x_strides, t_strides, mask, LOG)
    y = ops.narrow(p, out_ptr.dtype.element_ty, False)
    tl.store(out_ptr + element_offset(index, shape, out_strides), y, mask=mask)


@triton.jit
def _chunk(n, tiles, BLOCK: tl.constexpr):
    """Where this program's chunk of tiles begins, and how many of its tiles are whole.

    Whole tiles are read without a mask: of a mask by n, which the compiler knows nothing of, every element is loaded
    by itself. That a chunk begins at a multiple of BLOCK is what the compiler is to see as well.
    """
    first = tl.program_id(0).to(tl.int64) * tiles
    return first * BLOCK, tl.minimum(tiles, n // BLOCK - first)


@triton.jit
def kl_keys(
    x_ptr, t_ptr, keys_ptr, n, tiles, shape, x_strides, t_strides, LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key of a chunk of terms."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    begin, whole = _chunk(n, tiles, BLOCK)
    index = begin + tl.arange(0, BLOCK)
    everywhere = tl.full((BLOCK,), True, tl.int1)
    key = terms.term_key(tl.zeros((BLOCK,), work))
    for start in range(0, whole * BLOCK, BLOCK):
        p = _terms(x_ptr, t_ptr, index + start, shape, x_strides, t_strides, everywhere, LOG)
        key = tl.maximum(key, terms.term_key(p))
    if whole < tiles:
        at = index + whole * BLOCK
        p = _terms(x_ptr, t_ptr, at, shape, x_strides, t_strides, at < n, LOG)
        key = tl.maximum(key, terms.term_key(p))
    tl.store(keys_ptr + tl.program_id(0), tl.max(key, axis=0))


@triton.jit
def kl_parts(
    x_ptr, t_ptr, keys_ptr, words_ptr, n, tiles, chunks, shape, x_strides, t_strides,
    LOG: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The words of a chunk, or the mark of a sum that is not finite."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    c = tl.arange(0, CHUNKS)
    key = tl.max(tl.load(keys_ptr + c, mask=c < chunks, other=0), axis=0)
    _, scale, magic, low_scale = sums.term_scale(tl.zeros((1,), key.dtype) + key)
    special = tl.zeros((BLOCK,), work)
    scale, magic, low_scale = scale + special, magic + special, low_scale + special
    a = tl.zeros((BLOCK,), tl.int64)
    b = a
    begin, whole = _chunk(n, tiles, BLOCK)
    index = begin + tl.arange(0, BLOCK)
    everywhere = tl.full((BLOCK,), True, tl.int1)
    for start in range(0, whole * BLOCK, BLOCK):
        p = _terms(x_ptr, t_ptr, index + start, shape, x_strides, t_strides, everywhere, LOG)
        more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
        a += more_a
        b += more_b
        special += terms.special_terms(p)
    if whole < tiles:
        at = index + whole * BLOCK
        p = _terms(x_ptr, t_ptr, at, shape, x_strides, t_strides, at < n, LOG)
        more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
        a += more_a
        b += more_b
        special += terms.special_terms(p)
    # What one place of the tile holds fits a word; the tile as a whole may not.
    w0, w1, w2, w3 = terms.split_words(a, b, WORDS, work == tl.float64)
    mark = terms.mark_of(tl.sum(special, axis=0))
    words = words_ptr + tl.program_id(0) * WORDS
    tl.store(words, tl.where(terms.key_is_finite(key), tl.sum(w0, axis=0), mark))
    if WORDS > 1:
        tl.store(words + 1, tl.sum(w1, axis=0))
    if WORDS > 2:
        tl.store(words + 2, tl.sum(w2, axis=0))
        tl.store(words + 3, tl.sum(w3, axis=0))


@triton.jit
def kl_gradient(
    g_ptr, x_ptr, t_ptr, dx_ptr, n, divisor, shape, g_strides, x_strides, t_strides, dx_strides,
    LOG: tl.constexpr, INPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient for the input or the target."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    g = elements.load(g_ptr, index, shape, g_strides, mask)
    g = ops.divide(g, tl.zeros_like(g) + wide_int(divisor).to(g.dtype))
    t = elements.load(t_ptr, index, shape, t_strides, mask)
    if LOG:
        p = ops.exp(t)
    else:
        p = t
    if INPUT:
        slope = ops.negate(p)
    else:
        x = elements.load(x_ptr, index, shape, x_strides, mask)
        if LOG:
            slope = _known(p, x, p * ((t - x) + 1.0))
        else:
            slope = _known(p, x, (ops.log(t) - x) + 1.0)
    dx = ops.narrow(g * slope, dx_ptr.dtype.element_ty, False)
    tl.store(dx_ptr + element_offset(index, shape, dx_strides), dx, mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------
class _Sum(NamedTuple):
    """The kernels of a sum in chunks, and the sizes of their scratch memory."""

    keys: Launcher
    parts: Launcher
    finish: Launcher
    chunks: int
    words: int


@kept
def _sum(
    n: int, share: int, shape: Strides, strides: Any, log_target: bool, wide: bool, multiprocessors: int, _: Any
) -> _Sum:
    chunks = min(4 * multiprocessors, -(-n // elements.TILE), _MOST_CHUNKS)
    tiles = -(-n // (chunks * elements.TILE))
    chunks = -(-n // (tiles * elements.TILE))
    words = (2 if wide else 1) * (2 if n > _SHORT_SUM else 1)
    layout, most = elements.layout(shape, strides), _MOST_CHUNKS
    free = ("n", "tiles", "chunks")
    keys = Specification((n, tiles, *layout, log_target, elements.TILE), chunks, free=free[:2])
    parts = Specification((n, tiles, chunks, *layout, log_target, elements.TILE, most, words), chunks, free=free)
    tail = (share, 1, chunks, 1, 1, 1, (), (), 1, most, words, share != 1, False)
    finish = Specification(tail, 1, free=("n", "chunks"))
    return _Sum(
        Launcher(kl_keys, keys),
        Launcher(kl_parts, parts),
        Launcher(sum_finish, finish),
        chunks,
        words,
    )


@launcher("kl_div")
def kl_div(problem: Any, input: torch.Tensor, target: torch.Tensor, loss: torch.Tensor) -> None:  # noqa: A002
    """Compute the loss."""
    x, t, n = input, target, input.numel()
    shape, log_target, like = problem.shape, problem.log_target, (x.dtype, architecture(x))
    if problem.reduction == "none":
        if n:
            strides = (x.stride(), t.stride(), loss.stride())
            elements.prepared(kl_terms, n, (), shape, strides, (log_target,), like)(x, t, loss)
        return
    share = divisor(problem.reduction, shape)
    if n == 0:
        loss.fill_(0.0 if share else float("nan"))
        return
    wide = x.dtype == torch.float64
    found = _sum(n, share, shape, (x.stride(), t.stride()), log_target, wide, processors(x), like)
    keys = torch.empty(found.chunks, dtype=torch.int64 if wide else torch.int32, device=x.device)
    words = torch.empty(found.chunks * found.words, dtype=torch.int64, device=x.device)
    found.keys(x, t, keys)
    found.parts(x, t, keys, words)
    found.finish(keys, words, loss)


@launcher("kl_div_backward")
def kl_div_backward(
    problem: Any,
    dloss: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    target: torch.Tensor,
    dx: torch.Tensor,
) -> None:
    """Compute dx; it may be the input or the target."""
    if dx.numel() == 0:
        return
    shape, share = problem.shape, 1 if problem.reduction == "none" else divisor(problem.reduction, problem.shape)
    strides = (dloss.expand(shape).stride(), input.stride(), target.stride(), dx.stride())
    flags, like = (problem.log_target, problem.wrt == "input"), (input.dtype, architecture(input))
    elements.prepared(kl_gradient, dx.numel(), (share,), shape, strides, flags, like)(dloss, input, target, dx)
