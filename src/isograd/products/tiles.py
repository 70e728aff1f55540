"""Which tiles a product is computed in; they change no bit."""

from typing import NamedTuple

LONGEST = 512  # blocks of 128 elements whose products one accumulator holds


class Tiles(NamedTuple):
    """Rows and columns of a tile, elements of a step, rows of tiles in a group, whether operands come by TMA.

    pieces: parts of the contracted axis that are computed apart. consumers: groups of warps of the kernel for Hopper,
    with 64 rows each, two or three; 0 for Triton's.
    """

    rows: int
    columns: int
    depth: int
    group: int
    tma: bool
    warps: int
    stages: int
    pieces: int = 1
    consumers: int = 0

    @property
    def fixed(self) -> tuple[int, ...]:
        """What kernels are compiled for."""
        return self.rows, self.columns, self.depth, self.group, self.tma


# Of the kernel in Gluon, for Hopper alone.
HOPPER = Tiles(128, 256, 128, 8, True, 4, 4, 1, 2)
HOPPER_TALL = Tiles(192, 256, 128, 8, True, 4, 3, 1, 3)
# Tiles by the compute capability times ten at least, 0 for AMD; the larger, the less is read, the smaller, the more
# processors have one. From 120 on, a processor has the shared memory of 80 again.
_AMPERE = Tiles(128, 128, 64, 8, False, 8, 3), Tiles(64, 64, 128, 8, False, 4, 3)
_TMA = Tiles(128, 256, 128, 8, True, 8, 4), Tiles(128, 128, 128, 8, True, 4, 3), Tiles(64, 64, 128, 8, True, 4, 4)
_TABLE: dict[int, tuple[Tiles, ...]] = {
    120: _AMPERE,
    100: _TMA,
    90: (HOPPER, *_TMA[1:]),
    80: _AMPERE,
    0: (Tiles(128, 128, 64, 8, False, 8, 2), Tiles(64, 64, 128, 8, False, 4, 2)),
}
_PARTS: dict[int, Tiles] = {
    120: _AMPERE[1],
    100: Tiles(128, 128, 128, 8, True, 8, 3),
    90: Tiles(128, 128, 128, 8, True, 8, 3),
    80: _AMPERE[1],
    0: Tiles(64, 64, 128, 8, False, 4, 2),
}
_LEAST_PIECE = 8  # blocks


def chosen(m: int, n: int, blocks: int, matrices: int, arch: int, processors: int) -> Tiles:
    """The rule: a function of the sizes and the device."""
    level = max(a for a in _TABLE if a <= arch)

    def count(t: Tiles) -> int:
        return -(-m // t.rows) * -(-n // t.columns) * matrices

    # The first that gives every processor a tile and is not mostly beyond the ends.
    every = _TABLE[level]
    fitting = (t for t in every[:-1] if count(t) >= processors and m > t.rows // 2 and n > t.columns // 2)
    tile, parts = next(fitting, every[-1]), _PARTS[level]
    pieces = -(-blocks // LONGEST)
    if count(tile) < processors:
        pieces = max(pieces, min(2 * processors // count(parts), blocks // _LEAST_PIECE))
    return parts._replace(pieces=pieces) if pieces > 1 else tile


def in_parts(m: int, n: int, blocks: int, arch: int, processors: int) -> Tiles:
    """The rule for exact sums that are added up in memory."""
    t = chosen(m, n, blocks, 1, arch, processors)
    return _PARTS[max(a for a in _PARTS if a <= arch)]._replace(pieces=t.pieces)


def grouped(m: int, n: int, blocks: int, experts: int, arch: int, processors: int) -> tuple[Tiles, bool]:
    """The rule for products of experts, [m, n] on average: tiles, and whether sums are longer than an accumulator."""
    level = max(a for a in _TABLE if a <= arch)
    if blocks > LONGEST:
        return _TABLE[level][-1], True
    # Without parts of the contracted axis, which lie elsewhere for every expert.
    t = chosen(m, n, blocks, experts, arch, processors)
    return (triton(t) if t.pieces == 1 else _TABLE[level][-1]), False


def triton(t: Tiles) -> Tiles:
    """The tile for Triton's kernel in place of Hopper's, which takes matrices at even distances alone."""
    return _TMA[0] if t.consumers else t
