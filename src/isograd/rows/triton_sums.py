# mypy: ignore-errors
# ruff: noqa: N803, RET505, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Sums over the rows in Triton, for the gradients of weights and biases of norms: dy v and dy of every column.

v = x r, or (x - mean) r where rows are CENTERED. Integers are added by atomics, whose order leaves no trace. Columns of
the weight come before those of the bias in keys and words where both are asked for.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, merged, processors
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.rows.triton_launch import Strides

_ROUNDS = tl.constexpr(256)  # of limbs that an int32 holds


@triton.jit
def _terms(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, stop, column, n, shape, dy_steps, x_steps, mean_steps, rstd_steps, dy_axis,
    x_axis, CENTERED: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The terms (dy v, dy) [rows, columns], zero outside."""
    inside = row < stop
    mask = inside[:, None]
    if MASKED:
        mask = mask & (column < n)[None, :]
    dy_ptr += memory.element_offset(row, shape, dy_steps)[:, None] + column[None, :] * dy_axis
    x_ptr += memory.element_offset(row, shape, x_steps)[:, None] + column[None, :] * x_axis
    r = tl.load(rstd_ptr + memory.element_offset(row, shape, rstd_steps), mask=inside, other=0.0)
    dy = ops.widen(tl.load(dy_ptr, mask=mask, other=0.0), NATIVE)
    x = ops.widen(tl.load(x_ptr, mask=mask, other=0.0), NATIVE)
    if CENTERED:
        mean = tl.load(mean_ptr + memory.element_offset(row, shape, mean_steps), mask=inside, other=0.0)
        x = x - mean[:, None]
    p = dy * (x * r[:, None])
    if MASKED:  # a row that is not finite has NaN beyond its end as well
        p = tl.where(mask, p, 0.0)
    return p, dy


@triton.jit
def _chunk(chunks, length, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(first rows, where they stop, columns) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    begin = pid % chunks * length
    column = pid // chunks * COLUMNS + tl.arange(0, COLUMNS)
    return begin + tl.arange(0, ROWS), tl.minimum(begin + length, memory.wide_int(count)), column


@triton.jit
def column_keys(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, keys_ptr, n, count, chunks, length, shape, dy_steps, x_steps, mean_steps,
    rstd_steps, dy_axis, x_axis, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTERED: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The key of the largest term of every column."""
    row, stop, column = _chunk(chunks, length, count, ROWS, COLUMNS)
    key = tl.zeros((ROWS, COLUMNS), keys_ptr.dtype.element_ty)
    bias_key = key
    for start in range(0, length, ROWS):
        p, dy = _terms(
            dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + start, stop, column, n, shape, dy_steps, x_steps, mean_steps,
            rstd_steps, dy_axis, x_axis, CENTERED, MASKED, NATIVE,
        )  # fmt: skip
        if WEIGHT:
            key = tl.maximum(key, terms.term_key(p))
        if BIAS:
            bias_key = tl.maximum(bias_key, terms.term_key(dy))
    if WEIGHT:
        tl.atomic_max(keys_ptr + column, tl.max(key, axis=0), mask=column < n, sem="relaxed")
        keys_ptr += n
    if BIAS:
        tl.atomic_max(keys_ptr + column, tl.max(bias_key, axis=0), mask=column < n, sem="relaxed")


@triton.jit
def _scale(keys_ptr, column, n):
    """(key, scale, magic, low_scale) of every column."""
    key = tl.load(keys_ptr + column, mask=column < n, other=0)
    _, scale, magic, low_scale = sums.term_scale(key[None, :])
    return key, scale, magic, low_scale


@triton.jit
def _limbs(p, scale, magic, low_scale, high, low):
    more_high, more_low = sums.split_term_bits(p, scale, magic, low_scale)
    return high + more_high, low + more_low


@triton.jit
def _parts(high, low, magic, rounds):
    """The parts of terms from the sums of so many limbs that still stand on the bits of their constants."""
    rounds = memory.wide_int(rounds).to(high.dtype)
    high -= rounds * ops.as_int(magic)  # modulo the width
    if high.dtype == tl.int64:
        return high, low - rounds * ops.MAGIC_BITS_64
    else:
        term = (high.to(tl.int64) << 23) + (low - rounds * ops.MAGIC_BITS_32).to(tl.int64)
        return term, term


@triton.jit
def _add_up(words_ptr, columns, a, b, special, key, mask, WORDS: tl.constexpr, wide: tl.constexpr):
    a = tl.sum(a, axis=0)
    if wide:
        b = tl.sum(b, axis=0)
    else:
        b = a
    terms.accumulate(words_ptr, columns, a, b, special, key, mask, WORDS, wide)


@triton.jit
def column_parts(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, keys_ptr, words_ptr, n, count, chunks, length, shape, dy_steps, x_steps,
    mean_steps, rstd_steps, dy_axis, x_axis, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTERED: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The integer sums of every column, added up in memory."""
    row, stop, column = _chunk(chunks, length, count, ROWS, COLUMNS)
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    wide: tl.constexpr = work == tl.float64
    narrow: tl.constexpr = tl.int64 if wide else tl.int32
    a = tl.zeros((ROWS, COLUMNS), tl.int64)
    b, bias_a, bias_b = a, a, a
    key, scale, magic, low_scale = _scale(keys_ptr, column, n)
    bias_key, bias_scale, bias_magic, bias_low = key, scale, magic, low_scale
    if WEIGHT and BIAS:
        bias_key, bias_scale, bias_magic, bias_low = _scale(keys_ptr + n, column, n)
    for start in range(0, length, ROWS * _ROUNDS):
        high = tl.zeros((ROWS, COLUMNS), narrow)
        low, bias_high, bias_low_sum = high, high, high
        rounds = tl.minimum(_ROUNDS, tl.cdiv(length - start, ROWS))
        for i in tl.range(0, rounds, num_stages=STAGES):
            p, dy = _terms(
                dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + start + i * ROWS, stop, column, n, shape, dy_steps, x_steps,
                mean_steps, rstd_steps, dy_axis, x_axis, CENTERED, MASKED, NATIVE,
            )  # fmt: skip
            if WEIGHT:
                high, low = _limbs(p, scale, magic, low_scale, high, low)
            if BIAS:
                bias_high, bias_low_sum = _limbs(dy, bias_scale, bias_magic, bias_low, bias_high, bias_low_sum)
        if WEIGHT:
            more_a, more_b = _parts(high, low, magic, rounds)
            a += more_a
            if wide:
                b += more_b
        if BIAS:
            more_a, more_b = _parts(bias_high, bias_low_sum, bias_magic, rounds)
            bias_a += more_a
            if wide:
                bias_b += more_b
    special = tl.zeros((COLUMNS,), work)
    bias_special = special
    if not terms.key_is_finite(tl.maximum(tl.max(key, axis=0), tl.max(bias_key, axis=0))):
        for start in range(0, length, ROWS):
            p, dy = _terms(
                dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + start, stop, column, n, shape, dy_steps, x_steps, mean_steps,
                rstd_steps, dy_axis, x_axis, CENTERED, MASKED, NATIVE,
            )  # fmt: skip
            special += tl.sum(terms.special_terms(p), axis=0)
            bias_special += tl.sum(terms.special_terms(dy), axis=0)
    columns = n * (WEIGHT + BIAS)
    if WEIGHT:
        _add_up(words_ptr + column, columns, a, b, special, key, column < n, WORDS, wide)
        words_ptr += n
    if BIAS:
        _add_up(words_ptr + column, columns, bias_a, bias_b, bias_special, bias_key, column < n, WORDS, wide)


@triton.jit
def column_finish(
    keys_ptr, words_ptr, out_ptr, n, columns, first, out_axis, COLUMNS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Round the sums of n columns from the first one on, of so many."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < n
    key = tl.load(keys_ptr + first + column, mask=mask, other=0)
    w0, w1, w2, w3 = terms.load_words(words_ptr + first + column, columns, mask, WORDS)
    s = terms.sum_of_words(w0, w1, w2, w3, key, WORDS)
    tl.store(out_ptr + column * out_axis, ops.narrow(s, out_ptr.dtype.element_ty, False), mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------
_WAVES, _STAGES = 8, 4  # programs a multiprocessor; tiles that are fetched ahead, and one
_ROWS, _COLUMNS, _MOST_ROWS = 16, 128, 1 << 17  # of a tile; terms whose integer parts add up in one word each


class _Sums(NamedTuple):
    keys: Launcher
    parts: Launcher
    finish: tuple[Launcher, ...]


@kept
def _sums(
    axis: int,
    shape: Strides,
    strides: tuple[Strides, ...],
    centered: bool,
    weight: bool,
    out_steps: Strides,
    words: int,
    multiprocessors: int,
    arch: int,
    _: Any,
) -> _Sums:
    n, others = shape[axis], [d for d in range(len(shape)) if d != axis]
    dy, x, mean, rstd = strides
    outer = (tuple(dy[d] for d in others), tuple(x[d] for d in others), mean, rstd)
    sizes, steps = merged([shape[d] for d in others], outer)
    steps = steps or [(0, 0, 0, 0)]
    tall = _ROWS // 4 if words == 4 else _ROWS  # as many registers for doubles
    count, blocks, columns = math.prod(sizes), -(-n // _COLUMNS), n * len(out_steps)
    chunks = max(min(-(-_WAVES * multiprocessors // blocks), -(-count // tall)), -(-count // _MOST_ROWS))
    length = -(-count // (chunks * tall)) * tall
    # Nobody divides by the first size, which varies with the number of rows.
    walk = ((0, *sizes[1:]), *(tuple(step[t] for step in steps) for t in range(4)))
    bias = len(out_steps) > weight
    masked, native = n % _COLUMNS != 0, arch >= 90
    tail = (
        n, count, chunks, length, *walk, dy[axis], x[axis], tall, _COLUMNS, centered, weight, bias, masked, native
    )  # fmt: skip
    free = ("count", "chunks", "length")
    finish = [
        Launcher(column_finish, Specification((n, columns, i * n, step, _COLUMNS, words), blocks))
        for i, step in enumerate(out_steps)
    ]
    return _Sums(
        Launcher(column_keys, Specification(tail, chunks * blocks, free=free)),
        Launcher(
            column_parts,
            Specification((*tail, words, _STAGES), chunks * blocks, free=free),
        ),
        tuple(finish),
    )


def sums_over_rows(
    axis: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    find: Callable[[torch.Tensor], None] | None = None,
) -> None:
    """Write what is asked for, of x with elements: the gradients of a norm's weight and of its bias.

    find: what puts the keys of the columns' largest terms into memory, which is zero before.
    """
    outputs = [t for t in (dweight, dbias) if t is not None]
    center = rstd if mean is None else mean
    double = rstd.dtype == torch.float64
    words, n = 4 if double else 2, x.shape[axis]
    strides = (dy.stride(), x.stride(), center.stride(), rstd.stride())
    steps = tuple([out.stride(0) for out in outputs])
    found = _sums(
        axis, tuple(x.shape), strides, mean is not None, dweight is not None, steps, words, processors(x),
        architecture(x), x.dtype,
    )  # fmt: skip
    columns = n * len(outputs)
    keys = torch.zeros(columns, dtype=torch.int64 if double else torch.int32, device=x.device)
    sums_of_parts = torch.zeros(words * columns, dtype=torch.int64, device=x.device)
    if find is None:
        found.keys(dy, x, center, rstd, keys)
    else:
        find(keys)
    found.parts(dy, x, center, rstd, keys, sums_of_parts)
    for finish, out in zip(found.finish, outputs, strict=True):
        finish(keys, sums_of_parts, out)
