"""Attention on the CPU beside torch's own flash attention, forward alone and with its gradients.

    python benchmarks/attention_cpu.py [--output benchmarks/results] [--quick]

Both sides get the same values and the same number of threads; one run, in turns that rotate, medians of the wall clock.
TFLOP/s count two products forward and seven with the gradients (half of them where causal), whatever is recomputed.
Writes attention-<machine>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table

import isograd as ig
from isograd.cli import measure
from isograd.cli.files import checked_folder

ROUNDS = 11


def problems(quick: bool) -> Iterator[dict[str, Any]]:
    """Shapes [B, H, L, D], heads of k and v, causal or full, dtype."""
    length = 256 if quick else 2048
    for causal in (False, True):
        yield {"shape": (1, 8, length, 64), "kv_heads": 8, "causal": causal, "dtype": "float32"}
    yield {"shape": (1, 8, length, 128), "kv_heads": 8, "causal": True, "dtype": "float32"}
    yield {"shape": (1, 8, length, 64), "kv_heads": 2, "causal": True, "dtype": "float32"}
    yield {"shape": (1, 8, length, 64), "kv_heads": 8, "causal": True, "dtype": "bfloat16"}
    yield {"shape": (1, 1, 2 * length, 64), "kv_heads": 1, "causal": False, "dtype": "float32"}
    yield {"shape": (16, 8, 128, 64), "kv_heads": 8, "causal": False, "dtype": "float32"}


def calls(shape: tuple[int, ...], kv_heads: int, causal: bool, dtype: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each direction a callable a contender."""
    kind = getattr(torch, dtype)
    keys = (shape[0], kv_heads, *shape[2:])
    q, k, v, do = (torch.randn(s, dtype=torch.float32).to(kind) for s in (shape, keys, keys, shape))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours() -> Any:
        return ig.attention(q, k, v, causal=causal, return_lse=True)

    def ours_both() -> Any:
        o, lse = ours()
        return ig.attention_backward(do, q, k, v, o, lse, causal=causal)

    def torch_forward(inputs: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=kv_heads != shape[1])

    def torch_both() -> Any:
        return torch.autograd.grad(torch_forward(leaves), leaves, do)

    return {
        "forward": {"isograd": ours, "torch": lambda: torch_forward([q, k, v])},
        "forward and backward": {"isograd": ours_both, "torch": torch_both},
    }


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="small inputs: a try, not a comparison")
    options = parser.parse_args()
    checked_folder(options.output, "--output")
    torch.set_num_threads(ig.get_num_threads())
    torch.manual_seed(0)
    where = measure.machine(torch)
    table = Table(title=f"Attention on {where['cpu']}, {where['threads']} threads", title_justify="left")
    for name in ("Problem", "isograd ms", "TFLOP/s", "torch ms", "times as fast"):
        table.add_column(name, justify="left" if name == "Problem" else "right")
    results = []
    for problem in problems(options.quick):
        b, h, length, d = problem["shape"]
        for direction, contenders in calls(**problem).items():
            rounds = 3 if options.quick else ROUNDS
            times = measure.interleaved({name: (call, rounds) for name, call in contenders.items()})
            seconds = {name: statistics.median(values) for name, values in times.items()}
            products = 2 if direction == "forward" else 7
            operations = products * 2 * b * h * length * length * d / (2 if problem["causal"] else 1)
            ratio = seconds["torch"] / seconds["isograd"]
            results.append(
                {
                    **problem,
                    "direction": direction,
                    "milliseconds": {name: round(1e3 * s, 3) for name, s in seconds.items()},
                    "tflops": round(operations / seconds["isograd"] / 1e12, 4),
                    "times_as_fast_as_torch": round(ratio, 3),
                }
            )
            kind = "causal" if problem["causal"] else "full"
            name = f"{list(problem['shape'])}, {problem['kv_heads']} kv heads, {kind}, {problem['dtype']}, {direction}"
            ours, theirs = (f"{1e3 * seconds[n]:.2f}" for n in ("isograd", "torch"))
            table.add_row(name, ours, f"{results[-1]['tflops']:.3f}", theirs, f"{ratio:.2f}")
    Console().print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"attention-{measure.file_stem(where['cpu'])}.json"
    path.write_text(
        json.dumps({"machine": where, "quick": options.quick, "results": results}, indent=1) + "\n", "utf-8"
    )
    print(f"Results: {path}")


if __name__ == "__main__":
    main()
