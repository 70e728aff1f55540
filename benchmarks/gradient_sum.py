"""Time and memory of a training step with GradientSum beside torch's own gradients: plain, DDP and FSDP2.

    python benchmarks/gradient_sum.py [--device cuda] [--out FILE] [--quick] [--kernels] [--kinds KIND ...]
    torchrun --nproc-per-node 2 benchmarks/gradient_sum.py --device cuda [--out FILE]

A step is `--units` backward passes of each rank over a small Llama-like model (blocks of norm, attention and a gated
MLP; hidden 2,048 and 4,096 in bfloat16 on a GPU, 128 in float32 on the CPU), the reduction, and a stochastic gradient
step. DDP runs all but the last pass in `no_sync`; FSDP2 reduces in every pass, in float32. Contenders take turns, and
every rank waits for the others and the device before and after a step; the result is the median of the slowest rank.
Memory is the most that the device had allocated during a step, of the contender alone (not on the CPU). --kernels times
the kernels of GradientSum beside a copy instead. It runs with one rank as well, also without torchrun.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_times import measure
from torch import Tensor, nn

import isograd.torch as igt
from isograd.cli.bench_cuda import environment
from isograd.cli.files import checked_file
from isograd.torch.distributed import kernels

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        inner = 7 * hidden // 2
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList([Block(hidden, max(hidden // 128, 2)) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def model_of(kind: str, size: dict[str, int], device: torch.device) -> Any:
    torch.manual_seed(0)
    model: Any = Model(size["hidden"], size["layers"], size["vocabulary"])
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def step_of(kind: str, ours: bool, size: dict[str, int], units: int, device: torch.device) -> Step:
    """A training step of a model of its own."""
    model = model_of(kind, size, device)
    total = igt.distributed.GradientSum(model, units=units) if ours else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, size["vocabulary"], (size["batch"], size["length"] + 1), device=device)
    # Gloo has no average, which FSDP2 asks for.
    if kind == "fsdp" and not ours and device.type == "cpu":
        for module in (*model.blocks, model):
            module.set_force_sum_reduction_for_comms(True)

    def step() -> None:
        for unit in range(units):
            with model.no_sync() if kind == "ddp" and not ours and unit < units - 1 else nullcontext():
                model(tokens[:, :-1], tokens[:, 1:]).backward()
        if total is not None:
            total.finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def slowest(value: float, device: torch.device) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def compared(kind: str, size: dict[str, int], units: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step of both, and gigabytes on a GPU."""
    found: dict[str, Any] = {"kind": kind, "units": units, **size}
    peaks = {}
    for ours in (False, True):  # alone
        step = step_of(kind, ours, size, units, device)
        if device.type == "cuda":
            step()
            step()
            torch.cuda.reset_peak_memory_stats(device)
            step()
            wait(device)
            peaks["isograd" if ours else "torch"] = torch.cuda.max_memory_allocated(device) / 1e9
        del step
        gc.collect()  # hooks and what they hold make a circle
        if device.type == "cuda":
            torch.cuda.empty_cache()
    steps = {name: step_of(kind, name == "isograd", size, units, device) for name in ("torch", "isograd")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            wait(device)
            began = time.perf_counter()
            steps[name]()
            wait(device)
            if turn >= 2:
                times[name].append(slowest(time.perf_counter() - began, device))
    medians = {name: statistics.median(t) for name, t in times.items()}
    found |= {"seconds": medians, "ratio": medians["isograd"] / medians["torch"], "gigabytes": peaks}
    return found


def kernel_times() -> list[dict[str, Any]]:
    """Gigabytes a second of the kernels, beside a copy."""
    n, results = 1 << 28, []
    total, peaks = torch.zeros(n, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    header = torch.tensor([8, 0, 0], device="cuda")
    other = torch.empty_like(total)
    for dtype in (torch.bfloat16, torch.float32):
        g = (torch.randn(1 << 20, device="cuda") * 1e-3).to(dtype).repeat(n >> 20)
        calls = {
            "first": functools.partial(kernels.accumulate, g, total, peaks, 0, -48, 14, True),
            "add": functools.partial(kernels.accumulate, g, total, peaks, 0, -48, 14, False),
            "mean": functools.partial(kernels.mean, total, header, g, -48),
            "copy": functools.partial(other.copy_, total),
        }
        size = g.element_size()
        moved = {"first": 8 + size, "add": 16 + size, "mean": 8 + size, "copy": 16}
        times = measure(calls)
        results.append({
            "dtype": str(dtype), "elements": n, "ms": times,
            "gigabytes_per_second": {name: moved[name] * n / ms / 1e6 for name, ms in times.items()},
        })  # fmt: skip
    return results


def sizes(device: torch.device, quick: bool, hidden: list[int]) -> list[dict[str, int]]:
    if device.type == "cpu" or quick:
        return [{"hidden": 128, "layers": 2, "vocabulary": 512, "batch": 2, "length": 64}]
    shape = {"vocabulary": 32_000, "length": 4096}
    return [{"hidden": h, "layers": 16384 // h, "batch": 4, **shape} for h in hidden]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--kernels", action="store_true", help="the kernels alone, on a GPU")
    parser.add_argument("--units", type=int, nargs="+", default=[1, 4], help="backward passes a rank")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096], help="sizes on a GPU")
    parser.add_argument("--kinds", nargs="+", choices=("plain", "ddp", "fsdp"), help="all that the ranks take")
    arguments = parser.parse_args()
    checked_file(arguments.out, "--out")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29531")):
        os.environ.setdefault(name, value)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    where = environment() if device.type == "cuda" else {"device": "cpu", "threads": torch.get_num_threads()}
    results: list[dict[str, Any]] = []

    def keep(*found: dict[str, Any]) -> None:
        """Each result is written at once: an interrupted run has those before."""
        results.extend(found)
        if arguments.out and first:
            document = {"environment": where, "ranks": ranks, "results": results}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    if arguments.kernels:
        keep(*kernel_times())
        for result in results:
            print(result["dtype"], {name: round(rate) for name, rate in result["gigabytes_per_second"].items()}, "GB/s")
    else:
        for size in sizes(device, arguments.quick, arguments.hidden):
            for kind in arguments.kinds or (("plain", "ddp", "fsdp") if ranks == 1 else ("ddp", "fsdp")):
                for units in arguments.units:
                    rounds = 3 if arguments.quick else 15
                    found = compared(kind, size, units, rounds, device)
                    keep(found)
                    if first:
                        ms = {name: round(1e3 * s, 2) for name, s in found["seconds"].items()}
                        memory = {name: round(gb, 2) for name, gb in found["gigabytes"].items()}
                        print(
                            f"{ranks} ranks, hidden {size['hidden']}, {kind}, {units} units: {ms} ms, "
                            f"{found['ratio']:.3f} times torch's; {memory} GB",
                            flush=True,
                        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
