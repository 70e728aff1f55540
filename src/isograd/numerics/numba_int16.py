# mypy: ignore-errors
"""The product of 16-bit integers on the CPU; `int16.py` is the definition.

Lines are the rows of a and the columns of b, each with K elements. Their exponents are found, their integers packed for
an engine of `numba_dot.py`, and tiles of the product added up and scaled. Where no engine serves, a BLAS multiplies the
same integers in binary64, exactly.
"""

import functools
from typing import Any

import numpy as np

from isograd.numerics import int16, numba_dot
from isograd.numerics.numba_dot import AHEAD, add_products, tile_lanes, tile_rows, word_terms
from isograd.numerics.numba_memory import load, pointer, store, stored_bytes
from isograd.numerics.numba_ops import pow2_64
from isograd.numerics.numba_panels import CHUNK, ZERO, find_and_pack, line_exponents, round_lines
from isograd.numerics.numba_storage import narrow
from isograd.numerics.storage import address, kernel_type
from isograd.runtime.numba_compile import device_function, kernel
from isograd.runtime.parallel import for_ranges, get_num_threads, grain

_SLAB = 1 << 23  # bytes for a thread that hold packed columns at a time
_BLOCK = 192, 128  # rows and columns of a block of the result, whose sums fill half of an L2


@device_function
def _scaled(z, exponent):
    """An entry from its exact sum; exponents beyond 400 leave the range of binary32 either way."""
    t = np.float32((z + 128) >> 8)
    return np.float32(np.float64(t) * pow2_64(min(max(exponent, -400), 400)))


@device_function
def _exponent_of_line(exponents, i):
    return np.int64(0) if load(exponents, i) == ZERO else np.int64(load(exponents, i))


@kernel
def product_blocks(
    like, engine, element, a_address, b_address, e_address, f_address, c_address, m, n, k, c_step, high, wide,
    start, stop,
):  # fmt: skip
    """Blocks of the product, `high` panels of rows by `wide` of columns; c has a row every c_step elements."""
    rows, lanes, terms = tile_rows(engine), tile_lanes(engine), word_terms(element)
    e, f, c = pointer(e_address, np.int32(0)), pointer(f_address, np.int32(0)), pointer(c_address, like)
    groups, most, size = (k + terms - 1) // terms, CHUNK // terms, rows * lanes
    down, across = (m + rows - 1) // rows, (n + lanes - 1) // lanes
    blocks = (across + wide - 1) // wide
    parts = max(1, 2 * lanes * 4 // AHEAD)  # of the next panel of columns, one while a tile is multiplied
    sums = np.empty(high * wide * size + 8, np.int64)
    z_address = sums.ctypes.data + -sums.ctypes.data % 64  # no load crosses a line of a cache
    z = pointer(z_address, np.int64(0))
    for block in range(start, stop):
        top, left = block // blocks * high, block % blocks * wide
        below, right = min(high, down - top), min(wide, across - left)
        sums[:] = 0
        for at in range(0, groups, most):
            count = min(most, groups - at)
            for j in range(right):
                panel = left + j
                b = pointer(b_address + (panel * groups + at) * 2 * lanes * 4, np.int32(0))
                later = panel + 1 if j + 1 < right else left, at if j + 1 < right else at + most
                ahead = b_address + (later[0] * groups + later[1]) * 2 * lanes * 4
                for i in range(below):
                    a = pointer(a_address + ((top + i) * groups + at) * terms // 2 * rows * 4, np.int32(0))
                    to = pointer(z_address + (j * high + i) * size * 8, np.int64(0))
                    part = pointer(ahead + i % parts * count * AHEAD, np.int32(0))
                    add_products(engine, a, b, count, to, part)
        for i in range(top * rows, min((top + below) * rows, m)):
            row = _exponent_of_line(e, i) - 22
            for j in range(right):
                first = (left + j) * lanes
                tile = (j * high + i // rows - top) * size + i % rows * lanes
                for column in range(min(lanes, n - first)):
                    exponent = row + _exponent_of_line(f, first + column)
                    store(c, i * c_step + first + column, narrow(_scaled(load(z, tile + column), exponent), like))


@kernel
def scale_sums(like, z_like, z_address, e_address, f_address, c_address, n, start, stop):
    """Rows of the product from their exact sums, in binary64 or int64."""
    e, f, c = pointer(e_address, np.int32(0)), pointer(f_address, np.int32(0)), pointer(c_address, like)
    z = pointer(z_address, z_like)
    for i in range(start, stop):
        row = _exponent_of_line(e, i) - 22
        for j in range(n):
            exponent = row + _exponent_of_line(f, j)
            store(c, i * n + j, narrow(_scaled(np.int64(load(z, i * n + j)), exponent), like))


# --- small products --------------------------------------------------------------------------------------------------
_TERMS_AT_ONCE = 16  # multiplications that take about as long as another element of `grain`
_SMALL = 1 << 20  # multiplications of a product that is one piece of work: tens of microseconds


@device_function
def _moved(shift_address, n, sign):
    """The shifts of the terms of a line, balanced or not."""
    shift = np.zeros(n, np.int32)
    if shift_address != 0:
        for k in range(n):
            shift[k] = np.int32(sign * load(pointer(shift_address, np.int32(0)), k))
    return shift


@device_function
def _panel_words(lines, width, n, words, element):
    terms = word_terms(element)
    return (lines + width - 1) // width * ((n + terms - 1) // terms) * words * width


@kernel
def small_products(
    like, engine, element, digits, plain, a_address, a_batch, a_step, a_stride, b_address, b_batch, b_step, b_stride,
    c_address, m, n, k, shift_address, flag_address, start, stop,
):  # fmt: skip
    """Products of a batch, all steps of one and then of the next.

    The strides of a are those of products, rows and terms, those of b of products, columns and terms.
    """
    rows, lanes, size = tile_rows(engine), tile_lanes(engine), stored_bytes(like)
    left_shift, right_shift = _moved(shift_address, k, -1), _moved(shift_address, k, 1)
    e, f = np.empty(m, np.int32), np.empty(n, np.int32)
    left = np.empty(_panel_words(m, rows, k, 2 if digits else 1, element), np.int32)
    right = np.empty(_panel_words(n, lanes, k, 2, element), np.int32)
    down, across = (m + rows - 1) // rows, (n + lanes - 1) // lanes
    high, wide = min(down, _BLOCK[0] // rows), min(across, _BLOCK[1] // lanes)
    blocks = ((down + high - 1) // high) * ((across + wide - 1) // wide)
    for i in range(start, stop):
        # An operand that stays from one product to the next is not packed again.
        if i == start or a_batch != 0:
            find_and_pack(
                like, element, a_address + i * a_batch * size, a_step, a_stride, m, k, rows, digits, plain,
                e.ctypes.data, left_shift.ctypes.data, left.ctypes.data, flag_address, 0, down,
            )  # fmt: skip
        if i == start or b_batch != 0:
            find_and_pack(
                like, element, b_address + i * b_batch * size, b_step, b_stride, n, k, lanes, True, plain,
                f.ctypes.data, right_shift.ctypes.data, right.ctypes.data, flag_address, 0, across,
            )  # fmt: skip
        product_blocks(
            like, engine, element, left.ctypes.data, right.ctypes.data, e.ctypes.data, f.ctypes.data,
            c_address + i * m * n * size, m, n, k, n, high, wide, 0, blocks,
        )  # fmt: skip


# --- launches --------------------------------------------------------------------------------------------------------
_BLAS = "blas"


@functools.cache
def engine_names() -> tuple[str, ...]:
    """What can multiply here, the fastest first."""
    return (*[engine.name for engine in numba_dot.engines()], _BLAS)


def _aligned_words(count: int) -> Any:
    """Words from the start of a line of a cache on: no load crosses one."""
    room = np.empty(count + 16, np.int32)
    return room[-(address(room) // 4) % 16 :][:count]


class _Lines:
    """The rows of a matrix [lines, K], or the columns of [K, lines], and their exponents, once those were found."""

    def __init__(self, x: Any, columns: bool, balance: Any, width: int) -> None:
        self.step, self.stride = [s // x.itemsize for s in (x.strides[::-1] if columns else x.strides)]
        self.lines, self.terms = x.shape[::-1] if columns else x.shape
        self.x, self.like, self.width = x, kernel_type(x.dtype), width
        self.shift = np.zeros(self.terms, np.int32) if balance is None else balance.astype(np.int32)
        if balance is not None and not columns:
            self.shift = -self.shift
        self.plain = balance is None or bool(np.abs(balance).max(initial=0) <= 60)
        self.exponents = np.empty(self.lines, np.int32)
        self._flag = np.zeros(1, np.uint8)

    @property
    def finite(self) -> bool:
        """Whether all elements are whose exponents were found."""
        return not self._flag[0]

    def _over(
        self, function: Any, options: tuple[Any, ...], *addresses: int, kinds: tuple[Any, ...] = (), first: int = 0,
        count: int | None = None,
    ) -> None:  # fmt: skip
        lines = self.lines if count is None else count
        panels = -(-lines // self.width)
        x = address(self.x) + first * self.step * self.x.itemsize
        where = self.like, *kinds, x, self.step, self.stride, lines, self.terms, self.width
        for_ranges(function, panels, grain(panels, 4 * self.width * self.terms), *where, *options, *addresses)

    def find_exponents(self) -> None:
        """Fill `exponents`."""
        self._over(line_exponents, (), *[address(x) for x in (self.shift, self.exponents, self._flag)])

    def packed(self, element: Any, digits: bool, first: int, count: int) -> Any:
        """Find the exponents of some lines; return their words of integers, or of digits, in panels."""
        panels, groups, words = -(-count // self.width), -(-self.terms * element.itemsize // 4), 2 if digits else 1
        out = _aligned_words(panels * groups * words * self.width)
        addresses = address(self.exponents) + 4 * first, address(self.shift), address(out), address(self._flag)
        self._over(find_and_pack, (digits, self.plain), *addresses, kinds=(element,), first=first, count=count)
        return out

    def rounded(self) -> Any:
        """The integers as binary64 [lines, K]."""
        out = np.empty((self.lines, self.terms))
        self._over(round_lines, (self.plain,), address(self.exponents), address(self.shift), address(out))
        return out


def _by_blas(a: _Lines, b: _Lines, c: Any) -> None:
    a.find_exponents()
    b.find_exponents()
    left, right = a.rounded(), b.rounded().T
    z = np.matmul(left, right) if a.terms <= int16.EXACT else int16.exact_sums(left, right)
    addresses = [address(x) for x in (z, a.exponents, b.exponents, c)]
    for_ranges(scale_sums, a.lines, grain(a.lines, b.lines), a.like, z.dtype.type(0), *addresses, b.lines)


def _by_tiles(engine: numba_dot.Engine, a: _Lines, b: _Lines, c: Any) -> None:
    left = a.packed(engine.element, engine.digits == 2, 0, a.lines)
    # Some columns at a time: memory that is used again costs no page faults.
    column = max(1, 2 * b.terms * engine.element.itemsize)
    slab = max(_SLAB * get_num_threads() // column, 2 * _BLOCK[1]) // engine.lanes * engine.lanes
    for first in range(0, b.lines, slab):
        columns = min(slab, b.lines - first)
        right = b.packed(engine.element, True, first, columns)
        down, across = -(-a.lines // engine.rows), -(-columns // engine.lanes)
        high, wide = _BLOCK[0] // engine.rows, _BLOCK[1] // engine.lanes
        while (blocks := -(-down // high) * -(-across // wide)) < 4 * get_num_threads() and high * wide > 1:
            high, wide = (high // 2, wide) if high >= wide else (high, wide // 2)
        kinds = a.like, engine.like, engine.element
        exponents = address(a.exponents), address(b.exponents) + 4 * first
        addresses = address(left), address(right), *exponents, address(c) + first * c.itemsize
        for_ranges(
            product_blocks, blocks, 1, *kinds, *addresses, a.lines, columns, a.terms, b.lines, high, wide
        )  # fmt: skip


def product(a: Any, b: Any, c: Any, balance: Any = None, engine: str | None = None) -> bool:
    """Compute c [M, N] in C order from a [M, K] and b [K, N]; return whether all elements were finite.

    Elements that are not count as zero. balance: integers [K] or None. engine: one of `engine_names()`, by default the
    first; the bits are the same.
    """
    chosen = _engine(engine)
    rows, lanes = (16, 16) if chosen is None else (chosen.rows, chosen.lanes)
    left, right = _Lines(a, False, balance, rows), _Lines(b, True, balance, lanes)
    if chosen is None:
        _by_blas(left, right, c)
    else:
        _by_tiles(chosen, left, right, c)
    return left.finite and right.finite


def _engine(name: str | None) -> numba_dot.Engine | None:
    """What multiplies, None for a BLAS."""
    name = name or engine_names()[0]
    return next((e for e in numba_dot.ENGINES if e.name == name), None)


def _batch_step(x: Any) -> int:
    return x.strides[0] // x.itemsize if x.ndim == 3 and len(x) > 1 else 0


def _small(engine: numba_dot.Engine, a: Any, b: Any, c: Any, balance: Any) -> bool:
    """`products` of matrices that are one piece of work each, by one compiled call."""
    batch, m, n = c.shape
    k, size = a.shape[-1], a.itemsize
    shift = None if balance is None else balance.astype(np.int32)
    plain = shift is None or bool(np.abs(balance).max(initial=0) <= 60)
    flag = np.zeros(1, np.uint8)
    (row, term), (term_of_b, column) = a.strides[-2:], b.strides[-2:]
    left = address(a), _batch_step(a), row // size, term // size
    right = address(b), _batch_step(b), column // size, term_of_b // size
    chunk = grain(batch, (m + n) * k + m * n * k // _TERMS_AT_ONCE)
    for_ranges(
        small_products, batch, chunk, kernel_type(a.dtype), engine.like, engine.element, engine.digits == 2, plain,
        *left, *right, address(c), m, n, k, 0 if shift is None else address(shift), address(flag),
    )  # fmt: skip
    return not flag[0]


def products(a: Any, b: Any, c: Any, balance: Any = None, engine: str | None = None) -> bool:
    """Compute c [B, M, N] in C order from a [B, M, K] or [M, K] and b [B, K, N] or [K, N]; otherwise as `product`."""
    chosen = _engine(engine)
    batch, m, n = c.shape
    if c.size == 0:
        return True
    if chosen is not None and m * n * a.shape[-1] <= _SMALL and max(m, n) * a.shape[-1] <= _SMALL >> 4:
        return _small(chosen, a, b, c, balance)
    left, right = [np.broadcast_to(x, (batch, *x.shape[-2:])) for x in (a, b)]
    every = [product(left[i], right[i], c[i], balance, engine) for i in range(batch)]
    return all(every)


class Part:
    """A part of the contracted axis of a product, a [M, K] and b [K, N], whose other parts are elsewhere.

    exponents: those of rows and of columns, which are raised in place to the greatest of all parts before the sums.
    """

    def __init__(self, a: Any, b: Any, balance: Any) -> None:
        self._a, self._b = _Lines(a, False, balance, 16), _Lines(b, True, balance, 16)
        self._a.find_exponents()
        self._b.find_exponents()
        self.exponents = self._a.exponents, self._b.exponents
        self.finite = self._a.finite and self._b.finite

    def sums(self) -> Any:
        """The exact sums over this part, int64 [M, N]."""
        return int16.exact_sums(self._a.rounded(), self._b.rounded().T)

    def scale(self, z: Any, c: Any) -> None:
        """Fill c, in C order, from the sums over all parts."""
        addresses = [address(x) for x in (z, *self.exponents, c)]
        lines, n = self._a.lines, self._b.lines
        for_ranges(scale_sums, lines, grain(lines, n), self._a.like, np.int64(0), *addresses, n)


def exponents(x: Any, columns: bool) -> Any:
    """`int16.largest_exponents` of the rows of a matrix, or of its columns."""
    lines = _Lines(x, columns, None, 16)
    lines.find_exponents()
    return lines.exponents.astype(np.int64)


def balance_of(weight: Any) -> Any:
    """`int16.balance_of` of a weight [K, N]."""
    return int16.balance_from(exponents(weight, False))


def balance_between(a: Any, b: Any) -> Any:
    """`int16.balance_between` of a [M, K] and b [K, N]."""
    return int16.balance_from_tokens(exponents(a, True), exponents(b, False))
