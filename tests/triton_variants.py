"""What launches would be compiled anew, without a GPU: Triton's specialisation of their arguments."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from isograd.devices import triton_launcher

Variants = dict[str, set[Any]]


def _specialised(value: Any, free: bool) -> Any:
    """What the compiler distinguishes in an argument that is no constexpr."""
    if isinstance(value, tuple):
        return tuple(_specialised(v, free) for v in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if free:
        return width
    return 1 if value == 1 else (width, value % 16 == 0)


def _variant(kernel: Any, tensors: Sequence[Any], values: Sequence[Any], options: dict[str, Any]) -> Any:
    names = kernel.arg_names
    assert len(names) == len(tensors) + len(values), kernel.fn.__name__
    found: list[Any] = [(str(getattr(t, "dtype", None)), t.data_ptr() % 16 == 0) for t in tensors]
    for parameter, value in zip(kernel.params[len(tensors) :], values, strict=True):
        found.append(value if parameter.is_constexpr else _specialised(value, parameter.do_not_specialize))
    return tuple(map(str, found)), tuple(sorted(options.items()))


@contextlib.contextmanager
def watched(capability: int = 90, multiprocessors: int = 132) -> Iterator[Variants]:
    """Collect the variants of what is launched in the block, on tensors of the CPU, and launch nothing."""
    variants: Variants = {}

    def note(kernel: Any, tensors: Sequence[Any], values: Sequence[Any], options: dict[str, Any]) -> None:
        variants.setdefault(kernel.fn.__name__, set()).add(_variant(kernel, tensors, values, options))

    def call(self: Any, *tensors: Any, numbers: tuple[int, ...] = ()) -> None:
        tail = self._specification.tail
        note(self._kernel, tensors, (*numbers, *tail), self._specification.options)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (triton_launcher.Launcher, "__call__", call),
            (triton_launcher, "_capability", lambda index: capability),
            (triton_launcher, "_processors", lambda index: multiprocessors),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield variants


def differing(found: set[Any]) -> list[Any]:
    """The places where variants of a kernel differ, with what stands there."""
    columns = zip(*[(*arguments, *options) for arguments, options in found], strict=True)
    return [(i, sorted(map(str, set(column)))) for i, column in enumerate(columns) if len(set(column)) > 1]


def launch(kernel: Any, descriptor: Any) -> None:
    """Let a GPU's kernel launch for a descriptor, on the CPU's memory."""
    checked = descriptor.validated()
    operands = {o.name: torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in checked.operands()}
    kernel.launch(checked, operands, None, None)
