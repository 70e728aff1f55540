"""Tables of many tensors for kernels that go through all of them at once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._compile import _disable_dynamo

from isograd.errors import RecordingError, UnsupportedError
from isograd.optimizers.chunks import COLUMNS, chunks
from isograd.optimizers.chunks import COUNT as COUNT
from isograd.torch.tensors import DTYPES, require_tensor

# A zero of the type that a kernel on the CPU sees for a dtype.
KERNEL_TYPES = {
    torch.float16: np.int16(0), torch.bfloat16: np.uint16(0), torch.float32: np.float32(0), torch.float64: np.float64(0)
}  # fmt: skip
_PLAIN = (Tensor, torch.nn.Parameter)
_WIDEST = 16  # bytes of an access


P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile call a function and not look into it; torch._dynamo is loaded only where it does."""
    outside: Callable[P, R] = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return outside(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


# --- which tensors ---------------------------------------------------------------------------------------------------
def is_distributed(tensor: Tensor) -> bool:
    """Whether this is a DTensor, whose module is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_plain(tensor: Any) -> bool:
    """Whether kernels take a tensor as it is; quick, as an optimizer has many."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in KERNEL_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (tensor.is_cuda or tensor.is_cpu)
    )


def local(operation: str, name: str, tensor: Any) -> Tensor:
    """The memory behind a tensor, of a DTensor what this rank holds; an error for what no kernel takes."""
    if is_plain(tensor):
        return tensor  # type: ignore[no-any-return]
    require_tensor(operation, tensor, name)
    held: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    if held.layout is not torch.strided or held.is_nested:
        kind = "nested" if held.is_nested else str(held.layout).removeprefix("torch.")
        raise UnsupportedError(f"{operation}: {name} is {kind}; accepted: dense tensors")
    if held.dtype not in DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        given = str(held.dtype).removeprefix("torch.")
        raise UnsupportedError(f"{operation}: {name} has dtype {given}; accepted: {accepted}")
    if hasattr(type(held), "__tensor_flatten__"):
        raise UnsupportedError(
            f"{operation}: {name} is a {type(held).__name__}; accepted: plain tensors and DTensors of them"
        )
    if not (held.is_cpu or held.is_cuda):
        raise UnsupportedError(f"{operation}: {name} is on {held.device}; accepted: cpu, cuda")
    return held


def placements(tensor: Tensor) -> Any:
    """Where the parts of a DTensor are; None for any other tensor."""
    return getattr(tensor, "placements", None) if is_distributed(tensor) else None


def _fills_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are neighbours in memory, in whatever order, and aligned to their size."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return tensor.data_ptr() % tensor.element_size() == 0


def alike(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
    """The tensors in one layout that fills memory, and (tensor, copy) of those that are not in it by themselves."""
    given = [t for t in tensors if t is not None]
    if all(t.is_contiguous() and t.data_ptr() % t.element_size() == 0 for t in given):
        return list(tensors), []
    first = given[0]
    if all(t.stride() == first.stride() or first.dim() == 0 for t in given) and all(map(_fills_memory, given)):
        return list(tensors), []
    moved = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t) for t in tensors]
    return moved, [(t, copy) for t, copy in zip(tensors, moved, strict=True) if t is not None and copy is not None]


# --- tables ----------------------------------------------------------------------------------------------------------
Integers = NDArray[np.int64]
Row = tuple[Sequence[Any], Tensor | None]  # up to five tensors of one layout, the first there, and the count of steps


def table_of(rows: Sequence[Row]) -> Integers:
    """A row a tensor: addresses, number of elements, address of the count of steps."""
    table = []
    for tensors, step in rows:
        table += [0 if t is None else t.data_ptr() for t in tensors]
        table += (0,) * (COUNT - len(tensors))
        table += tensors[0].numel(), 0 if step is None else step.data_ptr()
    return np.array(table, np.int64).reshape(-1, COLUMNS)


def counts_of(table: Integers) -> Integers:
    """The numbers of elements."""
    return np.asarray(table[:, COUNT])


def by_alignment(table: Integers) -> list[tuple[bool, Integers]]:
    """Numbers of elements of the tensors that may be read in the widest accesses, then of the others; else 0."""
    aligned = (table[:, :COUNT] % _WIDEST == 0).all(axis=1)
    parts = [(flag, np.where(aligned == flag, table[:, COUNT], 0)) for flag in (True, False)]
    return [(flag, counts) for flag, counts in parts if counts.any()]


# Memory that a graph's copies read at each replay: allocated beforehand, as nothing can be during a capture, and never
# freed, as nobody knows how long a graph lives.
_reserve = torch.empty(0, dtype=torch.int64)
_captured: list[Any] = []


def upload(array: Integers, device: torch.device) -> Tensor:
    """Integers in a device's memory, without waiting, also while a graph is captured."""
    global _reserve
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    if not capturing(device):
        if _reserve.numel() < 8 * host.numel():
            _reserve = torch.empty(max(8 * host.numel(), 1 << 16), dtype=torch.int64, pin_memory=True)
        return host.pin_memory().to(device, non_blocking=True)
    if _reserve.numel() < host.numel():
        raise RecordingError("a first step of an optimizer, or a first call of clip_grad_norm_, precedes a capture")
    pinned, _reserve = _reserve[: host.numel()], _reserve[host.numel() :]
    on_device = torch.empty(host.shape, dtype=host.dtype, device=device)
    on_device.copy_(pinned.view(host.shape).copy_(host), non_blocking=True)
    keep_for_graph(pinned, on_device)
    return on_device


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured."""
    if device.type == "cpu":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def keep_for_graph(*tensors: Tensor) -> None:
    """Keep tensors for the graph that is being captured, if one is."""
    if capturing(tensors[-1].device):
        _captured.append(tensors)


_places: dict[Any, Tensor] = {}


def places(counts: Integers, length: int, device: torch.device) -> Tensor:
    """`chunks` on a device; kept, since tensors have the same sizes in every step."""
    key = counts.tobytes(), length, device
    if (found := _places.get(key)) is None:
        found = upload(chunks(counts, length), device)
        if not capturing(device):  # what a graph copies is there when it is replayed, not before
            if len(_places) >= 64:
                del _places[next(iter(_places))]
            _places[key] = found
    keep_for_graph(found)
    return found
