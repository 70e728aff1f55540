# mypy: ignore-errors
"""Norms of many tensors on the CPU, over chunks: keys of the largest terms, words of integer sums, and the scaling."""

import numpy as np

from isograd.numerics.numba_memory import BLOCK, load, load_block, pointer, stack_block, store, store_block
from isograd.numerics.numba_ops import as_float, magnitude_key
from isograd.numerics.numba_storage import narrow
from isograd.numerics.numba_sum import block_magnitude, block_terms, is_finite_key, sum_scale
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.optimizers.chunks import COLUMNS, COUNT
from isograd.runtime.numba_compile import kernel

LENGTH = 1 << 14  # elements of a chunk
_WORD = np.int64(0xFFFFFFFF)


@kernel
def norm_keys(like, zero, table_address, chunks_address, keys_address, squared, start, stop):
    """The key of the largest magnitude of every chunk, or of its square."""
    table, places = pointer(table_address, np.int64(0)), pointer(chunks_address, np.int64(0))
    keys = pointer(keys_address, np.int64(0))
    block = stack_block(zero)
    for chunk in range(start, stop):
        row = load(places, 2 * chunk) * COLUMNS
        x = pointer(load(table, row), like)
        begin = load(places, 2 * chunk + 1) * LENGTH
        end = min(begin + LENGTH, load(table, row + COUNT))
        key = magnitude_key(zero)
        for j in range(begin, end, BLOCK):
            count = min(end - j, BLOCK)
            load_block(x, j, 1, count, block)
            key = block_magnitude(block, count, key)
        if squared:
            largest = as_float(key)
            key = magnitude_key(largest * largest)
        store(keys, chunk, np.int64(key))


@kernel
def norm_words(like, zero, table_address, chunks_address, keys_address, words_address, start, stop):
    """The words of the sums of squares of every chunk, from the keys of the tensors."""
    table, places = pointer(table_address, np.int64(0)), pointer(chunks_address, np.int64(0))
    keys, words = pointer(keys_address, magnitude_key(zero)), pointer(words_address, np.int64(0))
    block = stack_block(zero)
    for chunk in range(start, stop):
        tensor = load(places, 2 * chunk)
        x, key = pointer(load(table, tensor * COLUMNS), like), load(keys, tensor)
        begin = load(places, 2 * chunk + 1) * LENGTH
        end = min(begin + LENGTH, load(table, tensor * COLUMNS + COUNT))
        first, second, _ = sum_scale(key)
        high, low = np.int64(0), np.int64(0)
        if is_finite_key(key):
            for j in range(begin, end, BLOCK):
                count = min(end - j, BLOCK)
                load_block(x, j, 1, count, block)
                for i in range(count):
                    store(block, i, load(block, i) * load(block, i))
                more_high, more_low = block_terms(block, count, first, second)
                high += more_high
                low += more_low
        if limb_shift(zero) < 32:  # binary32, whose terms fit one word
            high, low = (high << limb_shift(zero)) + low, np.int64(0)
        store(words, 4 * chunk, high >> 32)
        store(words, 4 * chunk + 1, high & _WORD)
        store(words, 4 * chunk + 2, low >> 32)
        store(words, 4 * chunk + 3, low & _WORD)


@kernel
def norm_sums(zero, keys_address, words_address, out_address, start, stop):
    """The sums of squares of the tensors, each rounded once."""
    keys, words = pointer(keys_address, magnitude_key(zero)), pointer(words_address, np.int64(0))
    out = pointer(out_address, zero)
    for i in range(start, stop):
        key = load(keys, i)
        if is_finite_key(key):
            hi, lo = add_limbs(np.int64(0), np.uint64(0), load(words, 4 * i), load(words, 4 * i + 1), np.int64(32))
            shift = limb_shift(zero)
            if shift > 32:  # binary64: that was the high part
                hi = np.int64(hi << shift) | np.int64(lo >> np.uint64(64 - shift))
                lo = np.uint64(lo << np.uint64(shift))
                hi, lo = add_limbs(hi, lo, load(words, 4 * i + 2), load(words, 4 * i + 3), np.int64(32))
            _, _, exponent = sum_scale(key)
            store(out, i, wide_to_float(hi, lo, exponent, zero))
        else:
            store(out, i, narrow(as_float(key), zero))


@kernel
def scale_chunks(like, zero, table_address, chunks_address, factor, start, stop):
    """Multiply the tensors of a table in place."""
    table, places = pointer(table_address, np.int64(0)), pointer(chunks_address, np.int64(0))
    block = stack_block(zero)
    for chunk in range(start, stop):
        row = load(places, 2 * chunk) * COLUMNS
        x = pointer(load(table, row), like)
        begin = load(places, 2 * chunk + 1) * LENGTH
        end = min(begin + LENGTH, load(table, row + COUNT))
        for j in range(begin, end, BLOCK):
            count = min(end - j, BLOCK)
            load_block(x, j, 1, count, block)
            for i in range(count):
                store(block, i, load(block, i) * factor)
            store_block(x, j, 1, count, block)
