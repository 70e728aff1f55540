"""Run under TRITON_INTERPRET=1: what is spread over ranks by the kernels for GPUs, in Triton's interpreter.

    python interpreted_ranks.py [--exhaustive] SUITE...

Ranks are threads that take turns, since the interpreter runs one kernel at a time. Prints the number of cases of each
suite and of those that differ. Not a test itself: the variable acts when triton is imported.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import contexts
import linears
import vocab
from interpreter_patches import report
from thread_ranks import Group, here, install

from isograd.flash_attention import triton_launch
from isograd.torch.distributed import (
    context_attention,
    context_pieces,
    parallel_products,
    products_gpu,
    vocab_gpu,
    vocab_loss,
    vocab_parts,
    vocab_softmax,
)

EVERY = "--exhaustive" in sys.argv
Case = tuple[str, bool]
install()
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
    for ranks in (1, 2, 3, 4) if EVERY else (3,):
        for dtype in dtypes if EVERY else dtypes[1:]:
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
    for ranks in (1, 2, 3, 4) if EVERY else (3,):
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
        first, stop = ((0, 8500), (8500, 9000))[here()]
        y = linears.row(x[:, first:stop], w[:, first:stop].clone(), None, group)
        return vocab.equal(y, linears.igt.linear(x, w))

    yield "long", Group(2).run(long_parts) == [True, True]


def attention() -> Iterator[Case]:
    """Sequences of which ranks have pieces, dq once from all keys."""
    contexts.use(triton_launch)
    context_pieces.STEP = 128  # a multiple of the tiles of these, for shorter sequences
    for dtype, case, all_keys in (("bfloat16", "everything", True), ("float32", "both sides", False)):
        context_attention._reads_all_keys = lambda q, preference, found=all_keys: found  # type: ignore[misc]
        shape = contexts.Shape(1, 2, 1, 330, 16, 16)
        found = Group(3).run(contexts.differ, kind="uneven", cases=[case], kinds=[(dtype, None)], shape=shape)
        yield f"{dtype} {case}: {found}", found == [[]] * 3


SUITES = {
    "losses": lambda: spread(vocab.losses_differ), "softmax": lambda: spread(vocab.softmax_differs),
    "long_rows": long_rows, "layouts": layouts,
    "linears": parallel_linears,
    "attention": attention,
}  # fmt: skip

if __name__ == "__main__":
    report(SUITES)
