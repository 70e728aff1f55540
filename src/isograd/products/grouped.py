"""Products of 16-bit integers of several experts on a GPU: a launch for all, whose offsets lie on the device.

Nothing here waits for the device. Rows offsets[e] to offsets[e + 1] are those of expert e.
"""

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, power_of_two, processors
from isograd.products import cuda, tiles, triton_grouped
from isograd.products.tiles import Tiles

Tensor = torch.Tensor
_DEPTH = 128  # elements of the contracted axis in a block
_LINES, _BLOCK = 64, 128  # of a tile that is cut along the rows
_REPAIRED = (32, 2048)  # entries of a tile, columns of a program


def _reach(experts: int) -> int:
    """The size of a vector that holds all offsets."""
    return power_of_two(experts + 1)


@kept
def _offset_launcher(operation: str, experts: int, rows: int, dtype: torch.dtype) -> Launcher:
    tail = (experts, rows, faults.code(operation, "offsets", False), _reach(experts))
    return Launcher(triton_grouped.check_offsets, Specification(tail, 1, 1, free=("count",)))


def checked_offsets(operation: str, offsets: Tensor, rows: int) -> Tensor:
    """The offsets [experts + 1] as the other functions take them; a fault is reported where they do not fit."""
    clean = torch.empty(offsets.numel() + 1, dtype=torch.int64, device=offsets.device)
    given = offsets.contiguous()
    _offset_launcher(operation, offsets.numel() - 1, rows, offsets.dtype)(given, clean, faults.flag(offsets.device))
    return clean


def _experts_of_rows(clean: Tensor, experts: int, rows: int) -> Tensor:
    """Which expert has a row, int32; any where the offsets do not fit."""
    every = torch.arange(rows, device=clean.device)
    found = torch.searchsorted(clean[1 : experts + 1], every, right=True, out_int32=True)
    return found.clamp_(max=experts - 1)


@kept
def _product_launcher(
    kernel: str, sizes: tuple[int, ...], programs: int, t: Tiles, long: bool, dtype: torch.dtype, arch: int
) -> Launcher:
    *_, experts, _, _ = sizes
    tail = (*sizes, *t.fixed, long, _reach(experts), arch >= 90)
    free = ("m", "blocks", "a_count", "b_count")
    specification = Specification(tail, programs, t.warps, t.stages, free=free, stays=True)
    return Launcher(getattr(triton_grouped, kernel), specification)


@kept
def _row_repair_launcher(
    m: int, n: int, terms: int, experts: int, strides: tuple[int, ...], dtype: torch.dtype, arch: int
) -> Launcher:
    size, span = _REPAIRED
    tail = (m, n, terms, experts, *strides, size, span, _reach(experts), arch >= 90)
    programs = (-(-m // size) + experts) * -(-n // span)
    return Launcher(triton_grouped.repair_rows, Specification(tail, programs, 4, 2, free=("m", "terms")))


def product_of_rows(
    a: Tensor, b: Tensor, offsets: Tensor, c: Tensor, balanced: bool = True, config: Tiles | None = None
) -> None:
    """Compute c [R, N] in C order: each row of a [R, K] times b [E, K, N] of its expert.

    offsets: of `checked_offsets`. balanced: by each expert's b, as for a weight. `config` overrides the rule of tiles.
    """
    (m, terms), (experts, _, n) = a.shape, b.shape
    if not c.numel():
        return
    if not (terms and experts):
        c.zero_()
        return
    balance = row_groups = column_groups = None
    if balanced:
        balance, row_groups = cuda.balances_of(b), _experts_of_rows(offsets, experts, m)
        every = torch.arange(experts, dtype=torch.int32, device=b.device)
        column_groups = every[:, None].expand(experts, n).contiguous().view(-1)
    x, y = cuda.sliced(a, -1, balance, row_groups), cuda.sliced(b, -2, balance, column_groups)
    arch, blocks = architecture(c), x.digits.shape[2] // _DEPTH
    t, long = tiles.grouped(max(m // experts, 1), n, blocks, experts, arch, processors(c))
    t = tiles.triton(config or t)
    programs = (-(-m // t.rows) + experts) * -(-n // t.columns)
    sizes = (m, n, blocks, experts, x.total, y.total)
    launcher = _product_launcher("product_of_rows", sizes, programs, t, long, c.dtype, arch)
    launcher(x.digits, y.digits, x.words, y.words, offsets, c)
    strides = (a.stride(1), a.stride(0), b.stride(1), b.stride(2), b.stride(0))
    _row_repair_launcher(m, n, terms, experts, strides, c.dtype, arch)(a, b, x.words, y.words, offsets, c)


# --- along the rows --------------------------------------------------------------------------------------------------
@kept
def _word_launcher(
    lines: int, experts: int, strides: tuple[int, int], sign: int, dtype: torch.dtype, native: bool
) -> Launcher:
    tail = (lines, *strides, sign, _LINES, _BLOCK, native)
    return Launcher(triton_grouped.expert_words, Specification(tail, experts * -(-lines // _LINES), 8))


@kept
def _slice_launcher(
    lines: int, blocks: int, experts: int, strides: tuple[int, int], sign: int, dtype: torch.dtype, native: bool
) -> Launcher:
    tail = (lines, blocks, experts, *strides, sign, _LINES, _reach(experts), native)
    specification = Specification(tail, blocks * -(-lines // _LINES), 8, free=("blocks",))
    return Launcher(triton_grouped.expert_slices, specification)


def _sliced(x: Tensor, offsets: Tensor, experts: int, balance: Tensor | None, sign: int) -> cuda.Lines:
    """The columns of x [R, lines], cut for each expert alone; words [experts * lines]."""
    rows, lines = x.shape
    # Every expert's digits begin at a whole block.
    blocks = rows // _DEPTH + experts
    digits = torch.empty((lines, 2, blocks * _DEPTH), dtype=torch.int8, device=x.device)
    words = torch.empty(experts * lines, dtype=torch.int32, device=x.device)
    shift, sign = (words, 0) if balance is None else (balance, sign)
    native, strides = architecture(x) >= 90 and x.dtype.itemsize == 2, (x.stride(0), x.stride(1))
    _word_launcher(lines, experts, strides, sign, x.dtype, native)(x, shift, offsets, words)
    _slice_launcher(lines, blocks, experts, strides, sign, x.dtype, native)(x, shift, offsets, words, digits)
    return cuda.Lines(digits, words)


@kept
def _along_repair_launcher(
    m: int, n: int, experts: int, strides: tuple[int, ...], dtype: torch.dtype, arch: int
) -> Launcher:
    size, span = _REPAIRED
    tail = (m, n, *strides, size, span, arch >= 90)
    programs = experts * -(-m // size) * -(-n // span)
    return Launcher(triton_grouped.repair_along_rows, Specification(tail, programs, 4, 2))


def product_along_rows(
    a: Tensor, b: Tensor, offsets: Tensor, c: Tensor, balanced: bool = True, config: Tiles | None = None
) -> None:
    """Compute c [E, M, N] in C order: of every expert its rows of a [R, M], transposed, times its rows of b [R, N].

    offsets: of `checked_offsets`. balanced: over the rows, as over tokens. `config` overrides the rule of tiles.
    """
    (rows, m), (experts, _, n) = a.shape, c.shape
    if not c.numel():
        return
    if not rows:
        c.zero_()
        return
    balance = cuda.balance_between(a.t(), b) if balanced else None
    x, y = _sliced(a, offsets, experts, balance, -1), _sliced(b, offsets, experts, balance, 1)
    arch, blocks = architecture(c), x.digits.shape[2] // _DEPTH
    t, long = tiles.grouped(m, n, blocks, experts, arch, processors(c))
    t = tiles.triton(config or t)
    programs = experts * -(-m // t.rows) * -(-n // t.columns)
    sizes = (m, n, blocks, experts, m, n)
    launcher = _product_launcher("product_along_rows", sizes, programs, t, long, c.dtype, arch)
    launcher(x.digits, y.digits, x.words, y.words, offsets, c)
    strides = (a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    _along_repair_launcher(m, n, experts, strides, c.dtype, arch)(a, b, x.words, y.words, offsets, c)
