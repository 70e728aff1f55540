"""torch's functions that multiply matrices, by the order-free products of 16-bit integers (rule 10).

Signatures and dtypes are torch's, under autocast too. What is served raises no error of torch's; for the rest there is
an error of isograd's, and whoever replaces a function calls torch's then.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.torch import grouped, losses, products
from isograd.torch.broadcasting import add, broadcast_shape, expanded
from isograd.torch.tensors import require_device, require_same_dtype, require_tensor

_PRECISION: Final = "int16"
# What autocast leaves in its dtype, by devices.
_NOT_CAST: Final = {"": (), "cpu": ("dot", "mv", "addmv"), "cuda": ("dot",)}


def _cast(name: str, *tensors: Any) -> list[Any]:
    """The operands in the dtype that torch's own would multiply; None stays."""
    for tensor in tensors:
        if tensor is not None:
            require_tensor(name, tensor, "an operand")
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or name in _NOT_CAST.get(device, _NOT_CAST[""]):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    narrow = [t is not None and t.is_floating_point() and t.dtype is not torch.float64 for t in tensors]
    return [t.to(dtype) if cast else t for t, cast in zip(tensors, narrow, strict=True)]


def _require_dims(name: str, *operands: tuple[Tensor, int]) -> None:
    for tensor, dims in operands:
        if tensor.dim() != dims:
            raise InvalidProblemError(f"{name}: an operand has {tensor.dim()} dimensions; expected {dims}")


def _multiplied(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """The product of operands that are cast already.

    In one of a single term nothing is added up: it is a multiplication, rounded once, and its gradients are sums by
    rule 4. Angles of positions are made so, which 16 bits would spoil.
    """
    outer = input.dim() > 1 and other.dim() > 1 and input.shape[-1] == 1 and other.shape[-2] == 1
    if not outer or input.dtype is not torch.float32 or other.dtype is not torch.float32:
        return products.matmul(input, other, precision=_PRECISION)
    require_device("matmul", input=input, other=other)
    return _times("matmul", input, other) + 0.0  # a sum that is zero is +0


def _times(name: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of elements, with order-free gradients where an operand is broadcast."""
    require_same_dtype(name, b, "the second operand", a, "the first")
    shape = broadcast_shape(a.shape, b.shape)
    if shape is None:
        raise InvalidProblemError(f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not broadcast")
    return expanded(a, shape) * expanded(b, shape)


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002
    """`torch.matmul`."""
    return _multiplied(*_cast("matmul", input, other))


def rmatmul(self: Tensor, other: Tensor) -> Tensor:
    """`other @ self`."""
    return matmul(other, self)


def mm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    """`torch.mm`."""
    _require_dims("mm", (input, 2), (mat2, 2))
    return matmul(input, mat2)


def mv(input: Tensor, vec: Tensor) -> Tensor:  # noqa: A002
    """`torch.mv`."""
    input, vec = _cast("mv", input, vec)  # noqa: A001
    _require_dims("mv", (input, 2), (vec, 1))
    return _multiplied(input, vec)


def dot(input: Tensor, tensor: Tensor) -> Tensor:  # noqa: A002
    """`torch.dot`."""
    input, tensor = _cast("dot", input, tensor)  # noqa: A001
    _require_dims("dot", (input, 1), (tensor, 1))
    return _multiplied(input, tensor)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:  # noqa: A002
    """`torch.bmm`."""
    _require_dims("bmm", (input, 3), (mat2, 3))
    if input.shape[0] != mat2.shape[0]:
        raise InvalidProblemError(f"bmm: batches of {input.shape[0]} and {mat2.shape[0]}; expected the same")
    return matmul(input, mat2)


def _plus(name: str, input: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:  # noqa: A002
    """The sum `beta * input + alpha * product` with the order-free gradient of a broadcast input."""
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return product
    (input,) = _cast(name, input)  # noqa: A001
    require_same_dtype(name, input, "input", product, "the product")
    if broadcast_shape(input.shape, product.shape) != tuple(product.shape):
        raise InvalidProblemError(f"{name}: input has shape {tuple(input.shape)}; the product {tuple(product.shape)}")
    return add(product, input if beta == 1 else beta * input)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:  # noqa: A002
    """`torch.addmm`, the product rounded before the addition."""
    return _plus("addmm", input, mm(mat1, mat2), beta, alpha)


def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:  # noqa: A002
    """`torch.addmv`, the product rounded before the addition."""
    return _plus("addmv", input, mv(mat, vec), beta, alpha)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:  # noqa: A002
    """`torch.baddbmm`, the product rounded before the addition."""
    return _plus("baddbmm", input, bmm(batch1, batch2), beta, alpha)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.nn.functional.linear`."""
    input, weight, bias = _cast("linear", input, weight, bias)  # noqa: A001
    return products.linear(input, weight, bias, precision=_PRECISION)


def linear_cross_entropy(
    input: Tensor,  # noqa: A002
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Any = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy`; whatever the options, a chunk of 16-bit logits is held."""
    name = "linear_cross_entropy"
    hidden, matrix, bias = _cast(name, input, linear_weight, linear_bias)
    require_tensor(name, target, "target")
    if target.is_floating_point() or matrix.dim() != 2 or hidden.dim() > 2:
        raise UnsupportedError(f"{name}: accepted: class indices, rows, and a weight of two dimensions")
    more: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": reduction}
    more["ignore_index"] = -100 if ignore_index is None else ignore_index
    if hidden.dtype not in (torch.float16, torch.bfloat16):
        return losses.cross_entropy(linear(hidden, matrix, bias), target, weight, **more)
    more |= {"class_weight": weight, "preference": "order_free"}
    loss = losses.linear_cross_entropy(hidden, matrix, target, bias, **more)
    return loss if torch.is_autocast_enabled(hidden.device.type) else loss.to(hidden.dtype)


def grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor | list[int]) -> Tensor:  # noqa: A002
    """`linear` of each expert on its rows."""
    input, weight = _cast("grouped_linear", input, weight)  # noqa: A001
    return grouped.grouped_linear(input, weight, offsets, precision=_PRECISION)


def _contracted(a: Tensor, left: str, b: Tensor, right: str, result: str) -> Tensor:
    """Two tensors whose axes have letters, summed over those that only they have."""
    sizes: dict[str, int] = {}
    for letters, tensor in ((left, a), (right, b)):
        if len(letters) != tensor.dim() or len(set(letters)) != len(letters):
            raise UnsupportedError("einsum: a letter occurs twice in an operand, or axes have none; accepted: one each")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise UnsupportedError(f"einsum: {letter} has sizes {sizes[letter]} and {size}; accepted: one size")
    if len(set(result)) != len(result) or not set(result) <= set(sizes):
        raise InvalidProblemError(f"einsum: the result is {result!r}; expected letters of the operands, once each")
    batch = [c for c in left if c in right and c in result]
    summed = [c for c in left if c in right and c not in result]
    rows, columns = ([c for c in of if c not in other] for of, other in ((left, right), (right, left)))
    if alone := [c for c in rows + columns if c not in result]:
        raise UnsupportedError(f"einsum: {alone[0]} is summed over one operand alone; accepted: letters of both")

    def matrices(tensor: Tensor, letters: str, *groups: list[str]) -> Tensor:
        moved = tensor.permute([letters.index(c) for group in groups for c in group])
        return moved.reshape([math.prod([sizes[c] for c in group]) for group in groups])

    order = [*batch, *rows, *columns]
    if not summed:  # torch multiplies elements, which autocast leaves in their dtype
        left_axes = matrices(a, left, *([c] for c in (*batch, *rows)))
        right_axes = matrices(b, right, *([c] for c in (*batch, *columns)))
        places = [*(slice(None),) * len(batch), *(None,) * len(rows)]
        found = _times("einsum", left_axes[(..., *(None,) * len(columns))], right_axes[tuple(places)])
        return found.permute([order.index(c) for c in result])
    product = matmul(matrices(a, left, batch, rows, summed), matrices(b, right, batch, summed, columns))
    return product.reshape([sizes[c] for c in order]).permute([order.index(c) for c in result])


def einsum(equation: str, *operands: Any) -> Tensor:
    """`torch.einsum` of two operands with letters for all axes."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        raise UnsupportedError("einsum: accepted: an equation of two operands without an ellipsis")
    terms, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = terms.partition(",")
    if not comma or "," in right:
        raise InvalidProblemError(f"einsum: the equation is {equation!r}; expected one term for each of two operands")
    if not arrow:
        result = "".join(sorted(set(left) ^ set(right)))
    for operand in operands:
        require_tensor("einsum", operand, "an operand")
    return _contracted(operands[0], left, operands[1], right, result)
