"""Host time of eager calls beside torch, and what is compiled when only the number of tokens changes.

    python benchmarks/host_time.py [--device cuda] [--json FILE] [--quick] [--profile OPERATION]

Host time is what a call takes to return: the device has little to do, and the queue is empty before each round. Both
contenders run in turns, forward alone (no gradient is recorded) and forward with backward; the result is the median
over rounds of the mean of a round. "kernels" counts Triton's compilations over 28 numbers of tokens from 1 to 4,096,
everything else fixed; on the CPU nothing is compiled for a shape. "a node in Python" is the least that an operator with
a derivative of its own can take: a `torch.autograd.Function` that negates, beside `torch.neg`. --profile prints where
the time of one operation's forward and backward goes.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table

import isograd.torch as igt
from isograd.cli import measure

SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 48),
    *(64, 100, 128, 200, 256, 300, 512, 777, 1000, 1024, 1500, 2048, 3000, 4096),
)
ROUNDS, CALLS = 15, 100


class Contest(NamedTuple):
    """The same call by both; `leaves` are what gradients are for."""

    isograd: Callable[[], Any]
    torch: Callable[[], Any]
    leaves: tuple[torch.Tensor, ...]


class _Negated(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.neg(g)


def contests(device: str, tokens: int = 64) -> dict[str, Contest]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int, leaf: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_(leaf)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator).to(device)

    x, targets, table = floats(tokens, 256), integers(256, tokens), floats(512, 64)
    q, k, v = (floats(1, 4, tokens, 64) for _ in range(3))
    wide, source, index = floats(tokens, 256), floats(tokens, 256), integers(256, tokens, 16)
    into, rows, words = floats(512, 256), integers(512, tokens), integers(512, tokens)
    scores, size = floats(tokens, 64), x.shape

    def routed() -> torch.Tensor:
        return torch.topk(torch.softmax(scores, -1), 4).values

    return {
        "a node in Python": Contest(lambda: _Negated.apply(x), lambda: torch.neg(x), (x,)),
        "softmax": Contest(lambda: igt.softmax(x, -1), lambda: torch.softmax(x, -1), (x,)),
        "cross_entropy": Contest(lambda: igt.cross_entropy(x, targets), lambda: F.cross_entropy(x, targets), (x,)),
        "scaled_dot_product_attention": Contest(
            lambda: igt.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (q, k, v),
        ),
        "gather": Contest(lambda: igt.gather(wide, 1, index), lambda: torch.gather(wide, 1, index), (wide,)),
        "index_add": Contest(
            lambda: igt.index_add(into, 0, rows, source), lambda: torch.index_add(into, 0, rows, source), (into, source)
        ),
        "embedding": Contest(lambda: igt.embedding(words, table), lambda: F.embedding(words, table), (table,)),
        "moe_router": Contest(lambda: igt.moe_router(scores, 4).weights, routed, (scores,)),
        "kl_div": Contest(
            lambda: igt.kl_div(x, x.detach().expand(size), log_target=True),
            lambda: F.kl_div(x, x.detach().expand(size), log_target=True),
            (x,),
        ),
        "linear_cross_entropy": Contest(
            lambda: igt.linear_cross_entropy(wide, into, words),
            lambda: F.cross_entropy(F.linear(wide, into), words),
            (wide, into),
        ),
    }


def forward(call: Callable[[], Any], leaves: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        call()


def both(call: Callable[[], Any], leaves: tuple[torch.Tensor, ...]) -> None:
    result = call()
    torch.autograd.grad(result, leaves, torch.ones_like(result))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_times(device: str, contest: Contest, step: Callable[..., None], rounds: int, calls: int) -> list[float]:
    """Medians in microseconds, isograd's and torch's."""
    contenders = (contest.isograd, contest.torch)
    found: list[list[float]] = [[], []]
    for call in contenders:
        for _ in range(3):
            step(call, contest.leaves)
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(calls):
                step(contenders[which], contest.leaves)
            found[which].append((time.perf_counter() - began) / calls * 1e6)
    return [statistics.median(times) for times in found]


def compilations(operation: str) -> tuple[int, float]:
    """(kernels compiled, seconds) for all numbers of tokens, forward and backward, on a GPU."""
    import triton

    count, before = 0, triton.knobs.compilation.listener

    def listen(**details: Any) -> None:
        nonlocal count
        count += 1

    triton.knobs.compilation.listener = listen
    began = time.monotonic()
    try:
        for tokens in SIZES:
            contest = contests("cuda", tokens)[operation]
            both(contest.isograd, contest.leaves)
        torch.cuda.synchronize()
    finally:
        triton.knobs.compilation.listener = before
    return count, time.monotonic() - began


def compared(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds, and no compilations counted")
    parser.add_argument("--profile", choices=sorted(contests("cpu")))
    given = parser.parse_args()
    if given.profile:
        contest = contests(given.device)[given.profile]
        for _ in range(10):
            both(contest.isograd, contest.leaves)
        profile = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):
            profile.enable()
            for _ in range(500):
                both(contest.isograd, contest.leaves)
            profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    rounds = 3 if given.quick else ROUNDS
    about = measure.machine(torch)
    if given.device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    rows: dict[str, Any] = {}
    table = Table("operation", "forward", "torch", "ratio", "with backward", "torch", "ratio", "kernels", "seconds")
    for name, contest in contests(given.device).items():
        row: dict[str, Any] = {}
        if given.device == "cuda" and not given.quick and name in igt.__all__:
            row["kernels"], row["compile_s"] = compilations(name)
        for key, step in (("forward", forward), ("both", both)):
            row[key] = host_times(given.device, contest, step, rounds, CALLS)
        rows[name] = row
        cells = [text for ours, theirs in (row["forward"], row["both"]) for text in compared(ours, theirs)]
        compiled = (str(row["kernels"]), f"{row['compile_s']:.1f}") if "kernels" in row else ("", "")
        table.add_row(name, *cells, *compiled)
        print(name, row, flush=True)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps({"machine": about, "microseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
