"""Run under TRITON_INTERPRET=1: compare the Triton kernels of igt.optim and of norms with the reference.

    python interpreted_optim.py [--exhaustive] CASE...

Prints the number of cases of each suite and of those that differ. Not a test itself: the variable acts when triton is
imported.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from interpreter_patches import report
from test_torch_optim import CASES, NUMPY, bits, expected_steps, flavoured, make, to_torch

from isograd.optimizers import norm_reference as ref
from isograd.optimizers import triton_norm, triton_updates
from isograd.optimizers.chunks import chunks
from isograd.torch import many_tensors, optim

SHAPES = ((3, 5), (0,), (), (2100,))
FLAVOURS = ("normal", "special", "extreme", "subnormal")
optim._Optimizer._on_cpu = optim._Optimizer._on_gpu


def compared(name: str) -> Iterator[tuple[str, bool]]:
    kind, options = CASES[name]
    for i, dtype in enumerate(NUMPY):
        flavour = FLAVOURS[(i + len(name)) % 4]
        rng = np.random.default_rng([i, len(name)])
        arrays = [[flavoured(rng, shape, flavour, NUMPY[dtype]) for shape in SHAPES] for _ in range(3)]
        params = [torch.nn.Parameter(to_torch(x)) for x in arrays[0]]
        optimizer = make(kind, params, options)
        for given in arrays[1:]:
            for p, g in zip(params, given, strict=True):
                p.grad = to_torch(g)
            with np.errstate(all="ignore"):
                optimizer.step()
        for k, p in enumerate(params):
            weights, states = expected_steps(optimizer, arrays[0][k], [given[k] for given in arrays[1:]])
            kept = [optimizer.state[p][key] for key in optimizer._update(optimizer.param_groups[0]).states]
            for got, right in zip([p, *kept], [weights, *states], strict=True):
                yield f"{dtype} {SHAPES[k]} {flavour}", bits(got) == bits(right)


def norms(squared: bool) -> Iterator[tuple[str, bool]]:
    shapes = ((70,), (0,), (), (2048,), (4100,))
    for dtype in NUMPY:
        work = torch.float64 if dtype == "float64" else torch.float32
        for flavour in FLAVOURS:
            rng = np.random.default_rng(len(flavour))
            arrays = [flavoured(rng, shape, flavour, NUMPY[dtype]) for shape in shapes]
            tensors = [to_torch(x) for x in arrays]
            table = many_tensors.table_of([((t,), None) for t in tensors])
            length = triton_norm.chunk_length(sum(t.numel() for t in tensors))
            where = torch.from_numpy(chunks(many_tensors.counts_of(table), length))
            rows = torch.from_numpy(table)
            keys, words = torch.zeros(len(arrays), dtype=torch.int64), torch.zeros(len(arrays), 4, dtype=torch.int64)
            sums, out = torch.zeros(len(arrays), dtype=work), torch.zeros(2, dtype=work)
            with np.errstate(all="ignore"):
                triton_norm.launch_keys(rows, where, keys, dtype, squared, True, length)
                if squared:
                    triton_norm.launch_words(rows, where, keys, words, dtype, True, length)
                    triton_norm.launch_sums(keys, words, sums)
                else:
                    sums = keys.view(work) if work is torch.float64 else keys.int().view(work)
                triton_norm.launch_finish(sums, out, 0.5, squared)
                triton_norm.launch_scale(rows, where, out[1:], dtype, True, length)
            norm = ref.total_norm(arrays, squared)
            factor = ref.clip_factor(norm, 0.5)
            yield f"{dtype} {flavour}: norm", bits(out[0]) == bits(norm)
            yield f"{dtype} {flavour}: factor", bits(out[1]) == bits(factor) or np.isnan(factor)
            for t, x in zip(tensors, arrays, strict=True):
                right = x if factor == 1 else ref.clipped(x, factor)
                yield f"{dtype} {flavour} {x.shape}: clipped", bits(t) == bits(right)


if __name__ == "__main__":
    assert triton_updates.chunk_length(1) < max(SHAPES[-1])  # some tensor has a whole chunk and a part of one
    report(
        {name: partial(compared, name) for name in CASES} | {"norm": partial(norms, True), "inf": partial(norms, False)}
    )
