"""Who wants to know of what runs outside of torch's dispatcher: graphs of Inductor's, and Triton kernels."""

import sys
import threading
from typing import Any, Protocol

from torch._inductor.output_code import CompiledFxGraph


class Watcher(Protocol):
    """Who is told, on the thread where it happens."""

    def graph_ran(self) -> None:
        """A graph of Inductor's is about to run."""

    def kernel_ran(self, name: str) -> None:
        """A Triton kernel is about to be launched, by Triton itself; the library's own are launched without it."""


_watchers: list[Watcher] = []
_lock = threading.RLock()  # a signal handler may come here while it is held
_call: Any = CompiledFxGraph.__call__


def _told(graph: Any, *args: Any) -> Any:
    for watcher in tuple(_watchers):
        watcher.graph_ran()
    return _call(graph, *args)


def _launched(metadata: Any) -> None:
    name = metadata.get().get("name", "?") if hasattr(metadata, "get") else "?"
    for watcher in tuple(_watchers):
        watcher.kernel_ran(name)


def _launch_hooks() -> Any:
    """Triton's hooks before a launch, where Triton is there and has a list of them."""
    triton = sys.modules.get("triton")
    hooks = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "launch_enter_hook", None)
    return hooks if hasattr(hooks, "add") and hasattr(hooks, "remove") else None


def watch(watcher: Watcher) -> None:
    """Tell `watcher` until `unwatch`."""
    with _lock:
        _watchers.append(watcher)
        CompiledFxGraph.__call__ = _told  # type: ignore[method-assign, assignment]
        if (hooks := _launch_hooks()) is not None:
            hooks.add(_launched)


def unwatch(watcher: Watcher) -> None:
    """Tell it nothing more."""
    with _lock:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers:
            CompiledFxGraph.__call__ = _call  # type: ignore[method-assign]
            if (hooks := _launch_hooks()) is not None:
                hooks.remove(_launched)
