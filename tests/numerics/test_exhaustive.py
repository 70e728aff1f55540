"""exp, log, log1p, tanh and gelu on every binary32 number. Run with `pytest -m exhaustive -s`; takes some minutes."""

import math
import threading

import numba
import numpy as np
import pytest

from isograd.elementwise import numba_activations as activations
from isograd.numerics import numba_ops as ops
from isograd.numerics import numba_storage as storage
from isograd.numerics.numba_ops import as_float, as_int
from isograd.runtime.numba_compile import kernel

MAX_ULP = 1.05
CHUNK = 1 << 22
_NAN_BITS = 0x7FC00000


# The oracle is the platform's binary64 function, at most an ulp of binary64 off: 2**-29 ulp of binary32.
@kernel
def exact_exp(x):
    return math.inf if x >= 100.0 else math.exp(x)


@kernel
def exact_log(x):
    return math.log(x) if x > 0.0 else (-math.inf if x == 0.0 else math.nan)


@kernel
def exact_log1p(x):
    return math.log1p(x) if x > -1.0 else (-math.inf if x == -1.0 else math.nan)


@kernel
def error_in_ulp(y, exact):
    """|y - exact| in spacings of binary32 around `exact`; infinity counts as 2**128, the wrong kind as infinite."""
    if exact != exact:
        return 0.0 if as_int(y) == _NAN_BITS else math.inf
    if y != y:
        return math.inf
    top = 2.0**128
    value = min(max(np.float64(y), -top), top)
    exact = min(max(exact, -top), top)
    exponent = min(max(((as_int(exact) >> 52) & 0x7FF) - 1023, -126), 127)
    return abs(value - exact) * ops.pow2_64(23 - exponent)


def _loop(function, exact, shift):
    # Not kept on disk: the key of a closure over other functions changes with every process.
    @numba.njit(nogil=True, error_model="numpy")
    def loop(start, stop, worst):
        for pattern in range(start, stop):
            x = as_float(np.int32(pattern))
            y = storage.narrow(function(x), x)
            y = as_float(np.int32(as_int(y) + shift))
            error = error_in_ulp(y, exact(np.float64(x)))
            if not error <= worst[0]:
                worst[0] = error
                worst[1] = np.float64(pattern)

    return loop


LOOPS = {
    "exp": _loop(ops.exp, exact_exp, 0),
    "log": _loop(ops.log, exact_log, 0),
    "log1p": _loop(ops.log1p, exact_log1p, 0),
}


def worst_error(loop, chunks, threads=2):
    """(largest error, its bit pattern) over chunks of bit patterns; the loops release the GIL."""
    chunks = list(chunks)
    results = [np.zeros(2) for _ in range(threads)]

    def work(result):
        while chunks:
            try:
                start = chunks.pop()
            except IndexError:
                return
            loop(start, start + CHUNK, result)

    workers = [threading.Thread(target=work, args=(result,)) for result in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tuple(max(results, key=lambda r: r[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOOPS)
def test_every_binary32_number(name):
    error, pattern = worst_error(LOOPS[name], range(-(1 << 31), 1 << 31, CHUNK))
    print(f"{name}: at most {error:.6f} ulp, at bits {int(pattern) & 0xFFFFFFFF:#010x}")
    assert 0.5 <= error <= MAX_ULP


# --- functions with bounds of their own ------------------------------------------------------------------------------
U, TINY = 2.0**-24, 2.0**-149


@kernel
def tanh_bound(x):
    """The value and the error that `elementwise.api` promises."""
    y = math.tanh(x)
    return y, 3.5 * U * abs(y)


@kernel
def gelu_bound(x):
    y = x * 0.5 * math.erfc(-x * math.sqrt(0.5))
    return y, 8 * U * abs(y) + TINY


@kernel
def gelu_slope_bound(x):
    p, q = 0.5 * math.erfc(-x * math.sqrt(0.5)), x * math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return p + q, 8 * U * (p + abs(q)) + 2 * (1 + abs(x)) * TINY


@kernel
def gelu_tanh_bound(x):
    v = math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    s, rest = 1 / (1 + math.exp(-v)), 1 / (1 + math.exp(v))
    return x * s, (4 + 3 * abs(v) * rest) * U * abs(x) * s + (1 + abs(x)) * TINY


@kernel
def gelu_tanh_slope_bound(x):
    v = math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)
    s, rest = 1 / (1 + math.exp(-v)), 1 / (1 + math.exp(v))
    w = math.sqrt(8 / math.pi) * (x + 3 * 0.044715 * x * x * x)
    return s * (1 + w * rest), (4 + 3 * abs(v)) * U * s * (1 + abs(w) * rest) + 2 * (1 + abs(w)) * TINY


def _bounded(function, promised, shift):
    @numba.njit(nogil=True, error_model="numpy")
    def loop(start, stop, worst):
        for pattern in range(start, stop):
            x = as_float(np.int32(pattern))
            # Where |x| is larger everything has its limit, which other tests look at.
            if abs(x) <= 64.0:
                y = as_float(np.int32(as_int(function(x)) + shift))
                exact, bound = promised(np.float64(x))
                error = abs(y - exact) / bound if y != exact else 0.0
                if not error <= worst[0]:
                    worst[0] = error
                    worst[1] = np.float64(pattern)

    return loop


BOUNDED = {
    "tanh": (activations.tanh_value, tanh_bound),
    "gelu": (activations.gelu_value, gelu_bound),
    "gelu_backward": (activations.gelu_slope, gelu_slope_bound),
    "gelu_tanh": (activations.gelu_tanh_value, gelu_tanh_bound),
    "gelu_tanh_backward": (activations.gelu_tanh_slope, gelu_tanh_slope_bound),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BOUNDED)
def test_every_binary32_number_within_the_bound(name):
    error, pattern = worst_error(_bounded(*BOUNDED[name], 0), range(-(1 << 31), 1 << 31, CHUNK))
    print(f"{name}: at most {error:.6f} of the bound, at bits {int(pattern) & 0xFFFFFFFF:#010x}")
    assert 0.5 <= error <= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BOUNDED)
def test_a_result_some_places_off_is_found(name):
    one = int(np.float32(1.5).view(np.int32))
    error, _ = worst_error(_bounded(*BOUNDED[name], 16), [one])
    assert error > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOOPS)
def test_a_result_one_place_off_is_found(name):
    wrong = _loop(getattr(ops, name), globals()[f"exact_{name}"], 1)
    one = int(np.float32(1.5).view(np.int32))
    error, _ = worst_error(wrong, [one])
    assert error > MAX_ULP
