# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF059
"""The product of lines of digits on Hopper, in Gluon; `triton_gemm.py` has the arithmetic and the same bits.

There is a program for each processor, which takes one tile of the result after another. One warp, the producer, brings
digits to shared memory by TMA, those of the next tile while the results of one are written. Each consumer, a group of
four warps, has 64 rows of the tile and starts a product before it waits for the one before. Triton's own products in
int32 wait for each, and halve the columns of an instruction.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isograd.numerics import triton_ops as ops

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name since Triton 3.9, or before


@gluon.jit
def _place(number, problem, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(matrix, first row, first column) of a tile: groups of rows whose tiles use the same lines of b."""
    m, n, width, tiles, a_step, b_step = problem
    down = (m + (ROWS - 1)) // ROWS
    across = (n + (COLUMNS - 1)) // COLUMNS
    matrix = number // (down * across)
    number -= matrix * (down * across)
    first = number // (GROUP * across) * GROUP
    size = gl.minimum(down - first, GROUP)
    inside = number % (GROUP * across)
    return matrix, (first + inside % size) * ROWS, inside // size * COLUMNS


@gluon.jit
def _turns(tiles):
    """How many tiles this program takes."""
    count = gl.num_programs(0)
    return (tiles - gl.program_id(0) + (count - 1)) // count


@gluon.jit
def _produce(a_desc, b_desc, buffers, barriers, problem, CONSUMERS: gl.constexpr, GROUP: gl.constexpr):
    """Bring low and low, high and low, low and high, high and high digits."""
    a_smem, b_smem = buffers
    full, empty = barriers
    m, n, width, tiles, a_step, b_step = problem
    STAGES: gl.constexpr = b_smem.shape[0]
    COLUMNS: gl.constexpr = b_smem.shape[1]
    DEPTH: gl.constexpr = b_smem.shape[2]
    step = 0
    for turn in range(_turns(tiles)):
        matrix, top, left = _place(
            gl.program_id(0) + turn * gl.num_programs(0), problem, 64 * CONSUMERS, COLUMNS, GROUP
        )  # fmt: skip
        row = matrix * a_step + top
        column = matrix * b_step + left
        for part in gl.static_range(4):
            a_first = width if part % 2 == 0 and part < 3 else 0
            b_first = width if part < 2 else 0
            for k in range(0, width, DEPTH):
                at = step % STAGES
                mbarrier.wait(empty.index(at), (step // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(at), (64 * CONSUMERS + COLUMNS) * DEPTH)
                for c in gl.static_range(CONSUMERS):
                    load(a_desc, [row + 64 * c, a_first + k], full.index(at), a_smem.index(at * CONSUMERS + c))
                load(b_desc, [column, b_first + k], full.index(at), b_smem.index(at))
                step += 1


@gluon.jit
def _sum(acc, step, count, buffers, barriers, c: gl.constexpr, CONSUMERS: gl.constexpr):
    """Add the products of `count` steps."""
    a_smem, b_smem = buffers
    full, empty = barriers
    STAGES: gl.constexpr = b_smem.shape[0]
    for i in range(count):
        at = step % STAGES
        mbarrier.wait(full.index(at), step // STAGES & 1)
        a = a_smem.index(at * CONSUMERS + c)
        acc = warpgroup_mma(a, b_smem.index(at).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + (STAGES - 1)) % STAGES), pred=i > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + (STAGES - 1)) % STAGES))
    return acc, step


@gluon.jit
def _halves(x, COLUMNS: gl.constexpr):
    """The left and the right half of a tile."""
    return gl.split(x.reshape([64, 2, COLUMNS // 2]).permute([0, 2, 1]))


@gluon.jit
def _store_quarter(c_ptr, high, low, row, column, e_ptr, f_ptr, m, n, layout: gl.constexpr):
    """Store RN(256 high + low) * 2**(e + f - 22) for some columns of a tile."""
    WIDTH: gl.constexpr = high.shape[1]
    held: gl.constexpr = high.type.layout
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, held))
    j = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, held))
    e = gl.load(e_ptr + i, mask=i < m, other=0) >> 2
    f = gl.load(f_ptr + j, mask=j < n, other=0) >> 2
    # Two exact floats, whose sum is rounded.
    t = (high & -4096).to(gl.float32) * 256.0 + ((high & 4095) * 256 + low).to(gl.float32)
    exponent = gl.minimum(gl.maximum(e[:, None] + f[None, :] - 22, -252), 252)
    half = exponent >> 1
    t = t * ops.pow2_32(half) * ops.pow2_32(exponent - half)
    t = gl.convert_layout(ops.narrow(t, c_ptr.dtype.element_ty, True), layout)
    i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    j = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(c_ptr + i.to(gl.int64)[:, None] * n + j.to(gl.int64)[None, :], t, mask=(i < m)[:, None] & (j < n)[None, :])


@gluon.jit
def _own(low_ptr, low, c: gl.constexpr, CONSUMERS: gl.constexpr):
    """Where the low bytes of a consumer stand in the meantime."""
    WIDTH: gl.constexpr = low.shape[1]
    held: gl.constexpr = low.type.layout
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, held))
    j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, held))
    first = (gl.program_id(0) * CONSUMERS + c) * (64 * WIDTH)
    return low_ptr + (i[:, None] * WIDTH + j[None, :] + first)


@gluon.jit
def _consume(
    e_ptr,
    f_ptr,
    c_ptr,
    low_ptr,
    buffers,
    barriers,
    problem,
    c: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """64 rows of every tile."""
    a_smem, b_smem = buffers
    m, n, width, tiles, a_step, b_step = problem
    COLUMNS: gl.constexpr = b_smem.shape[1]
    DEPTH: gl.constexpr = b_smem.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])  # Triton knows no wider one of int8
    written: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks = width // DEPTH
    step = 0
    for turn in range(_turns(tiles)):
        matrix, top, left = _place(
            gl.program_id(0) + turn * gl.num_programs(0), problem, 64 * CONSUMERS, COLUMNS, GROUP
        )  # fmt: skip
        acc = gl.full([64, COLUMNS], 128, gl.int32, layout)
        acc, step = _sum(acc, step, blocks, buffers, barriers, c, CONSUMERS)
        acc, step = _sum(acc >> 8, step, 2 * blocks, buffers, barriers, c, CONSUMERS)
        # The low bytes of four quarters of the columns share a register.
        x, y = _halves(acc & 255, COLUMNS)
        x, y = _halves(x | (y << 16), COLUMNS // 2)
        low = x | (y << 8)
        if CONSUMERS > 2:  # registers hold the sums alone; a thread reads again what it wrote itself
            gl.store(_own(low_ptr, low, c, CONSUMERS), low)
        acc, step = _sum(acc >> 8, step, blocks, buffers, barriers, c, CONSUMERS)
        if CONSUMERS > 2:
            low = gl.load(_own(low_ptr, low, c, CONSUMERS))
        row = top + 64 * c
        e = e_ptr + matrix * a_step
        f = f_ptr + matrix * b_step
        to = c_ptr + matrix.to(gl.int64) * m * n
        x, y = _halves(acc, COLUMNS)
        x0, x1 = _halves(x, COLUMNS // 2)
        y0, y1 = _halves(y, COLUMNS // 2)
        QUARTER: gl.constexpr = COLUMNS // 4
        _store_quarter(to, x0, low & 255, row, left, e, f, m, n, written)
        _store_quarter(to, x1, (low >> 8) & 255, row, left + QUARTER, e, f, m, n, written)
        _store_quarter(to, y0, (low >> 16) & 255, row, left + 2 * QUARTER, e, f, m, n, written)
        _store_quarter(to, y1, (low >> 24) & 255, row, left + 3 * QUARTER, e, f, m, n, written)


@gluon.jit(do_not_specialize=["m", "blocks", "tiles", "a_step", "b_step"])
def product_hopper(
    a_desc, b_desc, e_ptr, f_ptr, c_ptr, low_ptr, m, n, blocks, tiles, a_step, b_step,
    CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill c [matrices, m, n] from lines of digits a and b and their words e and f.

    A matrix' lines are a_step and b_step after those of the one before; tiles: of all matrices. low_ptr: room for an
    int32 for every four entries of a tile of each program, where there are three consumers.
    """
    a_smem = gl.allocate_shared_memory(gl.int8, [STAGES * CONSUMERS, 64, DEPTH], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.int8, [STAGES, COLUMNS, DEPTH], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    buffers = (a_smem, b_smem)
    barriers = (full, empty)
    problem = (m, n, blocks * 128, tiles, a_step, b_step)
    # Tuples of partitions are written out: they hold the groups' numbers as constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (e_ptr, f_ptr, c_ptr, low_ptr, buffers, barriers, problem, 0, CONSUMERS, GROUP)),
                (_consume, (e_ptr, f_ptr, c_ptr, low_ptr, buffers, barriers, problem, 1, CONSUMERS, GROUP)),
                (_produce, (a_desc, b_desc, buffers, barriers, problem, CONSUMERS, GROUP)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (e_ptr, f_ptr, c_ptr, low_ptr, buffers, barriers, problem, 0, CONSUMERS, GROUP)),
                (_consume, (e_ptr, f_ptr, c_ptr, low_ptr, buffers, barriers, problem, 1, CONSUMERS, GROUP)),
                (_consume, (e_ptr, f_ptr, c_ptr, low_ptr, buffers, barriers, problem, 2, CONSUMERS, GROUP)),
                (_produce, (a_desc, b_desc, buffers, barriers, problem, CONSUMERS, GROUP)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
