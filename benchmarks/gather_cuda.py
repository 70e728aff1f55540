"""The gather family and order-free sums on a GPU beside torch: bits first, then times.

    python benchmarks/gather_cuda.py [--json FILE] [--explore]

Times are medians of device events over rotated orders, in one run; before each, several times the L2 cache of data is
read. A "graph" is the device's time alone, without that of the calls in Python. "deterministic" is torch under
`use_deterministic_algorithms`. --explore also times other configurations than the rule's.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from device_times import Call, graphed, measure

from isograd.cli.bench_cuda import environment
from isograd.cli.files import checked_file
from isograd.gather import reference
from isograd.gather import triton_launch as gather
from isograd.reduction import cuda as reduction
from isograd.reduction import reference as reduction_reference

INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}


# --- bits ------------------------------------------------------------------------------------------------------------
def to_cuda(x: Any) -> torch.Tensor:
    name = x.dtype.name
    if name not in INTEGER:
        return torch.from_numpy(x).cuda()
    return torch.from_numpy(np.array(x, order="C").view(INTEGER[name])).cuda().view(getattr(torch, name))


def equal(name: str, found: torch.Tensor, expected: Any) -> int:
    integer = INTEGER[expected.dtype.name]
    got = found.contiguous().view(getattr(torch, np.dtype(integer).name)).cpu().numpy()
    wrong = int((got != np.ascontiguousarray(expected).view(integer).reshape(got.shape)).sum())
    if wrong:
        print(f"WRONG: {name}: {wrong} of {got.size} elements differ from the reference")
    return int(wrong > 0)


def check_bits() -> tuple[int, int]:
    """(cases, cases that differ from the reference)."""
    generator, count, wrong = np.random.default_rng(0), 0, 0
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for shape, k, axis in (((70, 256), 8, 1), ((9, 33), 50, 1)):
            sources = tuple(k if d == axis else n for d, n in enumerate(shape))
            indices = generator.integers(-shape[axis], shape[axis], sources)
            x, v = (generator.standard_normal(s).astype(dtype) for s in (shape, sources))
            x.reshape(-1)[:3], v.reshape(-1)[:4] = (-0.0, np.nan, 1), (np.inf, -0.0, np.nan, -np.inf)
            out, taken = torch.empty_like(to_cuda(x)), torch.empty_like(to_cuda(v))
            gather.take_along_axis(to_cuda(x), to_cuda(indices), taken, axis)
            wrong += equal(f"take {shape} {dtype}", taken, reference.take_along_axis(x, indices, axis))
            for base in (None, x):
                expected = reference.scatter_sum(shape, indices, v, axis, base)
                for atomics in (False, True):
                    tensors = to_cuda(indices), to_cuda(v), out.fill_(7), axis
                    gather.scatter_sum(*tensors, None if base is None else to_cuda(base), atomics=atomics)
                    wrong += equal(f"scatter {shape} {dtype} atomics {atomics}", out, expected)
                    count += 1
        for shape, sources in (((60, 100), 300), ((7, 5), 900)):
            indices = generator.integers(0, shape[0], sources)
            indices[generator.random(sources) < 0.3] = 5
            v = (generator.standard_normal((sources, *shape[1:])) * 1e3).astype(dtype)
            v[0, 0] = -np.inf
            out = torch.empty(shape, device="cuda", dtype=to_cuda(v).dtype)
            gather.index_sum(to_cuda(indices), to_cuda(v), out, skipped=3)
            wrong += equal(f"index_sum {shape} {dtype}", out, reference.index_sum(shape, indices, v, None, 3))
            count += 2
        for shape, axis in (((5000,), 0), ((3000, 40), 0), ((200_000,), 0)):
            x = generator.standard_normal(shape).astype(dtype)
            for operation in ("sum", "mean"):
                expected = np.asarray(getattr(reduction_reference, operation)(x, axis))
                wrong += equal(
                    f"{operation} {shape} {axis} {dtype}", getattr(reduction, operation)(to_cuda(x), axis), expected
                )
                count += 1
    return count, wrong


# --- times -----------------------------------------------------------------------------------------------------------
def deterministic(call: Call) -> Call:
    def run() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return call()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def scatters(explore: bool) -> Iterator[tuple[str, dict[str, Call]]]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, n, k = 65536, 256, 8
    dv = torch.randn(rows, k, device="cuda", generator=generator)
    repeated = torch.randint(0, n, (rows, k), device="cuda", generator=generator)
    distinct = torch.rand(rows, n, device="cuda", generator=generator).topk(k).indices
    x, v, dx = torch.randn(rows, n, device="cuda"), torch.empty_like(dv), torch.empty(rows, n, device="cuda")
    for what, indices in (("random indices", repeated), ("distinct indices", distinct)):

        def plain(indices: torch.Tensor = indices) -> Any:
            return torch.zeros(rows, n, device="cuda").scatter_add_(1, indices, dv)

        def ours(indices: torch.Tensor = indices, **options: Any) -> None:
            gather.scatter_sum(indices, dv, dx, 1, **options)

        calls = {"isograd": ours, "isograd graph": graphed(ours), "torch": plain, "torch graph": graphed(plain)}
        calls |= {"deterministic": deterministic(plain), "fill alone": dx.zero_}
        calls["isograd atomics"] = lambda ours=ours: ours(atomics=True)
        if indices is distinct:
            calls["isograd unique"] = graphed(lambda ours=ours: ours(unique=True))
        if explore and indices is repeated:
            for size, warps in ((16, 1), (16, 2), (32, 1), (32, 4), (64, 4), (64, 8)):
                config = gather.ScatterConfiguration("few", size, 4096 // size, warps, True)
                calls[f"rows {size} warps {warps}"] = graphed(lambda c=config, ours=ours: ours(config=c))
        yield f"take_along_axis backward [{rows}, {n}], k = {k}, float32, {what}", calls
    calls = {
        "isograd": lambda: gather.take_along_axis(x, repeated, v, 1),
        "isograd graph": graphed(lambda: gather.take_along_axis(x, repeated, v, 1)),
        "torch": lambda: torch.take_along_dim(x, repeated, 1),
    }
    yield f"take_along_axis [{rows}, {n}], k = {k}, float32", calls
    flat, ones = torch.randint(0, 1000, (1 << 20,), device="cuda"), torch.randn(1 << 20, device="cuda")
    few = torch.empty(1000, device="cuda")
    calls = {
        "isograd": lambda: gather.scatter_sum(flat, ones, few, 0),
        "isograd index_sum": lambda: gather.index_sum(flat, ones, few),
        "torch": lambda: torch.zeros(1000, device="cuda").scatter_add_(0, flat, ones),
    }
    yield "scatter_sum of 1,048,576 float32 into 1,000", calls


def row_sums(explore: bool) -> Iterator[tuple[str, dict[str, Call]]]:
    generator = torch.Generator("cuda").manual_seed(1)
    count, width, num = 32768, 1024, 50304
    values = torch.randn(count, width, device="cuda", generator=generator)
    spread = torch.randint(0, num, (count,), device="cuda", generator=generator)
    hot = spread.clone()
    hot[torch.rand(count, device="cuda", generator=generator) < 0.25] = 17
    out = torch.empty(num, width, device="cuda")
    y = torch.empty_like(values)
    copied = torch.empty(340 << 18, device="cuda")
    for what, indices in (("a quarter on one row", hot), ("no hot row", spread)):

        def ours(indices: torch.Tensor = indices, **options: Any) -> None:
            gather.index_sum(indices, values, out, **options)

        def plain(indices: torch.Tensor = indices) -> Any:
            return torch.zeros(num, width, device="cuda").index_add_(0, indices, values)

        def embedding(indices: torch.Tensor = indices) -> Any:
            return torch.ops.aten.embedding_dense_backward(values, indices, num, -1, False)

        calls = {
            "isograd": ours,
            "isograd graph": graphed(ours),
            "torch index_add": plain,
            "torch embedding": embedding,
        }
        calls["deterministic index_add"] = deterministic(plain)
        calls["deterministic embedding"] = deterministic(embedding)
        calls["copy of 340 MB / 2"] = lambda: copied[: 340 << 17].copy_(copied[340 << 17 :])
        if explore and indices is hot:
            rule = gather.sum_configuration(num, width, 4)
            changes: list[dict[str, int]] = [{"stages": 1}, {"stages": 4}]
            changes += [{"copy_rows": 4, "copy_warps": 8}, {"copy_rows": 1, "copy_warps": 2}, {"copy_rows": 1}]
            changes += [
                {"spread": 4},
                {"spread": 8},
                {"spread": 16},
                {"hot_rows": 8},
                {"hot_rows": 2, "hot_block": 512},
            ]
            for change in changes:
                config = rule._replace(**change)
                calls[str(change)] = graphed(lambda c=config, ours=ours: ours(config=c))
        yield f"index_sum {count} x {width} float32 into {num} rows, {what}", calls
    calls = {
        "isograd": lambda: gather.index_select(out, spread, y),
        "torch": lambda: torch.nn.functional.embedding(spread, out),
    }
    yield f"index_select {count} rows of {width} float32", calls


def reductions() -> Iterator[tuple[str, dict[str, Call]]]:
    for shape, axis in (((8192,), 0), ((65536,), 0), ((1 << 20,), 0), ((65536, 256), 0), ((65536, 256), 1)):
        x = torch.randn(shape, device="cuda")

        def ours(x: torch.Tensor = x, axis: int = axis) -> Any:
            return reduction.sum(x, axis)

        calls: dict[str, Call] = {"isograd": ours, "isograd graph": graphed(ours)}
        calls["torch"] = lambda x=x, axis=axis: x.sum(axis)
        calls["torch graph"] = graphed(calls["torch"])
        yield f"sum {list(shape)} over axis {axis} float32", calls


def host_time(call: Call, count: int = 200) -> float:
    """Microseconds of the processor for one call."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    microseconds = (time.perf_counter() - begin) / count * 1e6
    torch.cuda.synchronize()
    return microseconds


def host_times() -> dict[str, float]:
    """Microseconds of the processor for calls so small that the device never lags behind."""
    x, indices = torch.randn(64, 64, device="cuda"), torch.randint(0, 64, (64, 8), device="cuda")
    v, out, flat = torch.randn(64, 8, device="cuda"), torch.empty(64, 64, device="cuda"), indices[:, 0].contiguous()
    return {
        "take_along_axis": host_time(lambda: gather.take_along_axis(x, indices, v, 1)),
        "take_along_axis of torch": host_time(lambda: torch.take_along_dim(x, indices, 1)),
        "scatter_sum": host_time(lambda: gather.scatter_sum(indices, v, out, 1)),
        "index_sum": host_time(lambda: gather.index_sum(flat, x, out)),
        "index_add of torch": host_time(lambda: torch.zeros(64, 64, device="cuda").index_add_(0, flat, x)),
        "sum": host_time(lambda: reduction.sum(x, 1)),
        "sum of torch": host_time(lambda: x.sum(1)),
    }


def stages() -> dict[str, float]:
    """Median microseconds of each kernel of the hot index_sum, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    generator = torch.Generator("cuda").manual_seed(1)
    values, out = torch.randn(32768, 1024, device="cuda"), torch.empty(50304, 1024, device="cuda")
    indices = torch.randint(0, 50304, (32768,), device="cuda", generator=generator)
    indices[torch.rand(32768, device="cuda", generator=generator) < 0.25] = 17
    gather.index_sum(indices, values, out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(10):
            gather.index_sum(indices, values, out)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in record.events():
        found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name[:60]: statistics.median(t) for name, t in found.items()}


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
    for title, calls in itertools.chain(scatters(options.explore), row_sums(options.explore), reductions()):
        results[title] = measure(calls)
        print(f"\n{title} ({time.monotonic() - begin:.0f} s)")
        for call, milliseconds in results[title].items():
            print(f"  {call:44s} {milliseconds:8.4f} ms", flush=True)
    if options.explore:
        print("\nkernels of index_sum, microseconds")
        for kernel, microseconds in stages().items():
            print(f"  {kernel:60s} {microseconds:8.1f}")
    host = host_times()
    print("\nmicroseconds of the processor for one call")
    for call, microseconds in host.items():
        print(f"  {call:44s} {microseconds:8.1f}")
    if options.json is not None:
        document = {"environment": environment(), "cases": cases, "wrong": wrong}
        document |= {"ms": results, "host_us": host}
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
