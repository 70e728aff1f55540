"""The written rule that picks a kernel and its tile from shape, dtype and architecture; no choice changes a bit."""

from typing import NamedTuple

from isograd.devices.triton_launcher import power_of_two
from isograd.numerics.constants import SHORT_ROW

FORWARD = ("softmax", "log_softmax")
INT32_ROW = 1 << 17  # terms of binary32 whose integers fit an int64


class Configuration(NamedTuple):
    """What a launch is made of, apart from the problem itself."""

    variant: str  # "tile", "loop", "cluster", "staged", "piped" or "strip"
    block: int  # columns a tile
    rows: int  # rows a program
    warps: int
    group: int  # columns a thread, at most 256
    vector: int  # columns of one access
    ctas: int = 1  # blocks of a cluster that share a row
    native: bool = False
    registers: int = 0  # a thread may use; 0 leaves it to the compiler
    chunks: int = 1  # that a thread takes its columns in, which bounds what it holds at a time


def configuration(
    n: int, itemsize: int, op: str, arch: int, contiguous: bool = True, inner: int = 1 << 30, aligned: bool = True
) -> Configuration:
    """The variant for rows of n elements.

    `arch` is the compute capability times ten, 0 where it is not NVIDIA's; `aligned` says whether rows start at
    16 bytes and their elements are neighbours, or strips start at 4 bytes.
    """
    if not contiguous:
        return _strided_configuration(n, itemsize, op, inner, arch, aligned)
    if 90 <= arch < 110 and aligned and itemsize < 8 and n <= _longest(itemsize, op):
        block = power_of_two(n)
        if op in FORWARD and block * itemsize >= 16384 and (itemsize == 4 or block > 8192):
            return _forward_configuration(block, itemsize, op)
        if op not in FORWARD and block >= 4096:
            return _backward_configuration(block, itemsize, op)
    return _tile_configuration(n, itemsize, op, arch)


def _longest(itemsize: int, op: str) -> int:
    """Longest row whose integers fit an int64."""
    return SHORT_ROW if itemsize == 2 and op in FORWARD else INT32_ROW


def _tile_configuration(n: int, itemsize: int, op: str, arch: int) -> Configuration:
    """Whole rows in the registers of a block; long rows in passes."""
    native = arch >= 90
    vector = max(16 // itemsize, 1)
    block = power_of_two(n)
    if block * itemsize > 65536:
        return Configuration("loop", 16384 // itemsize, 1, 8, 64 // itemsize, vector, native=native)
    # Two warps a block, 64 bytes of a row a thread; the arithmetic of 16-bit rows is cheaper with 128 bytes.
    more = itemsize == 2 and op in FORWARD and (op == "log_softmax" or n > 1024)
    group = min((128 if more else 64) // itemsize, block)
    threads = block // group
    rows = max(64 // threads, 64 // block, 1)
    warps = min(max(rows * threads // 32, 1), 32)
    if threads > 1024:
        group = block // 1024
    return Configuration("tile", block, rows, warps, group, min(vector, group), native=native)


def clustered(
    variant: str, block: int, itemsize: int, bytes_per_thread: int, warps: int, registers: int, chunks: int = 1
) -> Configuration:
    """As many blocks of `warps` warps as hold the row; blocks grow where a cluster of 8 does not."""
    group = bytes_per_thread // itemsize
    threads = block // group
    warps = min(max(warps, threads // (32 * 8)), max(threads // 32, 1))
    ctas = max(threads // (32 * warps), 1)
    return Configuration(variant, warps * 32 * group, 1, warps, group, 16 // itemsize, ctas, True, registers, chunks)


def _forward_configuration(block: int, itemsize: int, op: str) -> Configuration:
    """Much arithmetic: the next row arrives meanwhile, in as few blocks as hold the row."""
    size = block * itemsize
    if size <= 16384:
        if op == "softmax":
            return clustered("cluster", block, itemsize, 64, 8, 64)
        return clustered("cluster", block, itemsize, 128, 4, 128)
    if itemsize == 2 and block == 16384:
        return clustered("staged", block, itemsize, 64, 16, 64)
    if itemsize == 2 and op == "softmax" and block <= 131072:
        return clustered("piped", block, itemsize, 128, 16 if block <= 65536 else 8, 128, 4)
    if itemsize == 4 and op == "log_softmax" and block == 8192:
        return clustered("staged", block, itemsize, 128, 8, 80, 2)
    if itemsize == 4 and op == "log_softmax" and block == 16384:
        return clustered("staged", block, itemsize, 256, 8, 128, 4)
    if itemsize == 4 and block == 65536:
        return clustered("staged", block, itemsize, 128, 8, 80, 2)
    return clustered("staged", block, itemsize, 128, 16 if size <= 65536 else 4, 128)


def _backward_configuration(block: int, itemsize: int, op: str) -> Configuration:
    """Little arithmetic: many small clusters that come and go, as far as registers allow.

    The exponential of log_softmax makes it as much as forward: there the next row arrives meanwhile.
    """
    if itemsize == 2:
        if op == "log_softmax_backward" and block >= 16384:
            return clustered("staged", block, itemsize, 128, 8 if block <= 32768 else 16, 128)
        if block <= 65536 and (op == "softmax_backward" or block <= 4096):
            return clustered("cluster", block, itemsize, 64, 8 if block in (8192, 16384) else 4, 80)
        return clustered("cluster", block, itemsize, 128, 4, 128)
    if op == "log_softmax_backward":
        if block >= 65536:
            return clustered("staged", block, itemsize, 128, 16, 128)
        return clustered("cluster", block, itemsize, 128, 16 if block == 16384 else 4, 128)
    return clustered("cluster", block, itemsize, 128, 8 if block <= 16384 else 16, 128)


class _Strip(NamedTuple):
    lanes: int  # threads of a warp that hold neighbouring rows; the others hold other columns of these
    warps: int
    ctas: int
    registers: int = 0
    chunks: int = 1


# The fastest on an H200 for [2^15 / n, n, 4096], by item size, operation and columns (a power of two).
_STRIPS: dict[tuple[int, str], dict[int, _Strip]] = {
    (4, "softmax"): {
        256: _Strip(32, 4, 1, 128, 4),
        512: _Strip(32, 8, 1, 128, 4),
        1024: _Strip(32, 8, 2, 128, 4),
        2048: _Strip(32, 8, 8, 80, 2),
        4096: _Strip(32, 8, 8, 128, 4),
    },
    (4, "log_softmax"): {
        256: _Strip(32, 4, 1, 128, 4),
        512: _Strip(32, 8, 1, 128, 4),
        1024: _Strip(32, 8, 4, 80, 2),
        2048: _Strip(32, 8, 8, 80, 2),
        4096: _Strip(32, 8, 8, 128, 4),
    },
    (4, "softmax_backward"): {
        256: _Strip(32, 8, 1),
        512: _Strip(32, 8, 2, 128, 2),
        1024: _Strip(32, 8, 4, 128, 2),
        2048: _Strip(32, 8, 8, 128, 2),
        4096: _Strip(16, 4, 8),
    },
    (4, "log_softmax_backward"): {
        256: _Strip(32, 8, 1),
        512: _Strip(32, 8, 2, 128, 2),
        1024: _Strip(32, 8, 4),
        2048: _Strip(32, 8, 8, 128),
        4096: _Strip(16, 8, 8, 128, 2),
    },
    (2, "softmax"): {
        256: _Strip(16, 4, 1),
        512: _Strip(16, 4, 1),
        1024: _Strip(16, 8, 2, 80, 4),
        2048: _Strip(32, 8, 8, 80, 4),
        4096: _Strip(32, 16, 8, 64, 4),
    },
    (2, "log_softmax"): {
        256: _Strip(32, 4, 1, 128, 8),
        512: _Strip(32, 8, 1, 128, 8),
        1024: _Strip(32, 4, 8, 80, 4),
        2048: _Strip(32, 8, 8, 80, 4),
        4096: _Strip(32, 8, 8, 128, 8),
    },
    (2, "softmax_backward"): {
        128: _Strip(32, 4, 1, 128),
        256: _Strip(16, 4, 1, 128),
        512: _Strip(16, 8, 1, 128),
        1024: _Strip(32, 4, 8, 128, 4),
        2048: _Strip(16, 8, 4, 128),
        4096: _Strip(16, 16, 4, 128),
    },
    (2, "log_softmax_backward"): {
        256: _Strip(16, 4, 1),
        512: _Strip(32, 4, 4, 128, 4),
        1024: _Strip(32, 4, 8, 128, 4),
        2048: _Strip(32, 8, 8, 128, 4),
        4096: _Strip(16, 8, 8, 128, 4),
    },
}


def _strided_configuration(n: int, itemsize: int, op: str, inner: int, arch: int, aligned: bool) -> Configuration:
    """Rows whose neighbours in memory belong to other rows: a program takes a strip of neighbouring rows."""
    native = arch >= 90
    block = power_of_two(n)
    if 90 <= arch < 110 and aligned and itemsize < 8 and n <= 4096:
        # Up to 128 columns take strips of 128 bytes and four warps; of 16-bit words a thread has two rows.
        strip = _STRIPS[itemsize, op].get(block) or _Strip(32, 4, 1)
        vector, threads = 4 // itemsize, 32 * strip.warps * strip.ctas
        group = max(block * strip.lanes // threads, 1)
        shape = (block, strip.lanes * vector, strip.warps, group, vector)
        return Configuration("strip", *shape, strip.ctas, True, strip.registers, strip.chunks)
    rows = min(128 // itemsize, power_of_two(inner))
    limit = 16384 * 2 // itemsize
    if rows * block > limit:
        rows = min(32 // itemsize, rows)
    variant = "tile"
    if rows * block > limit:
        variant, block = "loop", max(limit // 4 // rows, 1)
    warps = max(min(rows * block * itemsize // 2048, 16), 1)
    # Threads left over from the strip's width take neighbouring columns, and every thread some of each distance.
    across = max(32 * warps * min(16 // itemsize, rows) // rows, 1)
    group = min(max(block // across, 1), 256)
    return Configuration(variant, block, rows, warps, group, 1, native=native)
