"""What a user calls: silu_mul, gelu_mul and their gradients."""

from __future__ import annotations

from isograd.core import call
from isograd.ops.gated.operation import GELU_MUL, GELU_MUL_BACKWARD, SILU_MUL, SILU_MUL_BACKWARD
from isograd.typing import Approximate, ArrayT, DataT

_silu_mul, _silu_backward = call.function(SILU_MUL), call.function(SILU_MUL_BACKWARD)
_gelu_mul, _gelu_backward = call.function(GELU_MUL), call.function(GELU_MUL_BACKWARD)


def silu_mul(gate: ArrayT, up: ArrayT) -> ArrayT:
    """`silu(gate) * up`, the gated activation of SwiGLU.

    gate, up: float16, bfloat16, float32 or float64 of one shape and dtype, rank 0 to 8, any strides: NumPy arrays,
    torch tensors, arrays with DLPack or tape variables; the result is of gate's kind. silu is computed and multiplied
    in the work type, float32 for 16 bits, and the product rounded once (rule 20 of `docs/arithmetic.md`). The halves of
    a packed array, `x[..., :d]` and `x[..., d:]`, need no copies.

    Raises InvalidProblemError for shapes or dtypes that differ, UnsupportedError for another dtype.
    """
    result: ArrayT = _silu_mul((gate, up), ())
    return result


def silu_mul_backward(dy: DataT, gate: DataT, up: DataT) -> tuple[DataT, DataT]:
    """The gradients of silu_mul: `(dgate, dup) = (dy * up * silu'(gate), dy * silu(gate))`, in one pass.

    dy: the gradient of the result, of its shape and dtype; any strides. gate, up: as silu_mul got them.

    Raises InvalidProblemError for shapes or dtypes that differ, UnsupportedError for another dtype.
    """
    result: tuple[DataT, DataT] = _silu_backward((dy, gate, up), ())
    return result


def gelu_mul(gate: ArrayT, up: ArrayT, approximate: Approximate = "none") -> ArrayT:
    """`gelu(gate) * up`, the gated activation of GeGLU.

    gate, up: as for `silu_mul`. approximate: "none" for `x * Phi(x)`, "tanh" for gelu's tanh form.

    Raises InvalidProblemError for shapes or dtypes that differ and another `approximate`, UnsupportedError for another
    dtype.
    """
    result: ArrayT = _gelu_mul((gate, up), (approximate,))
    return result


def gelu_mul_backward(dy: DataT, gate: DataT, up: DataT, approximate: Approximate = "none") -> tuple[DataT, DataT]:
    """The gradients of gelu_mul: `(dgate, dup) = (dy * up * gelu'(gate), dy * gelu(gate))`, in one pass.

    dy: the gradient of the result, of its shape and dtype; any strides. gate, up, approximate: as gelu_mul got them.

    Raises InvalidProblemError for shapes or dtypes that differ and another `approximate`, UnsupportedError for another
    dtype.
    """
    result: tuple[DataT, DataT] = _gelu_backward((dy, gate, up), (approximate,))
    return result
