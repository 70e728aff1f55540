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


# Tiles by the compute capability times ten at least, 0 for AMD; the larger, the less is read, the smaller, the more
# processors have one.
_TABLE: dict[int, tuple[Tiles, ...]] = {
    90: (Tiles(128, 256, 128, 8, True, 8, 4), Tiles(128, 128, 128, 8, True, 4, 3), Tiles(64, 64, 128, 8, True, 4, 4)),
    80: (Tiles(128, 128, 64, 8, False, 8, 3), Tiles(64, 64, 128, 8, False, 4, 3)),
    0: (Tiles(128, 128, 64, 8, False, 8, 2), Tiles(64, 64, 128, 8, False, 4, 2)),
}
_PARTS: dict[int, Tiles] = {
    90: Tiles(128, 128, 128, 8, True, 8, 3),
    80: Tiles(64, 64, 128, 8, False, 4, 3),
    0: Tiles(64, 64, 128, 8, False, 4, 2),
}
# Of the kernel in Gluon. Not in the rule yet, as it has run in an emulation alone; `benchmarks/products_cuda.py
# --tiles` times it.
HOPPER = Tiles(128, 256, 128, 8, True, 4, 4, 1, 2)
HOPPER_TALL = Tiles(192, 256, 128, 8, True, 4, 3, 1, 3)
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


def triton(t: Tiles) -> Tiles:
    """The tile for Triton's kernel in place of Hopper's, which takes matrices at even distances alone."""
    return _TABLE[90][0] if t.consumers else t
