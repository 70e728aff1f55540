"""Activations, dropout, rotary embeddings and norms on a GPU beside torch, torch.compile, Liger, quack and a copy.

    python benchmarks/activations.py [--json FILE] [--only NAME ...] [--compile all] [--quick]

The published digests are compared first. Times are medians of device events in rotated order after a flush of the
second-level cache, of [32768, 4096] and [8192, 16384] elements. TB/s are algorithmic bytes: what has to be read and
written, once; the copy moves as many. A backward pass is `torch.autograd.grad` with the gradients that a module needs.
Compiling with Inductor takes most of the time of a run: only the graphs of the first shape in bfloat16 are, unless
`--compile all` is given.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from device_times import measure

import isograd as ig
import isograd.torch as igt
from isograd.cli import check
from isograd.cli.bench_cuda import environment
from isograd.cli.devices import DEVICES
from isograd.cli.files import checked_file, save
from isograd.cli.suites import SUITES
from isograd.core.registry import kernels

Function = Callable[..., Any]
SHAPES = ((32768, 4096), (8192, 16384))
DTYPES = (torch.bfloat16, torch.float32)
SECONDS = 0.15  # at least, of the rounds of one comparison


@dataclass
class Problem:
    """An operation: its inputs, who computes it, and how many arrays of a problem's size it moves, there and back."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    functions: dict[str, Function]
    forward: int
    backward: int
    compiled: Function | None = None  # what torch.compile gets, by default torch's


def liger(module: str, name: str) -> Any:
    """An autograd function of Liger's, or None."""
    try:
        return getattr(__import__(f"liger_kernel.ops.{module}", fromlist=[name]), name)
    except (ImportError, AttributeError):
        return None


def quack() -> Any:
    """The rmsnorm of quack, or None."""
    try:
        from quack.rmsnorm import rmsnorm
    except ImportError:
        return None
    return rmsnorm


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal variates that need a gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_()


def gated(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """The activation of a gate, times another tensor or another half."""
    gate, up = draw(shape, dtype, 0), draw(shape, dtype, 1)
    functions: dict[str, Function] = {"isograd": igt.silu_mul, "torch": lambda g, u: F.silu(g) * u}
    if (kernel := liger("swiglu", "LigerSiLUMulFunction")) is not None:
        functions["Liger"] = kernel.apply
    yield Problem("silu_mul", (gate, up), functions, 3, 5)
    functions = {
        "isograd": lambda g, u: igt.gelu_mul(g, u, "tanh"),
        "torch": lambda g, u: F.gelu(g, approximate="tanh") * u,
    }
    if (kernel := liger("geglu", "LigerGELUMulFunction")) is not None:
        functions["Liger"] = kernel.apply
    yield Problem("gelu_mul, tanh", (gate, up), functions, 3, 5)
    packed = draw((shape[0], 2 * shape[1]), dtype, 2)

    def torch_swiglu(x: torch.Tensor) -> torch.Tensor:
        g, u = x.chunk(2, -1)
        return F.silu(g) * u

    yield Problem("swiglu, packed", (packed,), {"isograd": igt.swiglu, "torch": torch_swiglu}, 3, 5)


def alone(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """Activations that gate nothing."""
    x = draw(shape, dtype, 0)
    yield Problem("silu", (x,), {"isograd": igt.silu, "torch": F.silu}, 2, 3)
    yield Problem("gelu", (x,), {"isograd": igt.gelu, "torch": F.gelu}, 2, 3)


def dropout(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """A tenth of the elements."""
    x = draw(shape, dtype, 6)
    functions: dict[str, Function] = {
        "isograd": lambda x: igt.dropout(x, 0.1, seed=7, offset=4096),
        "torch": lambda x: F.dropout(x, 0.1),
    }
    yield Problem("dropout", (x,), functions, 2, 2)


def rotary(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """Queries of heads of 128 elements, [B, H, L, D] as a projection leaves them, with sequences of 4,096."""
    length, head = min(4096, shape[0]), 128
    x = draw((shape[0] // length, length, shape[1] // head, head), dtype, 7).detach().transpose(1, 2).requires_grad_()
    cos, sin = (torch.from_numpy(t).cuda() for t in ig.rotary_table(length, head))
    wide_cos, wide_sin = (torch.cat([t, t], -1).to(dtype) for t in (cos, sin))

    def torch_rotary(x: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-x[..., head // 2 :], x[..., : head // 2]), -1)
        return x * wide_cos + turned * wide_sin

    yield Problem("rotary, half", (x,), {"isograd": lambda x: igt.rotary(x, cos, sin), "torch": torch_rotary}, 2, 2)
    pairs = torch.complex(cos, sin)

    def torch_interleaved(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * pairs
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    functions: dict[str, Function] = {
        "isograd": lambda x: igt.rotary(x, cos, sin, interleaved=True),
        "torch": torch_interleaved,
    }
    yield Problem("rotary, interleaved", (x,), functions, 2, 2)


def norms(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """Norms with their weights."""
    x, weight, bias = draw(shape, dtype, 3), draw(shape[1:], dtype, 4), draw(shape[1:], dtype, 5)
    functions: dict[str, Function] = {
        "isograd": lambda x, w: igt.rms_norm(x, shape[1:], w, 1e-6),
        "torch": lambda x, w: F.rms_norm(x, shape[1:], w, 1e-6),
    }
    if (kernel := liger("rms_norm", "LigerRMSNormFunction")) is not None:
        functions["Liger"] = lambda x, w: kernel.apply(x, w, 1e-6, 0.0, "llama", False)
    if (fused := quack()) is not None:
        functions["quack"] = lambda x, w: fused(x, w, eps=1e-6)
    yield Problem("rms_norm", (x, weight), functions, 2, 3)
    functions = {
        "isograd": lambda x, w, b: igt.layer_norm(x, shape[1:], w, b),
        "torch": lambda x, w, b: F.layer_norm(x, shape[1:], w, b),
    }
    if (of_layers := liger("layer_norm", "LigerLayerNormFunction")) is not None:
        functions["Liger"] = lambda x, w, b: of_layers.apply(x, w, b, 1e-5)
    yield Problem("layer_norm", (x, weight, bias), functions, 2, 3)


def added(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Problem]:
    """Norms of the sum with a residual, which is a result as well."""
    x, residual, weight, bias = (draw(s, dtype, 8 + i) for i, s in enumerate((shape, shape, shape[1:], shape[1:])))

    def torch_rms(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        summed = x + r
        return F.rms_norm(summed, shape[1:], w, 1e-6), summed

    def torch_layer(
        x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = x + r
        return F.layer_norm(summed, shape[1:], w, b), summed

    functions: dict[str, Any] = {
        "isograd": lambda x, r, w: igt.rms_norm(x, shape[1:], w, 1e-6, residual=r),
        "torch": torch_rms,
    }
    if (kernel := liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")) is not None:
        functions["Liger"] = lambda x, r, w: kernel.apply(x, r, w, 1e-6, 0.0, "llama", False)
    if (fused := quack()) is not None:
        functions["quack"] = lambda x, r, w: fused(x, w, residual=r, eps=1e-6, prenorm=True)
    yield Problem("rms_norm, residual", (x, residual, weight), functions, 4, 4)
    functions = {
        "isograd": lambda x, r, w, b: igt.layer_norm(x, shape[1:], w, b, residual=r),
        "torch": torch_layer,
    }
    yield Problem("layer_norm, residual", (x, residual, weight, bias), functions, 4, 4)


FAMILIES = {"gated": gated, "alone": alone, "dropout": dropout, "rotary": rotary, "norms": norms, "added": added}
OPERATIONS = ("silu_mul", "gelu_mul", "silu", "gelu", "dropout", "rotary", "rmsnorm", "layernorm", "add_rmsnorm")
OPERATIONS += ("add_layernorm", "swiglu", "geglu")
CHECKED = {f"{name}{kind}" for name in OPERATIONS for kind in ("", "_backward")}


def timed(what: str, calls: dict[str, Callable[[], Any]], moved: int, scratch: torch.Tensor) -> dict[str, Any]:
    """Milliseconds and TB/s of some calls and of a copy of as many bytes, printed."""
    source, target = scratch[: moved // 2], scratch[moved // 2 : moved]
    found = measure({"copy": lambda: target.copy_(source), **calls}, rounds=9, least=SECONDS)
    rates = {name: moved / ms / 1e9 for name, ms in found.items()}
    print(what)
    for name, ms in found.items():
        print(f"  {name:16} {ms:8.3f} ms {rates[name]:6.2f} TB/s", flush=True)
    return {"what": what, "ms": found, "TB/s": rates}


def ran(problem: Problem, compiles: bool, what: str, size: int, scratch: torch.Tensor) -> Iterator[dict[str, Any]]:
    """The forward pass of every contender, then the backward."""
    functions = dict(problem.functions)
    if compiles:
        torch._dynamo.reset()
        functions["torch.compile"] = torch.compile(problem.compiled or functions["torch"], dynamic=False)
    yield timed(
        f"{problem.name}, {what}, forward",
        {name: lambda f=f: f(*problem.inputs) for name, f in functions.items()},  # type: ignore[misc]
        problem.forward * size, scratch,
    )  # fmt: skip
    backward: dict[str, Callable[[], Any]] = {}
    dy: tuple[torch.Tensor, ...] = ()
    for name, function in functions.items():
        try:
            y = function(*problem.inputs)
        except Exception as error:  # a project that refuses the problem; the forward pass has said so
            print(f"  {name}: {error!r}"[:120])
            continue
        y = tuple(y)[:2] if isinstance(y, (tuple, list)) else (y,)
        dy = dy or tuple([torch.randn_like(t) for t in y])
        # Liger writes gradients into what it saved: what it computes from the second time on is no gradient.
        backward[name] = lambda y=y, dy=dy: torch.autograd.grad(y, problem.inputs, dy, retain_graph=True)  # type: ignore[misc]
    yield timed(f"{problem.name}, {what}, backward", backward, problem.backward * size, scratch)


def check_digests() -> int:
    """Compare results of all that is timed with the published digests; return how many."""
    published, count = check.published()["results"], 0
    for entry in kernels():
        if entry.device != "cuda" or entry.operation not in CHECKED or entry.dtype not in ("bfloat16", "float32"):
            continue
        run = check.Runner(SUITES[entry.operation], entry, DEVICES["cuda"])
        for case in SUITES[entry.operation].cases(entry.dtype):
            if case.name.startswith("40 x 256"):
                found, known = check.results_digest(run(case)), published[entry.operation][entry.dtype][case.name]
                if found != known:
                    raise SystemExit(f"{entry.operation}, {case.name} has the digest {found}; published: {known}")
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--compile", choices=["some", "all"], default="some", help="which graphs are compiled")
    parser.add_argument("--quick", action="store_true", help="small problems; the figures compare nothing")
    arguments = parser.parse_args()
    checked_file(arguments.json, "--json")
    checked = check_digests()
    print(f"{checked} results have the published digests")
    results: list[dict[str, Any]] = []
    shapes = [(256, n) for _, n in SHAPES] if arguments.quick else SHAPES
    largest = 5 * max(rows * n for rows, n in shapes) * 4
    scratch = torch.empty(largest, dtype=torch.uint8, device="cuda")
    for dtype in DTYPES:
        for shape in shapes:
            size = shape[0] * shape[1] * dtype.itemsize
            compiles = arguments.compile == "all" or (dtype is torch.bfloat16 and shape == shapes[0])
            for family in arguments.only:
                for problem in FAMILIES[family](shape, dtype):
                    results += ran(problem, compiles, f"{list(shape)}, {dtype}", size, scratch)
    if arguments.json:
        document = {"environment": environment(), "checked": checked, "results": results}
        save(arguments.json, lambda path: path.write_text(json.dumps(document, indent=1) + "\n", "utf-8"))


if __name__ == "__main__":
    main()
