"""What every operator asks of its tensors, and how plans run on them."""

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isograd.core import arrays, registry
from isograd.core.checks import DTYPES as DTYPE_NAMES
from isograd.core.checks import INDEX_DTYPES as INDEX_DTYPE_NAMES
from isograd.core.plan import Plan
from isograd.errors import DeviceMismatchError, InvalidProblemError, UnsupportedError
from isograd.runtime import launches, memory
from isograd.torch import sharding

DTYPES = tuple([getattr(torch, name) for name in DTYPE_NAMES])
INDEX_DTYPES = tuple([getattr(torch, name) for name in INDEX_DTYPE_NAMES])
Shape = tuple[int, ...] | torch.Size
# What descriptors call a dtype.
NAMES = {getattr(torch, name): name for name in (*DTYPE_NAMES, *INDEX_DTYPE_NAMES)}


# --- what users bring: any object ------------------------------------------------------------------------------------
def require_tensor(operation: str, tensor: Any, name: str) -> None:
    """Raise unless this is a tensor."""
    if not isinstance(tensor, Tensor):
        raise InvalidProblemError(f"{operation}: {name} is {type(tensor).__name__}; expected a torch tensor")
    if not isinstance(tensor, torch.nn.Parameter):
        sharding.register()  # perhaps a DTensor


def require_dense(operation: str, tensor: Any, name: str, dtype: torch.dtype | None = None) -> None:
    """Raise unless this is a dense tensor of a storage type, or one that is converted to such a `dtype` first."""
    if type(tensor) is not Tensor:
        require_tensor(operation, tensor, name)
    if (
        (tensor.dtype if dtype is None else dtype) not in DTYPES
        or tensor.layout is not torch.strided
        or tensor.is_nested
    ):
        arrays.tensor_dtype(tensor, operation, name, dtype)


_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)


def checked_index(operation: str, tensor: Any, name: str) -> Tensor:
    """A dense tensor of an index type; shorter integers are converted."""
    if type(tensor) is not Tensor:
        require_tensor(operation, tensor, name)
    if tensor.dtype in _SMALL_INTEGERS:
        tensor = tensor.to(torch.int64)
    if tensor.dtype not in INDEX_DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        arrays.tensor_dtype(tensor, operation, name, index=True)
    return tensor  # type: ignore[no-any-return]


def integer(operation: str, name: str, value: Any) -> int:
    """An argument as an int; InvalidProblemError for anything else, and beyond the 64 bits that operators take."""
    number: int = value
    if type(value) is not int:
        try:
            number = operator.index(value)
        except TypeError as error:
            raise InvalidProblemError(f"{operation}: {name} is {value!r}; expected an integer") from error
    if not -(1 << 63) <= number < 1 << 63:
        raise InvalidProblemError(f"{operation}: {name} is {number}; accepted: integers of 64 bits")
    return number


def refuse(operation: str, default: bool | None, **given: Any) -> None:
    """Raise for the first of torch's arguments that is not what it is by default: no operator here serves it."""
    for name, value in given.items():
        if value is not default and (default is None or value):
            raise UnsupportedError(f"{operation}: {name} is {value!r}; accepted: {default}")


# --- what operators get: tensors -------------------------------------------------------------------------------------


def normalized_dim(operation: str, dim: int, shape: torch.Size, name: str = "dim") -> int:
    """A dimension counted from the front; as in torch, a tensor without dimensions takes 0 and -1."""
    rank = max(len(shape), 1)
    if not -rank <= dim < rank:
        raise InvalidProblemError(f"{operation}: {name} is {dim}; shape {tuple(shape)} accepts {-rank} to {rank - 1}")
    return dim % rank


def holds(condition: Any) -> bool:
    """Whether a condition on sizes holds; False for one that only the data decide, which the call that runs checks."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def require_device(operation: str, **tensors: Tensor | None) -> None:
    """Raise unless the tensors are on one device."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        places = ", ".join(f"{name} is on {device}" for name, device in given.items())
        raise DeviceMismatchError(f"{operation}: {places}; expected one device")


def require_count(operation: str, count: Tensor | None, device: torch.device) -> None:
    """Raise unless this is None or one number that a mean on the device can be divided by without waiting."""
    if count is None:
        return
    if count.dim() or count.is_complex() or count.dtype is torch.bool or count.requires_grad:
        raise InvalidProblemError(
            f"{operation}: count has shape {tuple(count.shape)} and dtype {count.dtype}"
            f"{' and requires a gradient' if count.requires_grad else ''}; expected a number, or a tensor of one "
            "without dimensions and gradient"
        )
    if not count.is_cpu and count.device != device:
        raise DeviceMismatchError(
            f"{operation}: count is on {count.device} and the operands on {device}; expected the same or the CPU"
        )


def require_storage(operation: str, tensor: Tensor, name: str) -> None:
    """Raise unless a tensor, perhaps a fake one, has a storage type."""
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(f"{operation}: {name} has dtype {tensor.dtype}; accepted: {', '.join(DTYPE_NAMES)}")


def require_index(operation: str, tensor: Tensor, name: str) -> None:
    """Raise unless a tensor, perhaps a fake one, has an index type."""
    if tensor.dtype not in INDEX_DTYPES:
        raise UnsupportedError(
            f"{operation}: {name} has dtype {tensor.dtype}; accepted: {', '.join(INDEX_DTYPE_NAMES)}"
        )


def require_same_dtype(operation: str, tensor: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Raise if two tensors differ in dtype."""
    if tensor.dtype is not other.dtype:
        raise InvalidProblemError(
            f"{operation}: {name} has dtype {tensor.dtype} and {other_name} {other.dtype}; expected the same"
        )


def empty(shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor that waits to be written, of the dtype (unless given) and on the device of another."""
    tensor = torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
    return memory.with_huge_pages(tensor) if type(tensor) is Tensor else tensor  # a fake one has no memory


class Described(NamedTuple):
    """What stands for a tensor of which no element is read."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)


def like(tensor: Tensor) -> Described:
    """The description of a tensor."""
    return Described(tensor.shape, tensor.dtype, tensor.device)


def zeros_or(tangent: Tensor | None, described: Described) -> Tensor:
    """A tangent, or the zeros that None stands for."""
    shape, dtype, device = described
    return torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent


def usable(operation: str, name: str, tensor: Tensor) -> Tensor:
    """A tensor that kernels take: dense, of a storage type, aligned to its elements, with a dimension."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        arrays.tensor_dtype(tensor, operation, name)
    if tensor.data_ptr() % tensor.element_size():  # of a buffer that another library filled
        tensor = tensor.clone()
    return tensor if tensor.dim() else tensor.reshape(1)


def usable_index(operation: str, name: str, tensor: Tensor) -> Tensor:
    """The same for a tensor of indices."""
    if tensor.dtype not in INDEX_DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        arrays.tensor_dtype(tensor, operation, name, index=True)
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.clone()
    return tensor if tensor.dim() else tensor.reshape(1)


@functools.lru_cache(maxsize=4096)
def _selected(plan_type: Any, device: str, preference: str | None, generation: int, *fields: Any) -> Plan:
    plan: Plan = plan_type.select(plan_type.descriptor_type(*fields), device, preference)
    return plan


def run(
    plan_type: Any, device: torch.device, fields: tuple[Any, ...], preference: str | None = None, **operands: Tensor
) -> None:
    """Run the plan for a descriptor's fields on operands that were made for it: nothing is left to check."""
    launch(_selected(plan_type, device.type, preference, registry.generation(), *fields), **operands)


def launch(plan: Plan, **operands: Tensor) -> None:
    """Run a plan on operands that were made for it: nothing is left to check."""
    if (plans := launches.plans()) is not None:
        plans.append(plan)
    if plan.device == "cpu":
        views = {name: arrays.numpy_view(tensor) for name, tensor in operands.items()}
        plan.kernel.launch(plan.descriptor, views, None, None)
    else:
        launches.running(plan.kernel)
        plan.kernel.launch(plan.descriptor, operands, None, None)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that kernels compute a storage type in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the type that kernels compute in."""
    return [t if t.dtype is torch.float64 else t.float() for t in tensors]


def or_zeros(tangent: Tensor | None, like: Tensor) -> Tensor:
    """A tangent, zeros where there is none."""
    return torch.zeros_like(like) if tangent is None else tangent
