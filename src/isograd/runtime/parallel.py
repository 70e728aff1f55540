"""Threads of the library's own, for kernels that work on a range of rows.

A kernel is a compiled function that releases the GIL and takes (…, start, stop) as its last arguments. Small problems
run in the caller's thread. Larger ones are cut into chunks that the caller and the pool take from one counter, so a
busy pool (concurrent calls, nested use) slows a call down but never blocks it.

A signal handler may raise, or call the library again, between any two steps of the main thread, and a finalizer in any
thread. So there is no lock here: what several threads share changes in single calls into C.
"""

import _thread
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from isograd.errors import InvalidProblemError, IsogradError
from isograd.runtime import fenv, gate, stacks
from isograd.runtime.numba_compile import owns_compiler

# --- how many --------------------------------------------------------------------------------------------------------
_threads: int | None = None
_configured = False  # whether the environment was asked for _threads


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _quota(limit: str, period: str) -> int | None:
    """The processors that a control group grants; None where it sets no limit."""
    granted, each = _positive(limit.strip()), _positive(period.strip())
    return None if granted is None or each is None else -(-granted // each)


def _control_groups(root: Path, membership: str) -> list[int]:
    """The processors granted by the control groups that /proc/self/cgroup names, and by those above them."""
    found = []
    for line in membership.splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path(place.lstrip("/"))
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                if controllers:  # version 1
                    files = [root / "cpu" / folder / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
                    limit, period = (file.read_text() for file in files)
                else:
                    limit, period = (root / folder / "cpu.max").read_text().split()
                found.append(_quota(limit, period))
    return [number for number in found if number is not None]


@functools.cache
def _usable_cores() -> int:
    """The cores that this process may run on, or as many as its control group grants the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return cores
    return min([cores, *_control_groups(Path("/sys/fs/cgroup"), membership)])


def _from_environment() -> int | None:
    configured = os.environ.get("ISOGRAD_NUM_THREADS")
    if configured and _positive(configured) is None:
        raise InvalidProblemError(f"ISOGRAD_NUM_THREADS: got {configured!r}; expected a positive integer")
    return _positive(configured) if configured else None


@functools.cache
def _without_torch() -> int:
    # OpenMP takes a list, a number for each level of nesting.
    return _positive(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()) or _usable_cores()


def get_num_threads() -> int:
    """Threads that a CPU call may use, the caller's included."""
    global _threads, _configured
    if not _configured:
        _threads = _from_environment()
        _configured = True
    if _threads is not None:
        return _threads
    # torch tells its data loaders' workers, and whoever shares a machine, to take fewer.
    of_torch: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return _without_torch() if of_torch is None else of_torch()


def set_num_threads(threads: int) -> None:
    """Set the number of threads of later CPU calls. It never changes a result.

    The default is `ISOGRAD_NUM_THREADS`; else what `torch.set_num_threads` says where torch is loaded; else
    `OMP_NUM_THREADS`; else the number of cores that this process may use, by affinity and by the quota of its control
    group.
    """
    global _threads, _configured
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InvalidProblemError(f"set_num_threads: threads is {threads!r}; expected a positive integer")
    _threads = threads
    _configured = True


# --- chunks ----------------------------------------------------------------------------------------------------------
# A chunk is at least some 100 microseconds of work, as long as a virtual machine takes to wake a thread, and at most
# about a millisecond, so that an interrupt is noticed soon. Between the two every thread gets several chunks, and the
# last ones even out.
_SMALLEST, _LARGEST, _CHUNKS = 1 << 17, 1 << 20, 8


def grain(count: int, work: int) -> int:
    """How many of `count` steps of `work` elements make a chunk for `for_ranges`."""
    total = count * work
    share = _SMALLEST if total <= _SMALLEST else total // (get_num_threads() * _CHUNKS)
    return max(1, min(max(share, _SMALLEST), _LARGEST) // max(work, 1))


def for_ranges(function: Callable[..., Any], count: int, grain: int, *arguments: Any) -> None:
    """Call `function(*arguments, start, stop)` over chunks of `grain` that cover range(count).

    Every chunk runs under the default floating-point environment. An exception, KeyboardInterrupt included, stops
    the remaining chunks, waits for the running ones, and is raised.
    """
    if not (stacks.known.roomy or stacks.roomy()):
        stacks.call(for_ranges, function, count, grain, *arguments)
        return
    threads = 1 if count <= grain else min(get_num_threads(), -(-count // grain))
    # A pool thread may have to compile, and its caller waits for it.
    if threads <= 1 or owns_compiler():
        previous = fenv.current()
        other = previous & fenv.SETTINGS != fenv.DEFAULT
        try:
            if other:
                fenv.enter()
            function(*arguments, 0, count)
        finally:
            if other:
                fenv.leave(previous)
        return
    task = _Task(function, count, grain, arguments, sys._getframe(1))
    try:
        _submit(task, threads - 1)
        task.work()
        task.wait()
    finally:
        # No call but the one into C stands here: one in Python could be interrupted before it begins.
        task.stopped = True
        if task.queue is _queue:
            gate.drain(task.inside)
    task.finish()


class _Task:
    """A call's chunks on their way through the pool, and what keeps the memory alive that they read and write.

    The arguments are addresses. `owner` is the caller's frame, whose variables, and those of its callers, are the
    arrays: while a pool thread works, it holds them.
    """

    __slots__ = (
        "_arguments", "_count", "_done", "_function", "_grain", "_inside", "_starts", "error", "inside", "owner",
        "queue", "stopped",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Any], count: int, grain: int, arguments: tuple[Any, ...], owner: FrameType
    ) -> None:
        self._function, self._arguments = function, arguments
        self.owner: FrameType | None = owner
        self._count, self._grain, self._starts = count, grain, itertools.count(0, grain)
        self._inside = ctypes.c_int64()
        self.inside = ctypes.addressof(self._inside)
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self.queue = _queue
        self.stopped = False
        self.error: BaseException | None = None

    def work(self) -> None:
        """Run chunks until there are no more."""
        function, arguments, grain, count = self._function, self._arguments, self._grain, self._count
        starts = self._starts
        previous = fenv.current()
        other = previous & fenv.SETTINGS != fenv.DEFAULT
        try:
            if other:
                fenv.enter()
            while not self.stopped and (start := next(starts)) < count:
                function(*arguments, start, min(start + grain, count))
        finally:
            if other:
                fenv.leave(previous)

    def help(self) -> None:
        """Run chunks in a thread of the pool, unless the call is over."""
        if gate.change(self.inside, 1) >= gate.CLOSED:
            return
        try:
            self.work()
        except BaseException as error:
            self.stopped, self.error = True, error
        finally:
            if gate.change(self.inside, -1) == gate.CLOSED + 1:
                self._done.release()

    def wait(self) -> None:
        """Wait for the threads that are inside; nobody else comes in."""
        if gate.change(self.inside, gate.CLOSED) and self.queue is _queue:
            self._done.acquire()

    def finish(self) -> None:
        """Let go of everything, since the queue may still hold this, and raise what a helper raised."""
        self._arguments, self.owner = (), None
        error, self.error = self.error, None
        if error is not None:
            raise error
        if self.queue is not _queue and self._inside.value != gate.CLOSED:
            raise IsogradError("this process was forked during the call, whose result is complete in the parent only")


# --- the pool --------------------------------------------------------------------------------------------------------
_queue: SimpleQueue[_Task] = SimpleQueue()
_pool: set[int] = set()  # the numbers of its threads
_numbers = itertools.count(1)


def _submit(task: _Task, count: int) -> None:
    """Ask `count` threads of the pool to help."""
    while len(_pool) < count:
        number = next(_numbers)
        try:
            _pool.add(number)
            stacks.start(_serve, number)
        except BaseException as error:
            _pool.discard(number)
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            break  # no new threads: the others do the work, the caller alone if need be
    for _ in range(count):
        _queue.put(task)


def _serve(number: int) -> None:
    queue, pool = _queue, _pool
    threading.current_thread().name = f"isograd-{number}"
    while True:
        task = queue.get()
        pool.add(number)  # where an interrupt came as the thread was started, it was taken out
        task.help()
        del task


def _forget_pool() -> None:
    # A forked child has the pool's objects but none of its threads.
    global _queue, _pool
    _queue, _pool = SimpleQueue(), set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
