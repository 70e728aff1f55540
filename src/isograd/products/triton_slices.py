# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Lines of a matrix as 16-bit integers with one exponent, in two signed bytes an element; `int16.py` is the definition.

A line is a row of a or a column of b, its n elements the contracted axis. Its digits stand in [high | low], each of
`blocks` times 128 bytes of which those beyond n are 0. Its word is its exponent times 4, plus what is not finite in it:
1 for an infinity, 2 for a NaN. `line_words` finds words alone, of chunks of lines where there are few; `slice_chunks`
cuts by such words, and `slice_lines` does both in one pass.
"""

import triton
import triton.language as tl

from isograd.numerics import int16
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import outer_offset, place, wide_int

DEPTH = tl.constexpr(128)  # the digits of a line are padded to whole multiples
_ZERO = tl.constexpr(int16.ZERO)
_NONE = tl.constexpr(4 * int16.ZERO)  # the word of nothing
_CARRY = tl.constexpr((1 << 24) - (2 * int16.LARGEST + 1) * (1 << 8))  # lifts significands from the next integer's on
_DROPPED = tl.constexpr(int16.DROPPED)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def exponent_of(key):
    """The exponent of an element from the bits of its magnitude; int16.ZERO where it has none."""
    small = key < 0x00800000
    bits = tl.where(small, ops.as_int(ops.as_float(key) * 18446744073709551616.0), key)
    found = ((bits + _CARRY) >> 23) - tl.where(small, 190, 126)
    return tl.where((key == 0) | (key >= _INFINITY), _ZERO, found)


@triton.jit
def _load(x_ptr, row, k, inner, stop, x_axis, x_inner, NATIVE: tl.constexpr):
    inside = (row < inner) & (k < stop)
    return ops.widen(tl.load(x_ptr + row * x_inner + k * x_axis, mask=inside, other=0.0), NATIVE)


@triton.jit
def _balance(shift_ptr, group_ptr, number, inside, n, GROUPED: tl.constexpr):
    """Where lines have their balance: GROUPED lines that of their group, of which each has n numbers."""
    if GROUPED:
        group = tl.load(group_ptr + number, mask=inside, other=0).to(tl.int64)
        return shift_ptr + (group * n)[:, None]
    else:
        return shift_ptr


@triton.jit
def _shift(shift_ptr, k, stop, SIGN: tl.constexpr):
    """What is added to the exponents of elements: the balance, with the sign of its side."""
    return tl.load(shift_ptr + k, mask=k < stop, other=0) * SIGN


@triton.jit
def _greatest(top, most, x, shift, SIGN: tl.constexpr):
    """The greatest exponents, balanced, or without a balance the largest finite magnitudes; and those of anything."""
    key = ops.magnitude_key(x)
    most = tl.maximum(most, key)
    if SIGN == 0:
        top = tl.maximum(top, tl.where(key < _INFINITY, key, 0))
    else:
        e = exponent_of(key)
        top = tl.maximum(top, tl.where(e == _ZERO, e, e + shift))
    return top, most


@triton.jit
def _word(top, most, SIGN: tl.constexpr):
    e = exponent_of(top) if SIGN == 0 else top
    return e * 4 + tl.where(most > _INFINITY, 2, tl.where(most == _INFINITY, 1, 0))


@triton.jit
def _of_chunks(found_ptr, number, inside, chunks, count, CHUNKS: tl.constexpr):
    """The words of lines from those of their chunks."""
    c = tl.arange(0, CHUNKS).to(tl.int64)[None, :]
    words = tl.load(found_ptr + c * count + number[:, None], mask=inside[:, None] & (c < chunks), other=_NONE)
    return tl.max(words >> 2, axis=1) * 4 + tl.max(words & 3, axis=1)


@triton.jit
def _settled(word):
    """The word with the exponent 0 where the line has none."""
    return tl.where((word >> 2) == _ZERO, word & 3, word)


@triton.jit
def digits_of(x, exponent, shift):
    """The high and the low digit of each integer."""
    # Beyond 252 only a zero has a place, and below -252 nothing is left.
    power = tl.minimum(tl.maximum(15 - exponent + shift, -252), 252)
    half = power >> 1
    v = x * ops.pow2_32(half) * ops.pow2_32(power - half)
    v = tl.where(ops.is_finite(v), v, 0.0)
    integer = ops.as_int(v + ops.MAGIC_32) - ops.MAGIC_BITS_32
    low = ((integer + 128) & 255) - 128
    return ((integer - low) >> 8).to(tl.int8), low.to(tl.int8)


@triton.jit
def _store(digits_ptr, x, line, inside, k, word, shift, blocks):
    width = wide_int(blocks) * DEPTH
    high, low = digits_of(x, word >> 2, shift)
    at = digits_ptr + line * (2 * width) + k
    inside = inside & (k < width)
    tl.store(at, high, mask=inside)
    tl.store(at + width, low, mask=inside)


@triton.jit
def line_words(
    x_ptr, shift_ptr, group_ptr, found_ptr, n, inner, chunks, length, count, x_axis, x_inner, outer_shape, x_outer,
    SIGN: tl.constexpr, GROUPED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Words of every chunk of `length` elements [chunks, lines]; `count` lines in all."""
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid % chunks
    several = tl.cdiv(inner, LINES)
    outer = pid // chunks // several
    line = (pid // chunks - outer * several) * LINES + tl.arange(0, LINES)
    row = line[:, None]
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    shift_ptr = _balance(shift_ptr, group_ptr, outer * inner + line, line < inner, n, GROUPED)
    begin = chunk * length
    stop = tl.minimum(begin + length, n)
    top = tl.full((LINES, BLOCK), 0 if SIGN == 0 else _ZERO, tl.int32)
    most = tl.zeros((LINES, BLOCK), tl.int32)
    for start in range(0, length, BLOCK):
        k = begin + start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        shift = 0 if SIGN == 0 else _shift(shift_ptr, k, stop, SIGN)
        x = _load(x_ptr, row, k, inner, stop, x_axis, x_inner, NATIVE)
        top, most = _greatest(top, most, x, shift, SIGN)
    word = _word(tl.max(top, axis=1), tl.max(most, axis=1), SIGN)
    tl.store(found_ptr + chunk * count + outer * inner + line, word, mask=line < inner)


@triton.jit
def slice_chunks(
    x_ptr, shift_ptr, group_ptr, found_ptr, digits_ptr, words_ptr, n, inner, chunks, count, blocks, x_axis, x_inner,
    outer_shape, x_outer,
    SIGN: tl.constexpr, GROUPED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Digits [lines, 2, width] and words [lines] from the words of chunks."""
    pid = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(wide_int(blocks) * DEPTH, BLOCK)
    part = pid % parts
    several = tl.cdiv(inner, LINES)
    outer = pid // parts // several
    line = (pid // parts - outer * several) * LINES + tl.arange(0, LINES)
    number = outer * inner + line
    word = _settled(_of_chunks(found_ptr, number, line < inner, chunks, count, CHUNKS))
    if part == 0:
        tl.store(words_ptr + number, word, mask=line < inner)
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    shift_ptr = _balance(shift_ptr, group_ptr, number, line < inner, n, GROUPED)
    k = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    shift = 0 if SIGN == 0 else _shift(shift_ptr, k, n, SIGN)
    x = _load(x_ptr, line[:, None], k, inner, n, x_axis, x_inner, NATIVE)
    _store(digits_ptr, x, number[:, None], line[:, None] < inner, k, word[:, None], shift, blocks)


@triton.jit
def slice_lines(
    x_ptr, shift_ptr, group_ptr, digits_ptr, words_ptr, n, inner, blocks, x_axis, x_inner, outer_shape, x_outer,
    SIGN: tl.constexpr, GROUPED: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Digits [lines, 2, width] and words [lines]; HELD: a tile holds the lines."""
    row, _, outer = place(inner, 1, LINES, 1)
    number = outer * inner + row
    inside = row < inner
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    shift_ptr = _balance(shift_ptr, group_ptr, tl.reshape(number, (LINES,)), tl.reshape(inside, (LINES,)), n, GROUPED)
    k = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    top = tl.full((LINES, BLOCK), 0 if SIGN == 0 else _ZERO, tl.int32)
    most = tl.zeros((LINES, BLOCK), tl.int32)
    shift = 0 if SIGN == 0 else _shift(shift_ptr, k, n, SIGN)
    x = _load(x_ptr, row, k, inner, n, x_axis, x_inner, NATIVE)
    top, most = _greatest(top, most, x, shift, SIGN)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            more = 0 if SIGN == 0 else _shift(shift_ptr, k + start, n, SIGN)
            later = _load(x_ptr, row, k + start, inner, n, x_axis, x_inner, NATIVE)
            top, most = _greatest(top, most, later, more, SIGN)
    word = _settled(_word(tl.max(top, axis=1)[:, None], tl.max(most, axis=1)[:, None], SIGN))
    tl.store(words_ptr + number, word, mask=inside)
    _store(digits_ptr, x, number, inside, k, word, shift, blocks)
    if not HELD:
        for start in range(BLOCK, wide_int(blocks) * DEPTH, BLOCK):
            more = 0 if SIGN == 0 else _shift(shift_ptr, k + start, n, SIGN)
            later = _load(x_ptr, row, k + start, inner, n, x_axis, x_inner, NATIVE)
            _store(digits_ptr, later, number, inside, k + start, word, more, blocks)


# --- parts for kernels elsewhere -------------------------------------------------------------------------------------
@triton.constexpr_function
def lowest(sign):
    """What is below the exponents of all elements, or below their bits where nothing is balanced."""
    return int16.ZERO if sign else 0


@triton.jit
def greatest_of(
    top, most, x_ptr, shift_ptr, row, k, inner, stop, x_axis, x_inner, SIGN: tl.constexpr, NATIVE: tl.constexpr
):
    """`_greatest` of elements k below `stop`."""
    shift = 0 if SIGN == 0 else _shift(shift_ptr, k, stop, SIGN)
    return _greatest(top, most, _load(x_ptr, row, k, inner, stop, x_axis, x_inner, NATIVE), shift, SIGN)


@triton.jit
def word_of(top, most, SIGN: tl.constexpr):
    """The words of lines from their greatest elements."""
    return _settled(_word(top, most, SIGN))


@triton.jit
def store_slices(
    x_ptr, shift_ptr, digits_ptr, row, word, k, place, inner, stop, blocks, x_axis, x_inner,
    SIGN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store the digits of elements k below `stop`, zeros beyond, at places of their lines."""
    shift = 0 if SIGN == 0 else _shift(shift_ptr, k, stop, SIGN)
    x = _load(x_ptr, row, k, inner, stop, x_axis, x_inner, NATIVE)
    _store(digits_ptr, x, row, row < inner, place, word, shift, blocks)


# --- balances --------------------------------------------------------------------------------------------------------
@triton.jit
def _exponents(found_ptr, k, n, chunks, count):
    """The greatest exponents of lines k of n; chunks are `count` words apart."""
    greatest = tl.full(k.shape, _ZERO, tl.int32)
    for chunk in range(chunks):
        words = tl.load(found_ptr + wide_int(chunk) * count + k, mask=k < n, other=_NONE)
        greatest = tl.maximum(greatest, words >> 2)
    return greatest


@triton.jit
def weight_balance(found_ptr, balance_ptr, n, chunks, count, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """The balances that weights ask for, from the words of their rows [chunks, count]; a program for n of them."""
    found_ptr += tl.program_id(0).to(tl.int64) * n
    balance_ptr += tl.program_id(0).to(tl.int64) * n
    k = tl.arange(0, BLOCK).to(tl.int64)
    w = _exponents(found_ptr, k, n, chunks, count)
    some = tl.sum((w > _ZERO).to(tl.int32))
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            some += tl.sum((_exponents(found_ptr, k + start, n, chunks, count) > _ZERO).to(tl.int32))
    # The median is the greatest number that at most half of them are below; all lie within [-256, 256).
    middle = some * 0 - 256
    for bit in tl.static_range(9):
        trial = middle + (256 >> bit)
        below = tl.sum(((w > _ZERO) & (w < trial)).to(tl.int32))
        if not HELD:
            for start in range(BLOCK, n, BLOCK):
                later = _exponents(found_ptr, k + start, n, chunks, count)
                below += tl.sum(((later > _ZERO) & (later < trial)).to(tl.int32))
        middle = tl.where(below <= some // 2, trial, middle)
    tl.store(balance_ptr + k, _raised(w, middle), mask=k < n)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            later = _exponents(found_ptr, k + start, n, chunks, count)
            tl.store(balance_ptr + k + start, _raised(later, middle), mask=k + start < n)


@triton.jit
def _raised(w, middle):
    return tl.where(w > _ZERO, tl.maximum(0, ((middle - w) >> 2) * 4), _DROPPED)


@triton.jit
def tokens_balance(x_found_ptr, y_found_ptr, balance_ptr, n, x_chunks, y_chunks, BLOCK: tl.constexpr):
    """The balance of a product over n tokens, from their words in a [x_chunks, n] and in b [y_chunks, n]."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = _exponents(x_found_ptr, k, n, x_chunks, n)
    y = _exponents(y_found_ptr, k, n, y_chunks, n)
    level = x - ((x + y) >> 1)
    alone = tl.where(y == _ZERO, 0, -_DROPPED)
    balance = tl.where(x == _ZERO, alone, tl.where(y == _ZERO, _DROPPED, level))
    tl.store(balance_ptr + k, balance, mask=k < n)
