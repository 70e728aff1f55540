"""Run under TRITON_INTERPRET=1: what is spread over ranks by the kernels for GPUs, in Triton's interpreter.

    python interpreted_ranks.py [--exhaustive] SUITE...

Ranks are threads that take turns, since the interpreter runs one kernel at a time. Prints the number of cases of each
suite and of those that differ. Not a test itself: the variable acts when triton is imported.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import linears
import vocab
from interpreter_patches import report

from isograd.torch.distributed import (
    parallel_products,
    products_gpu,
    vocab_gpu,
    vocab_loss,
    vocab_parts,
    vocab_softmax,
)

EVERY = "--exhaustive" in sys.argv
Case = tuple[str, bool]
_here = threading.local()


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


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    theirs = torch.stack(group.exchange(x))
    x.copy_(theirs.amax(0) if op == dist.ReduceOp.MAX else theirs.sum(0))


def all_gather(everyone: list[torch.Tensor], x: torch.Tensor, group: Any = None) -> None:
    for mine, theirs in zip(everyone, group.exchange(x), strict=True):
        mine.copy_(theirs)


dist.ProcessGroup = Group  # type: ignore[misc, assignment]
dist.all_reduce, dist.all_gather = all_reduce, all_gather  # type: ignore[assignment]
dist.get_world_size = lambda group: group.size  # type: ignore[assignment, misc]
dist.get_rank = lambda group: _here.rank  # type: ignore[assignment, misc]
dist.get_process_group_ranks = lambda group: list(range(group.size))  # type: ignore[assignment, misc]
dist.get_backend = lambda group: "gloo"  # type: ignore[assignment, misc]
_logit_gradients = vocab_gpu.logit_gradients


def logit_gradients(logits: torch.Tensor, targets: torch.Tensor, dlosses: Any, *rest: Any) -> torch.Tensor:
    """The kernel with what on a GPU would be a tensor."""
    return _logit_gradients(logits, targets, torch.from_numpy(np.array(dlosses)), *rest)


vocab_gpu.logit_gradients = logit_gradients
for _module in (vocab_parts, vocab_loss, vocab_softmax):
    _module.of = lambda x: vocab_gpu  # type: ignore[attr-defined]
parallel_products.of = lambda x: products_gpu


def spread(function: Callable[..., Any]) -> Iterator[Case]:
    """Rows whose classes are spread, in every dtype, with parts of all kinds."""
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    kinds = itertools.cycle([("uneven", False), ("empty", True), ("even", True)])
    for ranks in (1, 2, 3, 4) if EVERY else (1, 3):
        for dtype in dtypes if EVERY or ranks > 1 else dtypes[1::2]:
            kind, special = next(kinds)
            sizes = [1, 5, 300] if EVERY else [5] if ranks == 1 else [300]
            given = {"dtypes": [dtype], "sizes": sizes, "kind": kind, "special": special}
            found = Group(ranks).run(function, **given)
            yield f"{ranks} {given}: {found}", found == [[]] * ranks


def long_rows() -> Iterator[Case]:
    """Rows longer than a tile, and with more classes than the short sums of 16 bits hold."""
    for dtype in ("bfloat16", "float64"):
        given = {"dtypes": [dtype], "sizes": [4097], "kind": "even", "special": True}
        for function in (vocab.losses_differ, vocab.softmax_differs):
            yield f"{dtype} {function.__name__}", Group(2).run(function, **given) == [[]] * 2
    yield "many classes", Group(2).run(vocab.many_classes_differ, dtype="bfloat16") == [[]] * 2


def layouts() -> Iterator[Case]:
    yield "layouts", Group(3).run(vocab.layouts_differ) == [False] * 3
    yield "nothing", Group(2).run(vocab.empty) == [[0.0, (0, 3), (2, 0)]] * 2


def parallel_linears() -> Iterator[Case]:
    """Linear layers of which ranks have columns or rows, in every dtype, with parts of all kinds."""
    kinds = itertools.cycle([("uneven", False), ("empty", True), ("even", True)])
    for ranks in (1, 2, 3, 4) if EVERY else (1, 3):
        for dtype in ("float16", "bfloat16", "float32"):
            kind, special = next(kinds)
            given = {"dtypes": [dtype], "kind": kind, "special": special}
            found = Group(ranks).run(linears.differ, **given)
            yield f"{ranks} {given}: {found}", found == [[]] * ranks
    yield "nothing", Group(2).run(linears.empty) == [[(0, 3), 0.0, [[0.0] * 3] * 2]] * 2
    # Long parts, cut by words of chunks and added up in pieces.
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randn(s, generator=generator).bfloat16() for s in ((5, 9000), (3, 9000)))

    def long_parts(group: Group) -> bool:
        first, stop = ((0, 8500), (8500, 9000))[_here.rank]
        y = linears.row(x[:, first:stop], w[:, first:stop].clone(), None, group)
        return vocab.equal(y, linears.igt.linear(x, w))

    yield "long", Group(2).run(long_parts) == [True, True]


SUITES = {
    "losses": lambda: spread(vocab.losses_differ), "softmax": lambda: spread(vocab.softmax_differs),
    "long_rows": long_rows, "layouts": layouts,
    "linears": parallel_linears,
}  # fmt: skip

if __name__ == "__main__":
    report(SUITES)
