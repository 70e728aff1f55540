"""Ranks that are threads and take turns, for kernels of which an interpreter runs one at a time."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from isograd.torch.distributed import buckets, context_pieces

_here = threading.local()


def here() -> int:
    """The rank of this thread."""
    rank: int = _here.rank
    return rank


class Group:
    """Ranks that are threads; the one that computes has the turn."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, threading.Lock()
        self._barrier, self._given = threading.Barrier(size), [torch.empty(0)] * size

    def exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What every rank gives."""
        self._given[_here.rank] = mine.clone()
        self.turn.release()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        self.turn.acquire()
        return found

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What a function of the group returns on each rank."""
        found: list[Any] = [None] * self.size

        def serve(rank: int) -> None:
            _here.rank = rank
            try:
                with self.turn:
                    found[rank] = function(self, **arguments)
            except Exception:
                self._barrier.abort()
                raise

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Done:
    """Work that has ended."""

    def wait(self) -> None:
        pass


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done:
    theirs = torch.stack(group.exchange(x))
    x.copy_(theirs.amax(0) if op == dist.ReduceOp.MAX else theirs.sum(0))
    return Done()


def all_gather_into_tensor(everyone: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Done:
    everyone.copy_(torch.cat(group.exchange(x)))
    return Done()


def all_gather(everyone: list[torch.Tensor], x: torch.Tensor, group: Any = None) -> None:
    for mine, theirs in zip(everyone, group.exchange(x), strict=True):
        mine.copy_(theirs)


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make torch.distributed take such groups; `put` sets what it has."""
    put(dist, "ProcessGroup", Group)
    put(dist, "all_reduce", all_reduce)
    put(dist, "all_gather", all_gather)
    put(context_pieces, "gather", all_gather_into_tensor)
    put(buckets, "gather", all_gather_into_tensor)
    put(dist, "get_world_size", lambda group: group.size)
    put(dist, "get_rank", lambda group: here())
    put(dist, "get_process_group_ranks", lambda group: list(range(group.size)))
    put(dist, "get_backend", lambda group: "gloo")
