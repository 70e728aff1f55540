"""The functions of the contract lane by lane: a vector's lanes have the bits of the numbers."""

import ml_dtypes
import numpy as np
import pytest

from isograd.numerics import numba_ops as ops
from isograd.numerics import numba_storage as storage
from isograd.numerics import numba_vectors as vectors
from isograd.numerics.numba_memory import load, pointer, store
from isograd.numerics.numba_wide import split_pair, split_term
from isograd.numerics.storage import compute_dtype, kernel_type
from isograd.runtime.numba_compile import kernel

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def sample(dtype, count=1 << 12):
    """Bits at random, so every exponent and many NaN, and ordinary numbers."""
    rng = np.random.default_rng(0)
    bits = np.frombuffer(rng.bytes(count * np.dtype(dtype).itemsize), dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 65504, 1e-40], np.float64)
    with np.errstate(all="ignore"):
        found = np.concatenate([bits, rng.standard_normal(count).astype(dtype), special.astype(dtype)])
    return np.concatenate([found, np.zeros(-len(found) % 64, dtype)])


@kernel
def by_numbers(like, factor, x_address, y_address, z_address, n):
    x, y, z = pointer(x_address, like), pointer(y_address, like), pointer(z_address, like)
    for i in range(n):
        v = storage.widen(load(x, i)) * factor
        store(y, i, storage.narrow(v, like))
        v = vectors.select(v == v, v, storage.widen(like))  # `like` is zero
        store(z, i, storage.narrow_number(v, like))


@kernel
def by_vectors(like, factor, x_address, y_address, z_address, n):
    x, y, z = pointer(x_address, like), pointer(y_address, like), pointer(z_address, like)
    for i in range(0, n, vectors.vector_lanes(x)):
        v = storage.widen(vectors.load_vector(x, i)) * factor
        vectors.store_vector(y, i, storage.narrow(v, like))
        v = vectors.select(v == v, v, storage.widen(like))  # `like` is zero
        vectors.store_vector(z, i, storage.narrow_number(v, like))


@pytest.mark.parametrize("dtype", DTYPES)
def test_between_storage_and_work_types(dtype):
    x = sample(DTYPES[dtype])
    factor = np.dtype(compute_dtype(dtype)).type(1.2345)
    found = []
    for run in (by_numbers, by_vectors):
        y, z = np.empty_like(x), np.empty_like(x)
        run(kernel_type(x.dtype), factor, x.ctypes.data, y.ctypes.data, z.ctypes.data, x.size)
        found.append((y, z))
    assert [a.tobytes() for a in found[0]] == [a.tobytes() for a in found[1]]
    with np.errstate(all="ignore"):
        right = (x.astype(factor.dtype) * factor).astype(x.dtype)
    number = ~np.isnan(right)
    for a in found[1]:
        assert a[number].tobytes() == right[number].tobytes()
    assert np.isnan(found[1][0][~number]).all()


@kernel
def results_of_numbers(x, y, keys, flags, scale, bias):
    for i in range(x.size):
        v = x[i]
        y[0, i] = ops.exp(v)
        y[1, i], y[2, i] = ops.exp_shifted(v, v - v, v, bias)
        keys[0, i], keys[1, i] = ops.max_key(v), ops.magnitude_key(v)
        keys[2, i], keys[3, i] = split_term(v, scale)
        keys[4, i], keys[5, i] = split_pair(v, y[0, i], scale, scale)
        flags[i] = ops.is_finite(v)


@kernel
def results_of_vectors(zero, integer, x_address, y_address, keys_address, flags_address, n, scale, bias):
    x, y = pointer(x_address, zero), pointer(y_address, zero)
    keys, flags = pointer(keys_address, integer), pointer(flags_address, integer)
    for i in range(0, n, vectors.vector_lanes(x)):
        v = vectors.load_vector(x, i)
        e = ops.exp(v)
        vectors.store_vector(y, i, e)
        first, second = ops.exp_shifted(v, v - v, v, bias)
        vectors.store_vector(y, n + i, first)
        vectors.store_vector(y, 2 * n + i, second)
        vectors.store_vector(keys, i, ops.max_key(v))
        vectors.store_vector(keys, n + i, ops.magnitude_key(v))
        high, low = split_term(v, scale)
        vectors.store_vector(keys, 2 * n + i, high)
        vectors.store_vector(keys, 3 * n + i, low)
        high, low = split_pair(v, e, scale, scale)
        vectors.store_vector(keys, 4 * n + i, high)
        vectors.store_vector(keys, 5 * n + i, low)
        one = high - high + 1
        vectors.store_vector(flags, i, vectors.select(ops.is_finite(v), one, one - 1))


def numbers_only(a):
    return np.where(np.isnan(a), np.nan, a).astype(a.dtype).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exponentials_keys_and_terms(dtype):
    x, integer = sample(DTYPES[dtype]), np.int32 if dtype == "float32" else np.int64
    scale, bias = x.dtype.type(8), integer(127 << 23 if dtype == "float32" else 1023 << 52)
    found = []
    for _ in range(2):
        found.append((np.empty((3, x.size), dtype), np.zeros((6, x.size), integer), np.empty(x.size, integer)))
    (y, keys, flags), others = found
    results_of_numbers(x, y, keys, flags, scale, bias)
    places = [a.ctypes.data for a in (x, *others)]
    results_of_vectors(x.dtype.type(0), integer(0), *places, x.size, scale, bias)
    assert numbers_only(y) == numbers_only(others[0])
    assert keys[:2].tobytes() == others[1][:2].tobytes()
    finite = np.abs(x) < 1e30  # an infinite term has no integers
    assert keys[:, finite].tobytes() == others[1][:, finite].tobytes()
    assert flags.tolist() == others[2].tolist() == np.isfinite(x).tolist()
