"""What a user calls: silu_mul, gelu_mul and their gradients, of two arrays and of one that has both."""

from __future__ import annotations

from isograd.core import call
from isograd.ops.gated.operation import (
    GEGLU,
    GEGLU_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    SILU_MUL,
    SILU_MUL_BACKWARD,
    SWIGLU,
    SWIGLU_BACKWARD,
)
from isograd.typing import Approximate, ArrayT, DataT

_silu_mul, _silu_backward = call.function(SILU_MUL), call.function(SILU_MUL_BACKWARD)
_gelu_mul, _gelu_backward = call.function(GELU_MUL), call.function(GELU_MUL_BACKWARD)
_swiglu, _swiglu_backward = call.function(SWIGLU), call.function(SWIGLU_BACKWARD)
_geglu, _geglu_backward = call.function(GEGLU), call.function(GEGLU_BACKWARD)


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


def swiglu(x: ArrayT) -> ArrayT:
    """`silu(gate) * up` of an array whose last dimension has the gate in its first half and up in its second.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, a last dimension of even size, any strides: a NumPy array, a
    torch tensor, an array with DLPack or a tape variable; the result is of its kind and has half of that dimension.
    The bits are those of `silu_mul`.

    Raises InvalidProblemError for a last dimension of odd size, UnsupportedError for another dtype.
    """
    result: ArrayT = _swiglu((x,), ())
    return result


def swiglu_backward(dy: DataT, x: DataT) -> DataT:
    """The gradient of swiglu, both halves written by one pass; dy: the gradient of the result. x: as swiglu got it.

    Raises InvalidProblemError for shapes or dtypes that do not match, UnsupportedError for another dtype.
    """
    result: DataT = _swiglu_backward((dy, x), ())
    return result


def geglu(x: ArrayT, approximate: Approximate = "none") -> ArrayT:
    """`gelu(gate) * up` of an array that has both, as for `swiglu`; approximate: as for `gelu_mul`.

    Raises InvalidProblemError for a last dimension of odd size and another `approximate`, UnsupportedError for another
    dtype.
    """
    result: ArrayT = _geglu((x,), (approximate,))
    return result


def geglu_backward(dy: DataT, x: DataT, approximate: Approximate = "none") -> DataT:
    """The gradient of geglu, both halves written by one pass; dy: the gradient of the result. x: as geglu got it.

    Raises InvalidProblemError for shapes or dtypes that do not match and another `approximate`, UnsupportedError for
    another dtype.
    """
    result: DataT = _geglu_backward((dy, x), (approximate,))
    return result
