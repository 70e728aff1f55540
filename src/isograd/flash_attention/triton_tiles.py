"""The tiles of the attention kernels: functions of the head dimensions, the dtype and the architecture alone.

What a row adds up in which order follows from its tiles; so neither the batch nor the lengths may enter here.
"""

from typing import NamedTuple

from isograd.devices.triton_launcher import power_of_two


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class BackwardTiles(NamedTuple):
    """The tiles of the kernel over keys and of the one over queries."""

    over_keys: Tile
    over_queries: Tile


def width(head_dim: int) -> int:
    """Elements of a row of a tile."""
    return power_of_two(head_dim)


def _bytes(head_dim: int, v_dim: int, size: int) -> int:
    return max(width(head_dim), width(v_dim)) * size


def forward(head_dim: int, v_dim: int, size: int, architecture: int) -> Tile:
    """The tile of the forward pass; `size`: bytes of an element."""
    row = _bytes(head_dim, v_dim, size)
    if size == 4:
        return {1024: Tile(32, 16, 8, 1), 512: Tile(64, 32, 8, 1)}.get(row, Tile(64, 32, 4, 2))
    if architecture < 90:
        return {512: Tile(64, 32, 4, 2), 256: Tile(128, 32, 4, 3)}.get(row, Tile(128, 64, 4, 3))
    return {512: Tile(128, 64, 8, 2), 256: Tile(64, 64, 4, 3)}.get(row, Tile(64, 128, 4, 2))


def backward(head_dim: int, v_dim: int, size: int, architecture: int) -> BackwardTiles:
    """The tiles of the backward pass; `size`: bytes of an element."""
    row = _bytes(head_dim, v_dim, size)
    if size == 4:
        tile = {1024: Tile(16, 16, 8, 1), 512: Tile(32, 32, 8, 1)}.get(row, Tile(32, 32, 4, 1))
        return BackwardTiles(tile, tile)
    if architecture < 90:
        tile = {512: Tile(32, 32, 4, 1), 256: Tile(32, 64, 4, 2)}.get(row, Tile(64, 64, 4, 2))
        return BackwardTiles(tile, Tile(tile.keys, tile.queries, tile.warps, tile.stages))
    if row == 512:
        return BackwardTiles(Tile(32, 64, 8, 2), Tile(64, 32, 4, 2))
    # Two programs of four warps on a multiprocessor: while one takes exponentials, the other one multiplies.
    return BackwardTiles(Tile(64, 64, 4, 2), Tile(128, 64, 8, 3) if row == 256 else Tile(64, 64, 4, 2))


def bias(head_dim: int, v_dim: int, size: int) -> Tile:
    """The tile of the gradient of a bias; `size`: bytes of an element."""
    side = 32 if _bytes(head_dim, v_dim, size) >= 512 else 64
    return Tile(side, side, 4, 1)
