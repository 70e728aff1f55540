"""rmsnorm in torch's spelling, and its derivatives beyond the first."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from isograd.ops.rmsnorm.operation import ADD_RMSNORM, ADD_RMSNORM_BACKWARD, RMSNORM, RMSNORM_BACKWARD
from isograd.torch import bind, norms
from isograd.torch.tensors import work_dtype


def _tangent(saved: norms.Named, settings: Any, tangents: norms.Named) -> tuple[Tensor, None]:
    return norms.tangent(saved, settings, tangents), None


bind.operator(RMSNORM_BACKWARD, derivative=norms.second, tangent=norms.second_tangent)
_rmsnorm = bind.function(bind.operator(RMSNORM, tangent=_tangent, autocast=("CUDA",)), "rms_norm")


def _added_tangent(saved: norms.Named, settings: Any, tangents: norms.Named) -> tuple[Tensor | None, ...]:
    return *norms.added_tangent(saved, settings, tangents), None


bind.operator(ADD_RMSNORM_BACKWARD, derivative=norms.added_second, tangent=norms.added_second_tangent)
_added = bind.function(bind.operator(ADD_RMSNORM, tangent=_added_tangent, autocast=("CUDA",)), "rms_norm")


@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: None = ...,
) -> Tensor: ...
@overload
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
) -> Any:
    """`torch.nn.functional.rms_norm`: `input / sqrt(mean(input^2) + eps) * weight` over the last dimensions.

    input: float16, bfloat16, float32 or float64. normalized_shape: the sizes of those dimensions. weight: of that
    shape and input's dtype. eps: 2^-23 (2^-52 for float64) where it is None, as in torch.

    residual: of input's shape and dtype; with it comes `(result, sum)`, the sum of the two and its norm, in one pass
    and with the bits of two, in the gradients as well.

    Bits and bounds as for `isograd.rmsnorm`, those of the weight's gradient for any number and order of rows.
    Differentiable twice. Under CUDA autocast narrow operands give float32, as with torch's own
    from 2.13 on.

    Raises InvalidProblemError for sizes that are not input's last ones and a weight or residual that does
    not fit, UnsupportedError for another dtype.
    """
    rows, along = norms.rows_of("rms_norm", input, normalized_shape, weight=weight)
    if eps is None:
        eps = torch.finfo(work_dtype(input.dtype)).eps
    if residual is not None:
        return norms.of_sum("rms_norm", _added, input, rows, residual, along, (-1, eps))
    y: Tensor = _rmsnorm((rows, *along), (-1, eps))[0]
    return y if rows is input else y.view(input.shape)
