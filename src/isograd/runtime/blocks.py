"""Ends of `with` blocks that an interrupt cannot skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


class _End:
    __slots__ = ("_method", "watch")

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method
        self.watch: weakref.ref[Any] | None = None

    def reached(self, *error: object) -> None:
        self._method(*error)
        self.watch = None

    def missed(self, watch: object) -> None:
        self.watch = None
        self._method()


def held(method: Callable[..., None]) -> Callable[..., None]:
    """An `__exit__` that calls the method with what it is given, or with nothing once it is let go without that.

    An interrupt may come as the end is called, before its first line. The interpreter holds what it is going to call
    for as long as the block runs, and nobody else does, not even the frames of a traceback: where the call did not get
    through, the method runs as that is released. It may run twice, so it has to restore what was there before and not
    to undo a step.
    """
    end = _End(method)
    call = partial(end.reached)  # called in C, so no frame refers to it
    end.watch = weakref.ref(call, end.missed)
    return call


class BlockEnd:
    """A method as an `__exit__`, run at the end of a block whatever happens: see `held`."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Callable[..., None]:
        if instance is None:
            return self  # contextlib.ExitStack calls it with the instance
        return held(partial(self._method, instance))

    def __call__(self, instance: Any, *error: object) -> None:
        """End the block of an instance."""
        self._method(instance, *error)
