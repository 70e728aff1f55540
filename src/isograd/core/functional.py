"""What the functional APIs of all families share: arrays of any kind in, results of the same kind out.

    (x, indices), restore = functional.inputs("take_along_axis", x=x, indices=indices)
    device, dtype = arrays.describe(x, "take_along_axis", "x")
    plan = functional.plan(TakeAlongAxisPlan, TakeAlongAxisDescriptor(...), device)
    v = functional.empty(shape, dtype, x)
    return restore(functional.run(plan, x=x, indices=indices, v=v))

Inside an `Encoder` the plan is recorded instead, and what `run` returns is a promise of the result.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from isograd.core import arrays, encoder, registry
from isograd.core.checks import integer as integer
from isograd.core.descriptor import Descriptor
from isograd.core.plan import Plan
from isograd.errors import UnsupportedError
from isograd.runtime import memory
from isograd.runtime.fenv import default_environment

P = TypeVar("P", bound=Plan)


@functools.lru_cache(maxsize=4096)
def _selected(plan_type: Any, descriptor: Descriptor, device: str, preference: str | None, generation: int) -> Any:
    return plan_type.select(descriptor, device, preference)


def plan(plan_type: type[P], descriptor: Descriptor, device: str = "cpu", preference: str | None = None) -> P:
    """The plan for a descriptor, selected once. Its fields have to be hashable and plain: see `integer`."""
    key: Any = plan_type
    with default_environment():  # a cache compares numbers: with subnormals flushed they would equal zero
        selected: P = _selected(key, descriptor, device, preference, registry.generation())
    return selected


def tape_of(*values: Any) -> Any:
    """The module `isograd.tape` if one of the values is a tape variable, else None."""
    tape = sys.modules.get("isograd.tape")
    return tape if tape is not None and any(isinstance(v, tape.Variable) for v in values) else None


def inputs(operation: str, **given: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The inputs as NumPy arrays and tensors, and a function that turns a result into the first input's kind.

    Promised results of a recording are unwrapped, arrays with DLPack enter as NumPy arrays.
    """
    taken, restore = [], None
    for position, (name, value) in enumerate(given.items()):
        array = encoder.unwrapped(value)
        if not arrays.is_tensor(array):
            array, back = arrays.to_numpy(array, operation, name)
            if back is not None:
                encoder.refuse(operation, f"{name} is a {type(value).__name__}")
            restore = back if position == 0 else restore
        taken.append(array)
    return taken, restore if restore is not None else lambda result: result


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """An array of the kind and on the device of `like` that waits to be written; `dtype` is a name."""
    if not arrays.is_tensor(like):
        return np.empty(shape, arrays.numpy_dtype(dtype) if dtype == "bfloat16" else dtype)
    torch = sys.modules["torch"]
    return memory.with_huge_pages(torch.empty(shape, dtype=getattr(torch, dtype), device=like.device))


def empty_like(like: Any) -> Any:
    """The same of the shape, the dtype and the layout of `like`."""
    if type(like) is np.ndarray:
        return np.empty_like(like)
    with unguarded():
        return memory.with_huge_pages(sys.modules["torch"].empty_like(like))


def refuse_gradients(operation: str, arguments: Mapping[str, Any], where: str = "here; use isograd.torch,") -> None:
    """Raise UnsupportedError for a tensor that autograd follows: the result would silently lack its history."""
    torch = sys.modules.get("torch")
    if torch is not None:
        tensors = [name for name, a in arguments.items() if arrays.is_tensor(a) and a.requires_grad]
        if tensors and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{operation}: {tensors[0]} requires a gradient, which is not recorded {where} torch.no_grad() or "
                "detach()"
            )


def run(plan: Plan, **arguments: Any) -> Any:
    """Run a plan and return what it wrote, one array or a tuple of them; errors as of `refuse_gradients`."""
    refuse_gradients(plan.sku.op, arguments)
    plan.run(**arguments)
    written = [promised(plan.sku.op, arguments[name]) for name in plan.outputs]
    return written[0] if len(written) == 1 else tuple(written)


def promised(operation: str, result: Any) -> Any:
    """What a functional call returns for a result: a promise of it where the call was recorded."""
    return encoder.result(operation, result) if encoder.recordings and isinstance(result, np.ndarray) else result


# --- views of arrays of either kind ----------------------------------------------------------------------------------
def unguarded() -> AbstractContextManager[None]:
    """Let views of tensors be made that a recording has only promised yet."""
    recording = encoder.current() if encoder.recordings else None
    return nullcontext() if recording is None else recording.unguarded()


def expanded(array: Any, shape: tuple[int, ...]) -> Any:
    """The array seen in a shape that it broadcasts to, without a copy."""
    if array.shape == shape:
        return array
    if not arrays.is_tensor(array):
        return np.broadcast_to(array, shape)
    with unguarded():
        return array.expand(shape)


def permuted(array: Any, order: tuple[int, ...]) -> Any:
    """The array with its axes in another order, without a copy."""
    if not arrays.is_tensor(array):
        return array.transpose(order)
    with unguarded():
        return array.permute(order)


def reshaped(operation: str, argument: str, array: Any, shape: tuple[int, ...]) -> Any:
    """The array in another shape, copied if its strides allow no view; a recording may not copy and refuses that."""
    if isinstance(array, encoder.Pending):
        return promised(array.operation, reshaped(operation, argument, encoder.unwrapped(array), shape))
    if array.shape == shape:
        return array
    with unguarded():
        result = array.reshape(shape)
    same = arrays.placement(array)[0] == arrays.placement(result)[0]
    if not same and arrays.size_of(shape):
        encoder.refuse(operation, f"{argument} has strides that need a copy")
    return result
