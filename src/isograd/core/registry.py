"""Which kernel serves an operation on a device for a dtype, and how to add one.

    class MyKernel(isograd.Kernel): ...
    isograd.register_kernel("softmax", "cpu", "float32", MyKernel(), priority=10)

The kernel with the highest priority that does not reject a descriptor is chosen; the library's own have priority 0.
`prefer` puts kernels of certain names before all others, for good or for a block.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from typing import Any, NamedTuple

from isograd.core.checks import DTYPES, INDEX_DTYPES
from isograd.core.descriptor import Descriptor, Kernel
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.runtime.blocks import BlockEnd


class Entry(NamedTuple):
    """One line of the registry."""

    operation: str
    device: str
    dtype: str
    kernel: Kernel
    priority: int


# A family registers its kernels when its plans module is imported.
_FAMILIES = (
    "isograd.gather.plans",
    "isograd.gather.cuda",
    "isograd.gather.metal",
    "isograd.gather.mlx",
    "isograd.losses.cross_entropy_plans",
    "isograd.losses.linear_cpu",
    "isograd.losses.cross_entropy_cuda",
    "isograd.ops",
    "isograd.flash_attention.plans",
    "isograd.flash_attention.cuda",
    "isograd.flash_attention.metal",
    "isograd.flash_attention.mlx",
    "isograd.products.plans",
)
# By operation, device, dtype and name: the entry and its place in the order of registration.
_entries: dict[tuple[str, str, str, str], tuple[int, Entry]] = {}
_numbers = itertools.count()
# Held over no call: a signal handler or a finalizer that comes here too would wait for its own thread.
_lock = threading.Lock()
_states = itertools.count(1)
_generation = 0
_preferred: tuple[str, ...] = ()
# The numbers of what has been preferred since a kernel was registered last: a block of `prefer` that comes again finds
# the plans that it had.
_generations: dict[tuple[str, ...], int] = {(): 0}


def _renumber(registered: bool) -> None:
    """Give the registry's state its number, under the lock."""
    global _generation
    if registered:
        _generations.clear()
    _generation = _generations.setdefault(_preferred, next(_states))


def register_kernel(operation: str, device: str, dtype: str, kernel: Kernel, *, priority: int = 0) -> None:
    """Let `kernel` serve an operation on a device for a dtype; the same name registered again replaces the old one.

    operation: of the library or of a descriptor of your own. device: a type without a number, "cuda". Raises
    InvalidProblemError for names that are no identifiers, another dtype, a priority that is no integer, and for what is
    no kernel: an instance of `Kernel` with its methods, a name and a backend.
    """
    if not isinstance(kernel, Kernel):
        raise InvalidProblemError(f"register_kernel: kernel is {type(kernel).__name__}; expected an isograd.Kernel")
    for argument, value in (("operation", operation), ("device", device)):
        if not isinstance(value, str) or not value.isidentifier():
            raise InvalidProblemError(f"register_kernel: {argument} is {value!r}; expected a name")
    accepted = (*DTYPES, *INDEX_DTYPES)
    if not isinstance(dtype, str) or dtype not in accepted:
        raise InvalidProblemError(f"register_kernel: dtype is {dtype!r}; accepted: {', '.join(accepted)}")
    for attribute in ("name", "backend"):
        if not isinstance(text := getattr(kernel, attribute, None), str) or not text.strip():
            raise InvalidProblemError(
                f"register_kernel: {type(kernel).__name__} has no name or backend; expected a string for each"
            )
    for method in ("reject", "sku", "workspace_size", "launch"):
        if not callable(function := getattr(kernel, method)):
            raise InvalidProblemError(
                f"register_kernel: {method} of {type(kernel).__name__} is {function!r}; expected a method"
            )
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidProblemError(f"register_kernel: priority is {priority!r}; expected an integer")
    entry = Entry(operation, device, dtype, kernel, priority)
    number = next(_numbers)
    with _lock:
        _entries[operation, device, dtype, kernel.name] = number, entry
        _renumber(registered=True)


def unregister_kernel(operation: str, device: str, dtype: str, name: str) -> None:
    """Take a kernel out again."""
    try:
        with _lock:
            del _entries[operation, device, dtype, name]
            _renumber(registered=True)
    except KeyError:
        raise InvalidProblemError(
            f"unregister_kernel: no kernel {name!r} is registered for {operation} on {device} in {dtype}"
        ) from None


class Preference(tuple[str, ...]):
    """What `prefer` returns: the names before, which the end of a `with` block over it brings back."""

    __slots__ = ()

    def __enter__(self) -> Preference:
        return self

    def _restore(self, *error: object) -> None:
        _exchange(tuple(self))

    __exit__ = BlockEnd(_restore)


def prefer(*names: str) -> Preference:
    """Choose kernels of these names, the first name first, for every problem that they take; return the names before.

        isograd.prefer("triton")        # attention on an H100 too by the kernels of other GPUs
        isograd.prefer()                # the usual order again
        with isograd.prefer("triton"):  # for a block, whatever happens in it

    It holds for the process and for calls to come, whatever their API; a plan's own `preference` goes before it. Plans,
    recordings and graphs that exist keep their kernels, and a gradient is computed by what is preferred when it runs.
    Another kernel may promise something else, as `Plan.precision_guarantee` says. `isograd kernels` lists the names
    and the reason where a kernel does not serve this machine. InvalidProblemError for a name that no kernel has.
    """
    known = sorted({entry.kernel.name for entry in kernels()})
    if unknown := [name for name in names if name not in known]:
        raise InvalidProblemError(f"prefer: names has {unknown[0]!r}; accepted: {', '.join(known)}")
    return Preference(_exchange(names))


def _exchange(names: tuple[str, ...]) -> tuple[str, ...]:
    """Prefer names that were checked; those before."""
    global _preferred
    with _lock:
        before, _preferred = _preferred, names
        _renumber(registered=False)
    return before


def generation() -> int:
    """A number for the kernels and names that are preferred now, for caches of plans."""
    return _generation


def kernels() -> list[Entry]:
    """Every registered kernel, in the order of choice."""
    for family in _FAMILIES:
        importlib.import_module(family)
    first = _preferred

    def order(numbered: tuple[int, Entry]) -> tuple[int, int, int]:
        number, entry = numbered
        name = entry.kernel.name
        return first.index(name) if name in first else len(first), -entry.priority, number

    return [entry for _, entry in sorted(_entries.values(), key=order)]


def find_kernel(descriptor: Descriptor, device: str, preference: str | None) -> Any:
    """The kernel for a validated descriptor, or UnsupportedError with each candidate's reason."""
    problem = (descriptor.operation, device, descriptor.dtype)
    entries = kernels()
    candidates = [e.kernel for e in entries if e[:3] == problem]
    if preference is not None:
        names = [kernel.name for kernel in candidates]
        candidates = [kernel for kernel in candidates if kernel.name == preference]
        if not candidates:
            raise UnsupportedError(
                f"{descriptor.operation}: preference is {preference!r}; registered for {descriptor.dtype} on {device}: "
                f"{names or 'nothing'}"
            )
    reasons = []
    for kernel in candidates:
        reason = kernel.reject(descriptor)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    if reasons:
        raise UnsupportedError(f"{descriptor.operation}: no kernel takes {descriptor}: {'; '.join(reasons)}")
    devices = sorted({e.device for e in entries if e.operation == descriptor.operation})
    raise UnsupportedError(
        f"{descriptor.operation}: no kernel for {descriptor.dtype} on {device!r}; devices with one: {devices}"
    )
