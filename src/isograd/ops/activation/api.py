"""What a user calls: silu, gelu and their gradients."""

from __future__ import annotations

from isograd.core import call
from isograd.ops.activation.operation import GELU, GELU_BACKWARD, SILU, SILU_BACKWARD
from isograd.typing import Approximate, ArrayT, DataT

_silu, _silu_backward = call.function(SILU), call.function(SILU_BACKWARD)
_gelu, _gelu_backward = call.function(GELU), call.function(GELU_BACKWARD)


def silu(x: ArrayT) -> ArrayT:
    """The product `x * sigmoid(x)`; -0 at -inf.

    x: float16, bfloat16, float32 or float64, rank 0 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind.

    With u = 2^-24 (float64: 2^-53) the result is off by at most 5.2 u |silu(x)| + (1 + |x|) 2^-149 (float64: 2^-1074),
    plus half an ulp of a 16-bit result (rule 8 of `docs/arithmetic.md`).

    Raises InvalidProblemError for what is no array, UnsupportedError for another dtype.
    """
    result: ArrayT = _silu((x,), ())
    return result


def silu_backward(dy: DataT, x: DataT) -> DataT:
    """The gradient of silu: `dy * s * (1 + x * (1 - s))`, s = sigmoid(x).

    dy: the gradient of the result, of its shape and dtype; any strides. x: as silu got it.

    Raises InvalidProblemError for shapes or dtypes that differ, UnsupportedError for another dtype.
    """
    result: DataT = _silu_backward((dy, x), ())
    return result


def gelu(x: ArrayT, approximate: Approximate = "none") -> ArrayT:
    """The product `x * Phi(x)`, Phi the normal distribution function, or its tanh form; -0 at -inf.

    x: as for `silu`. approximate: "none", or "tanh" for gelu's tanh form. With u and t as in rule 8 of
    `docs/arithmetic.md` the result is off by at most 8 u |gelu(x)| + t, the tanh form by what stands there.

    Raises InvalidProblemError for what is no array and another `approximate`, UnsupportedError for another dtype.
    """
    result: ArrayT = _gelu((x,), (approximate,))
    return result


def gelu_backward(dy: DataT, x: DataT, approximate: Approximate = "none") -> DataT:
    """The gradient of gelu: `dy * (Phi(x) + x * phi(x))`, phi the density, or that of the tanh form.

    dy: the gradient of the result, of its shape and dtype; any strides. x, approximate: as gelu got them.

    Raises InvalidProblemError for shapes or dtypes that differ and another `approximate`, UnsupportedError for another
    dtype.
    """
    result: DataT = _gelu_backward((dy, x), (approximate,))
    return result
