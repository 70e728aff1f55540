# mypy: ignore-errors
"""Random numbers as Numba device functions; `random.py` is the definition."""

import numpy as np

from isograd.runtime.numba_compile import device_function

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_K0, _K1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@device_function
def philox(c0, c1, c2, c3, seed):
    """Philox-4x32-10: the four words of the counter (c0, c1, c2, c3), each in 64 bits, as the counter's."""
    k0, k1 = seed & _MASK, seed >> _HALF
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _K0) & _MASK, (k1 + _K1) & _MASK
    return c0, c1, c2, c3
