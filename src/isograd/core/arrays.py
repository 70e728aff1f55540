"""One view of the arrays that users bring.

Kernels on the CPU work on NumPy arrays, kernels on a GPU on torch tensors. Tensors on the CPU and anything else with
DLPack enter without a copy; tape variables have a module of their own. bfloat16 is `ml_dtypes.bfloat16`. torch is
looked up among the modules that are loaded already, never imported: without it nobody can hand over a tensor.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core import dlpack
from isograd.errors import DeviceMismatchError, InvalidProblemError, UnsupportedError
from isograd.numerics.reference import BFLOAT16
from isograd.numerics.storage import address, dtype_name, plain_array

# dtype.name is Python code and slower than all that a plan checks besides.
_ARRAY_TYPES = {np.dtype(name): name for name in ("float16", "float32", "float64")} | {BFLOAT16: "bfloat16"}
_INDEX_TYPES = {np.dtype(name): name for name in ("int32", "int64", "uint32")}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a storage type's name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def describe(array: Any, operation: str, argument: str, index: bool = False) -> tuple[str, str]:
    """(device, dtype name) of an array that a plan is handed; the device is "cpu", "cuda" or another of torch's types.

    index: whether it has to hold integers (int32, int64, uint32) and not floating-point numbers.

    Raises InvalidProblemError for anything that is neither a NumPy array nor a tensor with memory of its own, and
    UnsupportedError for another dtype or a tensor that is sparse, nested or quantized.
    """
    accepted = _INDEX_TYPES if index else _ARRAY_TYPES
    if type(array) is np.ndarray and (name := accepted.get(array.dtype)) is not None:
        return "cpu", name
    if not isinstance(array, np.ndarray):
        if is_tensor(array):
            return _describe_tensor(array, operation, argument, index)
        raise InvalidProblemError(
            f"{operation}: {argument} is {type(array).__name__}; expected a NumPy array or a torch tensor"
        )
    plain_array(operation, argument, array)
    return "cpu", index_name(array.dtype, operation, argument) if index else dtype_name(
        array.dtype, operation, argument
    )


def describe_mask(mask: Any, operation: str, argument: str) -> tuple[str, str]:
    """(device, "bool") of a boolean array that a plan is handed; errors as for `describe`."""
    if isinstance(mask, np.ndarray):
        device, dtype = "cpu", plain_array(operation, argument, mask).dtype.name
    elif is_tensor(mask):
        if mask.is_nested or mask.layout is not sys.modules["torch"].strided:
            raise UnsupportedError(f"{operation}: {argument} is no dense, strided tensor; accepted: such tensors")
        device, dtype = mask.device.type, str(mask.dtype).removeprefix("torch.")
    else:
        raise InvalidProblemError(
            f"{operation}: {argument} is {type(mask).__name__}; expected a NumPy array or a torch tensor"
        )
    if dtype != "bool":
        raise UnsupportedError(f"{operation}: {argument} has dtype {dtype}; accepted: bool")
    return device, dtype


def index_name(dtype: Any, operation: str, argument: str) -> str:
    """The name of an index type; UnsupportedError for any other dtype."""
    name = _INDEX_TYPES.get(dtype)
    if name is None:
        raise UnsupportedError(
            f"{operation}: {argument} has dtype {dtype}; accepted: {', '.join(_INDEX_TYPES.values())}"
        )
    return name


def to_numpy(x: Any, operation: str, argument: str) -> tuple[NDArray[Any], Callable[[NDArray[Any]], Any] | None]:
    """A NumPy view of an array, and the function that turns a result into the same kind of array."""
    if isinstance(x, np.ndarray):
        return plain_array(operation, argument, x), None
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        if x.__dlpack_device__()[0] != 1:
            raise DeviceMismatchError(
                f"{operation}: {argument} is a {type(x).__name__} outside the CPU's memory; accepted: arrays on the CPU"
            )
        space = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
        try:
            view = dlpack.taken(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidProblemError(
                f"{operation}: {argument} is a {type(x).__name__} that DLPack cannot hand over ({error})"
            ) from error
        return view, None if space is None else lambda result: space.from_dlpack(dlpack.given(result))
    raise InvalidProblemError(
        f"{operation}: {argument} is {type(x).__name__}; expected a NumPy array, a torch tensor, an array with DLPack "
        "or a tape variable"
    )


def copied(x: Any, operation: str, argument: str) -> NDArray[Any]:
    """A copy of an array for later use: the caller may overwrite the original meanwhile."""
    return np.array(to_numpy(x, operation, argument)[0])


def is_tensor(array: Any) -> bool:
    """Whether something is a torch tensor."""
    return type(array) is not np.ndarray and isinstance(array, getattr(sys.modules.get("torch"), "Tensor", ()))


@functools.cache
def _tensor_types(index: bool) -> dict[Any, str]:
    torch = sys.modules["torch"]
    return {getattr(torch, name): name for name in (_INDEX_TYPES if index else _ARRAY_TYPES).values()}


def tensor_dtype(tensor: Any, operation: str, argument: str, dtype: Any = None, index: bool = False) -> str:
    """The name of a tensor's storage type; UnsupportedError for any other, or for memory that is not strided.

    `dtype` is what the caller wants the tensor converted to first.
    """
    name = _tensor_types(index).get(tensor.dtype if dtype is None else dtype)
    if name is None:
        accepted = ", ".join(_tensor_types(index).values())
        given = f"{argument} has dtype {tensor.dtype}" if dtype is None else f"dtype is {dtype}"
        raise UnsupportedError(f"{operation}: {given}; accepted: {accepted}")
    if tensor.is_nested or tensor.layout is not sys.modules["torch"].strided:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise UnsupportedError(f"{operation}: {argument} is {kind}; accepted: dense, strided tensors")
    return name


def _describe_tensor(tensor: Any, operation: str, argument: str, index: bool) -> tuple[str, str]:
    name = tensor_dtype(tensor, operation, argument, index=index)
    if tensor.is_neg():
        raise InvalidProblemError(
            f"{operation}: {argument} is a view that torch negates when it is read; call resolve_neg() on it first"
        )
    device: str = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type
    if device == "meta":
        return device, name
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a wrapper: fake, distributed, or inside a transform
        pointer = 0
    if not pointer and tensor.numel():
        raise InvalidProblemError(
            f"{operation}: {argument} is a {type(tensor).__name__} without memory of its own; expected a plain tensor"
        )
    return device, name


def location(array: Any) -> str:
    """Where an array lies, for messages and comparisons: "cpu", "cuda:0"."""
    return "cpu" if isinstance(array, np.ndarray) else str(getattr(array, "device", "no device"))


def _same_views(operands: Sequence[Any]) -> list[tuple[Any, frozenset[str]]]:
    """Operands, each with those that it may be the same memory as, where shape and dtype are the same too."""
    kinds = {o.name: (o.shape, o.dtype) for o in operands}
    return [(o, frozenset(name for name in o.aliases if kinds.get(name) == kinds[o.name])) for o in operands]


def _reaches(start: int, stop: int, places: list[tuple[str, int, int]], aliases: frozenset[str]) -> bool:
    """Whether an output's memory is also that of an operand before it, which it may not be the same as."""
    for other, first, last in places:
        if start < last and first < stop and not (start == first and other in aliases):
            return True
    return False


def array_check(operands: Sequence[Any]) -> Callable[[Mapping[str, Any]], bool]:
    """As `tensor_check`, for NumPy arrays."""
    rows = [
        (o.name, o.shape, numpy_dtype(o.dtype), size_of(o.shape) * numpy_dtype(o.dtype).itemsize, o.output, aliases)
        for o, aliases in _same_views(operands)
    ]

    def check(arguments: Mapping[str, Any]) -> bool:
        places: list[tuple[str, int, int]] = []
        for name, shape, dtype, size, output, aliases in rows:
            array = arguments[name]
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return False
            flags = array.flags
            if not (flags.carray if output else flags.c_contiguous and flags.aligned):
                return False
            start = address(array)
            stop = start + size
            if output and _reaches(start, stop, places, aliases):
                return False
            places.append((name, start, stop))
        return True

    return check


def tensor_check(operands: Sequence[Any]) -> Callable[[Mapping[str, Any], str], bool]:
    """A function (arguments, device) that says whether all are contiguous tensors with nothing wrong about them.

    In a quarter of the time that finding out what is wrong takes; False says only that it has to be found out.
    `operands` are those of a plan, inputs before results.
    """
    torch = sys.modules["torch"]
    plain, strided = torch.Tensor, torch.strided
    rows = [
        (o.name, o.shape, getattr(torch, o.dtype), size_of(o.shape), o.output, aliases)
        for o, aliases in _same_views(operands)
    ]

    def check(arguments: Mapping[str, Any], device: str) -> bool:
        places: list[tuple[str, int, int]] = []
        index = None
        for name, shape, dtype, size, output, aliases in rows:
            tensor = arguments[name]
            if type(tensor) is not plain or tensor.dtype is not dtype or tensor.layout is not strided:
                return False
            if tensor.is_nested or tensor.is_neg() or tensor.shape != shape or not tensor.is_contiguous():
                return False
            if not (tensor.is_cuda if device == "cuda" else tensor.is_cpu and device == "cpu"):
                return False
            try:
                start, itemsize = tensor.data_ptr(), tensor.itemsize
            except RuntimeError:  # a wrapper, inside a transform
                return False
            stop = start + size * itemsize
            if not start or start % itemsize:
                return False
            if index is None:
                index = tensor.get_device()
            elif tensor.get_device() != index:
                return False
            if output and _reaches(start, stop, places, aliases):
                return False
            places.append((name, start, stop))
        return True

    return check


_NOWHERE = 64  # the address of an empty tensor: NumPy before 2.2 takes no array at address 0


class _Memory:
    """The memory of a tensor in NumPy's terms; an array made from it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, kind: str = "|V") -> None:
        itemsize = tensor.element_size()
        strides = None if tensor.is_contiguous() else tuple([stride * itemsize for stride in tensor.stride()])
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr() or _NOWHERE, False),
            "shape": tensor.shape,
            "strides": strides,
            "typestr": f"{kind}{itemsize}",
            "version": 3,
        }


_ORDER = "<" if sys.byteorder == "little" else ">"


def numpy_view(tensor: Any) -> NDArray[Any]:
    """The memory of a tensor on the CPU as a NumPy array, without a copy.

    `Tensor.numpy` would do but for bfloat16, which NumPy knows through ml_dtypes only, and for a lasting effect: it
    forbids torch to resize the tensor's storage ever after.
    """
    torch = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:
        return np.asarray(_Memory(tensor)).view(BFLOAT16)
    if tensor.dtype is torch.bool:
        return np.asarray(_Memory(tensor)).view(np.bool_)
    kind = "f" if tensor.is_floating_point() else "u" if tensor.dtype is torch.uint32 else "i"
    return np.asarray(_Memory(tensor, _ORDER + kind))


def _memory(array: Any) -> NDArray[Any]:
    """An array for questions about addresses alone; where the tensor lies on a GPU it must never be read."""
    return array if isinstance(array, np.ndarray) else np.asarray(_Memory(array))


def mark_written(array: Any) -> None:
    """Tell torch's autograd that a tensor has new contents, so that a backward that saved the old ones is refused."""
    if not isinstance(array, np.ndarray) and not array.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(array)


def size_of(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def is_aligned(array: Any) -> bool:
    """Whether the address and every stride are multiples of the element size."""
    if not isinstance(array, np.ndarray):  # the strides of tensors count elements
        return bool(array.data_ptr() % array.element_size() == 0)
    itemsize = array.itemsize
    if array.flags.c_contiguous and array.flags.aligned:
        return True
    return address(array) % itemsize == 0 and all(
        stride % itemsize == 0 or length < 2 for stride, length in zip(array.strides, array.shape, strict=True)
    )


def is_writeable(array: Any) -> bool:
    """Whether results may be stored into an array."""
    return array.flags.writeable if isinstance(array, np.ndarray) else True


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array share memory; decided exactly."""
    if not isinstance(array, np.ndarray):
        if array.is_contiguous():
            return False
        array = _memory(array)
    if array.flags.c_contiguous or array.size < 2:
        return False
    extent = array.itemsize
    dimensions = sorted((abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True))
    for stride, length in dimensions:
        if length > 1:
            if stride < extent:
                break
            extent += stride * (length - 1)
    else:
        return False
    # Interleaved strides: no simple rule decides, so look at the addresses.
    offsets = np.zeros(1, np.int64)
    for stride, length in dimensions:
        offsets = (offsets[:, None] + stride * np.arange(length, dtype=np.int64)).ravel()
    offsets.sort()
    return bool(np.any(np.diff(offsets) < array.itemsize))


def _disjoint(a: Any, b: Any) -> bool:
    """Whether two tensors obviously share no memory: one ends before the other starts, or starts before it.

    On an Apple GPU a storage's address is the handle of a buffer: distances mean something within one storage alone.
    """
    if a.device.type == "mps" and a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return True
    first, second = a.data_ptr(), b.data_ptr()
    if first > second:
        a, first, second = b, second, first
    if a.is_contiguous():
        return bool(first + a.nbytes <= second)
    last = sum((length - 1) * stride for length, stride in zip(a.shape, a.stride(), strict=True))
    return bool(first + (last + 1) * a.element_size() <= second)


def placement(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(address, shape, strides) of an array or tensor: equal for the same view of the same memory."""
    if isinstance(array, np.ndarray):
        return address(array), array.shape, array.strides
    return array.data_ptr(), tuple(array.shape), tuple([stride * array.element_size() for stride in array.stride()])


def same_view(a: Any, b: Any) -> bool:
    """Whether two arrays of one shape and dtype are the same memory in the same order."""
    a, b = _memory(a), _memory(b)
    return address(a) == address(b) and all(
        p == q or length < 2 for p, q, length in zip(a.strides, b.strides, a.shape, strict=True)
    )


def overlaps(a: Any, b: Any) -> bool:
    """Whether two arrays share an element's memory; interleaved views do not."""
    if is_tensor(a) and is_tensor(b) and _disjoint(a, b):
        return False
    return bool(np.shares_memory(_memory(a), _memory(b)))


def overlaps_partly(out: Any, array: Any) -> bool:
    """Whether two arrays share memory without being the same view; interleaved views do not overlap."""
    if not isinstance(out, np.ndarray) or not isinstance(array, np.ndarray):
        if is_tensor(out) and is_tensor(array) and _disjoint(out, array):
            return False
        out, array = _memory(out), _memory(array)
    if not np.may_share_memory(out, array):
        return False
    return not same_view(out, array) and np.shares_memory(out, array)


def byte_buffer(workspace: Any, operation: str) -> tuple[int, int]:
    """(bytes, address) of a workspace."""
    if is_tensor(workspace) and workspace.is_contiguous():
        return workspace.numel() * workspace.element_size(), workspace.data_ptr()
    if not isinstance(workspace, np.ndarray) or not workspace.flags.c_contiguous or not workspace.flags.writeable:
        raise InvalidProblemError(
            f"{operation}: workspace is {type(workspace).__name__}; expected a contiguous, writeable array or tensor"
        )
    return workspace.nbytes, address(workspace)
