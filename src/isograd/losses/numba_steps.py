# mypy: ignore-errors
"""Steps of the losses' CPU kernels, where the widths differ. `like` is a value of the work type."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.losses.divergence_reference import REST_BITS
from isograd.numerics import constants as c
from isograd.numerics.numba_compile import INLINED

_BITS_64 = c.QUANTUM_BITS + c.LIMB_SHIFT_64


def rest_is_large(hi: Any, lo: Any, like: Any) -> Any:
    """Whether the rest of a row's exponentials is at least 2**-REST_BITS of the largest."""
    raise NotImplementedError


@overload(rest_is_large, jit_options=INLINED)
def _rest_is_large(hi, lo, like):
    if like == types.float64:
        return lambda hi, lo, like: hi >= np.int64(1 << (_BITS_64 - 64 - REST_BITS))
    return lambda hi, lo, like: hi > 0 or (hi == 0 and lo >= np.uint64(1 << (c.QUANTUM_BITS - REST_BITS)))
