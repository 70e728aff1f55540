"""Who watches the launches of kernels: `torch/replay.py`, to repeat those on a GPU, and `torch/auditing.py`."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from isograd.runtime.blocks import BlockEnd


class Watcher(Protocol):
    """Who is told of launches."""

    def launched(self, prepared: Callable[..., None], tensors: Sequence[Any], arguments: Sequence[Any]) -> None:
        """A launch is about to happen; the arguments begin with what is passed of the tensors."""

    def foreign(self, kernel: Any) -> None:
        """A kernel from outside the library is about to launch, where nobody sees it."""


class _Current(threading.local):
    watcher: Watcher | None = None
    plans: list[Any] | None = None


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


class planning:  # noqa: N801 - a block
    """Collect the plans that this thread launches for torch's operators in the block; nothing is replayed in it."""

    __slots__ = ("_before",)

    def __enter__(self) -> list[Any]:
        self._before, _current.plans = _current.plans, []
        return _current.plans

    def _restore(self, *error: object) -> None:
        if hasattr(self, "_before"):
            _current.plans = self._before

    __exit__ = BlockEnd(_restore)


def plans() -> list[Any] | None:
    """Where the plans of this thread are collected."""
    return _current.plans


def watcher() -> Watcher | None:
    """Who watches this thread."""
    return _current.watcher


def running(kernel: Any) -> None:
    """Say that a kernel is about to launch."""
    if _current.watcher is not None and not type(kernel).__module__.startswith("isograd."):
        _current.watcher.foreign(kernel)
