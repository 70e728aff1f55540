"""Who watches the launches of kernels on a GPU: `torch/replay.py`, to repeat them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from isograd.blocks import BlockEnd


class Watcher(Protocol):
    """Who is told of launches."""

    def launched(self, prepared: Callable[..., None], tensors: Sequence[Any], arguments: Sequence[Any]) -> None:
        """A launch is about to happen; the arguments begin with what is passed of the tensors."""

    def foreign(self, kernel: Any) -> None:
        """A kernel from outside the library is about to launch, where nobody sees it."""


class _Current(threading.local):
    watcher: Watcher | None = None


_current = _Current()


class watched:  # noqa: N801 - a block
    """Tell a watcher of this thread's launches in the block."""

    __slots__ = ("_before", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._before = watcher, _current.watcher

    def __enter__(self) -> None:
        _current.watcher = self._watcher

    def _restore(self, *error: object) -> None:
        _current.watcher = self._before

    __exit__ = BlockEnd(_restore)


def watcher() -> Watcher | None:
    """Who watches this thread."""
    return _current.watcher


def running(kernel: Any) -> None:
    """Say that a kernel is about to launch."""
    if _current.watcher is not None and not type(kernel).__module__.startswith("isograd."):
        _current.watcher.foreign(kernel)
