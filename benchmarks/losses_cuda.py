"""Cross entropy and linear cross entropy on a GPU beside torch, torch.compile, Liger and quack, in one run.

    python benchmarks/losses_cuda.py [--out FILE] [--quick] [--only plain|linear]

Bits of cross entropy are compared with the NumPy reference first. Times are medians of device events in rotated order;
every function returns the loss and leaves the gradients. Peak memory is what a call needs besides its arguments, its
results included. What is not installed or refuses is left out.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import isograd as ig
from isograd.cli.bench_cuda import environment, medians
from isograd.cli.files import checked_file
from isograd.losses import cross_entropy_reference as reference

Functions = dict[str, Callable[[], Any]]


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def check_bits() -> int:
    """Compare small problems with the reference; return how many."""
    rng, count = np.random.default_rng(0), 0
    for dtype, numpy_dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        for shape in ((64, 256), (9, 8192), (6, 32_000), (3, 128_256), (2, 262_144), (2, 300_000)):
            for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
                x = (3 * rng.standard_normal(shape)).astype(numpy_dtype)
                t = np.where(rng.random(shape[0]) < 0.2, -100, rng.integers(0, shape[1], shape[0]))
                g = np.ones(shape[0], np.float32)
                losses, dx = reference.cross_entropy_gradient(g, x, t, **options)
                word = np.int16 if dtype == "bfloat16" else np.int32
                logits = torch.from_numpy(x.view(word).copy()).cuda().view(getattr(torch, dtype))
                targets = torch.from_numpy(t).cuda()
                got = ig.cross_entropy(
                    logits, targets, **options, reduction="none", return_gradient=True, out=logits
                )  # fmt: skip
                if (bits(got[0]), bits(got[1])) != (losses.tobytes(), dx.tobytes()):
                    raise SystemExit(f"cross entropy of {dtype} {shape} {options} differs from the reference")
                count += 1
    ig.check()
    return count


class WithBackward:
    """Call, then backward; gradients of the leaves are dropped before."""

    def __init__(self, function: Callable[..., Any], *leaves: torch.Tensor) -> None:
        self._function, self._leaves = function, leaves

    def drop(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def __call__(self) -> Any:
        self.drop()
        loss = self._function(*self._leaves)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        return loss


def usable(found: Functions) -> Functions:
    """Those that run."""
    kept = {}
    for name, function in found.items():
        try:
            function()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name}: {error!r}"[:200])
            continue
        kept[name] = function
    return kept


def peak(function: Callable[[], Any]) -> float:
    """Gigabytes that a call needs besides its arguments."""
    function()
    if isinstance(function, WithBackward):
        function.drop()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def cross_entropies(rows: int, classes: int, compiled: bool) -> Functions:
    """Losses and gradients of everybody; each that works in place has logits of its own."""
    targets = torch.randint(0, classes, (rows,), device="cuda")

    def logits() -> torch.Tensor:
        return torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)

    x, place, out = logits(), logits(), torch.empty(rows, classes, device="cuda", dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()

    def plain(z: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(z, targets)

    def apart() -> Any:
        loss, state = ig.cross_entropy(x, targets, return_state=True)
        return loss, ig.cross_entropy_backward(1.0, x, targets, state=state, out=out)

    found: Functions = {
        "isograd": lambda: ig.cross_entropy(x, targets, return_gradient=True, out=out),
        "isograd, in place": lambda: ig.cross_entropy(place, targets, return_gradient=True, out=place),
        "isograd, forward and backward": apart,
        "torch": WithBackward(plain, leaf),
        "copy": lambda: out.copy_(x),
    }
    if compiled:
        found["torch.compile"] = WithBackward(torch.compile(plain, dynamic=False), leaf)
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        other = logits().requires_grad_()
        found["liger"] = WithBackward(lambda z: LigerCrossEntropyFunction.apply(z, targets, None, -100), other)
    except ImportError as error:
        print(f"  liger: {error!r}")
    try:
        from quack.cross_entropy import cross_entropy as quack

        found["quack"] = WithBackward(lambda z: quack(z, targets, reduction="mean"), leaf)
        own = logits().requires_grad_()
        found["quack, in place"] = WithBackward(
            lambda z: quack(z, targets, reduction="mean", inplace_backward=True), own
        )
    except ImportError as error:
        print(f"  quack: {error!r}")
    return usable(found)


def linear_cross_entropies(rows: int, features: int, classes: int) -> Functions:
    hidden = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) / features**0.5).requires_grad_()
    targets = torch.randint(0, classes, (rows,), device="cuda")

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, w), targets)

    h, w = hidden.detach(), weight.detach()
    found: Functions = {
        "isograd": lambda: ig.linear_cross_entropy(h, w, targets, return_gradient=True),
        "isograd, order-free": lambda: ig.linear_cross_entropy(
            h, w, targets, return_gradient=True, preference="order_free"
        ),
        "torch": WithBackward(plain, hidden, weight),
    }
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        found["liger"] = WithBackward(lambda a, b: Fused.apply(a, b, targets), hidden, weight)
    except ImportError as error:
        print(f"  liger: {error!r}")
    return usable(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="without torch.compile, fewer rounds")
    parser.add_argument("--only", choices=("plain", "linear"), help="one of the two operations")
    arguments = parser.parse_args()
    checked_file(arguments.out, "--out")
    checked = check_bits() if arguments.only != "linear" else 0
    print(f"{checked} results equal the reference, bit for bit")
    rounds = 5 if arguments.quick else 15
    results: list[dict[str, Any]] = []

    def measure(what: str, shape: tuple[int, ...], functions: Functions, rounds: int) -> None:
        times = medians(functions, rounds)
        memory = {name: peak(function) for name, function in functions.items() if name != "copy"}
        results.append({"what": what, "shape": shape, "ms": times, "gigabytes": memory})
        functions.clear()
        torch.cuda.empty_cache()

    if arguments.only != "linear":
        for rows, classes in ((8192, 128_256), (16_384, 32_000), (65_536, 1024)):
            functions = cross_entropies(rows, classes, not arguments.quick)
            measure("cross entropy", (rows, classes), functions, rounds)
    if arguments.only != "plain":
        for shape in ((8192, 4096, 128_256), (8192, 2048, 32_000)):
            measure("linear cross entropy", shape, linear_cross_entropies(*shape), 5)
    for result in results:
        print(result["what"], "bfloat16", "x".join(map(str, result["shape"])))
        for name, ms in result["ms"].items():
            memory = result["gigabytes"].get(name)
            print(f"  {name:32} {ms:9.3f} ms" + ("" if memory is None else f" {memory:8.3f} GB"))
    if arguments.out:
        document = {"environment": environment(), "checked": checked, "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
