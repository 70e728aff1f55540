"""layernorm in torch's spelling, and its derivatives beyond the first."""

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from isograd.ops.layernorm.operation import ADD_LAYERNORM, ADD_LAYERNORM_BACKWARD, LAYERNORM, LAYERNORM_BACKWARD
from isograd.torch import bind, norms


def _tangent(saved: norms.Named, settings: Any, tangents: norms.Named) -> tuple[Tensor, None, None]:
    return norms.tangent(saved, settings, tangents), None, None


bind.operator(LAYERNORM_BACKWARD, derivative=norms.second, tangent=norms.second_tangent)
_layernorm = bind.function(bind.operator(LAYERNORM, tangent=_tangent, autocast=("CUDA",)), "layer_norm")


def _added_tangent(saved: norms.Named, settings: Any, tangents: norms.Named) -> tuple[Tensor | None, ...]:
    return *norms.added_tangent(saved, settings, tangents), None, None


bind.operator(ADD_LAYERNORM_BACKWARD, derivative=norms.added_second, tangent=norms.added_second_tangent)
_added = bind.function(bind.operator(ADD_LAYERNORM, tangent=_added_tangent, autocast=("CUDA",)), "layer_norm")


@overload
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = ...,
) -> Tensor: ...
@overload
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """`torch.nn.functional.layer_norm`: rows of the last dimensions less their mean, over their standard deviation.

    input: float16, bfloat16, float32 or float64. normalized_shape: the sizes of those dimensions. weight, bias: of that
    shape and input's dtype. residual: of input's shape and dtype; with it comes `(result, sum)`, the sum of the two and
    its norm, in one pass and with the bits of two, in the gradients as well.

    Bits and bounds as for `isograd.layernorm`, those of the gradients of weight and bias for any number and order of
    rows. Differentiable twice. Under CUDA autocast narrow operands give float32, as with torch's own.

    Raises InvalidProblemError for sizes that are not input's last ones and a weight, bias or residual that does
    not fit, UnsupportedError for another dtype.
    """
    rows, along = norms.rows_of("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    if residual is not None:
        return norms.of_sum("layer_norm", _added, input, rows, residual, along, (-1, eps))
    y: Tensor = _layernorm((rows, *along), (-1, eps))[0]
    return y if rows is input else y.view(input.shape)
