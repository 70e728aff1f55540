# mypy: ignore-errors
"""Lines of a matrix as integers of 16 bits, in the panels of words that the tiles of `numba_dot.py` read.

A line is a row or a column. `int16.py` is the definition of its exponent and integers.
"""

import numpy as np

from isograd.numerics import int16, numba_dot
from isograd.numerics.constants import MAGIC_32
from isograd.numerics.numba_dot import word_terms
from isograd.numerics.numba_memory import advance, load, pointer, raise_flag, stack_lines, store, work_zero
from isograd.numerics.numba_ops import as_int, pow2_32
from isograd.numerics.numba_storage import widen
from isograd.runtime.numba_compile import device_function, kernel, subroutine

ZERO = int16.ZERO
CHUNK = numba_dot.TERMS  # elements of a line that are packed, and multiplied, at a time
_MAGIC = np.float32(MAGIC_32)
_CARRY = (1 << 24) - (2 * int16.LARGEST + 1) * (1 << 8)  # what lifts a significand from the next integer's on


@device_function
def _pack(source, step, stride, lines, n, width, split, element, out):
    terms = word_terms(element)
    bits, groups = 32 // terms, n // terms
    mask, words = np.int32((1 << bits) - 1), 2 * width if split else width
    for first in range(0, lines, width):
        for group in range(groups):
            to = advance(out, (first // width * groups + group) * words)
            from_ = advance(source, first * step + group * terms * stride)
            if split:
                for i in range(width):
                    high, low = np.int32(0), np.int32(0)
                    for t in range(terms):
                        v = np.int32(load(from_, i * step + t * stride))
                        less = np.int32(np.int32(np.int32(v + 128) & 255) - 128)
                        more = np.int32(np.int32(v - less) >> 8)
                        low = np.int32(low | np.int32(np.int32(less & mask) << np.int32(bits * t)))
                        high = np.int32(high | np.int32(np.int32(more & mask) << np.int32(bits * t)))
                    store(to, i, high)
                    store(to, width + i, low)
            else:
                for i in range(width):
                    word = np.int32(0)
                    for t in range(terms):
                        v = np.int32(load(from_, i * step + t * stride))
                        word = np.int32(word | np.int32(np.int32(v & mask) << np.int32(bits * t)))
                    store(to, i, word)


@subroutine
def pack_panels(source, step, stride, lines, n, width, split, element, out):
    """Panels of `width` lines of n integers each, as words or, split, as words of digits; step or stride is 1."""
    if step == 1:
        _pack(source, 1, stride, lines, n, width, split, element, out)
    else:
        _pack(source, step, 1, lines, n, width, split, element, out)


@device_function
def exponent_of(x):
    """That of an element, whose sign and being finite do not matter."""
    size = np.int32(as_int(x) & 0x7FFFFFFF)
    small = size < 0x00800000
    bits = np.int32(as_int(abs(x) * np.float32(2.0**64)) if small else size)
    found = np.int32(np.int32(np.int32(bits + _CARRY) >> 23) - np.int32(190 if small else 126))
    return np.int32(ZERO) if size == 0 or size >= 0x7F800000 else found


@device_function
def _load_panel(x, offset, step, stride, lines, count, values):
    """Widen a piece of some lines, in the order in which it lies in memory."""
    if abs(step) < abs(stride):
        for j in range(count):
            for i in range(lines):
                store(values, i * CHUNK + j, widen(load(x, offset + i * step + j * stride)))
    elif stride == 1:
        for i in range(lines):
            for j in range(count):
                store(values, i * CHUNK + j, widen(load(x, offset + i * step + j)))
    else:
        for i in range(lines):
            for j in range(count):
                store(values, i * CHUNK + j, widen(load(x, offset + i * step + j * stride)))


@device_function
def _raise_exponents(values, lines, count, shift, exponents):
    """Raise the exponents of lines by a piece of them; whether an element is not finite."""
    wild = False
    for i in range(lines):
        most, unknown = load(exponents, i), np.int32(0)
        for j in range(count):
            v = load(values, i * CHUNK + j)
            e = exponent_of(v)
            most = max(most, np.int32(e + load(shift, j)) if e > ZERO else e)
            unknown = np.int32(unknown | np.int32(np.int32(as_int(v) & 0x7FFFFFFF) >= 0x7F800000))
        wild |= unknown != 0
        store(exponents, i, most)
    return wild


@device_function
def _find_exponents(x, first, step, stride, lines, n, shift_address, exponents, values):
    """The greatest exponents of the lines of a panel, whose last piece `values` holds in the end."""
    wild = False
    for i in range(lines):
        store(exponents, i, np.int32(ZERO))
    for k in range(0, n, CHUNK):
        count = min(n - k, CHUNK)
        _load_panel(x, first * step + k * stride, step, stride, lines, count, values)
        wild |= _raise_exponents(values, lines, count, pointer(shift_address + 4 * k, np.int32(0)), exponents)
    return wild


@kernel
def line_exponents(
    like, x_address, step, stride, lines, n, width, shift_address, out_address, flag_address, start, stop
):  # fmt: skip
    """The greatest exponents of lines, panels of them at a time; a flag where an element is not finite."""
    x, values, wild = pointer(x_address, like), stack_lines(work_zero(like)), False
    for first in range(start * width, stop * width, width):
        out = pointer(out_address + 4 * first, np.int32(0))
        wild |= _find_exponents(
            x, first, step, stride, min(width, lines - first), n, shift_address, out, values
        )  # fmt: skip
    raise_flag(flag_address, wild)


@device_function
def _round_piece(values, at, count, exponent, shift, plain, integers):
    """The integers of a piece of a line; plain: shifts that take no step of scaling out of range."""
    power = np.int32(15 - (np.int32(0) if exponent == ZERO else exponent))
    if plain and -60 <= power <= 60:
        factor = pow2_32(power)
        for j in range(count):
            store(values, at + j, load(values, at + j) * factor * pow2_32(load(shift, j)))
    else:
        for j in range(count):
            # Beyond 252 only a zero has a place, and below -252 nothing is left.
            p = np.int32(min(max(np.int32(power + load(shift, j)), np.int32(-252)), np.int32(252)))
            half = np.int32(p >> 1)
            store(values, at + j, load(values, at + j) * pow2_32(half) * pow2_32(np.int32(p - half)))
    for j in range(count):
        v = load(values, at + j)
        finite = np.int32(as_int(v) & 0x7FFFFFFF) < 0x7F800000
        store(integers, at + j, np.int16(np.int32(as_int((v if finite else np.float32(0)) + _MAGIC) & 0xFFFF)))


@device_function
def _round_panel(values, lines, count, width, plain, exponents, shift, integers):
    """The integers of a piece of the lines of a panel; zeros for lines, and for the rest of a word, beyond the end."""
    for i in range(lines):
        _round_piece(values, i * CHUNK, count, load(exponents, i), shift, plain, integers)
        for j in range(count, count + -count % 4):
            store(integers, i * CHUNK + j, np.int16(0))
    for i in range(lines, width):
        for j in range(count + -count % 4):
            store(integers, i * CHUNK + j, np.int16(0))


@kernel
def find_and_pack(
    like, element, x_address, step, stride, lines, n, width, digits, plain, exponents_address, shift_address,
    out_address, flag_address, start, stop,
):  # fmt: skip
    """The exponents of lines, and their panels: words of integers [groups, width] or, with digits, [groups, 2, width].

    A flag is raised where an element is not finite.
    """
    x, values, piece = pointer(x_address, like), stack_lines(work_zero(like)), stack_lines(np.int16(0))
    terms, both, wild = word_terms(element), 2 * width if digits else width, False
    for panel in range(start, stop):
        first = panel * width
        some = min(width, lines - first)
        exponents = pointer(exponents_address + 4 * first, np.int32(0))
        out = pointer(out_address + panel * ((n + terms - 1) // terms) * both * 4, np.int32(0))
        wild |= _find_exponents(x, first, step, stride, some, n, shift_address, exponents, values)
        for k in range(0, n, CHUNK):
            count, shift = min(n - k, CHUNK), pointer(shift_address + 4 * k, np.int32(0))
            if n > CHUNK:  # else all of them were loaded last
                _load_panel(x, first * step + k * stride, step, stride, some, count, values)
            _round_panel(values, some, count, width, plain, exponents, shift, piece)
            words = advance(out, k // terms * both)
            pack_panels(piece, CHUNK, 1, width, count + -count % terms, width, digits, element, words)
    raise_flag(flag_address, wild)


@kernel
def round_lines(
    like, x_address, step, stride, lines, n, width, plain, exponents_address, shift_address, out_address, start, stop
):  # fmt: skip
    """Lines of integers as binary64."""
    x, values, piece = pointer(x_address, like), stack_lines(work_zero(like)), stack_lines(np.int16(0))
    out = pointer(out_address, np.float64(0))
    for first in range(start * width, stop * width, width):
        some, exponents = min(width, lines - first), pointer(exponents_address + 4 * first, np.int32(0))
        for k in range(0, n, CHUNK):
            count, shift = min(n - k, CHUNK), pointer(shift_address + 4 * k, np.int32(0))
            _load_panel(x, first * step + k * stride, step, stride, some, count, values)
            _round_panel(values, some, count, width, plain, exponents, shift, piece)
            for i in range(some):
                for j in range(count):
                    store(out, (first + i) * n + k + j, np.float64(load(piece, i * CHUNK + j)))
