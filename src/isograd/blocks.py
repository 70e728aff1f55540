"""Ends of `with` blocks that an interrupt cannot skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _End:
    __slots__ = ("_instance", "_method", "_ran")

    def __init__(self, method: Callable[..., None], instance: Any) -> None:
        self._method, self._instance, self._ran = method, instance, False

    def __call__(self, *error: object) -> None:
        self._method(self._instance)
        self._ran = True

    def __del__(self) -> None:
        if not self._ran:
            self._method(self._instance)


class BlockEnd:
    """A method without arguments as an `__exit__`, run at the end of a block whatever happens.

    An interrupt may come as the end is called, before its first line. The interpreter holds what it is going to call
    for as long as the block runs, and nobody else does: where the call did not get through, the method runs as that is
    released. It may run twice, so it has to restore what was there before and not to undo a step.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Callable[..., None]:
        if instance is None:
            return self  # contextlib.ExitStack calls it with the instance
        return _End(self._method, instance)

    def __call__(self, instance: Any, *error: object) -> None:
        """End the block of an instance."""
        self._method(instance)
