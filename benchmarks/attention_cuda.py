"""Attention on a GPU beside torch's flash and cuDNN backends, in one run; what each kernel's tiles cost.

    python benchmarks/attention_cuda.py [--out NAME] [--quick] [--explore] [--order-free] [--memory]

Values are checked against binary64 first. TFLOP/s count the two products of the forward pass, 4 B H Lq Lk D, and 2.5
times that for the backward pass, half of both with a causal mask; times are medians of device events in rotated order.
--explore times candidates for the tiles of every kernel instead, --order-free those of the order-free kernels; --memory
shows what 131,072 queries and keys need.
--out NAME writes NAME.json and, of a comparison, NAME.png.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import device_times
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from isograd.cli.bench_cuda import environment
from isograd.cli.files import checked_file
from isograd.devices.triton_launcher import Launcher
from isograd.flash_attention import triton_launch as launch
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free import triton_launch as order_free

TOKENS = 32_768
HEADS = {64: 32, 128: 16}
PROBLEMS = [(d, n, causal) for d in (64, 128) for n in (2048, 8192) for causal in (True, False)]
Problem = tuple[int, int, bool]
Call = Callable[[], Any]
console = Console(width=200)


def teraflops(problem: Problem, milliseconds: float, backward: bool) -> float:
    head_dim, length, causal = problem
    operations = 4 * TOKENS * HEADS[head_dim] * length * head_dim * (2.5 if backward else 1.0)
    return operations / (2 if causal else 1) / milliseconds / 1e9


class Case:
    """One problem's tensors on the GPU, and calls of ours over them."""

    def __init__(self, head_dim: int, length: int, causal: bool, batch: int | None = None, heads: int | None = None):
        heads = heads or HEADS[head_dim]
        batch = batch or max(TOKENS // length, 1)
        make = lambda: torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.causal = causal
        options = AttentionOptions(causal=causal)
        sizes = (batch, heads, heads, length, length, head_dim, head_dim, "bfloat16")
        self.descriptor: Any = AttentionBackwardDescriptor(*sizes, options).validated()
        self.arguments = {name: make() for name in ("q", "k", "v", "do")}
        for name in ("o", "dq", "dk", "dv"):
            self.arguments[name] = torch.empty_like(self.arguments["q"])
        self.arguments["lse"] = torch.empty(batch, heads, length, device="cuda")
        self.forward()

    def forward(self, tile: tiles.Tile | None = None) -> None:
        launch.forward(self.descriptor, self.arguments, tile)

    def backward(self, config: tiles.BackwardTiles | None = None) -> None:
        launch.backward(self.descriptor, self.arguments, config)

    def order_free_forward(self, tile: order_free.Tile | None = None) -> None:
        order_free.forward(self.descriptor, self.arguments, tile)

    def order_free_backward(self, config: order_free.BackwardTiles | None = None) -> None:
        order_free.backward(self.descriptor, self.arguments, config)


# --- values ----------------------------------------------------------------------------------------------------------
def check_values() -> int:
    """Hold small problems to binary64, by the rule of FlashAttention: twice the error of the plain computation."""
    count = 0
    for head_dim in (64, 128):
        for length, causal in ((64, True), (600, True), (600, False)):
            case = Case(head_dim, length, causal, batch=2, heads=4)
            a = case.arguments

            def plain(dtype: Any, a: Any = a, length: int = length, causal: bool = causal) -> list[torch.Tensor]:
                q, k, v = (a[name].to(dtype).requires_grad_() for name in "qkv")
                s = q @ k.mT / math.sqrt(q.shape[-1])
                if causal:
                    s = s.masked_fill(torch.ones(length, length, device="cuda").triu(1).bool(), -math.inf)
                o = torch.softmax(s, -1) @ v
                return [o, *torch.autograd.grad(o, (q, k, v), a["do"].to(dtype))]

            exact, usual = plain(torch.float64), plain(torch.bfloat16)
            case.backward()
            for name, x, y in zip(("o", "dq", "dk", "dv"), exact, usual, strict=True):
                error, other = (float((t.double() - x).detach().abs().max()) for t in (a[name], y))
                if not error <= 2 * other:
                    raise SystemExit(f"{name} {head_dim} {length} {causal}: {error} beside {other}")
                count += 1
    return count


# --- the comparison --------------------------------------------------------------------------------------------------
@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def torch_calls(case: Case, backend: Any, strict: bool) -> tuple[Call, Call]:
    """Forward and backward of one of torch's backends."""
    leaves = [case.arguments[name].detach().requires_grad_() for name in "qkv"]
    do, held = case.arguments["do"], []

    def forward() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=case.causal)

    def backward() -> None:
        if not held:
            held.append(forward())
        torch.autograd.grad(held[0], leaves, do, retain_graph=True)

    def under(call: Call) -> Call:
        def run() -> Any:
            with deterministic():
                return call()

        return run

    return (under(forward), under(backward)) if strict else (forward, backward)


def calls_of(case: Case) -> tuple[dict[str, Call], dict[str, Call]]:
    """Everybody's forward and backward passes."""
    forward: dict[str, Call] = {"isograd, Triton": case.forward, "isograd, order-free": case.order_free_forward}
    backward: dict[str, Call] = {"isograd, Triton": case.backward, "isograd, order-free": case.order_free_backward}
    if torch.cuda.get_device_capability() == (9, 0):
        from isograd.flash_attention import gluon_launch as hopper

        forward["isograd, Hopper"] = lambda: hopper.forward(case.descriptor, case.arguments)
        backward["isograd, Hopper"] = lambda: hopper.backward(case.descriptor, case.arguments)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        for strict in (False, True):
            label = f"torch {name}{', deterministic' if strict else ''}"
            one, other = torch_calls(case, backend, strict)
            if not strict:
                forward[label] = one
            backward[label] = other
    return forward, backward


def compare(problems: list[Problem], rounds: int) -> list[dict[str, Any]]:
    results = []
    with Progress(console=console) as progress:
        task = progress.add_task("attention", total=len(problems))
        for problem in problems:
            case = Case(*problem)
            for calls, backward in zip(calls_of(case), (False, True), strict=True):
                times = device_times.measure(calls, rounds)
                rates = {name: teraflops(problem, t, backward) for name, t in times.items()}
                results.append({"problem": problem, "backward": backward, "ms": times, "teraflops": rates})
            del case, calls
            torch.cuda.empty_cache()
            progress.advance(task)
    for backward in (False, True):
        rows = [r for r in results if r["backward"] is backward]
        table = Table("backward" if backward else "forward", title="TFLOP/s, bfloat16")
        for row in rows:
            head_dim, length, causal = row["problem"]
            table.add_column(f"{head_dim} {length} {'causal' if causal else 'full'}", justify="right")
        for name in dict.fromkeys(name for row in rows for name in row["teraflops"]):
            rates = [row["teraflops"].get(name) for row in rows]
            table.add_row(name, *("" if rate is None else f"{rate:.0f}" for rate in rates))
        console.print(table)
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 9))
    for axis, backward in zip(axes, (False, True), strict=True):
        rows = [r for r in results if r["backward"] is backward]
        names = list(dict.fromkeys(name for row in rows for name in row["teraflops"]))
        for i, name in enumerate(names):
            heights = [row["teraflops"].get(name, 0) for row in rows]
            places = [x + i * 0.8 / len(names) for x in range(len(rows))]
            axis.bar(places, heights, 0.8 / len(names), label=name)
        labels = [f"D {d}, {n}\n{'causal' if c else 'full'}" for d, n, c in (row["problem"] for row in rows)]
        axis.set_xticks([x + 0.4 for x in range(len(rows))], labels)
        axis.set_ylabel(f"{'backward' if backward else 'forward'}, TFLOP/s")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# --- tiles -----------------------------------------------------------------------------------------------------------
# (queries, keys, warps, stages) that are worth a try; the rules in `triton_tiles` are the best of them.
FORWARD = {
    64: [(64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)],
    128: [(64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3)],
}
OVER_KEYS = {
    64: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2), (32, 64, 4, 3)],
    128: [(64, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 3), (32, 64, 4, 3), (32, 64, 4, 2)],
}
OVER_QUERIES = {
    64: [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3)],
    128: [(128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 4, 3), (128, 128, 8, 2), (64, 128, 4, 3)],
}


def recorded(call: Call) -> dict[str, Call]:
    """The launches of a call by the kernels' names, each to be repeated alone."""
    found: dict[str, Call] = {}
    original = Launcher.__call__

    def record(self: Any, *tensors: Any, numbers: Any = ()) -> None:
        original(self, *tensors, numbers=numbers)
        found[self._kernel.__name__] = lambda: original(self, *tensors, numbers=numbers)

    with mock.patch.object(Launcher, "__call__", record):
        call()
    return found


def _found(calls: dict[tuple[str, Any], Call], what: str, tile: Any, kernel: str, call: Call) -> None:
    try:
        calls[what, tile] = recorded(call)[kernel]
        torch.cuda.synchronize()
    except Exception as error:
        console.print(f"  {what} {tile}: {error!r}"[:160])


def candidates(case: Case) -> dict[tuple[str, Any], Call]:
    """The launch of every kernel with every tile."""
    head_dim = case.descriptor.head_dim
    rule = tiles.backward(head_dim, head_dim, 2, launch.architecture(case.arguments["q"]))
    calls: dict[tuple[str, Any], Call] = {}
    for tile in map(tiles.Tile._make, FORWARD[head_dim]):
        _found(calls, "forward", tile, "attention_forward", lambda t=tile: case.forward(t))
    for tile in map(tiles.Tile._make, OVER_KEYS[head_dim]):
        config = rule._replace(over_keys=tile)
        _found(calls, "keys", tile, "attention_backward_keys", lambda c=config: case.backward(c))
    for tile in map(tiles.Tile._make, OVER_QUERIES[head_dim]):
        config = rule._replace(over_queries=tile)
        _found(calls, "queries", tile, "attention_backward_queries", lambda c=config: case.backward(c))
    calls["rows", None] = recorded(case.backward)["attention_rows"]
    return calls


# (rows, warps, stages) of the order-free kernels, and how often the one over keys computes the scores.
ORDER_FREE = [(64, 4, 1), (64, 4, 2), (128, 8, 2)]
ORDER_FREE_BACKWARD = [(64, 4, 1, 1), (64, 4, 1, 2), (64, 4, 2, 2), (128, 8, 1, 2)]


def order_free_candidates(case: Case) -> dict[tuple[str, Any], Call]:
    """The launch of every order-free kernel with every tile, and of what cuts the operands."""
    calls: dict[tuple[str, Any], Call] = {}
    for tile in map(order_free.Tile._make, ORDER_FREE):
        _found(calls, "forward", tile, "order_free_forward", lambda t=tile: case.order_free_forward(t))
    for *sizes, turns in ORDER_FREE_BACKWARD:
        tile = order_free.Tile._make(sizes)
        both = order_free.BackwardTiles(tile, tile, turns)
        for what, kernel in (("keys", "order_free_backward_keys"), ("queries", "order_free_backward_queries")):
            _found(calls, what, (*tile, turns), kernel, lambda b=both: case.order_free_backward(b))
    for call in (case.order_free_forward, case.order_free_backward):
        calls |= {(name, None): run for name, run in recorded(call).items() if name.startswith("cut")}
    return calls


def explore(problems: list[Problem], rounds: int, find: Callable[[Case], Any] = candidates) -> list[dict[str, Any]]:
    """Time candidates for each kernel's tiles."""
    results = []
    with Progress(console=console) as progress:
        task = progress.add_task("tiles", total=len(problems))
        for problem in problems:
            calls = find(Case(*problem))
            names = {f"{what} {tile}": (what, tile) for what, tile in calls}
            times = device_times.measure({name: calls[key] for name, key in names.items()}, rounds, 0.0)
            table = Table("kernel", "tile", "ms", "TFLOP/s", title=str(problem))
            for name, ms in sorted(times.items(), key=lambda item: (names[item[0]][0], item[1])):
                what, tile = names[name]
                products = {"forward": 2, "keys": 4, "queries": 3}.get(what, 0)
                rate = teraflops(problem, ms, False) * products / 2
                shown = str(tuple(tile)) if tile else ""
                table.add_row(what, shown, f"{ms:.3f}", f"{rate:.0f}" if rate else "")
                results.append({"problem": problem, "kernel": what, "tile": tile, "ms": ms, "teraflops": rate})
            console.print(table)
            del calls
            torch.cuda.empty_cache()
            progress.advance(task)
    return results


# --- memory ----------------------------------------------------------------------------------------------------------
def memory() -> dict[str, float]:
    """Peak memory of forward and backward beside that of their operands and results: 131,072 rows, one head."""
    case = Case(128, 131_072, True, batch=1, heads=1)
    case.backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.forward()
    case.backward()
    torch.cuda.synchronize()
    operands = sum(t.numel() * t.element_size() for t in case.arguments.values())
    peak = torch.cuda.max_memory_allocated() - before + operands
    return {"peak": peak, "operands": operands, "ratio": peak / operands}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--explore", action="store_true")
    parser.add_argument("--order-free", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--head-dim", type=int, choices=(64, 128))
    arguments = parser.parse_args()
    checked_file(arguments.out and arguments.out.with_suffix(".json"), "--out")
    torch.manual_seed(0)
    checked = check_values()
    console.print(f"{checked} results within twice the plain computation's error")
    rounds = 5 if arguments.quick else 15
    problems = [p for p in PROBLEMS if arguments.head_dim in (None, p[0])]
    document: dict[str, Any] = {"environment": environment(), "checked": checked}
    if arguments.memory:
        document["memory"] = memory()
        console.print(document["memory"])
    elif arguments.explore or arguments.order_free:
        long = [p for p in problems if p[1] == 8192 and not (arguments.order_free and p[2])]
        find = order_free_candidates if arguments.order_free else candidates
        document["tiles"] = explore(long if arguments.quick else problems, rounds, find)
    else:
        document["results"] = compare(problems, rounds)
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        if "results" in document:
            plot(document["results"], arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
