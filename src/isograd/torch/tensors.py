"""What every operator asks of its tensors, and how plans run on them."""

import torch
from torch import Tensor

from isograd import arrays
from isograd.errors import DeviceMismatchError, InvalidProblemError
from isograd.plan import Plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def normalized_dim(operation: str, dim: int, shape: torch.Size, name: str = "dim") -> int:
    """A dimension counted from the front; as in torch, a tensor without dimensions takes 0 and -1."""
    rank = max(len(shape), 1)
    if not -rank <= dim < rank:
        raise InvalidProblemError(f"{operation}: {name} is {dim}; shape {tuple(shape)} accepts {-rank} to {rank - 1}")
    return dim % rank


def require_same(operation: str, dy: Tensor, y: Tensor) -> None:
    """Raise if a gradient and a result differ in device, dtype or shape."""
    if dy.device != y.device:
        raise DeviceMismatchError(f"{operation}: dy is on {dy.device} and y on {y.device}; expected one device")
    if dy.dtype is not y.dtype:
        raise InvalidProblemError(f"{operation}: dy has dtype {dy.dtype} and y {y.dtype}; expected the same")
    if dy.shape != y.shape:
        raise InvalidProblemError(
            f"{operation}: dy has shape {tuple(dy.shape)} and y {tuple(y.shape)}; expected the same"
        )


def usable(operation: str, name: str, tensor: Tensor) -> Tensor:
    """A tensor that kernels take: dense, of a storage type, aligned to its elements, with a dimension."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        arrays.tensor_dtype(tensor, operation, name)
    if tensor.data_ptr() % tensor.element_size():  # of a buffer that another library filled
        tensor = tensor.clone()
    return tensor if tensor.dim() else tensor.reshape(1)


def launch(plan: Plan, **operands: Tensor) -> None:
    """Run a plan on operands that were made for it: nothing is left to check."""
    if plan.device == "cpu":
        views = {name: arrays.numpy_view(tensor) for name, tensor in operands.items()}
        plan.kernel.launch(plan.descriptor, views, None, None)
    else:
        plan.kernel.launch(plan.descriptor, operands, None, None)


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the type that kernels compute in."""
    return [t if t.dtype is torch.float64 else t.float() for t in tensors]
