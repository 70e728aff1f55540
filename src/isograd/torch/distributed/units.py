"""When a backward pass ends: the unit that a sum of gradients counts."""

from collections.abc import Callable
from typing import Any

import torch


class Passes:
    """Tells the end of each backward pass in which `enter` was called.

    A checkpoint with `use_reentrant=True` runs backward passes inside of one; they belong to it.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._tasks: set[int] = set()  # passes of autograd's engine whose end is awaited
        self._waiting: list[Any] = []  # hooks on nodes of the pass outside

    def enter(self, *_: Any) -> None:
        """Say that a pass is under way; called in it."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        outside = torch._C._current_autograd_node()
        if outside is None:
            self._drop()
            self._ended()
            return
        # The pass outside has not been entered if none of its own parameters had a gradient yet.
        for node, _ in outside.next_functions:
            if node is not None:
                self._waiting.append(node.register_prehook(self.enter))

    def _drop(self) -> None:
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            handle.remove()

    @property
    def broken(self) -> bool:
        """Whether a pass was entered that has not ended: between passes, one that an exception ended."""
        return bool(self._tasks)

    def forget(self) -> None:
        """Wait for no pass any more."""
        self._drop()
        self._tasks.clear()
