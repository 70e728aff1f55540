"""Write the table of figures in README.md from `benchmarks/results`; with `--check` say whether it has theirs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PLACE = re.compile(r"(?s)(<!-- figures of tools/update_readme.py -->\n).*?(<!-- end of figures -->)")
RECORDED = re.compile(r"; recorded from \S+ to \S+(?=\.\n)")  # which only git knows


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


def _day(file: str) -> str:
    """When a file was recorded: the day of its last commit, or nothing."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "log", "-1", "--format=%as", "--", f"benchmarks/results/{file}.json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def figures() -> str:
    """The table, and where it comes from."""
    number = _number()
    rows, machines, days = [], set(), set()
    for line in LINES:
        content = json.loads((RESULTS / f"{line.file}.json").read_text(encoding="utf-8"))
        found = next(row for row in _rows(content) if line.chosen(row))[line.unit]
        about = content.get("environment") or content["machine"]
        machines.add(f"{about['device']}, torch {about.get('versions', about)['torch']}")
        days.add(_day(line.file))
        best = max if line.unit in _MORE_IS_BETTER else min
        other = best((name for name in line.others if name in found), key=lambda name: found[name], default=None)
        cells = [number(found.get(name)) for name in (line.isograd, line.torch, line.deterministic)]
        cells.append(f"{number(found[other])} {other.removeprefix('torch ')}" if other else "")
        rows.append(f"| {line.text.format(copy=number(found.get('copy')))} | {' | '.join(cells)} |")
    days.discard("")
    (machine,) = machines
    head = "| | isograd | torch | its deterministic mode | best of others |\n|---|---:|---:|---:|---:|\n"
    recorded = f"; recorded from {min(days)} to {max(days)}" if days else ""
    return head + "\n".join(rows) + f"\n\nMeasured on one {machine}{recorded}.\n"


def _number() -> Callable[[float | None], str]:
    sys.path.insert(0, str(ROOT / "tools/site"))
    try:
        import site_figures
    finally:
        sys.path.pop(0)
    number: Callable[[float | None], str] = site_figures._number
    return number


def updated(text: str) -> str:
    """README's text with the table as the files have it."""
    if not PLACE.search(text):
        raise ValueError(f"README.md has no place for figures: {PLACE.pattern}")
    return PLACE.sub(lambda found: found[1] + figures() + found[2], text)


def main() -> None:
    """The script."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = updated(text)
    if "--check" in sys.argv[1:]:
        if RECORDED.sub("", new) != RECORDED.sub("", text):
            sys.exit("README.md has other figures than benchmarks/results; run python tools/update_readme.py")
    else:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
