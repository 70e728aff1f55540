"""sparsemax in torch's spelling."""

from torch import Tensor

from isograd.ops.sparsemax.operation import SPARSEMAX, SPARSEMAX_BACKWARD
from isograd.torch import bind

bind.operator(SPARSEMAX_BACKWARD)
_sparsemax = bind.function(bind.operator(SPARSEMAX))


def sparsemax(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    """The point of the simplex nearest to the input along `dim`; bits and errors as `isograd.sparsemax`.

    input: float16, bfloat16, float32 or float64. Differentiable twice (its second derivative is 0).
    """
    result: Tensor = _sparsemax((input,), (dim,))
    return result
