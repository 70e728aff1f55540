"""Record launches, submit them once, run them again.

    with isograd.Encoder(device="cuda") as encoder:
        isograd.softmax(x, out=y)
        isograd.softmax_backward(dy, y, out=dx)
    encoder.replay()

Inside the block plan launches and functional calls are checked and recorded, not run. Leaving it submits them in order
without waiting. On a GPU the first `replay` captures the recording into one CUDA graph; the submission before it has
compiled every kernel, so nothing is compiled during capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from isograd.core import arrays
from isograd.errors import DeviceMismatchError, InvalidProblemError, RecordingError, UnsupportedError
from isograd.runtime.blocks import BlockEnd

if TYPE_CHECKING:
    from isograd.core.plan import Plan

# Open recordings in all threads: a look at whether there are any keeps calls outside fast.
recordings: set[Encoder] = set()
_local = threading.local()

Placement = tuple[int, tuple[int, ...], tuple[int, ...]]


def current() -> Encoder | None:
    """The recording that is open in this thread."""
    encoder: Encoder | None = getattr(_local, "encoder", None)
    if encoder is not None and encoder.state != "open":  # its block was let go of by another thread
        _local.encoder = None
        return None
    return encoder


class _Unguarded:
    """A block in which the library itself may touch results that are not there yet."""

    __slots__ = ("_before", "_guard")

    def __init__(self, guard: Any) -> None:
        self._guard, self._before = guard, guard.suspended

    def __enter__(self) -> None:
        self._guard.suspended = True

    def _restore(self, *error: object) -> None:
        self._guard.suspended = self._before

    __exit__ = BlockEnd(_restore)


class _Capture:
    """A block whose work on the current stream becomes a CUDA graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.capture_begin(capture_error_mode="thread_local")

    def _end(self, *error: object) -> None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            self._graph.capture_end()

    __exit__ = BlockEnd(_end)


class _Conversion(NamedTuple):
    """An argument and its copy in another dtype, which is made anew before each run."""

    source: Any
    target: Any


class _Launch(NamedTuple):
    """A plan with its arguments (kept alive), as its kernel takes them, and where they lay when they were recorded."""

    plan: Plan
    arguments: Mapping[str, Any]
    operands: Mapping[str, Any]
    workspace: Any
    placements: tuple[Placement, ...]
    conversions: tuple[_Conversion, ...]

    def run(self) -> None:
        """Compute on the current contents of the arguments."""
        for source, target in self.conversions:
            target[...] = source
        self.plan.launch(self.operands, self.workspace, None)


class Encoder:
    """A recording of launches on one device.

    device: "cpu", "cuda", or a GPU by number ("cuda:1"); "cuda" takes the GPU of the first launch.

    The recording belongs to the thread that opened it; calls of other threads run at once. Operators called otherwise
    (`torch.ops.isograd`, the backward pass of autograd) run at once too. The encoder keeps every argument alive.

    A replay reads the arguments again, so an output may be read by later launches but must not overlap what the
    recording reads from outside: results in place are refused with InvalidProblemError. Numbers (a seed, a gradient of
    1) and shapes are those of the recording. RecordingError: a result is used before it was submitted, the encoder is
    used out of turn, or an argument's memory was released or moved since (a storage resized to nothing, say).
    DeviceMismatchError: an argument on another device. UnsupportedError: a call that would need a gradient, or a copy
    of an argument, recorded as well, and an array in place of a number.
    """

    def __init__(self, device: str = "cpu") -> None:
        kind, _, index = str(device).partition(":")
        if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
            raise InvalidProblemError(f'Encoder: device is {device!r}; accepted: "cpu", "cuda", "cuda:<number>"')
        self.device = str(device)
        self._kind = kind
        self._place = self.device if index or kind == "cpu" else None
        self._state = "new"
        self._launches: list[_Launch] = []
        self._conversions: dict[int, _Conversion] = {}
        self._written: set[Placement] = set()
        self._read: dict[Placement, tuple[str, Any]] = {}
        self._guard: Any = None
        self._graph: Any = None

    def __enter__(self) -> Self:
        if current() is not None:
            raise RecordingError("Encoder: this thread is recording already; leave the other block first")
        if self._state != "new":
            raise RecordingError(f"Encoder: the recording is {self._state}; an encoder records once, make another")
        self._state = "open"
        try:
            if hasattr(sys.modules.get("torch"), "Tensor"):
                from isograd.core.guard import PendingGuard

                self._guard = PendingGuard()
                self._guard.__enter__()
            recordings.add(self)
            _local.encoder = self
        except BaseException:
            self.close()
            raise
        return self

    def _leave(self, *error: object) -> None:
        if not error:  # an interrupt came before
            if self._state in ("open", "discarded"):  # discarded, but perhaps not to the end
                self.close()
            return
        if self._state != "open" or current() is not self:
            raise RecordingError(f"Encoder: its block is left while it is {self._state}; use one `with` statement")
        launches = self._launches
        self.close()
        if error[0] is None:
            self._launches = launches
            self._require_arguments()
            self._run()
            self._state = "submitted"

    __exit__ = BlockEnd(_leave)

    def close(self) -> None:
        """Record no more, and forget what was recorded."""
        self._state = "discarded"
        self._launches = []
        if self._guard is not None:
            self._guard.leave()
            self._guard = None
        recordings.discard(self)
        if getattr(_local, "encoder", None) is self:
            _local.encoder = None

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def state(self) -> str:
        """What became of the recording: "new", "open", "submitted", or "discarded" after an exception."""
        return self._state

    def replay(self) -> None:
        """Run the recording again on the current contents of its arguments, without waiting.

        On a GPU it runs on the current stream of its device; inside a capture of the caller's, it becomes part of that.
        """
        if self._state != "submitted":
            raise RecordingError(f"Encoder.replay: the recording is {self._state}; only a submitted one can run again")
        if current() is not None:
            raise RecordingError("Encoder.replay: this thread is recording; a recording cannot contain another")
        self._require_arguments()
        if self._kind == "cpu" or not self._launches:
            self._run()
            return
        import torch

        with torch.cuda.device(self._place):
            if torch.cuda.is_current_stream_capturing():
                self._run()
                return
            if self._graph is None:
                self._graph = self._captured()
            self._mark_written()
            self._graph.replay()

    def record(self, plan: Plan, arguments: Mapping[str, Any], workspace: Any = None, stream: Any = None) -> None:
        """Check a launch as `Plan.run` does and append it; called by `Plan.run` inside the block."""
        with self.unguarded():
            operation = plan.sku.op
            if plan.device != self._kind:
                raise DeviceMismatchError(
                    f"{operation}: it runs on {plan.device}; the encoder records for {self.device}"
                )
            if stream is not None:
                raise InvalidProblemError(f"{operation}: stream is {stream!r}; a recording takes None only")
            arguments = {key: unwrapped(array) for key, array in arguments.items()}
            operands = plan.check(arguments, workspace)
            place = arrays.location(arguments[plan.outputs[0]])
            if self._place not in (None, place):
                raise DeviceMismatchError(
                    f"{operation}: {plan.outputs[0]} is on {place}; the recording is for {self._place}"
                )
            # From here on arguments stand for their copies.
            conversions = {key: self._conversions[id(a)] for key, a in arguments.items() if id(a) in self._conversions}
            arguments = arguments | {key: conversion.source for key, conversion in conversions.items()}
            placements = tuple(arrays.placement(array) for array in arguments.values())
            read = dict(self._read)
            for (key, array), placement in zip(arguments.items(), placements, strict=True):
                if key not in plan.outputs and placement not in self._written:
                    read[placement] = (key, array)
            # Its own inputs count as read from outside even where an earlier launch wrote them.
            own = [(key, array) for key, array in arguments.items() if key not in plan.outputs]
            for output in plan.outputs:
                for key, array in (*own, *read.values()):
                    if arrays.overlaps(arguments[output], array):
                        raise InvalidProblemError(
                            f"{operation}: {output} overlaps {key}, which the recording reads; a replay would find it "
                            "overwritten: give the result memory of its own"
                        )
            self._place, self._read = place, read
            for output in plan.outputs:
                out = arguments[output]
                self._written.add(arrays.placement(out))
                if self._guard is not None and not isinstance(out, np.ndarray):
                    self._guard.pending.append((operation, out))
            launch = _Launch(plan, arguments, operands, workspace, placements, tuple(conversions.values()))
            self._launches.append(launch)

    def converted(self, array: Any, copy: Any) -> Any:
        """Take `copy`, of another dtype, for an array in a launch that is recorded; every run fills it again."""
        self._conversions[id(copy)] = _Conversion(array, copy)
        return copy

    def unguarded(self) -> AbstractContextManager[None]:
        """Let the library itself touch results that are not there yet."""
        return nullcontext() if self._guard is None else _Unguarded(self._guard)

    def _mark_written(self) -> None:
        for launch in self._launches:
            launch.plan.mark_written(launch.arguments)

    def _run(self) -> None:
        self._mark_written()
        for launch in self._launches:
            launch.run()

    def _require_arguments(self) -> None:
        for launch in self._launches:
            for (key, array), placement in zip(launch.arguments.items(), launch.placements, strict=True):
                if arrays.placement(array) != placement:
                    raise RecordingError(
                        f"{launch.plan.sku.op}: the memory of {key} was released or moved after the call was recorded"
                    )

    def _captured(self) -> Any:
        """The recording as a CUDA graph, captured on a stream of its own with a memory pool of its own.

        `torch.cuda.graph` would do, but waits for the device and empties torch's cache first.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        stream: Any = torch.cuda.Stream(self._place)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), _Capture(graph):
            self._run()
        return graph


class Pending(NDArrayOperatorsMixin):
    """The NumPy result of a call that was recorded: an error until the recording is submitted, the array afterwards.

    NumPy's functions, operators, indexing and attributes work on it; `result()` is the array itself. isograd's
    functions take it inside the recording, where its launch comes first.
    """

    def __init__(self, encoder: Encoder, operation: str, array: Any) -> None:
        self.encoder, self.operation, self.promised = encoder, operation, array

    def result(self) -> Any:
        """The array, or RecordingError if the recording was not submitted."""
        if self.encoder.state != "submitted":
            raise RecordingError(
                f"{self.operation}: the result was recorded but has not been computed; the encoder is "
                f"{self.encoder.state}, leave its block first"
            )
        return self.promised

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.result(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*map(_resolved, inputs), **{k: _resolved(v) for k, v in kwargs.items()})

    def __array_function__(self, function: Any, types: Any, arguments: Any, kwargs: Any) -> Any:
        return function(*map(_resolved, arguments), **{k: _resolved(v) for k, v in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.result()[index]

    def __len__(self) -> int:
        return len(self.result())

    def __float__(self) -> float:
        return float(self.result())

    def __repr__(self) -> str:
        state = self.encoder.state
        return repr(self.promised) if state == "submitted" else f"<{self.operation}: result of a recording, {state}>"


def _resolved(value: Any) -> Any:
    if isinstance(value, Pending):
        return value.result()
    if isinstance(value, tuple | list):
        return type(value)(map(_resolved, value))
    return value


def result(operation: str, array: Any) -> Any:
    """What a functional call on NumPy arrays returns: the array, or a promise of it where the call was recorded."""
    encoder = current()
    if encoder is None:
        return array
    return Pending(encoder, operation, array)


def unwrapped(array: Any) -> Any:
    """The array behind a result that this thread's recording, or a submitted one, has promised."""
    if not isinstance(array, Pending):
        return array
    return array.promised if array.encoder is current() else array.result()


def refuse(operation: str, reason: str) -> None:
    """Raise UnsupportedError if this thread is recording."""
    if recordings and current() is not None:
        raise UnsupportedError(f"{operation}: {reason}, which a recording cannot contain")
