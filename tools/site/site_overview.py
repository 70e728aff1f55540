"""The README's table of figures: one line a family, beside torch and the best of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import site_results
from site_figures import number


class Line(NamedTuple):
    """A row of the table: a file of one machine, which of its results, and the unit and names that are shown."""

    text: str
    file: str
    chosen: Callable[[dict[str, Any]], bool]
    unit: str
    isograd: str = "isograd"
    torch: str = "torch"
    deterministic: str = "torch, deterministic"
    others: tuple[str, ...] = ()


def _named(start: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["problem"].startswith(start)


def _attention(backward: bool) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["problem"] == [128, 8192, True] and row["backward"] is backward


LINES = (
    Line(
        "softmax, bfloat16, rows of 8,192, TB/s (a copy of memory: {copy})",
        "cuda-nvidia-h200",
        lambda r: (r["operation"], r["dtype"], r["shape"]) == ("softmax", "bfloat16", [131072, 8192]),
        "terabytes_per_second",
        others=("torch.compile", "quack", "liger"),
    ),
    Line(
        "`index_add` of 32,768 rows, a quarter onto one, ms",
        "families-cuda-nvidia-h200",
        _named("index_add"),
        "milliseconds",
    ),
    Line(
        "gradient of an embedding, the same rows, ms",
        "families-cuda-nvidia-h200",
        _named("embedding_backward"),
        "milliseconds",
    ),
    Line(
        "router of 256 experts, 65,536 tokens, ms",
        "families-cuda-nvidia-h200",
        _named("moe_router,"),
        "milliseconds",
        others=("torch.compile",),
    ),
    Line(
        "cross entropy and its gradient, 8,192 x 128,256, ms",
        "losses-cuda-nvidia-h200",
        lambda r: r["what"] == "cross entropy" and r["shape"] == [8192, 128256],
        "ms",
        others=("torch.compile", "liger", "quack"),
    ),
    Line(
        "attention, head dimension 128, 8,192 keys, causal, TFLOP/s",
        "attention-cuda-nvidia-h200",
        _attention(False),
        "teraflops",
        "isograd, Hopper",
        "torch flash",
        others=("torch cuDNN",),
    ),
    Line(
        "its gradient, TFLOP/s",
        "attention-cuda-nvidia-h200",
        _attention(True),
        "teraflops",
        "isograd, Hopper",
        "torch flash",
        others=("torch cuDNN",),
    ),
    Line(
        "product of 8,192³ without an order, beside bfloat16, TFLOP/s",
        "products-cuda-nvidia-h200",
        lambda r: r["problem"] == "8192 x 8192 x 8192",
        "TFLOP/s",
        "product",
        "cuBLAS bfloat16",
    ),
    Line(
        "training step with `GradientSum`, beside DDP, s",
        "gradient-sum-cuda-nvidia-h200",
        lambda r: r["kind"] == "ddp",
        "seconds",
    ),
)
_MORE_IS_BETTER = ("terabytes_per_second", "teraflops", "TFLOP/s")


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    if "sizes" in content:
        return [{"problem": name, **figures} for name, figures in content["sizes"].items()]
    rows: list[dict[str, Any]] = content["results"]
    return rows


def table(results: Path) -> str:
    """The table, and where and when its figures were recorded."""
    rows, devices, versions, days = [], set(), set(), set()
    for line in LINES:
        content = json.loads((results / f"{line.file}.json").read_text(encoding="utf-8"))
        found = _figures(line, content)
        about = site_results.about(content)
        devices.add(about["device"])
        versions.add(about.get("versions", about)["torch"])
        days.add(site_results.recorded(content, line.file))
        best = max if line.unit in _MORE_IS_BETTER else min
        other = best((name for name in line.others if name in found), key=lambda name: found[name], default=None)
        cells = [number(found.get(name)) for name in (line.isograd, line.torch, line.deterministic)]
        cells.append(f"{number(found[other])} {other.removeprefix('torch ')}" if other else "")
        rows.append(f"| {line.text.format(copy=number(found.get('copy')))} | {' | '.join(cells)} |")
    head = "| | isograd | torch | its deterministic mode | best of others |\n|---|---:|---:|---:|---:|\n"
    when = f"from {min(days)} to {max(days)}" if len(days) > 1 else f"on {min(days)}"
    where = f"one {' and one '.join(sorted(devices))}, torch {' and '.join(sorted(versions))}"
    return f"{head}{chr(10).join(rows)}\n\nMeasured on {where}; recorded {when}."


def _figures(line: Line, content: dict[str, Any]) -> dict[str, float]:
    """What a file has for a line; ValueError where it has nothing, or nothing of isograd."""
    row = next((row for row in _rows(content) if line.chosen(row)), None)
    if row is None:
        raise ValueError(f"{line.file}.json has no row for the README's line {line.text!r}")
    found: dict[str, float] = row[line.unit]
    if line.isograd not in found:
        raise ValueError(f"{line.file}.json has no {line.isograd!r} for {line.text!r}, but {', '.join(found)}")
    return found
