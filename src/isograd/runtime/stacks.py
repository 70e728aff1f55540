"""Threads of the library's own, with room on their stacks.

`threading.stack_size` holds for the whole process and may be as little as 32 KiB, which a kernel's blocks overflow, and
Numba's compiler long before. The library's threads have `STACK` bytes whatever it is, and what is called in a thread
with less than `LEAST` is done in one of them.
"""

import _thread
import atexit
import ctypes
import sys
import threading
from collections.abc import Callable
from functools import partial
from operator import call as apply
from typing import Any

STACK = 8 << 20  # addresses, not memory: what is never touched costs nothing
LEAST = 1 << 20


class _Known(threading.local):
    roomy: bool | None = None


known = _Known()  # of this thread


def _stack_bytes() -> int:
    """The stack of this thread, which is not the main one; `STACK` where the platform does not say."""
    library = ctypes.CDLL(None)
    this = ctypes.c_void_p(threading.get_ident())
    if sys.platform == "darwin":
        size_of = library.pthread_get_stacksize_np
        size_of.argtypes, size_of.restype = (ctypes.c_void_p,), ctypes.c_size_t
        return int(size_of(this))
    attributes = ctypes.create_string_buffer(256)  # a pthread_attr_t, which has at most 64 bytes
    if not hasattr(library, "pthread_getattr_np") or library.pthread_getattr_np(this, attributes):
        return STACK
    size = ctypes.c_size_t()
    library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    library.pthread_attr_destroy(attributes)
    return size.value


def roomy() -> bool:
    """Whether this thread's stack has room for kernels and their compiler."""
    if known.roomy is None:
        main = threading.get_ident() == threading.main_thread().ident
        known.roomy = main or _stack_bytes() >= LEAST
    return known.roomy


def start(function: Callable[..., None], *arguments: Any, first: Callable[[], object] = bool) -> None:
    """Call a function in a new thread, which the process does not wait for; RuntimeError where none can be had.

    first: a function in C that notes that the thread is being started. Unlike `threading.Thread` this holds no lock
    that an interrupt could leave locked.
    """
    before: list[int] = []
    steps: tuple[Callable[[], Any], ...] = (
        first,
        partial(before.extend, map(_thread.stack_size, (STACK,))),
        partial(_thread.start_new_thread, function, arguments),
        partial(list, map(_thread.stack_size, before)),
    )
    # All of it in one call into C: no other thread runs, and no interrupt comes, while the size is another.
    try:
        list(map(apply, steps))
    except BaseException:
        if before:
            _thread.stack_size(before[0])
        raise


def _report(function: Callable[..., Any], arguments: tuple[Any, ...], outcome: list[Any], done: Any) -> None:
    try:
        outcome[:] = function(*arguments), None
    except BaseException as error:
        outcome[:] = None, error
    finally:
        _unfinished.discard(done)
        done.release()


# Of calls under way. The process ends after them: a compiler that runs on while its memory is torn down would crash.
_unfinished: set[Any] = set()


@atexit.register
def _finish() -> None:
    for done in list(_unfinished):
        done.acquire()


def call(function: Callable[..., Any], *arguments: Any, meanwhile: Callable[[], None] | None = None) -> Any:
    """Call a function in a new thread and return what it returns, or raise what it raises.

    An interrupt is raised here at once and the thread goes on; only the main thread is interrupted. `meanwhile` is
    called every half second.
    """
    outcome: list[Any] = []
    done = _thread.allocate_lock()
    done.acquire()
    try:
        start(_report, function, arguments, outcome, done, first=partial(_unfinished.add, done))
    except RuntimeError:
        _unfinished.discard(done)
        raise
    while not done.acquire(timeout=0.5):
        if meanwhile is not None:
            meanwhile()
    result, error = outcome
    if error is not None:
        try:
            raise error
        finally:
            del error, outcome  # which refer to this frame
    return result
