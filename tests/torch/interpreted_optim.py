"""Run under TRITON_INTERPRET=1: compare the Triton kernels of igt.optim with the reference in Triton's interpreter.

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

from isograd.torch import optim

SHAPES = ((3, 5), (0,), (), (2100,))
optim._Optimizer._on_cpu = optim._Optimizer._on_gpu


def compared(name: str) -> Iterator[tuple[str, bool]]:
    kind, options = CASES[name]
    for i, dtype in enumerate(NUMPY):
        flavour = ("normal", "special", "extreme", "subnormal")[(i + len(name)) % 4]
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


if __name__ == "__main__":
    report({name: partial(compared, name) for name in CASES})
