"""Indices out of range on a GPU, where raising would cost a synchronisation: a flag on the device, read on request.

A kernel that meets such an index reads and writes nothing out of bounds, makes the outputs that depend on it NaN (a
scatter leaves the source out) and notes the index in the flag of its device. `check()` waits for the devices and raises
for what it finds there; after `debug()` every call does so. The CPU raises at once and has no flag.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from isograd.errors import IndexOutOfRangeError, IsogradError, RecordingError
from isograd.runtime.blocks import BlockEnd

if TYPE_CHECKING:
    import torch


class _Source(NamedTuple):
    operation: str
    argument: str
    negative: bool


_lock = threading.RLock()  # a signal handler or a finalizer may call the library while it is held
_sources: list[_Source] = []
_flags: dict[tuple[str, int | None], torch.Tensor] = {}
_debugging = False


def code(operation: str, argument: str = "indices", negative: bool = True) -> int:
    """The number, from 1, by which kernels name an operation's argument; `negative` says if -size is in range."""
    for naming in reversed(_called.namings):
        operation, argument = naming.operation, naming.arguments.get(argument, argument)
    return _code(operation, argument, negative)


@functools.cache
def _code(operation: str, argument: str, negative: bool) -> int:
    source = _Source(operation, argument, negative)
    with _lock:
        if source not in _sources:  # the cache may compute twice at once
            _sources.append(source)
        return _sources.index(source) + 1


class named:  # noqa: N801 - a block
    """Let errors and faults in a block speak of the function that was called and not of the plan that serves it.

        with faults.named("gather", indices="index", axis="dim"):
            run(TakeAlongAxisPlan, ...)

    at: the axis that the caller means, where the plan sees it in front. The arguments are called as the plan has them.
    """

    __slots__ = ("_depth", "_namings", "arguments", "at", "operation")

    def __init__(self, operation: str, *, at: int | None = None, **arguments: str) -> None:
        self.operation, self.at, self.arguments = operation, at, arguments
        self._namings = _called.namings
        self._depth = len(self._namings)

    def __enter__(self) -> None:
        self._namings.append(self)

    def _leave(self, *error: object) -> None:
        del self._namings[self._depth :]
        if error and isinstance(error[1], IsogradError):
            self.renamed(error[1])

    __exit__ = BlockEnd(_leave)

    def renamed(self, error: IsogradError) -> IsogradError:
        """The error, which now speaks of the function that was called."""
        _, _, rest = str(error).partition(": ")
        if self.at is not None:
            rest = rest.replace("; axis 0 of size", f"; axis {self.at} of size", 1)
        # An argument stands in front, where a sentence goes on with it, and where two share memory.
        rest = re.sub(r"(^|[;,] | overlaps )(\w+)", lambda m: m[1] + self.arguments.get(m[2], m[2]), rest)
        error.args = (f"{self.operation}: {rest}",)
        return error


def names() -> tuple[Any, ...]:
    """What `code` depends on besides its arguments, for caches of what holds codes."""
    if not _called.namings:
        return ()
    return tuple([(n.operation, *n.arguments.items()) for n in _called.namings])


class _Called(threading.local):
    def __init__(self) -> None:
        self.namings: list[named] = []


_called = _Called()


def flag(device: torch.device) -> torch.Tensor:
    """The flag of a device: an int64 tensor of (code or 0, flat position, value, size of the axis).

    Raises RecordingError where the first use of a device is inside the capture of a CUDA graph: memory cannot be
    allocated there, and kernels are compiled before a capture anyway.
    """
    key = device.type, device.index
    found = _flags.get(key)
    return found if found is not None else _new_flag(device, key)


def _new_flag(device: torch.device, key: tuple[str, int | None]) -> torch.Tensor:
    import torch

    with _lock, torch.inference_mode(False):  # a flag of inference mode could not be cleared out of it
        if key in _flags:
            return _flags[key]
        if device.type != "cuda":  # one stream, or none
            made = torch.zeros(4, dtype=torch.int64, device=device)
        else:
            if torch.cuda.is_current_stream_capturing():
                raise RecordingError(
                    f"the first call with indices on {device} is inside a CUDA graph's capture; call it once before"
                )
            # On a stream of its own, which is waited for: no other stream may meet the flag before its zeros.
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                made = torch.zeros(4, dtype=torch.int64, device=device)
            stream.synchronize()
        return _flags.setdefault(key, made)


def debugging() -> bool:
    """Whether every call waits."""
    return _debugging


def after_launch(device: torch.device) -> None:
    """Every operation that reports faults ends with this: while debugging, wait for it and raise."""
    if not _debugging:
        return
    import torch

    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        check()


def check() -> None:
    """Raise IndexOutOfRangeError if a GPU has met an index out of range since the last call; clears what it found.

    Waits for every GPU that isograd has used. The error names the operation, the argument, the flat position and the
    value of one such index. Without a GPU there is nothing to find: the CPU raises where the index is given.
    """
    for (kind, index), found in list(_flags.items()):
        if kind == "cuda":
            import torch

            torch.cuda.synchronize(index)
        number, position, value, size = found.tolist()
        if number:
            found.zero_()
            source = _sources[number - 1]
            raise IndexOutOfRangeError(
                f"{source.operation}: {source.argument} has {value} at flat position {position}; accepted: "
                f"{-size if source.negative else 0} to {size - 1}"
            )


class debug:  # noqa: N801 - a switch that reads like a function
    """Make every call on a GPU wait and raise at once for an index out of range.

    `isograd.debug()` switches it on, `isograd.debug(False)` off; `with isograd.debug():` does so for a block. The
    switch is one for all threads. Calls inside a capture of a CUDA graph cannot wait: call `check()` after a replay.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _debugging
        self._before = _debugging
        _debugging = bool(enabled)

    def __enter__(self) -> debug:
        return self

    def _restore(self, *error: object) -> None:
        global _debugging
        _debugging = self._before

    __exit__ = BlockEnd(_restore)
