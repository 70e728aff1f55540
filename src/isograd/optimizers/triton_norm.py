# ruff: noqa: N803, RET505
# mypy: ignore-errors
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Norms of many tensors in Triton; `norm_reference.py` is the definition.

Chunks of a tensor meet in integer maxima and sums, whose order leaves no trace.
"""

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Specification, launch
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.storage import compute_dtype
from isograd.optimizers.chunks import COLUMNS, COUNT
from isograd.optimizers.norm_reference import SMALL, WORDS
from isograd.optimizers.triton_updates import base, read, write
from isograd.rows.triton_launch import words_of
from isograd.rows.triton_tiles import number

_COLUMNS, _COUNT, _WORDS = tl.constexpr(COLUMNS), tl.constexpr(COUNT), tl.constexpr(WORDS)
_INF_32 = tl.constexpr(0x7F800000)
_INF_64 = tl.constexpr(0x7FF0000000000000)
_SMALL = tl.constexpr(SMALL)
_BLOCK, _WARPS = 1024, 4
_SHORT, _LONG, _MANY = 2048, 1 << 15, 1 << 25  # elements of a chunk, for few and for many elements in all


@triton.jit
def _chunk(table_ptr, chunks_ptr, G: tl.constexpr, ALIGNED: tl.constexpr, LENGTH: tl.constexpr):
    """(tensor, its address, where the chunk begins, elements of the tensor) of this program."""
    chunk = chunks_ptr + 2 * tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk)
    row = table_ptr + tensor * _COLUMNS
    return tensor, base(row, 0, G, ALIGNED), tl.load(chunk + 1) * LENGTH, tl.load(row + _COUNT)


@triton.jit
def _largest(x_ptr, begin, count, LENGTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offset = begin + tl.arange(0, BLOCK)
    key = ops.magnitude_key(read(x_ptr, offset, count, MASKED))
    for start in range(BLOCK, LENGTH, BLOCK):
        key = tl.maximum(key, ops.magnitude_key(read(x_ptr, offset + start, count, MASKED)))
    return tl.max(key, axis=0)


@triton.jit
def norm_keys(
    table_ptr, chunks_ptr, keys_ptr, G: tl.constexpr, SQUARED: tl.constexpr, ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key of the largest magnitude of every tensor, or of its square, which is the largest square."""
    tensor, x_ptr, begin, count = _chunk(table_ptr, chunks_ptr, G, ALIGNED, LENGTH)
    if begin + LENGTH <= count:
        key = _largest(x_ptr, begin, count, LENGTH, BLOCK, False)
    else:
        key = _largest(x_ptr, begin, count, LENGTH, BLOCK, True)
    largest = ops.as_float(key)
    if SQUARED:
        largest *= largest
    tl.atomic_max(keys_ptr + tensor, terms.term_key(largest).to(tl.int64), sem="relaxed")


@triton.jit
def _narrow_key(key, work: tl.constexpr):
    """A key in memory as one of the work type."""
    if work == tl.float64:
        return key
    else:
        return key.to(tl.int32)


@triton.jit
def _limbs(
    x_ptr, begin, count, scale, magic, low_scale, LENGTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Sums of the limbs of the squares of a chunk, a sum a place of the tile."""
    offset = begin + tl.arange(0, BLOCK)
    x = read(x_ptr, offset, count, MASKED)
    high, low = sums.split_term_bits(x * x, scale, magic, low_scale)
    for start in range(BLOCK, LENGTH, BLOCK):
        x = read(x_ptr, offset + start, count, MASKED)
        more_high, more_low = sums.split_term_bits(x * x, scale, magic, low_scale)
        high += more_high
        low += more_low
    return high, low


@triton.jit
def norm_words(
    table_ptr, chunks_ptr, keys_ptr, words_ptr, G: tl.constexpr, WORK: tl.constexpr, ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the words of the sums of squares of every tensor."""
    tensor, x_ptr, begin, count = _chunk(table_ptr, chunks_ptr, G, ALIGNED, LENGTH)
    key = _narrow_key(tl.load(keys_ptr + tensor), WORK)
    wide: tl.constexpr = tl.float64 == WORK
    if terms.key_is_finite(key):
        _, scale, magic, low_scale = sums.term_scale(key)
        if begin + LENGTH <= count:
            high, low = _limbs(x_ptr, begin, count, scale, magic, low_scale, LENGTH, BLOCK, False)
        else:
            high, low = _limbs(x_ptr, begin, count, scale, magic, low_scale, LENGTH, BLOCK, True)
        a, b = terms.limb_parts(high, low, magic, LENGTH // BLOCK)
        w0, w1, w2, w3 = terms.split_words(tl.sum(a, axis=0), tl.sum(b, axis=0), 4 if wide else 2, wide)
        into = words_ptr + tensor * _WORDS
        tl.atomic_add(into, w0, sem="relaxed")
        tl.atomic_add(into + 1, w1, sem="relaxed")
        if wide:
            tl.atomic_add(into + 2, w2, sem="relaxed")
            tl.atomic_add(into + 3, w3, sem="relaxed")


@triton.jit
def norm_sums(keys_ptr, words_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The sums of squares of the tensors, each rounded once."""
    work: tl.constexpr = out_ptr.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    key = _narrow_key(tl.load(keys_ptr + i, mask=mask, other=0), work)
    words: tl.constexpr = 4 if work == tl.float64 else 2
    w0, w1, w2, w3 = terms.load_words(words_ptr + i * _WORDS, 1, mask, words)
    infinite: tl.constexpr = _INF_64 if work == tl.float64 else _INF_32
    w0 = tl.where(terms.key_is_finite(key), w0, tl.where(key == infinite, 1, 3))
    s = terms.sum_of_words(w0, w1, w2, w3, key, words)
    tl.store(out_ptr + i, ops.narrow(s, work, False), mask=mask)


@triton.jit(do_not_specialize=["max_low", "max_high", "n"])
def norm_finish(sums_ptr, out_ptr, max_low, max_high, n, SQUARED: tl.constexpr, BLOCK: tl.constexpr):
    """The norm and the factor that gradients are clipped by, from the tensors' sums or largest magnitudes."""
    work: tl.constexpr = out_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK).to(tl.int64)
    p = tl.load(sums_ptr + i, mask=i < n, other=0.0)
    key = terms.term_key(p)
    for start in range(BLOCK, n, BLOCK):
        key = tl.maximum(key, terms.term_key(tl.load(sums_ptr + i + start, mask=i + start < n, other=0.0)))
    key = tl.max(key, axis=0)
    norm = ops.as_float(key)
    if SQUARED:
        exponent, scale, magic, low_scale = sums.term_scale(key)
        a, b = terms.term_parts(p, scale, magic, low_scale)
        for start in range(BLOCK, n, BLOCK):
            p = tl.load(sums_ptr + i + start, mask=i + start < n, other=0.0)
            more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
            a += more_a
            b += more_b
        norm = ops.root(terms.sum_of_parts(tl.sum(a, axis=0), tl.sum(b, axis=0), exponent, norm, key))
    norm = ops.narrow(norm, work, False)
    factor = ops.divide(number(max_low, max_high, work), norm + tl.full((), _SMALL, work))
    tl.store(out_ptr, norm)
    tl.store(out_ptr + 1, tl.where(factor > 1.0, 1.0, factor))


@triton.jit
def _scale(x_ptr, begin, count, factor, LENGTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    for start in range(0, LENGTH, BLOCK):
        offset = begin + start + tl.arange(0, BLOCK)
        write(x_ptr, offset, count, read(x_ptr, offset, count, MASKED) * factor, MASKED)


@triton.jit
def scale_chunks(
    table_ptr, chunks_ptr, factor_ptr, G: tl.constexpr, WORK: tl.constexpr, ALIGNED: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply the tensors of a table in place; a factor of 1 leaves memory alone."""
    factor = tl.load(factor_ptr).to(WORK)
    if factor != 1.0:
        _, x_ptr, begin, count = _chunk(table_ptr, chunks_ptr, G, ALIGNED, LENGTH)
        if begin + LENGTH <= count:
            _scale(x_ptr, begin, count, factor, LENGTH, BLOCK, False)
        else:
            _scale(x_ptr, begin, count, factor, LENGTH, BLOCK, True)


# --- launches --------------------------------------------------------------------------------------------------------
def chunk_length(elements: int) -> int:
    """The length of the chunks of tensors that have so many elements in all."""
    return _LONG if elements >= _MANY else _SHORT


def _of_chunks(name: str, option: bool | None, aligned: bool, length: int, programs: int) -> Specification:
    middle = getattr(tl, compute_dtype(name)) if option is None else option
    return Specification((getattr(tl, name), middle, aligned, length, _BLOCK), programs, _WARPS)


def _of_tensors(n: int) -> Specification:
    block = 32
    return Specification((n, block), -(-n // block), 1, free=("n",))


def _finish(squared: bool) -> Specification:
    return Specification((squared, _BLOCK), 1, _WARPS)


def launch_keys(
    table: torch.Tensor, where: torch.Tensor, keys: torch.Tensor, name: str, squared: bool, aligned: bool, length: int
) -> None:
    """The keys of tensors of a dtype, into zeros."""
    launch(norm_keys, (table, where, keys), _of_chunks, name, squared, aligned, length, where.shape[0])


def launch_words(
    table: torch.Tensor, where: torch.Tensor, keys: torch.Tensor, words: torch.Tensor, name: str, aligned: bool,
    length: int,
) -> None:  # fmt: skip
    """The words of the sums of squares, into zeros."""
    launch(norm_words, (table, where, keys, words), _of_chunks, name, None, aligned, length, where.shape[0])


def launch_sums(keys: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """The sums from keys and words."""
    launch(norm_sums, (keys, words, out), _of_tensors, out.shape[0])


def launch_finish(of_tensors: torch.Tensor, out: torch.Tensor, max_norm: float, squared: bool) -> None:
    """The norm and the factor."""
    work = "float64" if out.dtype is torch.float64 else "float32"
    numbers = (*words_of(max_norm, work), of_tensors.shape[0])
    launch(norm_finish, (of_tensors, out), _finish, squared, numbers=numbers)


def launch_scale(
    table: torch.Tensor, where: torch.Tensor, factor: torch.Tensor, name: str, aligned: bool, length: int
) -> None:
    """Multiply the tensors of a dtype."""
    launch(scale_chunks, (table, where, factor), _of_chunks, name, None, aligned, length, where.shape[0])
