"""Order-free matrix products and linear layers in torch's spelling."""

from typing import Literal

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.torch.indexing import enter
from isograd.torch.ops_matmul import ADD_TO_ROWS, MATMUL
from isograd.torch.tensors import require_dense, require_device, require_same_dtype

Precision = Literal["int16", "wide"]


def matmul(input: Tensor, other: Tensor, *, precision: Precision | None = None) -> Tensor:  # noqa: A002
    """`torch.matmul` in no order: `[..., M, K] @ [..., K, N]`, broadcast batches, a 1-D operand a row or a column.

    input, other: of one dtype, any strides. precision: "int16" rounds rows of input and columns of other to 16-bit
    integers, whose product is exact; the default of float16 and bfloat16, and float32 may have it. "wide" keeps some 50
    bits of a row (float64: 67) at many times the cost; the default of float32 and float64. "int16" has the same bits on
    the CPU and on CUDA devices, "wide" is for the CPU.

    Bits as of `isograd.matmul`: neither the order of K, zeros, threads nor any split of M, N and the batch changes one.
    The gradients are such products of the same precision; where an operand is broadcast the batch joins their
    contracted axis. Differentiable any number of times, in reverse and in forward mode. Autocast leaves the dtypes.

    Raises InvalidProblemError for shapes and dtypes that do not match and another precision, UnsupportedError for other
    dtypes, for int16 with float64 and for wide on a GPU, DeviceMismatchError for two devices.
    """
    enter("matmul")
    for name, tensor in (("input", input), ("other", other)):
        require_dense("matmul", tensor, name)
        if not tensor.dim():
            raise InvalidProblemError(f"matmul: {name} is a scalar; expected at least one dimension")
    left = input.unsqueeze(0) if input.dim() == 1 else input
    right = other.unsqueeze(1) if other.dim() == 1 else other
    found: Tensor = MATMUL(left, right, checked_precision("matmul", precision, input))
    if other.dim() == 1:
        found = found.squeeze(-1)
    return found.squeeze(-2 if other.dim() > 1 else -1) if input.dim() == 1 else found


def linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    precision: Precision | None = None,
) -> Tensor:
    """`torch.nn.functional.linear`, `input @ weight.T + bias`, by order-free products.

    input: [..., features]. weight: [outputs, features], bias: [outputs], both of input's dtype. precision, devices: as
    for `matmul`.

    In "int16" the weight's balance (rule 10 of `docs/arithmetic.md`) measures an activation by what it can do to the
    result, so outlier channels that the weight damps cost nothing; input's gradient is balanced by the weight too, and
    the weight's by the tokens' scales in both operands. A row of the result depends on its row of input and on the
    whole weight; no split of the tokens changes a bit of it. The bias is added to the rounded product, and its gradient
    is the sum over all rows by rule 4.

    Differentiable any number of times. Raises as `matmul`.
    """
    enter("linear")
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if tensor is not None or name != "bias":
            require_dense("linear", tensor, name)
    if not input.dim() or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise InvalidProblemError(
            f"linear: input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}; expected [..., features] "
            "and [outputs, features]"
        )
    require_device("linear", input=input, weight=weight, bias=bias)
    require_same_dtype("linear", weight, "weight", input, "input")
    if bias is not None:
        require_same_dtype("linear", bias, "bias", input, "input")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidProblemError(f"linear: bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    found: Tensor = MATMUL(rows, weight.t(), checked_precision("linear", precision, input), "other")
    if bias is not None:
        found = ADD_TO_ROWS(found, bias)
    return found.reshape(*input.shape[:-1], weight.shape[0])


def checked_precision(operation: str, precision: str | None, input: Tensor) -> str:  # noqa: A002
    """The operator's word for a precision; raises for another, and for one that does not serve input's dtype."""
    if precision not in (None, "int16", "wide"):
        raise InvalidProblemError(f"{operation}: precision is {precision!r}; accepted: int16, wide, None")
    if precision == "int16" and input.dtype is torch.float64:
        raise UnsupportedError(f"{operation}: precision is 'int16' for float64; accepted for float64: wide")
    return precision or ""
