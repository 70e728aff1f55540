"""`isograd bench --device cuda`: bits, then bandwidth beside torch, torch.compile, quack and Liger.

Everything is timed in one run: device events, rotated order, medians, several times the L2 of data. The ceiling is a
device-to-device copy. Bandwidth counts every operand once. This module imports torch and Triton; import it where they
are known to be there.
"""

import datetime
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from isograd.cli.files import save
from isograd.cli.progress import Activity, optional
from isograd.ops.softmax import reference
from isograd.ops.softmax.triton import launch

OPERATIONS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
DTYPES = ("bfloat16", "float32")
COLUMNS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
OTHER_AXES = (
    ((8, 4096, 4096), 1),
    ((16, 2048, 4096), 1),
    ((32, 1024, 4096), 1),
    ((128, 256, 4096), 1),
    ((64, 128, 64, 64), 1),
)
Problem = tuple[str, str, tuple[int, ...], int]  # operation, dtype, shape, axis


# --- bits ------------------------------------------------------------------------------------------------------------
def check_bits() -> int:
    """Compare a handful of shapes with the NumPy reference; return how many."""
    integer = {"bfloat16": torch.int16, "float32": torch.int32}
    generator, count = np.random.default_rng(0), 0
    for dtype in DTYPES:
        numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

        def to_torch(a: Any, dtype: str = dtype) -> torch.Tensor:
            bits = torch.from_numpy(a.view(np.int16 if dtype == "bfloat16" else np.int32).copy())
            return bits.cuda().view(getattr(torch, dtype))

        for shape, axis in (((64, 256), 1), ((9, 4096), 1), ((4, 32768), 1), ((1, 131072), 1), ((2, 128, 256), 1)):
            x, dy = ((generator.standard_normal(shape) * 3).astype(numpy_dtype) for _ in range(2))
            for operation in OPERATIONS:
                forward = operation.removesuffix("_backward")
                arrays = [x] if operation == forward else [dy, getattr(reference, forward)(x, axis)]
                expected = to_torch(getattr(reference, operation)(*arrays, axis)).view(integer[dtype])
                out = torch.empty(shape, device="cuda", dtype=getattr(torch, dtype))
                launch(operation, (*[to_torch(a) for a in arrays], out), axis)
                if not torch.equal(out.view(integer[dtype]), expected):
                    raise SystemExit(f"{operation} of {dtype} {shape} differs from the reference")
                count += 1
    return count


# --- what is compared ------------------------------------------------------------------------------------------------
def eager(operation: str, axis: int) -> Callable[..., torch.Tensor]:
    """What torch offers, with the arguments of isograd."""
    if operation == "softmax":
        return lambda x: torch.softmax(x, axis)
    if operation == "log_softmax":
        return lambda x: torch.log_softmax(x, axis)
    if operation == "softmax_backward":
        return lambda dy, y: torch.ops.aten._softmax_backward_data(dy, y, axis, y.dtype)
    return lambda dy, y: torch.ops.aten._log_softmax_backward_data(dy, y, axis, y.dtype)


def quack(operation: str) -> Callable[..., torch.Tensor] | None:
    """The function of quack for an operation, if it is installed and has one."""
    try:
        from quack.softmax import softmax_bwd, softmax_fwd
    except ImportError:
        return None
    return {"softmax": softmax_fwd, "softmax_backward": softmax_bwd}.get(operation)


def liger(operation: str, columns: int) -> Callable[..., torch.Tensor] | None:
    """The function of Liger for an operation, if it is installed and has one."""
    try:
        from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward
    except ImportError:
        return None
    if operation == "softmax":
        return lambda x: _softmax_forward(x)[0]
    if operation == "softmax_backward":
        _, *settings = _softmax_forward(torch.zeros(1, columns, device="cuda"))
        return lambda dy, y: _softmax_backward(dy, y, *settings)
    return None


def implementations(problem: Problem, tensors: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Callables without arguments by name; those that do not run are left out."""
    operation, _, shape, axis = problem
    out = torch.empty_like(tensors[0])
    found: dict[str, Callable[[], Any]] = {"isograd": lambda: launch(operation, (*tensors, out), axis)}
    plain = eager(operation, axis)
    torch._dynamo.reset()  # it stops compiling after some shapes of one function
    others: dict[str, Callable[..., Any] | None] = {
        "torch": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
    }
    if axis == len(shape) - 1:
        try:
            others |= {"quack": quack(operation), "liger": liger(operation, shape[-1])}
        except Exception as error:  # a project that refuses the length
            print(f"  {operation} {shape}: {error!r}"[:160])
    for name, function in others.items():
        if function is None:
            continue
        try:
            function(*tensors)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name} {operation} {shape}: {error!r}"[:160])
            continue
        found[name] = functools.partial(function, *tensors)
    return found


def make_tensors(problem: Problem) -> list[torch.Tensor]:
    """Inputs of a problem."""
    operation, dtype, shape, axis = problem
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype), generator=generator)

    if not operation.endswith("backward"):
        return [draw().mul_(2)]
    y = draw().mul_(2)
    launch(operation.removesuffix("_backward"), (y, y), axis)
    return [draw(), y]


# --- timing ----------------------------------------------------------------------------------------------------------
def medians(
    functions: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median milliseconds by name; every round runs all of them, each time from another one on.

    `before` runs before each, outside the time that counts.
    """
    names = list(functions)
    for name in names:
        functions[name]()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before()
            start.record()
            functions[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Bandwidth in TB/s of each contender for one problem."""
    tensors = make_tensors(problem)
    functions = implementations(problem, tensors)
    source = tensors[0]
    target = torch.empty_like(source)
    functions["copy"] = lambda: target.copy_(source)
    size = source.numel() * source.element_size()
    operands = {name: 2 if name == "copy" else len(tensors) + 1 for name in functions}
    result = {name: operands[name] * size / ms / 1e9 for name, ms in medians(functions, rounds).items()}
    operation, dtype, shape, axis = problem
    return {"operation": operation, "dtype": dtype, "shape": shape, "axis": axis, "terabytes_per_second": result}


def problems(columns: Iterable[int], gigabytes: float) -> list[Problem]:
    """What is measured."""
    found: list[Problem] = []
    for dtype in DTYPES:
        elements = int(gigabytes * 2**30) // (2 if dtype == "bfloat16" else 4)
        for n in columns:
            found += [(operation, dtype, (elements // n, n), 1) for operation in OPERATIONS]
        found += [(operation, dtype, shape, axis) for shape, axis in OTHER_AXES for operation in OPERATIONS]
    return found


def prepare(share: list[Problem]) -> None:
    """Compile for some problems, so that the caches on disk are filled by several processes at a time."""
    for problem in share:
        implementations(problem, make_tensors(problem))
        torch.cuda.empty_cache()


def host_microseconds() -> dict[str, float]:
    """Time of a launch on the host for a problem that was seen before."""
    x = torch.randn(64, 256, device="cuda")
    out = torch.empty_like(x)
    result = {}
    for name, function in (
        ("isograd", lambda: launch("softmax", (x, out), 1)),
        ("torch", lambda: torch.softmax(x, 1)),
    ):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            function()
        result[name] = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
    return result


# --- results ---------------------------------------------------------------------------------------------------------
def version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    packages = ("torch", "triton", "numpy", "quack-kernels", "liger-kernel")
    return {
        "recorded": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def plot(results: list[dict[str, Any]], quick: bool, path: Path) -> None:
    """Draw bandwidth over row length."""
    pyplot = optional("matplotlib.pyplot", "matplotlib", "bench", "The plot")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(len(DTYPES), len(OPERATIONS), figsize=(18, 8), sharex=True, sharey=True)
    for row, dtype in enumerate(DTYPES):
        for column, operation in enumerate(OPERATIONS):
            axis = axes[row][column]
            chosen = [r for r in results if (r["dtype"], r["operation"]) == (dtype, operation) and len(r["shape"]) == 2]
            for name in ("copy", "isograd", "torch", "torch.compile", "quack", "liger"):
                points = [(r["shape"][1], r["terabytes_per_second"].get(name)) for r in chosen]
                points = [p for p in points if p[1] is not None]
                if points:
                    style, opacity = {"copy": ("k--", 1.0), "isograd": ("C3o-", 1.0)}.get(name, ("-", 0.6))
                    axis.plot(*zip(*points, strict=True), style, label=name, alpha=opacity)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{operation}, {dtype}")
            axis.grid(alpha=0.3)
            if row == len(DTYPES) - 1:
                axis.set_xlabel("columns")
            if column == 0:
                axis.set_ylabel("TB/s")
    axes[0][0].legend(loc="lower left")
    figure.suptitle(f"{torch.cuda.get_device_name()}, {_size(quick)[1]:g} GiB an operand")
    figure.tight_layout()
    save(path, lambda target: figure.savefig(target, dpi=110))


def show(result: dict[str, Any]) -> str:
    """One line of figures."""
    rates = " ".join(f"{name}={value:.2f}" for name, value in result["terabytes_per_second"].items())
    return f"{result['operation']:21} {result['dtype']:9} {'x'.join(map(str, result['shape'])):>16} {rates}"


def compile_ahead(todo: list[Problem]) -> None:
    """Fill the caches of compiled kernels from several processes: one alone takes many minutes."""
    count = min(8, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=prepare, args=(todo[i::count],)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def run(quick: bool, activity: Activity, lines: list[str], results: list[dict[str, Any]]) -> None:
    """Check and measure everything; `lines` to show and `results` grow by one at a time, so an interrupt keeps them."""
    columns, gigabytes, rounds = _size(quick)
    todo = problems(columns, gigabytes)
    activity.step("compiling, the first time some minutes")
    if not quick:
        compile_ahead(todo)
    lines.append(f"{check_bits()} results equal the reference, bit for bit")
    for problem in todo:
        activity.step(" ".join(map(str, problem[:3])))
        results.append(measure(problem, rounds))
        lines.append(show(results[-1]))
        torch.cuda.empty_cache()


def _size(quick: bool) -> tuple[tuple[int, ...], float, int]:
    """Columns, gigabytes an operand, rounds."""
    return ((256, 4096), 1 / 32, 3) if quick else (COLUMNS, 2.0, 15)


def keep(folder: Path, quick: bool, results: list[dict[str, Any]], interrupted: bool) -> Path:
    """Write a JSON file into a folder; return its path."""
    where = environment()
    document = {
        "environment": where,
        "quick": quick,
        "interrupted": interrupted,
        "host_microseconds": host_microseconds(),
        "results": results,
    }
    path = folder / f"cuda-{re.sub('[^a-z0-9]+', '-', where['device'].lower())}.json"
    text = json.dumps(document, indent=1) + "\n"
    save(path, lambda target: target.write_text(text, "utf-8"))
    return path


def steps(quick: bool) -> int:
    """How many steps `run` reports."""
    return 1 + len(problems(*_size(quick)[:2]))
