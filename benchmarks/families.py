"""Gather, scatter, routing and losses beside torch, and beside Liger and quack where they are installed.

    python benchmarks/families.py [--device cuda] [--output benchmarks/results] [--quick] [--only NAME ...]

Both sides get the same tensors and the same number of threads. One run, in turns, medians: on a GPU with device events
after its cache was flushed, every call captured as a CUDA graph where it lets itself be captured, so that the host's
time does not count; on the CPU with the wall clock. Writes families-<machine>.json and .png; the bars are times
as fast as torch. Memory time is what moving the problem's bytes takes at the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table

import isograd as ig
import isograd.torch as igt
from isograd.cli import measure
from isograd.cli.files import checked_folder
from isograd.cli.progress import Activity

Call = Callable[[], Any]
ROUNDS = 15


@dataclass
class Problem:
    """A comparison: what it moves at least, and a callable for each contender."""

    name: str
    bytes: int
    calls: dict[str, Call]
    note: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


def size_of(*tensors: torch.Tensor) -> int:
    """The bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def compiled(device: str, function: Callable[..., Any], *arguments: Any) -> dict[str, Call]:
    """torch.compile of a function, on a GPU; on the CPU it needs a C++ compiler and is left out."""
    if device == "cpu":
        return {}
    fast = torch.compile(function, dynamic=False)
    return {"torch.compile": lambda: fast(*arguments)}


def gather(device: str, quick: bool) -> Iterator[Problem]:
    """take_along_axis and its gradient for a router, rows added onto rows, embeddings."""
    rows, width, k = (1024 if quick else 65536), 256, 8
    x = torch.randn(rows, width, device=device)
    indices = torch.rand(rows, width, device=device).topk(k).indices
    dv = torch.randn(rows, k, device=device)
    yield Problem(
        f"take_along_axis [{rows}, {width}], k = {k}",
        size_of(indices, dv, dv),
        {"isograd": lambda: ig.take_along_axis(x, indices), "torch": lambda: torch.gather(x, 1, indices)},
    )
    yield Problem(
        f"take_along_axis_backward [{rows}, {width}], k = {k}",
        size_of(indices, dv, x),
        {
            "isograd": lambda: ig.take_along_axis_backward(dv, indices, x.shape),
            "torch": lambda: torch.zeros_like(x).scatter_add_(1, indices, dv),
        }
        | deterministic(device, lambda: torch.zeros_like(x).scatter_add_(1, indices, dv)),
    )
    count, columns, words = (1024, 256, 2000) if quick else (32768, 1024, 50304)
    values = torch.randn(count, columns, device=device)
    tokens = torch.randint(words, (count,), device=device)
    tokens[torch.rand(count, device=device) < 0.25] = 17
    out = torch.zeros(words, columns, device=device)
    yield Problem(
        f"index_add {count} x {columns} into {words} rows, a quarter onto one",
        size_of(values, tokens, out, out),
        {
            "isograd": lambda: ig.scatter_sum(out, tokens, values, axis=0),
            "torch": lambda: out.index_add(0, tokens, values),
        }
        | deterministic(device, lambda: out.index_add(0, tokens, values)),
    )
    yield Problem(
        f"embedding {count} x {columns} of {words}",
        size_of(values, values, tokens),
        {"isograd": lambda: ig.embedding(out, tokens), "torch": lambda: F.embedding(tokens, out)},
    )

    def backward() -> Any:
        return torch.ops.aten.embedding_dense_backward(values, tokens, words, -1, False)

    yield Problem(
        f"embedding_backward {count} x {columns} into {words} rows, a quarter onto one",
        size_of(values, tokens, out),
        {"isograd": lambda: ig.embedding_backward(values, tokens, words), "torch": backward}
        | deterministic(device, backward),
    )


def deterministic(device: str, call: Call) -> dict[str, Call]:
    """The same call in torch's deterministic mode; on the CPU there is no difference worth a bar."""
    if device == "cpu":
        return {}

    def run() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    return {"torch, deterministic": run}


def router(device: str, quick: bool) -> Iterator[Problem]:
    """Routing of tokens to experts, and the way there and back."""
    tokens, experts, k, width = (1024, 64, 4, 64) if quick else (65536, 256, 8, 1024)
    logits = torch.randn(tokens, experts, device=device)

    def torch_router(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, chosen = torch.softmax(x, -1).topk(k)
        return w / w.sum(-1, keepdim=True), chosen

    weights, chosen = ig.moe_router(logits, k, renormalize=True)
    shape = f"{tokens} tokens, {experts} experts, k = {k}"
    yield Problem(
        f"moe_router, {shape}",
        size_of(logits, weights, chosen),
        {
            "isograd": lambda: ig.moe_router(logits, k, renormalize=True),
            "torch": lambda: torch_router(logits),
        }
        | compiled(device, torch_router, logits),
    )
    dw = torch.randn_like(weights)
    y = torch.softmax(logits, -1)

    def torch_backward(dw: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        w = y.gather(-1, chosen)
        total = w.sum(-1, keepdim=True)
        g = (dw - (dw * w).sum(-1, keepdim=True) / total) / total
        dy = torch.zeros_like(y).scatter_add_(-1, chosen, g)
        return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)

    yield Problem(
        f"moe_router_backward, {shape}",
        size_of(logits, logits, dw, chosen),
        {
            "isograd": lambda: ig.moe_router_backward(dw, logits, chosen, renormalize=True),
            "torch": lambda: torch_backward(dw, y),
        }
        | compiled(device, torch_backward, dw, y),
        note="torch is given the probabilities; isograd computes them again from the logits",
    )
    yield Problem(
        f"top_k [{tokens}, {experts}], k = {k}",
        size_of(logits, weights, chosen),
        {"isograd": lambda: ig.top_k(logits, k), "torch": lambda: torch.topk(logits, k)},
    )
    few = tokens // 8
    x = torch.randn(few, width, device=device)
    some, where = weights[:few].contiguous(), chosen[:few].contiguous()
    order, _ = ig.expert_permutation(where, experts)
    y_out = ig.moe_permute(x, order, k)
    yield Problem(
        f"expert_permutation, {few} tokens, {experts} experts, k = {k}",
        size_of(where, order),
        {
            "isograd": lambda: ig.expert_permutation(where, experts),
            "torch": lambda: torch.sort(where.flatten(), stable=True),
        },
    )
    yield Problem(
        f"moe_permute [{few}, {width}], k = {k}",
        size_of(y_out, y_out, order),
        {"isograd": lambda: ig.moe_permute(x, order, k), "torch": lambda: x[order // k]},
    )
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=device)

    def torch_combine(y: torch.Tensor, w: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return (y[inverse].view(few, k, width) * w[:, :, None]).sum(1)

    yield Problem(
        f"moe_combine [{few}, {width}], k = {k}",
        size_of(y_out, x, some, order),
        {
            "isograd": lambda: ig.moe_combine(y_out, some, order),
            "torch": lambda: torch_combine(y_out, some, inverse),
        }
        | compiled(device, torch_combine, y_out, some, inverse),
        note="torch is given the inverse of the order",
    )


def _differentiated(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Any:
    return torch.autograd.grad(function(*inputs), [x for x in inputs if x.requires_grad])


def losses(device: str, quick: bool) -> Iterator[Problem]:
    """Cross entropy and its relatives, forward and backward together."""
    if quick:
        rows, classes, hidden, dtype = 64, 1000, 32, torch.float32
    elif device == "cpu":
        rows, classes, hidden, dtype = 512, 32768, 256, torch.float32
    else:
        rows, classes, hidden, dtype = 8192, 128256, 4096, torch.bfloat16
    logits = torch.randn(rows, classes, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(classes, (rows,), device=device)
    calls: dict[str, Call] = {
        "isograd": lambda: _differentiated(lambda x: igt.cross_entropy(x, targets), logits),
        "torch": lambda: _differentiated(lambda x: F.cross_entropy(x, targets), logits),
    }
    if device != "cpu":
        fast = torch.compile(lambda x: F.cross_entropy(x, targets), dynamic=False)
        calls["torch.compile"] = lambda: _differentiated(fast, logits)
        calls |= peers(logits, targets)
    plain = logits.detach()
    yield Problem(
        f"cross_entropy [{rows}, {classes}] {str(dtype)[6:]}, forward and backward",
        3 * size_of(logits),
        calls,
        note="bytes: the logits read twice, the gradient written",
    )
    scratch = plain.clone()
    inplace: dict[str, Call] = {
        "isograd": lambda: ig.cross_entropy(scratch, targets, return_gradient=True, out=scratch),
    }
    if device != "cpu":
        inplace |= inplace_peers(scratch, targets)
    else:
        inplace["torch"] = calls["torch"]
    yield Problem(
        f"cross_entropy [{rows}, {classes}] {str(dtype)[6:]}, gradient in place of the logits",
        2 * size_of(logits),
        inplace,
    )
    if device != "cpu":
        rows //= 2
        targets = targets[:rows]
    h = torch.randn(rows, hidden, device=device, dtype=dtype).requires_grad_()
    w = (torch.randn(classes, hidden, device=device, dtype=dtype) / hidden**0.5).requires_grad_()
    linear: dict[str, Call] = {
        "isograd": lambda: _differentiated(lambda h, w: igt.linear_cross_entropy(h, w, targets), h, w),
        "torch": lambda: _differentiated(lambda h, w: F.cross_entropy(h @ w.T, targets), h, w),
    }
    if device != "cpu":
        linear |= linear_peers(targets, h, w)
    yield Problem(f"linear_cross_entropy {rows} x {hidden} x {classes}, forward and backward", 0, linear)


def peers(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, Call]:
    """Cross entropies of other projects, if they are installed."""
    found: dict[str, Call] = {}
    try:
        from quack.cross_entropy import cross_entropy

        found["quack"] = lambda: _differentiated(lambda x: cross_entropy(x, targets, reduction="mean"), logits)
    except ImportError:
        pass
    return found


def inplace_peers(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, Call]:
    """Cross entropies that overwrite the logits with the gradient."""
    try:
        from liger_kernel.ops.cross_entropy import cross_entropy_forward
    except ImportError:
        return {}
    return {
        "Liger": lambda: cross_entropy_forward(logits, targets, None, -100, 0.0, 0.0, "mean", None, False, False, False)
    }


def linear_peers(targets: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
    """Fused linear cross entropies of other projects."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return {}
    return {"Liger": lambda: _differentiated(lambda h, w: liger_fused_linear_cross_entropy(h, w, targets), h, w)}


def divergences(device: str, quick: bool) -> Iterator[Problem]:
    """Divergences, and distributions other than softmax's."""
    shape = (64, 500) if quick else (1024, 8192) if device == "cpu" else (8192, 32768)
    dtype = torch.float32
    x = torch.randn(shape, device=device, dtype=dtype)
    logp, p = torch.log_softmax(x, -1), torch.softmax(torch.randn_like(x), -1)
    name = list(shape)
    yield Problem(
        f"kl_div {name}",
        size_of(logp, p),
        {"isograd": lambda: ig.kl_div(logp, p, "batchmean"), "torch": lambda: F.kl_div(logp, p, reduction="batchmean")},
    )
    teacher = torch.randn_like(x)

    def torch_distillation(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a, b = torch.log_softmax(s / 2, -1), torch.log_softmax(t / 2, -1)
        return F.kl_div(a, b, reduction="batchmean", log_target=True) * 4

    yield Problem(
        f"distillation_loss {name}, temperature 2",
        size_of(x, teacher),
        {
            "isograd": lambda: ig.distillation_loss(x, teacher, 2.0),
            "torch": lambda: torch_distillation(x, teacher),
        }
        | compiled(device, torch_distillation, x, teacher),
    )
    yield Problem(
        f"gumbel_softmax {name}",
        size_of(x, x),
        {"isograd": lambda: ig.gumbel_softmax(x, 0.7, seed=0), "torch": lambda: F.gumbel_softmax(x, 0.7)}
        | compiled(device, functools.partial(F.gumbel_softmax, tau=0.7), x),
    )


def norms(device: str, quick: bool) -> Iterator[Problem]:
    """Rows divided by their root mean square, and the gradients of rows and weight."""
    rows, width = (64, 256) if quick else (2048, 4096) if device == "cpu" else (16384, 4096)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, dy = (torch.randn(rows, width, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)
    calls: dict[str, Call] = {}
    for who, norm in (("isograd", igt.rms_norm), ("torch", F.rms_norm)):
        y = norm(x, (width,), weight)
        calls[who] = lambda y=y: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    yield Problem(f"rms_norm backward [{rows}, {width}] {str(dtype)[6:]}, rows and weight", size_of(x, x, x), calls)


FAMILIES = {"gather": gather, "router": router, "losses": losses, "divergences": divergences, "norms": norms}


# --- timing ----------------------------------------------------------------------------------------------------------
def seconds(device: str, calls: dict[str, Call], rounds: int, graphs: bool = True) -> dict[str, float]:
    """Median seconds of each call, in turns that rotate; on a GPU as graphs, unless `graphs` is false."""
    if device == "cpu":
        times = measure.interleaved({name: (call, rounds) for name, call in calls.items()})
        return {name: statistics.median(values) for name, values in times.items()}
    from isograd.cli.bench_cuda import medians

    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    # A capture that fails, as some of the deterministic mode do, leaves torch's generator unusable.
    captured = {
        name: as_graph(call) if graphs and "deterministic" not in name else call for name, call in calls.items()
    }
    return {name: ms / 1e3 for name, ms in medians(captured, rounds, flush.zero_).items()}


def as_graph(call: Call) -> Call:
    """The call as a CUDA graph; the call itself where it waits for the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
    except Exception:
        torch.cuda.synchronize()
        return call
    return graph.replay


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones((1 << 27) if device == "cpu" else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    # A graph's node for a copy takes half as long again as the copy.
    return 2 * source.numel() / seconds(device, {"copy": lambda: target.copy_(source)}, rounds, graphs=False)["copy"]


def usable(calls: dict[str, Call], messages: Console) -> dict[str, Call]:
    """The calls that run here; what isograd cannot do is an error."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            if name == "isograd":
                raise
            messages.print(f"{name}: {error!r}"[:200], markup=False)
            continue
        found[name] = call
    return found


# --- results ---------------------------------------------------------------------------------------------------------
def as_dict(problem: Problem, bandwidth: float) -> dict[str, Any]:
    """One comparison in the JSON file."""
    ours = problem.seconds["isograd"]
    result: dict[str, Any] = {
        "problem": problem.name,
        "milliseconds": {name: round(1e3 * s, 4) for name, s in problem.seconds.items()},
        "times_as_fast_as": {n: round(s / ours, 3) for n, s in problem.seconds.items() if n != "isograd"},
    }
    if problem.bytes:
        result |= {"bytes": problem.bytes, "fraction_of_copy": round(problem.bytes / ours / bandwidth, 3)}
    return result | ({"note": problem.note} if problem.note else {})


def show(console: Console, results: list[dict[str, Any]], title: str) -> None:
    """A table of all comparisons."""
    table = Table(title=title, title_justify="left")
    for name in ("Problem", "isograd ms", "of copy", "times as fast as"):
        table.add_column(name, justify="left" if name == "Problem" else "right")
    for r in results:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in r["times_as_fast_as"].items())
        share = f"{r['fraction_of_copy']:.0%}" if "fraction_of_copy" in r else "-"
        table.add_row(r["problem"], f"{r['milliseconds']['isograd']:.3f}", share, ratios)
    console.print(table)


def plot(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars: how many times as fast as each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for r in results for name in r["times_as_fast_as"]})
    figure, axes = pyplot.subplots(figsize=(11, 0.55 * len(results) + 1.6), layout="constrained")
    height = 0.8 / max(len(names), 1)
    for offset, name in enumerate(names):
        places = [i + offset * height for i, r in enumerate(results) if name in r["times_as_fast_as"]]
        values = [r["times_as_fast_as"][name] for r in results if name in r["times_as_fast_as"]]
        bars = axes.barh(places, values, height=height, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(results))], [r["problem"] for r in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("isograd is so many times as fast")
    axes.legend(loc="lower right")
    axes.set_title(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="small inputs: a try, not a comparison")
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    options = parser.parse_args()
    checked_folder(options.output, "--output")
    console, messages = Console(), Console(stderr=True)
    rounds = 3 if options.quick else ROUNDS
    torch.set_num_threads(ig.get_num_threads())
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(options.device, rounds)
    results = []
    with Activity(messages, "Measuring", len(options.only)) as activity:
        for family in options.only:
            activity.step(family)
            for problem in FAMILIES[family](options.device, options.quick):
                calls = usable(problem.calls, messages)
                problem.seconds = seconds(options.device, calls, rounds)
                results.append(as_dict(problem, bandwidth))
    if options.device == "cuda":
        from isograd.cli.bench_cuda import environment

        where = environment()
        stem = "families-cuda-" + re.sub("[^a-z0-9]+", "-", where["device"].lower())
        title = f"{where['device']}, a copy moves {bandwidth / 1e12:.2f} TB/s"
    else:
        where = measure.machine(torch)
        stem = "families-" + measure.file_stem(where["cpu"])
        title = f"{where['cpu']}, {where['threads']} threads, a copy moves {bandwidth / 1e9:.1f} GB/s"
    show(console, results, title)
    options.output.mkdir(parents=True, exist_ok=True)
    report = {"machine": where, "quick": options.quick, "copy_bytes_per_s": round(bandwidth), "results": results}
    (options.output / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    plot(results, title, options.output / f"{stem}.png")
    console.print(f"Results: {options.output / stem}.json and .png", soft_wrap=True)


if __name__ == "__main__":
    main()
