"""AdamW and clip_grad_norm_ on a GPU beside torch's fused ones and a copy, in one run.

    python benchmarks/optim.py [--out FILE] [--quick]

The published digests are compared first. Times are medians of device events in rotated order, for 1e9 parameters in
matrices of 4,096 x 4,096 with a vector each. TB/s are algorithmic bytes: everything that a step has to read and to
write, once; of torch with the states that it keeps, which have the parameters' dtype. Clipping reads gradients for the
norm, and reads and writes them for the scaling; with a norm below the limit isograd leaves the second part out. Host
times are those of a call for 300 small parameters, without waiting for the device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import isograd.torch as igt
from isograd.cli import check
from isograd.cli.bench_cuda import environment, medians
from isograd.cli.files import checked_file
from isograd.core import arrays
from isograd.optimizers.cases import MAX_NORM, OPTIMIZERS, cases

Functions = dict[str, Callable[[], Any]]
INTEGER = {"float16": "int16", "bfloat16": "int16", "float32": "int32", "float64": "int64"}


def check_digests() -> int:
    """Compare trainings of a few steps with the published digests; return how many."""
    published, count = check.published()["optimizers"], 0
    for case in cases():

        def tensor(a: Any, dtype: str = case.dtype) -> torch.Tensor:
            return torch.from_numpy(a.view(INTEGER[dtype]).copy()).view(getattr(torch, dtype)).cuda()

        kind, options, update = OPTIMIZERS[case.optimizer]
        p = torch.nn.Parameter(tensor(case.weights))
        optimizer = getattr(igt.optim, kind)([p], **options)
        norm = torch.empty(0)
        for g in case.gradients:
            p.grad = tensor(g)
            norm = igt.clip_grad_norm_(p, MAX_NORM)
            optimizer.step()
        results = [p.detach(), *[optimizer.state[p][name] for name in update.states], norm]
        found = check.results_digest(tuple(arrays.numpy_view(t.cpu()) for t in results))
        if found != published[case.name]:
            raise SystemExit(f"{case.name} has the digest {found}; published: {published[case.name]}")
        count += 1
    return count


def parameters(elements: int, dtype: torch.dtype, side: int = 4096) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    made = []
    for _ in range(max(elements // (side * side), 1)):
        for shape in ((side, side), (side,)):
            p = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype))
            p.grad = torch.randn_like(p)
            made.append(p)
    return made


def count(params: list[torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def timed(functions: Functions, bytes_of: dict[str, float], rounds: int, what: str) -> dict[str, Any]:
    """Milliseconds and TB/s, printed."""
    found = medians(functions, rounds)
    rates = {name: bytes_of[name] / ms / 1e9 for name, ms in found.items()}
    print(what)
    for name, ms in found.items():
        print(f"  {name:46} {ms:9.3f} ms {rates[name]:6.2f} TB/s")
    return {"what": what, "ms": found, "TB/s": rates}


def steps(elements: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    size = dtype.itemsize
    functions: Functions = {}
    moved: dict[str, float] = {}
    kept = []
    ways: list[tuple[str, Any, dict[str, Any], float]] = [
        ("isograd, float32 state", igt.optim.AdamW, {}, 3 * size + 16),
        ("torch fused, state of the dtype", torch.optim.AdamW, {"fused": True}, 7 * size),
    ]
    if dtype is not torch.float32:
        ways.append(("isograd, float32 state and master", igt.optim.AdamW, {"master_weights": True}, 2 * size + 24))
    for name, kind, options, per_element in ways:
        params = parameters(elements, dtype)
        optimizer = kind(params, lr=1e-4, **options)
        functions[name], moved[name] = optimizer.step, per_element * count(params)
        kept.append((params, optimizer))
    source = torch.empty(elements, device="cuda", dtype=dtype)
    target = torch.empty_like(source)
    functions["copy"], moved["copy"] = (lambda: target.copy_(source)), 2.0 * size * elements
    return timed(functions, moved, rounds, f"AdamW, {elements:.2g} parameters, {dtype}")


def clips(elements: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    params = parameters(elements, dtype)
    n, size = count(params), dtype.itemsize
    functions: Functions = {
        "isograd, clipped": lambda: igt.clip_grad_norm_(params, 1e-30),
        "isograd, not clipped": lambda: igt.clip_grad_norm_(params, 1e30),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
    }
    moved = {"isograd, clipped": 3.0 * size * n, "isograd, not clipped": 1.0 * size * n, "torch": 3.0 * size * n}
    gradients = [torch.randn_like(p) for p in params]

    def fresh(function: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
            return function()

        return run

    return timed(
        {name: fresh(function) for name, function in functions.items()}, moved, rounds,
        f"clip_grad_norm_, {elements:.2g} parameters, {dtype}",
    )  # fmt: skip


def host(rounds: int) -> dict[str, Any]:
    """Milliseconds that a call takes on the host."""
    params = parameters(300 * 64 * 64, torch.bfloat16, 64)[:300]
    ours = igt.optim.AdamW(params, lr=1e-4)
    theirs = torch.optim.AdamW(params, lr=1e-4, fused=True)
    functions: Functions = {
        "isograd AdamW": ours.step,
        "torch fused AdamW": theirs.step,
        "isograd clip_grad_norm_": lambda: igt.clip_grad_norm_(params, 1.0),
        "torch clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
    }
    found = {}
    for name, function in functions.items():
        each = []
        for _ in range(3 + rounds):
            torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            each.append(1e3 * (time.perf_counter() - began))
        found[name] = statistics.median(each[3:])
        print(f"  host, 300 parameters: {name:24} {found[name]:9.3f} ms")
    return {"what": "host, 300 parameters", "ms": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer parameters and rounds; the figures compare nothing")
    arguments = parser.parse_args()
    checked_file(arguments.out, "--out")
    checked = check_digests()
    print(f"{checked} digests are the published ones")
    elements, rounds = (50_000_000, 3) if arguments.quick else (1_000_000_000, 15)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        results.append(steps(elements, rounds, dtype))
        torch.cuda.empty_cache()
        results.append(clips(elements, rounds, dtype))
        torch.cuda.empty_cache()
    results.append(host(rounds))
    if arguments.out:
        document = {"environment": environment(), "checked": checked, "elements": elements, "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
