# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Keys and values in a cache, contiguous or in pages, for the attention kernels in Triton.

`check_cache` looks at lengths and pages before a kernel goes by them, so that nothing waits for the host: what is wrong
is noted in the device's flag, and a sequence with it counts as one of -1 keys, whose rows are NaN.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory


@triton.jit
def check_cache(
    lengths_ptr, table_ptr, used_ptr, flag_ptr, most, pages, each, lengths_code, table_code,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each sequence, a program: its keys, or -1 where there cannot be as many or a page that they need is not."""
    z = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + z)
    bad = (length < 0) | (length > most)
    memory.report(
        flag_ptr, lengths_code, bad & (tl.arange(0, 1) == 0), z + tl.arange(0, 1).to(tl.int64),
        length + tl.arange(0, 1).to(tl.int64), memory.wide_int(most) + 1,
    )  # fmt: skip
    wrong = bad.to(tl.int32)
    if PAGE:
        needed = tl.where(bad, 0, tl.cdiv(length, PAGE))
        for first in range(0, needed, BLOCK):
            n = first + tl.arange(0, BLOCK)
            page = tl.load(table_ptr + z * each + n, mask=n < needed, other=0)
            out = (n < needed) & ((page < 0) | (page >= pages))
            memory.report(
                flag_ptr, table_code, out, z * each + n.to(tl.int64), page.to(tl.int64), memory.wide_int(pages)
            )  # fmt: skip
            wrong = tl.maximum(wrong, tl.max(out.to(tl.int32), 0))
    tl.store(used_ptr + z, tl.where(wrong > 0, -1, length))


@triton.jit
def place(ptr, table_ptr, z, head, each, strides):
    """What `rows` reads by: where a head of sequence z is; strides are (batch element or page, head, row)."""
    return ptr + head * strides[1], table_ptr + z * each, z, strides


@triton.jit
def rows(
    where, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Rows [ROWS, BLOCK] from `first` on, zero from `count` on and beyond WIDTH elements. PAGE: of a page, or 0."""
    ptr, table, z, strides = where
    j = first + tl.arange(0, ROWS)
    if PAGE:
        page = tl.load(table + j // PAGE, mask=j < count, other=0).to(tl.int64)
        at = page * strides[0] + (j % PAGE).to(tl.int64) * strides[2]
    else:
        at = z.to(tl.int64) * strides[0] + j.to(tl.int64) * strides[2]
    d = tl.arange(0, BLOCK)
    return tl.load(ptr + at[:, None] + d[None, :], mask=(j < count)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def tile(
    where, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """A tile of keys or values: of pages, or by the descriptor that a contiguous array has."""
    if PAGE:
        return rows(where, first, count, WIDTH, ROWS, BLOCK, PAGE)
    else:
        return where.load([first, 0])
