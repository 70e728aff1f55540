# mypy: ignore-errors
# ruff: noqa: N803
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Long contiguous rows on NVIDIA GPUs, in Gluon: how a cluster of blocks holds a row, fetches it and stores it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from isograd.rows.triton_configuration import Configuration

# The name since Triton 3.9, and the one before.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def broad(v):
    """A value a row as a tile."""
    return v[:, :, None, None]


@gluon.jit
def columns(
    CTAS: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    layout: gl.constexpr,
):
    """Columns that a cluster holds, as [BLOCK // GROUP, CTAS, GROUP // V, V], in two parts; a block begins every STEP.

    The first says where a thread begins, the second, the same for every thread, ends up in the instructions.
    """
    cube: gl.constexpr = gl.SliceLayout(3, layout)
    q = gl.arange(0, BLOCK // GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None, None, None]
    c = gl.arange(0, CTAS, layout=gl.SliceLayout(0, gl.SliceLayout(2, cube)))[None, :, None, None]
    p = gl.arange(0, GROUP // V, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :, None]
    line: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return c * STEP + q * V, p * (BLOCK // GROUP * V) + gl.arange(0, V, layout=line)[None, None, None, :]


@gluon.jit
def threads(CTAS: gl.constexpr, BLOCK: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """An int32 a thread."""
    line: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    c = gl.arange(0, CTAS, layout=gl.SliceLayout(0, line))[None, :]
    return gl.arange(0, BLOCK // GROUP, layout=gl.SliceLayout(1, line))[:, None] + c


@gluon.jit
def put(ptr, row, stride, begin, offset, n, value, MASKED: gl.constexpr):
    """Store what the cluster holds of a row."""
    pointers = (ptr + row.to(gl.int64) * stride + begin) + offset
    if MASKED:
        gl.store(pointers, value, mask=begin + offset < n)
    else:
        gl.store(pointers, value)


@gluon.jit
def fetch(stage, ptr, row, n_rows, stride, begin, offset, n, MASKED: gl.constexpr):
    """Start the copy of a row into shared memory; past the last row nothing is read."""
    pointers = (ptr + row.to(gl.int64) * stride + begin) + offset
    if MASKED:
        _async_load(stage, pointers, (begin + offset < n) & (row < n_rows))
    else:
        _async_load(stage, pointers, row < n_rows)


def layout_of(config: Configuration) -> gl.BlockedLayout:
    """A thread holds groups of neighbours, 16 bytes each; the blocks of a cluster split the second axis."""
    bases = [[0, 1 << i, 0, 0] for i in range(config.ctas.bit_length() - 1)]
    size = [1, 1, config.group // config.chunks // config.vector, config.vector]
    return gl.BlockedLayout(size, [32, 1, 1, 1], [config.warps, 1, 1, 1], [3, 0, 2, 1], bases)


def shared_layout_of(config: Configuration) -> gl.SwizzledSharedLayout:
    """A row as it lies in memory, in the parts of the blocks."""
    bases = [[0, 1 << i, 0, 0] for i in range(config.ctas.bit_length() - 1)]
    return gl.SwizzledSharedLayout(1, 1, 1, [3, 0, 2, 1], bases)
