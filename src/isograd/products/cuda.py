"""The product of 16-bit integers of torch tensors on a GPU, with the bits of `isograd.matmul`: slices, then products.

`product` does both; a matrix that several products need is sliced once by `rows_of` or `columns_of`, for `multiply`.
Nothing here waits for the device or reads what it computed. Where tensors are on the CPU, kernels go to Triton's
interpreter.
"""

import math
from typing import NamedTuple

import torch

from isograd.devices.triton_launcher import (
    Launcher,
    Rows,
    Specification,
    architecture,
    c_strides,
    kept,
    merged,
    power_of_two,
    processors,
    rows,
)
from isograd.numerics.int16 import ZERO
from isograd.products import tiles, triton_gemm, triton_slices
from isograd.products.tiles import Tiles

Tensor = torch.Tensor
_DEPTH = 128  # elements of the contracted axis in a block
_HELD = 16384  # elements of a line that a program holds
_TILE = 4096  # elements of a tile, where lines are short
_MOST_CHUNKS = 64
_BALANCED = 16384  # exponents that one program holds to find their median
_REPAIRED = (32, 2048)  # entries of a tile, columns of a program
_ELEMENTS = 1024


class Lines(NamedTuple):
    """Lines of digits: int8 [count, 2, blocks * 128], and their words, int32 [count]."""

    digits: Tensor
    words: Tensor

    @property
    def total(self) -> int:
        """How many there are."""
        return self.words.shape[0]


def _blocks(terms: int) -> int:
    return max(-(-terms // _DEPTH), 1)


# --- slices ----------------------------------------------------------------------------------------------------------
class _Problem(NamedTuple):
    """The lines of an operand along an axis of n elements; along: elements of a line are the nearer neighbours."""

    n: int
    rows: Rows
    along: bool
    sign: int
    grouped: bool
    native: bool
    processors: int

    @property
    def total(self) -> int:
        return self.rows.outer * self.rows.inner

    @property
    def strides(self) -> tuple[object, ...]:
        """The strides of the operand as kernels take them."""
        return self.rows.axis_strides[0], self.rows.inner_strides[0], self.rows.outer_shape, self.rows.outer_strides[0]

    @property
    def free(self) -> tuple[str, ...]:
        """The extent in the direction in which memory is not read in one go."""
        return ("inner",) if self.along else ("n",)


def _problem(x: Tensor, axis: int, sign: int, grouped: bool = False) -> _Problem:
    return _described(tuple(x.shape), x.stride(), axis, sign, grouped, x.dtype, architecture(x), processors(x))


@kept
def _described(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axis: int,
    sign: int,
    grouped: bool,
    dtype: torch.dtype,
    arch: int,
    most: int,
) -> _Problem:
    reduced = list(shape)
    reduced[axis] = 1
    found = rows(shape, [strides, c_strides(reduced)], axis)
    step, line = found.axis_strides[0], found.inner_strides[0]
    along = step == 1 or found.inner == 1 or abs(step) < abs(line)
    return _Problem(shape[axis], found, along, sign, grouped, arch >= 90 and dtype.itemsize == 2, most)


def _tile(p: _Problem) -> tuple[int, int]:
    """Lines and elements of a tile that is read in chunks."""
    return (4, 1024) if p.along else (64, 128)


def _chunks(p: _Problem) -> tuple[int, int]:
    """Chunks of the lines of a problem, and elements of a chunk."""
    lines, block = _tile(p)
    pieces = max(-(-p.n // block), 1)
    programs = p.rows.outer * -(-p.rows.inner // lines)
    chunks = max(min(8 * p.processors // programs, pieces, _MOST_CHUNKS), 1)
    length = -(-pieces // chunks) * block
    return max(-(-p.n // length), 1), length


@kept
def _word_launcher(p: _Problem, dtype: torch.dtype) -> Launcher:
    lines, block = _tile(p)
    chunks, length = _chunks(p)
    tail = (p.n, p.rows.inner, chunks, length, p.total, *p.strides, p.sign, p.grouped, lines, block, p.native)
    programs = p.rows.outer * -(-p.rows.inner // lines) * chunks
    specification = Specification(tail, programs, 8, free=(*p.free, "chunks", "count"))
    return Launcher(triton_slices.line_words, specification)


@kept
def _chunk_launcher(p: _Problem, chunks: int, dtype: torch.dtype) -> Launcher:
    lines, block = (16, 512) if p.along else (64, 128)
    blocks = _blocks(p.n)
    most = next(c for c in (1, 8, _MOST_CHUNKS) if c >= chunks)
    tail = (p.n, p.rows.inner, chunks, p.total, blocks, *p.strides, p.sign, p.grouped, lines, block, most, p.native)
    programs = p.rows.outer * -(-p.rows.inner // lines) * -(-blocks * _DEPTH // block)
    specification = Specification(tail, programs, 8, free=(*p.free, "chunks", "count", "blocks"))
    return Launcher(triton_slices.slice_chunks, specification)


@kept
def _line_launcher(p: _Problem, dtype: torch.dtype) -> Launcher:
    blocks = _blocks(p.n)
    block = min(power_of_two(blocks * _DEPTH), _HELD)
    lines = max(_TILE // block, 1)
    tail = (p.n, p.rows.inner, blocks, *p.strides, p.sign, p.grouped, lines, block, blocks * _DEPTH <= block, p.native)
    warps = min(max(lines * block // 1024, 4), 16)
    programs = p.rows.outer * -(-p.rows.inner // lines)
    return Launcher(triton_slices.slice_lines, Specification(tail, programs, warps, free=p.free))


def _words(x: Tensor, p: _Problem, shift: Tensor, groups: Tensor) -> Tensor:
    """The words of chunks of the lines [chunks, lines]."""
    found = torch.empty((_chunks(p)[0], p.total), dtype=torch.int32, device=x.device)
    _word_launcher(p, x.dtype)(x, shift, groups, found)
    return found


def sliced(x: Tensor, axis: int, balance: Tensor | None = None, groups: Tensor | None = None) -> Lines:
    """The lines of x along an axis, its last (of a) or last but one (of b), in C order of the others.

    balance: int32 of the axis' length, a's columns divided by 2^balance and b's rows multiplied with it. groups: int32,
    which of the rows of a balance [groups, axis] is that of a line.
    """
    sign = 0 if balance is None else (-1 if axis in (-1, x.dim() - 1) else 1)
    p = _problem(x, axis % x.dim(), sign, groups is not None)
    digits = torch.empty((p.total, 2, _blocks(p.n) * _DEPTH), dtype=torch.int8, device=x.device)
    words = torch.empty(p.total, dtype=torch.int32, device=x.device)
    if not x.numel():
        return Lines(digits, words)  # which no product reads
    shift, of = words if balance is None else balance, words if groups is None else groups
    if p.along and (p.n <= _TILE or 2 * p.total >= p.processors):
        _line_launcher(p, x.dtype)(x, shift, of, digits, words)
    else:
        _chunk_launcher(p, _chunks(p)[0], x.dtype)(x, shift, of, _words(x, p, shift, of), digits, words)
    return Lines(digits, words)


# --- slices of lines that go on elsewhere ----------------------------------------------------------------------------
def words_of(x: Tensor, axis: int, balance: Tensor | None = None) -> Tensor:
    """The words of a matrix' lines along an axis, int32; 4 * ZERO for nothing.

    Of several parts of lines the maxima have the exponents of whole lines, and the marks of some part.
    """
    p = _problem(x, axis, 0 if balance is None else (-1 if axis == 1 else 1))
    if not x.numel():
        return torch.full((p.total,), 4 * ZERO, dtype=torch.int32, device=x.device)
    shift = torch.empty(0, dtype=torch.int32, device=x.device) if balance is None else balance
    return _words(x, p, shift, shift).amax(0)


def sliced_by(x: Tensor, axis: int, words: Tensor, balance: Tensor | None = None) -> Lines:
    """As `sliced` for a matrix whose lines have these words, which longer lines may have."""
    settled = torch.where(words >> 2 == ZERO, words & 3, words)
    p = _problem(x, axis, 0 if balance is None else (-1 if axis == 1 else 1))
    digits = torch.empty((p.total, 2, _blocks(p.n) * _DEPTH), dtype=torch.int8, device=x.device)
    if not x.numel():
        return Lines(digits.zero_(), settled)
    shift = words if balance is None else balance
    _chunk_launcher(p, 1, x.dtype)(x, shift, shift, words, digits, torch.empty_like(words))
    return Lines(digits, settled)


# --- balances --------------------------------------------------------------------------------------------------------
def _exponents(x: Tensor, axis: int) -> Tensor:
    """Words of lines along an axis without a balance [chunks, lines]."""
    p = _problem(x, axis, 0)
    found = torch.empty((_chunks(p)[0], p.total), dtype=torch.int32, device=x.device)
    _word_launcher(p, x.dtype)(x, found, found, found)
    return found


@kept
def _weight_launcher(n: int, chunks: int, weights: int) -> Launcher:
    block = min(max(power_of_two(n), 1024), _BALANCED)
    tail = (n, chunks, n * weights, block, n <= block)
    free = ("n", "chunks", "count")
    return Launcher(triton_slices.weight_balance, Specification(tail, weights, block // 1024, free=free))


def balance_of(weight: Tensor) -> Tensor:
    """`int16.balance_of` of a weight [K, N], int32 [K]."""
    return balance_from(_exponents(weight, 1))


def balance_from(words: Tensor) -> Tensor:
    """The same from the words of its rows [chunks, K]."""
    balance = torch.empty(words.shape[1], dtype=torch.int32, device=words.device)
    if balance.numel():
        _weight_launcher(words.shape[1], words.shape[0], 1)(words, balance)
    return balance


def balances_of(weights: Tensor) -> Tensor:
    """`balance_of` of each of several weights [E, K, N], int32 [E, K]."""
    balance = torch.empty(weights.shape[:2], dtype=torch.int32, device=weights.device)
    if balance.numel():
        words = _exponents(weights, 2)
        _weight_launcher(weights.shape[1], words.shape[0], weights.shape[0])(words, balance)
    return balance


@kept
def _tokens_launcher(n: int, x_chunks: int, y_chunks: int) -> Launcher:
    tail = (n, x_chunks, y_chunks, _ELEMENTS)
    free = ("n", "x_chunks", "y_chunks")
    return Launcher(triton_slices.tokens_balance, Specification(tail, -(-n // _ELEMENTS), free=free))


def balance_between(a: Tensor, b: Tensor) -> Tensor:
    """`int16.balance_between` of a [M, K] and b [K, N], int32 [K]."""
    return balance_from_tokens(_exponents(a, 0), _exponents(b, 1))


def balance_from_tokens(x: Tensor, y: Tensor) -> Tensor:
    """The same from the words of the tokens in a [chunks, K] and in b [chunks, K]."""
    balance = torch.empty(x.shape[1], dtype=torch.int32, device=x.device)
    if balance.numel():
        _tokens_launcher(x.shape[1], x.shape[0], y.shape[0])(x, y, balance)
    return balance


# --- products --------------------------------------------------------------------------------------------------------
class _Shape(NamedTuple):
    """Products of matrices: sizes, the shape they come in, and steps along it for a and b, in elements and lines."""

    m: int
    n: int
    terms: int
    batch: tuple[int, ...]
    a_outer: tuple[int, ...]
    b_outer: tuple[int, ...]
    a_lines: tuple[int, ...]
    b_lines: tuple[int, ...]

    @property
    def matrices(self) -> int:
        return math.prod(self.batch)


def _steps(t: Tensor, rank: int, axis: int) -> tuple[list[int], list[int]]:
    """Strides of the batch's axes in elements and in lines, 0 where a matrix is used again."""
    missing = rank - (t.dim() - 2)
    others = [*t.shape[:-2], t.shape[axis]]
    lines = c_strides(others)
    some = [t.shape[d] != 1 for d in range(t.dim() - 2)]
    elements = [s if used else 0 for s, used in zip(t.stride()[:-2], some, strict=True)]
    return [0] * missing + elements, [0] * missing + [s if u else 0 for s, u in zip(lines[:-1], some, strict=True)]


def _shape(a: Tensor, b: Tensor, c: Tensor) -> _Shape:
    rank = c.dim() - 2
    steps = [*_steps(a, rank, -2), *_steps(b, rank, -1), list(c.stride()[:-2])]
    sizes, found = merged(c.shape[:-2], steps)
    if not sizes:
        sizes, found = [1], [(0, 0, 0, 0, 0)]
    m, n, terms = a.shape[-2], b.shape[-1], a.shape[-1]
    elements, lines, b_elements, b_lines, _ = found[-1]
    if sizes[-1] > 1 and not (b_elements or b_lines) and elements == m * a.stride(-2) and lines == m:
        m *= sizes[-1]  # one matrix with more rows
        sizes[-1], found[-1] = 1, (0, 0, 0, 0, 0)
        if len(sizes) > 1:
            sizes.pop()
            found.pop()
    columns = list(zip(*found, strict=True))
    return _Shape(m, n, terms, tuple(sizes), columns[0], columns[2], columns[1], columns[3])


@kept
def _product_launcher(s: _Shape, counts: tuple[int, int], dtype: torch.dtype, t: Tiles, arch: int) -> Launcher:
    tail = (s.m, s.n, _blocks(s.terms), s.matrices, *counts, s.batch, s.a_lines, s.b_lines, *t.fixed, arch >= 90)
    free = ("m", "blocks", "matrices", "a_count", "b_count")
    programs = -(-s.m // t.rows) * -(-s.n // t.columns) * s.matrices
    return Launcher(triton_gemm.product, Specification(tail, programs, t.warps, t.stages, free=free, stays=True))


@kept
def _hopper_launcher(s: _Shape, counts: tuple[int, int], dtype: torch.dtype, t: Tiles, most: int) -> Launcher:
    from isograd.devices.tma_launcher import Block, BlockLauncher
    from isograd.products import gluon_gemm

    blocks = _blocks(s.terms)
    width = 2 * _DEPTH * blocks
    a, b = (Block((n, width), (width, 1), (size, t.depth)) for n, size in zip(counts, (64, t.columns), strict=True))
    total = -(-s.m // t.rows) * -(-s.n // t.columns) * s.matrices
    tail = (s.m, s.n, blocks, total, s.a_lines[0], s.b_lines[0], t.consumers, t.columns, t.depth, t.group, t.stages)
    # Registers a thread as the program starts; the groups of warps then divide them among themselves.
    specification = Specification(tail, min(total, most), 4, None, 168 if t.consumers == 2 else 128)
    return BlockLauncher(gluon_gemm.product_hopper, specification, (a, b))


@kept
def _parts_launcher(s: _Shape, counts: tuple[int, int], t: Tiles) -> Launcher:
    blocks = _blocks(s.terms)
    length = -(-blocks // t.pieces)
    pieces = -(-blocks // length)
    tail = (s.m, s.n, blocks, s.matrices, *counts, pieces, length, s.batch, s.a_lines, s.b_lines, *t.fixed)
    free = ("m", "blocks", "matrices", "a_count", "b_count", "pieces", "length")
    programs = -(-s.m // t.rows) * -(-s.n // t.columns) * s.matrices * pieces
    return Launcher(triton_gemm.add_parts, Specification(tail, programs, t.warps, t.stages, free=free, stays=True))


@kept
def _round_launcher(s: _Shape, dtype: torch.dtype, arch: int) -> Launcher:
    tail = (s.m, s.n, s.matrices, s.batch, s.a_lines, s.b_lines, _ELEMENTS, arch >= 90)
    programs = -(-s.m * s.n * s.matrices // _ELEMENTS)
    return Launcher(triton_gemm.round_sums, Specification(tail, programs, free=("m", "matrices")))


@kept
def _repair_launcher(s: _Shape, strides: tuple[int, ...], dtype: torch.dtype, arch: int) -> Launcher:
    size, span = _REPAIRED
    outer = (s.batch, s.a_outer, s.b_outer, s.a_lines, s.b_lines)
    tail = (s.m, s.n, s.terms, *strides, *outer, size, span, arch >= 90)
    programs = -(-s.m // size) * -(-s.n // span) * s.matrices
    return Launcher(triton_gemm.repair, Specification(tail, programs, 4, 2, free=("m", "terms")))


def multiplied(x: Lines, y: Lines, s: _Shape, c: Tensor, config: Tiles | None = None) -> None:
    """Fill c, in C order, from lines of digits; `config` overrides the rule."""
    arch = architecture(c)
    t = config or tiles.chosen(s.m, s.n, _blocks(s.terms), s.matrices, arch, processors(c))
    counts = x.total, y.total
    if t.pieces == 1 and t.consumers and len(s.batch) == 1:
        most = processors(c)
        low = (
            x.words
            if t.consumers == 2
            else torch.empty(most * t.rows * t.columns // 4, dtype=torch.int32, device=c.device)
        )
        digits = x.digits.view(x.total, -1), y.digits.view(y.total, -1)
        _hopper_launcher(s, counts, c.dtype, t, most)(*digits, x.words, y.words, c, low)
    elif t.pieces == 1:
        t = tiles.triton(t)
        _product_launcher(s, counts, c.dtype, t, arch)(x.digits, y.digits, x.words, y.words, c)
    else:
        z = torch.zeros(c.shape, dtype=torch.int64, device=c.device)
        _parts_launcher(s, counts, t)(x.digits, y.digits, z)
        _round_launcher(s, c.dtype, arch)(z, x.words, y.words, c)


def sums_of(x: Lines, y: Lines, terms: int) -> Tensor:
    """The exact sums of a product of matrices from lines of so many digits each, int64 [M, N]."""
    m, n, blocks = x.total, y.total, _blocks(terms)
    z = torch.zeros((m, n), dtype=torch.int64, device=x.words.device)
    t = tiles.in_parts(m, n, blocks, architecture(z), processors(z))
    _parts_launcher(_one(m, n, terms), (m, n), t)(x.digits, y.digits, z)
    return z


def rounded(z: Tensor, x: Tensor, y: Tensor, c: Tensor) -> None:
    """Fill c, in C order, from exact sums and the words of rows and columns."""
    _round_launcher(_one(c.shape[0], c.shape[1], 0), c.dtype, architecture(c))(z, x, y, c)


def _one(m: int, n: int, terms: int) -> _Shape:
    """A product of two matrices."""
    return _Shape(m, n, terms, (1,), (0,), (0,), (0,), (0,))


class Operand(NamedTuple):
    """Matrices with their lines: rows of one on the left of a product, columns of one on the right."""

    matrices: Tensor
    lines: Lines


def rows_of(a: Tensor, balance: Tensor | None = None) -> Operand:
    """The left operand a [..., M, K]."""
    return Operand(a, sliced(a, -1, balance))


def columns_of(b: Tensor, balance: Tensor | None = None) -> Operand:
    """The right operand b [..., K, N]."""
    return Operand(b, sliced(b, -2, balance))


def some_rows(a: Operand, part: slice) -> Operand:
    """Some rows of a matrix that is sliced."""
    return Operand(a.matrices[part], Lines(a.lines.digits[part], a.lines.words[part]))


def some_columns(b: Operand, part: slice) -> Operand:
    """Some columns of a matrix that is sliced."""
    return Operand(b.matrices[:, part], Lines(b.lines.digits[part], b.lines.words[part]))


def multiply(a: Operand, b: Operand, c: Tensor, config: Tiles | None = None) -> None:
    """Compute c [..., M, N] in C order from operands with one balance; `config` overrides the rule of tiles."""
    x, y = a.matrices, b.matrices
    if not c.numel():
        return
    if not x.shape[-1]:
        c.zero_()
        return
    s = _shape(x, y, c)
    multiplied(a.lines, b.lines, s, c, config)
    strides = (x.stride(-1), x.stride(-2), y.stride(-2), y.stride(-1))
    _repair_launcher(s, strides, c.dtype, architecture(c))(x, y, a.lines.words, b.lines.words, c)


def product(a: Tensor, b: Tensor, c: Tensor, balance: Tensor | None = None, config: Tiles | None = None) -> None:
    """Compute c [..., M, N] in C order from a [..., M, K] and b [..., K, N], whose batches broadcast to c's.

    float16, bfloat16 or float32, any strides. balance: int32 [K] or None. `config` overrides the rule of tiles, which
    changes no bit.
    """
    if c.numel():
        multiply(rows_of(a, balance), columns_of(b, balance), c, config)


@kept
def _bias_launcher(count: int, n: int, dtype: torch.dtype, arch: int) -> Launcher:
    tail = (count, n, _ELEMENTS, arch >= 90 and dtype.itemsize == 2)
    programs = -(-count // _ELEMENTS)
    return Launcher(triton_gemm.add_to_rows, Specification(tail, programs, free=("count",)))


def add_to_rows(x: Tensor, bias: Tensor, out: Tensor) -> None:
    """Fill out from x [M, N] and bias [N], each rounded once."""
    if out.numel():
        _bias_launcher(out.numel(), x.shape[1], x.dtype, architecture(x))(x.contiguous(), bias.contiguous(), out)
