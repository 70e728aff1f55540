"""The files in `benchmarks/results`: where and when they were recorded, and their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_TITLES = {
    "activations-cuda": "Activations and norms",
    "accuracy": "Accuracy of softmax and log_softmax",
    "attention-cpu": "Attention on a CPU",
    "attention-cuda": "Attention",
    "attention-memory": "Memory of attention",
    "attention-cuda-nvidia-h200-tried": "Attention, what was tried",
    "axes-cuda": "Softmax over another axis than the last",
    "cpu": "The softmax family on a CPU",
    "cuda": "The softmax family",
    "demo-cpu": "The training of the demo",
    "divergences-cuda": "Divergences and gumbel_softmax",
    "families-cpu": "The other families on a CPU",
    "families-cuda": "The other families",
    "first-use-cpu": "The first use",
    "first-use-cuda": "The first use",
    "gather-cuda": "Gather and scatter",
    "gradient-sum-2-cuda": "A training step with GradientSum on two GPUs",
    "gradient-sum-cuda": "A training step with GradientSum",
    "gradient-sum-kernels-cuda": "GradientSum's kernels",
    "host-cuda": "Time on the host",
    "linear-cross-entropy-cuda": "Linear cross entropy",
    "llama-step-cuda": "A step of a Llama",
    "lm-curve": "A language model with order-free products",
    "losses-cuda": "Cross entropy",
    "matmul-cpu": "Order-free matrix products on a CPU",
    "optim-cuda": "Optimizers and clipping",
    "products-cuda": "Order-free matrix products",
}
UNITS = {
    "milliseconds": "ms",
    "ms": "ms",
    "seconds": "seconds",
    "teraflops": "TFLOP/s",
    "terabytes_per_second": "TB/s",
    "TB/s": "TB/s",
    "TFLOP/s": "TFLOP/s",
    "GFLOP/s": "GFLOP/s",
    "gb_per_s": "GB/s",
    "gigabytes_per_second": "GB/s",
    "gigabytes": "GB",
    "times_as_fast_as": "times as fast as",
    "ulp": "ulp",
    "nats": "nats at the end",
}
# What rows are drawn by, the first that they have; more is better, or less.
DRAWN = {
    "teraflops": True,
    "TFLOP/s": True,
    "GFLOP/s": True,
    "terabytes_per_second": True,
    "TB/s": True,
    "gb_per_s": True,
    "milliseconds": False,
    "ms": False,
}

Row = tuple[str, Mapping[str, Mapping[str, float]]]  # what was measured, and by unit who had which figure


# By operation and dtype, by contender: (length of the axis, figure).
Panels = dict[str, dict[str, list[tuple[int, float]]]]


class Results(NamedTuple):
    """What a file of results says: where and when it was measured, its rows, and what of them lines are drawn of."""

    name: str
    title: str
    machine: str
    recorded: str
    rows: list[Row]
    panels: Panels


def read(path: Path) -> Results:
    """A file of results."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kinds = [kind for kind in _TITLES if path.stem == kind or path.stem.startswith(f"{kind}-")]
    kind = max(kinds, key=len, default="")
    device = path.stem.removeprefix(kind).strip("-").replace("-", " ")
    title = f"{_TITLES[kind]}, {_spelled(device)}".removesuffix(", ") if kind else _spelled(device).capitalize()
    rows = list(_rows(content))
    if not rows:
        raise ValueError(f"{path.name} has no rows that site_results.py knows how to show")
    return Results(path.stem, title, _machine(content), recorded(content, path.name), rows, _panels(content))


def about(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a file that says where it was measured."""
    found: Mapping[str, Any] = content.get("environment") or content.get("machine") or content
    return found


def recorded(content: Mapping[str, Any], name: str) -> str:
    """The day on which a file was recorded; ValueError where it does not say."""
    day = about(content).get("recorded")
    if not isinstance(day, str):
        raise ValueError(f"{name} does not say when it was recorded; python tools/update_figures.py adds it")
    return day


def _spelled(device: str) -> str:
    words = {
        "nvidia": "NVIDIA",
        "amd": "AMD",
        "epyc": "EPYC",
        "intel": "Intel",
        "xeon": "Xeon",
        "80gb": "80GB",
        "hbm3": "HBM3",
    }
    return " ".join(words.get(word, word.upper() if word.startswith("h") else word) for word in device.split())


def _machine(content: Mapping[str, Any]) -> str:
    """Where it was measured, and with what."""
    where = about(content)
    versions = where.get("versions", where)
    parts = [where.get("device") or where["cpu"]]
    parts += [f"{where['threads']} threads"] if "threads" in where else []
    parts += [f"{name} {versions[name]}" for name in ("torch", "triton", "numba", "numpy") if versions.get(name)]
    return ", ".join(parts)


def _rows(content: Mapping[str, Any]) -> Iterator[Row]:
    results = content.get("results", [])
    if isinstance(results, dict):  # accuracy: by function, by problem, by contender
        for function, problems in results.items():
            for problem, figures in problems.items():
                yield f"{function}, {problem}", {"ulp": figures}
    elif results:
        for row in results:
            groups = {key: _numbers(row[key]) for key in UNITS if isinstance(row.get(key), dict)}
            named = {key: value for key, value in row.items() if key not in groups and not _is_figure(key, value)}
            yield _problem(named), groups
    elif isinstance(content.get("sizes"), dict):
        for problem, said in (content["sizes"] | content.get("experts", {})).items():
            yield problem, {key: _numbers(said[key]) for key in UNITS if isinstance(said.get(key), dict)}
    elif isinstance(content.get("ms"), dict):
        for problem, figures in content["ms"].items():
            yield problem, {"ms": _numbers(figures)}
    elif isinstance(content.get("memory"), dict):
        memory = content["memory"]
        yield "forward and backward", {"gigabytes": {key: memory[key] / 1e9 for key in ("peak", "operands")}}
    elif isinstance(content.get("verdict"), dict):
        for seed, plain in enumerate(content["verdict"]["last_torch"]):
            last = {"torch, bfloat16": plain}
            if seed < len(content["verdict"]["last_int16"]):
                last["order-free"] = content["verdict"]["last_int16"][seed]
            yield f"seed {seed}", {"nats": last}
    else:
        yield from _host(content)


def _panels(content: Mapping[str, Any]) -> Panels:
    """What lines are drawn of: bandwidth by the length of the last axis, where a file has that."""
    found: Panels = {}
    for row in content["results"] if isinstance(content.get("results"), list) else []:
        unit = next((key for key in DRAWN if DRAWN[key] and key in row), None)
        if unit is not None and "operation" in row and row["axis"] == len(row["shape"]) - 1:
            panel = found.setdefault(f"{row['operation']}, {row['dtype']}", {})
            for contender, figure in _numbers(row[unit]).items():
                panel.setdefault(contender, []).append((row["shape"][row["axis"]], figure))
    return {name: panel for name, panel in found.items() if len(next(iter(panel.values()))) > 2}


def _host(content: Mapping[str, Any]) -> Iterator[Row]:
    """Microseconds of the host: isograd's and torch's, before and after."""
    runs = {"": content} if "microseconds" in content else content
    for when, run in runs.items():
        if isinstance(run, dict) and isinstance(run.get("microseconds"), dict):
            for function, said in run["microseconds"].items():
                for direction in ("forward", "both"):
                    if isinstance(said.get(direction), list):
                        ours, theirs = said[direction][:2]
                        named = {"forward": "forward", "both": "forward and backward"}[direction]
                        turn = f" ({when})" if when else ""
                        yield f"{function}, {named}{turn}", {"µs": {"isograd": ours, "torch": theirs}}


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in group.items() if isinstance(value, (int, float))}


def _is_figure(key: str, value: Any) -> bool:
    return isinstance(value, float) or key in ("bytes", "tflops", "ratio") or isinstance(value, dict)


def _problem(named: Mapping[str, Any]) -> str:
    """What was measured, in words."""
    texts = []
    for key, value in named.items():
        if isinstance(value, bool):
            texts += [key] if value else [{"causal": "full", "backward": "forward"}.get(key, f"not {key}")]
        elif isinstance(value, list):
            numbers = [f"{v:,}" for v in value if not isinstance(v, bool)]
            texts += [" x ".join(numbers), *("causal" if v else "full" for v in value if isinstance(v, bool))]
        elif isinstance(value, str):
            texts.append(value.replace("torch.", ""))
        else:
            texts.append(f"{key.replace('_', ' ')} {value:,}")
    return ", ".join(texts)
