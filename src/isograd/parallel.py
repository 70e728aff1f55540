"""Threads of the library's own, for kernels that work on a range of rows.

A kernel is a compiled function that releases the GIL and takes (…, start, stop) as its last arguments. Small problems
run in the caller's thread. Larger ones are cut into chunks that the caller and the pool take from one counter, so a
busy pool (concurrent calls, nested use) slows a call down but never blocks it.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from isograd import fenv
from isograd.errors import InvalidProblemError

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads: int | None = None


def _default_threads() -> int:
    configured = os.environ.get("ISOGRAD_NUM_THREADS")
    if configured:
        if not configured.isdecimal() or int(configured) < 1:
            raise InvalidProblemError(f"ISOGRAD_NUM_THREADS: got {configured!r}; expected a positive integer")
        return int(configured)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_num_threads() -> int:
    """Threads that a CPU call may use, the caller's included."""
    global _threads
    if _threads is None:
        _threads = _default_threads()
    return _threads


def set_num_threads(threads: int) -> None:
    """Set the number of threads of later CPU calls. It never changes a result.

    The default is `ISOGRAD_NUM_THREADS` or the number of cores this process may run on.
    """
    global _threads, _pool
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InvalidProblemError(f"set_num_threads: threads is {threads!r}; expected a positive integer")
    with _lock:
        _threads = threads
        if _pool is not None:
            _pool.shutdown(wait=False)
            _pool = None


def _forget_pool() -> None:
    # A forked child has the pool's object but none of its threads.
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _submit(task: Callable[[], None], count: int) -> list[Future[None]]:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(get_num_threads() - 1, 1), thread_name_prefix="isograd")
        futures: list[Future[None]] = []
        try:
            for _ in range(count):
                futures.append(_pool.submit(task))
        except RuntimeError:  # no new threads, as when the interpreter shuts down: the caller does the work alone
            pass
        return futures


# A chunk is at least some 20 microseconds of work, which pays for handing it over, and at most about a millisecond, so
# that an interrupt is noticed soon. Between the two every thread gets several chunks and the last ones even out.
_SMALLEST, _LARGEST, _CHUNKS = 1 << 15, 1 << 20, 8


def grain(count: int, work: int) -> int:
    """How many of `count` steps of `work` elements make a chunk for `for_ranges`."""
    share = count * work // (get_num_threads() * _CHUNKS)
    return max(1, min(max(share, _SMALLEST), _LARGEST) // max(work, 1))


def for_ranges(function: Callable[..., Any], count: int, grain: int, *arguments: Any) -> None:
    """Call `function(*arguments, start, stop)` over chunks of `grain` that cover range(count).

    Every chunk runs under the default floating-point environment. An exception, KeyboardInterrupt included, stops
    the remaining chunks, waits for the running ones, and is raised.
    """
    threads = min(get_num_threads(), -(-count // grain))
    if threads <= 1:
        previous = fenv.enter()
        try:
            function(*arguments, 0, count)
        finally:
            fenv.leave(previous)
        return
    starts = itertools.count(0, grain)
    stopped = threading.Event()

    def work() -> None:
        previous = fenv.enter()
        try:
            while not stopped.is_set() and (start := next(starts)) < count:
                function(*arguments, start, min(start + grain, count))
        except BaseException:
            stopped.set()
            raise
        finally:
            fenv.leave(previous)

    futures = _submit(work, threads - 1)
    try:
        work()
    finally:
        stopped.set()
        running = [future for future in futures if not future.cancel()]
        _wait(running)
    for future in running:
        future.result()


def _wait(futures: list[Future[None]]) -> None:
    """Wait for all; an interrupt meanwhile is raised when they are done, since they still write."""
    interrupt = None
    for future in futures:
        while not future.done():
            try:
                future.exception()
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
