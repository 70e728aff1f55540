"""Tables and plots of the figures in `benchmarks/results`: nothing on these pages is typed by hand."""

from __future__ import annotations

import functools
import html
import json
import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_TITLES = {
    "activations-cuda": "Activations and norms",
    "accuracy": "Accuracy of softmax and log_softmax",
    "attention-cpu": "Attention on a CPU",
    "attention-cuda": "Attention",
    "attention-memory": "Memory of attention",
    "axes-cuda": "Softmax over another axis than the last",
    "cpu": "The softmax family on a CPU",
    "cuda": "The softmax family",
    "divergences-cuda": "Divergences and gumbel_softmax",
    "families-cpu": "The other families on a CPU",
    "families-cuda": "The other families",
    "first-use-cpu": "The first use",
    "first-use-cuda": "The first use",
    "gather-cuda": "Gather and scatter",
    "gradient-sum-cuda": "A training step with GradientSum",
    "gradient-sum-kernels-cuda": "GradientSum's kernels",
    "host-cuda": "Time on the host",
    "losses-cuda": "Cross entropy",
    "optim-cuda": "Optimizers and clipping",
    "products-cuda": "Order-free matrix products",
}
_UNITS = {
    "milliseconds": "ms",
    "ms": "ms",
    "seconds": "s",
    "teraflops": "TFLOP/s",
    "terabytes_per_second": "TB/s",
    "TB/s": "TB/s",
    "TFLOP/s": "TFLOP/s",
    "gb_per_s": "GB/s",
    "gigabytes_per_second": "GB/s",
    "gigabytes": "GB",
    "times_as_fast_as": "times as fast as",
    "ulp": "ulp",
}
# What rows are drawn by, the first that they have; more is better, or less.
_DRAWN = {
    "teraflops": True,
    "TFLOP/s": True,
    "terabytes_per_second": True,
    "TB/s": True,
    "gb_per_s": True,
    "milliseconds": False,
    "ms": False,
}
_COLORS = ("#5c7cfa", "#e07b00", "#2e9e5b", "#c2185b", "#00838f", "#8d6e63", "#7e57c2", "#78909c")
_MOST_BARS = 24  # rows: more are a table alone

Row = tuple[str, Mapping[str, Mapping[str, float]]]  # what was measured, and by unit who had which figure


# By operation and dtype, by contender: (length of the axis, figure).
Panels = dict[str, dict[str, list[tuple[int, float]]]]


class Results(NamedTuple):
    """What a file of results says: where it was measured, its rows, and what of them lines are drawn of."""

    name: str
    title: str
    machine: str
    rows: list[Row]
    panels: Panels


def pages(root: Path) -> dict[str, tuple[str, str]]:
    """(title, text) of every page of figures, by its name; the overview first."""
    folder = root / "benchmarks/results"
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    dates = _dates(root)
    rows = [f"| [{r.title}]({r.name}.md) | {r.machine} | {dates.get(r.name, '')} | {len(r.rows)} |" for r in found]
    overview = (
        "# Figures\n\nEvery table and plot here is generated from a file in "
        "[benchmarks/results](../../benchmarks/results) while the site is built. "
        "[How it was measured](measurements.md) says what each script does, and what limits the slower kernels.\n\n"
        "| figures | machine | recorded | problems |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    made = {r.name: (r.title, "\n\n".join(_page(r, dates.get(r.name, ""))) + "\n") for r in found}
    return {"index": ("Overview", overview), **made}


def with_tables(markdown: str, root: Path, page: str) -> str:
    """A page's text with a table where a comment asks for one: `<!-- figures: NAME UNIT -->`."""

    def made(found: re.Match[str]) -> str:
        results = read(root / f"benchmarks/results/{found[1]}.json")
        rows = [(name, groups[found[2]]) for name, groups in results.rows if found[2] in groups]
        if not rows:
            raise ValueError(f"{page} asks for {found[2]} of {found[1]}, which has none")
        up = "../" * page.count("/")
        date = _dates(root).get(found[1], "")
        source = f"[Measured on {results.machine}]({up}figures/{found[1]}.md)" + (
            f", recorded on {date}." if date else "."
        )
        return f"{table(rows)}\n\n{source}"

    return re.sub(r"<!-- figures: (\S+) (\S+) -->", made, markdown)


@functools.cache
def _dates(root: Path) -> dict[str, str]:
    """The day on which each file was recorded, from the history; nothing outside a repository."""
    command = ["git", "log", "--format=%cs", "--name-only", "--", "benchmarks/results"]
    try:
        text = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, str] = {}
    day = ""
    for line in text.splitlines():
        if line.startswith("benchmarks/"):
            found.setdefault(Path(line).stem, day)
        elif line:
            day = line
    return found


def read(path: Path) -> Results:
    """A file of results."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kinds = [kind for kind in _TITLES if path.stem == kind or path.stem.startswith(f"{kind}-")]
    kind = max(kinds, key=len, default="")
    device = path.stem.removeprefix(kind).strip("-").replace("-", " ")
    title = f"{_TITLES[kind]}, {_spelled(device)}".removesuffix(", ") if kind else _spelled(device).capitalize()
    return Results(path.stem, title, _machine(content), list(_rows(content)), _panels(content))


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
    about = content.get("environment") or content.get("machine") or content
    versions = about.get("versions", about)
    parts = [about.get("device") or about.get("cpu") or "a CPU"]
    parts += [f"{about['threads']} threads"] if "threads" in about else []
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
            groups = {key: _numbers(row[key]) for key in _UNITS if isinstance(row.get(key), dict)}
            named = {key: value for key, value in row.items() if key not in groups and not _is_figure(key, value)}
            yield _problem(named), groups
    elif isinstance(content.get("sizes"), dict):
        for problem, said in content["sizes"].items():
            yield problem, {key: _numbers(said[key]) for key in _UNITS if isinstance(said.get(key), dict)}
    elif isinstance(content.get("ms"), dict):
        for problem, figures in content["ms"].items():
            yield problem, {"ms": _numbers(figures)}
    elif isinstance(content.get("memory"), dict):
        memory = content["memory"]
        yield "forward and backward", {"gigabytes": {key: memory[key] / 1e9 for key in ("peak", "operands")}}
    else:
        yield from _host(content)


def _panels(content: Mapping[str, Any]) -> Panels:
    """What lines are drawn of: bandwidth by the length of the last axis, where a file has that."""
    found: Panels = {}
    for row in content["results"] if isinstance(content.get("results"), list) else []:
        unit = next((key for key in _DRAWN if _DRAWN[key] and key in row), None)
        if unit is not None and "operation" in row and row["axis"] == len(row["shape"]) - 1:
            panel = found.setdefault(f"{row['operation']}, {row['dtype']}", {})
            for contender, figure in _numbers(row[unit]).items():
                panel.setdefault(contender, []).append((row["shape"][row["axis"]], figure))
    return {name: panel for name, panel in found.items() if len(next(iter(panel.values()))) > 2}


def _host(content: Mapping[str, Any]) -> Iterator[Row]:
    """Microseconds of the host: isograd's and torch's, before and after."""
    for when, run in content.items():
        if isinstance(run, dict) and isinstance(run.get("microseconds"), dict):
            for function, said in run["microseconds"].items():
                for direction in ("forward", "both"):
                    if isinstance(said.get(direction), list):
                        ours, theirs = said[direction][:2]
                        named = {"forward": "forward", "both": "forward and backward"}[direction]
                        yield f"{function}, {named} ({when})", {"µs": {"isograd": ours, "torch": theirs}}


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
            texts.append(value)
        else:
            texts.append(f"{key.replace('_', ' ')} {value:,}")
    return ", ".join(texts)


def _page(results: Results, date: str) -> Iterator[str]:
    yield f"# {results.title}"
    recorded = f" Recorded on {date}." if date else ""
    source = f"[benchmarks/results/{results.name}.json](../../benchmarks/results/{results.name}.json)"
    yield f"Measured on {results.machine}.{recorded} From {source}."
    drawn = next((key for key in _DRAWN if any(key in groups for _, groups in results.rows)), None)
    if drawn is not None and len(results.rows) <= _MOST_BARS:
        better = "longer is better" if _DRAWN[drawn] else "shorter is better"
        yield f"{_UNITS[drawn]}, {better}:"
        yield bars([(name, groups[drawn]) for name, groups in results.rows if drawn in groups])
    elif drawn is not None and results.panels:
        yield f"{_UNITS[drawn]} by the length of the last axis; higher is better:"
        yield lines(results.panels)
    units = list(dict.fromkeys(unit for _, groups in results.rows for unit in groups))
    for unit in units:
        yield f"## {_UNITS.get(unit, unit).capitalize() if unit == 'times_as_fast_as' else _UNITS.get(unit, unit)}"
        yield table([(name, groups[unit]) for name, groups in results.rows if unit in groups])


def table(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Rows of figures, a column for each contender; rows that share no contender come in tables of their own."""
    groups: list[tuple[dict[str, None], list[tuple[str, Mapping[str, float]]]]] = []
    for name, figures in rows:
        first = next(iter(figures), "")
        columns, members = next((group for group in groups if first in group[0]), ({}, []))
        if not members:
            groups.append((columns, members))
        columns.update(dict.fromkeys(figures))
        members.append((name, figures))
    return "\n\n".join(_one_table(list(columns), members) for columns, members in groups)


def _one_table(columns: list[str], rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    lines = [f"| | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    lines += [f"| {name} | {' | '.join(_number(figures.get(c)) for c in columns)} |" for name, figures in rows]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A drawing of the figures: a group of bars a row, in colors that both themes can show."""
    columns = list(dict.fromkeys(key for _, figures in rows for key in figures))[: len(_COLORS)]
    height, gap, left, width = 14, 12, 8, 640
    longest = max((figures[c] for _, figures in rows for c in columns if c in figures), default=1.0)
    y, parts = 4.0, []
    for name, figures in rows:
        parts.append(f'<text x="{left}" y="{y + 12:.0f}" class="name">{html.escape(name)}</text>')
        y += 18
        for color, column in zip(_COLORS, columns, strict=False):
            if column in figures:
                length = max(1.0, figures[column] / longest * (width - 120))
                label = html.escape(f"{_number(figures[column])} {column}")
                parts.append(
                    f'<rect x="{left}" y="{y:.0f}" width="{length:.1f}" height="{height - 3}" fill="{color}"/>'
                )
                parts.append(f'<text x="{left + length + 5:.1f}" y="{y + height - 4:.0f}">{label}</text>')
                y += height
        y += gap
    body = "".join(parts)
    return (
        f'<div class="figure"><svg viewBox="0 0 {width + 120} {y:.0f}" role="img" '
        f'aria-label="Bars of the figures in the table">{body}</svg></div>'
    )


def lines(panels: Panels) -> str:
    """A drawing of the panels, two beside each other, with one key to the colors."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))[: len(_COLORS)]
    colors = dict(zip(names, _COLORS, strict=False))
    width, height, left, top = 340, 170, 34, 24
    parts = []
    for i, name in enumerate(names):
        parts.append(f'<rect x="{8 + 110 * i}" y="4" width="14" height="9" fill="{colors[name]}"/>')
        parts.append(f'<text x="{26 + 110 * i}" y="12">{html.escape(name)}</text>')
    for i, (title, panel) in enumerate(panels.items()):
        x0, y0 = (i % 2) * width + left, (i // 2) * (height + 36) + top + 14
        points = [point for line in panel.values() for point in line]
        sizes, most = [math.log2(size) for size, _ in points], max(figure for _, figure in points)
        low, span = min(sizes), max(max(sizes) - min(sizes), 1.0)
        wide, high = width - left - 16, height - 30
        parts.append(f'<text x="{x0}" y="{y0 - 4}" class="name">{html.escape(title)}</text>')
        parts.append(f'<rect x="{x0}" y="{y0}" width="{wide}" height="{high}" class="box"/>')
        parts.append(f'<text x="{x0 - 4}" y="{y0 + 9}" text-anchor="end">{_number(most)}</text>')
        parts.append(f'<text x="{x0 - 4}" y="{y0 + high}" text-anchor="end">0</text>')
        for end, anchor in ((min(points)[0], "start"), (max(points)[0], "end")):
            at = x0 if anchor == "start" else x0 + wide
            parts.append(f'<text x="{at}" y="{y0 + high + 13}" text-anchor="{anchor}">{end:,}</text>')
        for name, line in panel.items():
            if name in colors:
                path = " ".join(
                    f"{x0 + (math.log2(size) - low) / span * wide:.1f},{y0 + high - figure / most * high:.1f}"
                    for size, figure in sorted(line)
                )
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
    total = math.ceil(len(panels) / 2) * (height + 36) + top
    return (
        f'<div class="figure"><svg viewBox="0 0 {2 * width + 16} {total}" role="img" '
        f'aria-label="Lines of the figures in the table">{"".join(parts)}</svg></div>'
    )
