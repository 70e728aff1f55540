"""The router family on a GPU beside torch: bits first, then times.

    python benchmarks/router_cuda.py [--json FILE] [--explore]

Times are medians of device events over rotated orders, in one run; before each, several times the L2 cache of data is
written. A "graph" is the device's time alone, without that of the calls in Python. "bytes" is what moving the
operation's inputs and outputs once would take at the speed of a copy in the same run. --explore also times other tiles
than the rule's.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_times import Call, graphed, measure

from isograd.cli import suites
from isograd.cli.bench_cuda import environment
from isograd.cli.files import checked_file
from isograd.core import kernel
from isograd.ops.router import operation as declared
from isograd.ops.router import triton
from isograd.ops.router import triton_launch as router
from isograd.ops.router import triton_losses_launch as losses

INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
SUITES = {name: suite for name, suite in suites.SUITES.items() if suite.plan.__module__ == declared.__name__}
TOKENS, EXPERTS, K = 65536, 256, 8


# --- bits ------------------------------------------------------------------------------------------------------------
def to_cuda(x: Any) -> torch.Tensor:
    bits = torch.from_numpy(np.array(x, order="C").view(INTEGER[x.dtype.itemsize]))
    return bits.cuda().view(getattr(torch, x.dtype.name))


def bits(t: torch.Tensor) -> bytes:
    integer = getattr(torch, np.dtype(INTEGER[t.element_size()]).name)
    return bytes(t.contiguous().view(integer).cpu().numpy().tobytes())


def check_bits() -> tuple[int, int]:
    """(cases, cases that differ from the reference): small cases of `isograd verify`."""
    count = wrong = 0
    for operation, suite in SUITES.items():
        chosen = ("int64",) if "int64" in suite.dtypes else ("float32", "bfloat16")
        for dtype in chosen:
            for case in suite.cases(dtype):
                if sum(a.size for a in case.inputs.values()) > 20_000:
                    continue
                descriptor = suite.descriptor(case, dtype).validated()
                outputs = {
                    o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype), device="cuda")
                    for o in descriptor.operands()
                    if o.output
                }
                inputs = {name: to_cuda(a) for name, a in case.inputs.items()}
                kernel.functions[operation, triton.__name__].launch(descriptor, **inputs, **outputs)
                with np.errstate(all="ignore"):
                    expected = suite.reference(**case.inputs, **case.options)
                expected = expected if isinstance(expected, tuple) else (expected,)
                count += 1
                if [bits(t) for t in outputs.values()] != [np.ascontiguousarray(e).tobytes() for e in expected]:
                    wrong += 1
                    print(f"WRONG: {operation} {dtype} {case.name}")
    return count, wrong


# --- times -----------------------------------------------------------------------------------------------------------


def moved(*tensors: torch.Tensor) -> Call:
    """A copy that moves as many bytes as these tensors have."""
    half = sum(t.nbytes for t in tensors) // 2
    source, target = (torch.empty(half, dtype=torch.int8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def plain(x: torch.Tensor) -> Any:
    return torch.topk(torch.softmax(x, -1, dtype=torch.float32), K)


def grouped(x: torch.Tensor, bias: torch.Tensor) -> Any:
    """Eight groups, of which four are left; sigmoid scores, renormalized and scaled."""
    scores = torch.sigmoid(x.float())
    choice = scores + bias
    groups = choice.view(len(x), 8, -1).topk(2, -1).values.sum(-1).topk(4, -1).indices
    kept = torch.zeros(len(x), 8, device=x.device, dtype=torch.bool).scatter_(1, groups, True)
    masked = choice.masked_fill(~kept.repeat_interleave(x.shape[1] // 8, 1), float("-inf"))
    chosen = masked.topk(K, -1).indices
    w = scores.gather(1, chosen)
    return w / w.sum(-1, keepdim=True) * 2.5, chosen


def routers(explore: bool) -> Iterator[tuple[str, dict[str, Call]]]:
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(TOKENS, EXPERTS, device="cuda", generator=generator).to(dtype)
        w = torch.empty(TOKENS, K, device="cuda")
        e = torch.empty(TOKENS, K, dtype=torch.int64, device="cuda")
        g = torch.randn(TOKENS, K, device="cuda", generator=generator)
        dx = torch.empty_like(x)
        bias = torch.randn(EXPERTS, device="cuda", generator=generator) / 100

        def ours(x: torch.Tensor = x, w: torch.Tensor = w, e: torch.Tensor = e, bias: Any = None, **o: Any) -> None:
            router.moe_router(x, bias, w, e, **o)

        compiled = torch.compile(plain)
        calls = {"isograd": ours, "isograd graph": graphed(ours), "bytes": moved(x, w, e)}
        calls |= {"torch": lambda x=x: plain(x), "torch.compile": lambda x=x, f=compiled: f(x)}
        if explore:
            for rows, group, warps in (
                (8, 8, 4),
                (4, 8, 4),
                (8, 16, 4),
                (4, 16, 4),
                (2, 8, 1),
                (4, 16, 1),
                (16, 16, 8),
            ):
                tile = router.Tile(EXPERTS, rows, group, min(16 // x.element_size(), group), warps)
                config = router.RouterConfiguration(tile, "separated")
                label = f"rows {rows} group {group} warps {warps}"
                calls[label] = graphed(lambda c=config, ours=ours: ours(config=c))
            config = router.router_configuration(EXPERTS, K, x.element_size(), True)._replace(kernel="lanes")
            calls["every score"] = graphed(lambda c=config, ours=ours: ours(config=c))
        yield f"router [{TOKENS}, {EXPERTS}], k = {K}, {name}, forward", calls

        def back(
            x: torch.Tensor = x, g: torch.Tensor = g, e: torch.Tensor = e, dx: torch.Tensor = dx, **o: Any
        ) -> None:
            router.moe_router_backward(g, x, e, dx, **o)

        ours()
        calls = {"isograd": back, "isograd graph": graphed(back), "bytes": moved(g, e, x, dx)}
        for label, function in (("torch", plain), ("torch.compile", compiled)):
            leaf = x.clone().requires_grad_()
            weights = function(leaf).values

            def grad(leaf: Any = leaf, weights: Any = weights, g: torch.Tensor = g) -> Any:
                return torch.autograd.grad(weights, leaf, g, retain_graph=True)

            calls[label] = grad
        if explore:
            for rows, group, warps in (
                (8, 8, 4),
                (4, 8, 4),
                (16, 16, 4),
                (16, 32, 4),
                (8, 32, 2),
                (4, 16, 2),
                (4, 32, 1),
            ):
                tile = router.Tile(EXPERTS, rows, group, min(16 // x.element_size(), group), warps)
                label = f"rows {rows} group {group} warps {warps}"
                calls[label] = graphed(lambda c=tile, back=back: back(config=c))
        yield f"router [{TOKENS}, {EXPERTS}], k = {K}, {name}, backward", calls

        options = {"softmax": False, "renormalize": True, "groups": 8, "group_k": 4, "scale": 2.5, "bias": bias}
        calls = {"isograd": lambda o=options, ours=ours: ours(**o)}
        compiled = torch.compile(grouped)
        calls |= {"bytes": moved(x, w, e), "torch": lambda x=x, b=bias: grouped(x, b)}
        calls["torch.compile"] = lambda x=x, b=bias, f=compiled: f(x, b)
        yield f"sigmoid router with bias and groups, {name}, forward", calls


def others() -> Iterator[tuple[str, dict[str, Call]]]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(TOKENS, EXPERTS, device="cuda", generator=generator)
    v, i = torch.empty(TOKENS, K, device="cuda"), torch.empty(TOKENS, K, dtype=torch.int64, device="cuda")
    calls: dict[str, Call] = {"isograd": lambda: router.top_k(x, v, i, 1), "torch": lambda: torch.topk(x, K)}
    yield f"top_k [{TOKENS}, {EXPERTS}], k = {K}, float32", calls | {"bytes": moved(x, v, i)}
    experts = torch.rand(TOKENS, EXPERTS, device="cuda", generator=generator).topk(K).indices
    order = torch.empty(TOKENS * K, dtype=torch.int64, device="cuda")
    offsets = torch.empty(EXPERTS + 1, dtype=torch.int64, device="cuda")
    calls = {"isograd": lambda: router.expert_permutation(experts, order, offsets)}
    calls["isograd graph"] = graphed(calls["isograd"])
    calls["torch stable sort"] = lambda: torch.sort(experts.view(-1), stable=True)
    yield f"expert_permutation of {TOKENS * K} entries, {EXPERTS} experts", calls
    tokens, width = 8192, 2048
    router.expert_permutation(experts[:tokens], order[: tokens * K], offsets)
    order = order[: tokens * K].clone()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
    rows = torch.randn(tokens * K, width, device="cuda", generator=generator).bfloat16()
    w = torch.rand(tokens, K, device="cuda", generator=generator)
    y = torch.empty(tokens, width, device="cuda", dtype=torch.bfloat16)
    dy, drows, dw = torch.randn_like(y), torch.empty_like(rows), torch.empty_like(w)

    def combine(rows: torch.Tensor, w: torch.Tensor) -> Any:
        return (rows[inverse].view(tokens, K, width) * w[..., None].bfloat16()).sum(1)

    calls = {"isograd": lambda: router.moe_permute(y, order, drows, K), "torch": lambda: y[order // K]}
    yield f"moe_permute {tokens} x {width} bfloat16, k = {K}", calls | {"bytes": moved(y, drows)}
    compiled = torch.compile(combine)
    calls = {
        "isograd": lambda: router.moe_combine("moe_combine", rows, w, order, y),
        "torch": lambda: combine(rows, w),
        "torch.compile": lambda: compiled(rows, w),
        "bytes": moved(rows, y),
    }
    yield f"moe_combine {tokens} x {width} bfloat16, k = {K}", calls
    leaves = rows.clone().requires_grad_(), w.clone().requires_grad_()
    out = combine(*leaves)
    calls = {
        "isograd": lambda: router.moe_combine_backward(dy, rows, w, order, drows, dw),
        "torch": lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True),
        "bytes": moved(rows, drows, dy),
    }
    yield f"moe_combine backward {tokens} x {width} bfloat16, k = {K}", calls
    loss = torch.empty((), device="cuda")
    calls = {
        "isograd": lambda: losses.load_balancing_loss(x, experts, loss),
        "torch": lambda: (x.mean(0) * torch.bincount(experts.view(-1), minlength=EXPERTS)).sum() / (TOKENS * K),
        "bytes": moved(x, experts),
    }
    yield f"load_balancing_loss [{TOKENS}, {EXPERTS}] float32", calls
    calls = {
        "isograd": lambda: losses.router_z_loss(x, loss),
        "torch": lambda: (torch.logsumexp(x, -1) ** 2).mean(),
        "bytes": moved(x),
    }
    yield f"router_z_loss [{TOKENS}, {EXPERTS}] float32", calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--explore", action="store_true")
    options = parser.parse_args()
    checked_file(options.json, "--json")
    name, begin = torch.cuda.get_device_name(), time.monotonic()
    print(f"{name}, torch {torch.__version__}", flush=True)
    cases, wrong = check_bits()
    print(f"{cases} cases, {wrong} differ from the reference ({time.monotonic() - begin:.0f} s)", flush=True)
    results: dict[str, dict[str, float]] = {}
    for part in (routers(options.explore), others()):
        for title, calls in part:
            results[title] = measure(calls)
            print(f"\n{title} ({time.monotonic() - begin:.0f} s)")
            for call, milliseconds in results[title].items():
                print(f"  {call:44s} {milliseconds:8.4f} ms", flush=True)
    if options.json is not None:
        document = {"environment": environment(), "cases": cases, "wrong": wrong, "ms": results}
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
