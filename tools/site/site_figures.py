"""Tables and plots of the figures in `benchmarks/results`: nothing on these pages is typed by hand."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from site_results import DRAWN, UNITS, Panels, Results, read

_COLORS = ("#5c7cfa", "#e07b00", "#2e9e5b", "#c2185b", "#00838f", "#8d6e63", "#7e57c2", "#78909c")
_MOST_BARS = 24  # rows: more are a table alone


def pages(root: Path) -> dict[str, tuple[str, str]]:
    """(title, text) of every page of figures, by its name; the overview first."""
    folder = root / "benchmarks/results"
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    rows = [f"| [{r.title}]({r.name}.md) | {r.machine} | {r.recorded} | {len(r.rows)} |" for r in found]
    overview = (
        "# Figures\n\nEvery table and plot here is generated from a file in "
        "[benchmarks/results](../../benchmarks/results) while the site is built. "
        "[How it was measured](measurements.md) says what each script does, and what limits the slower kernels.\n\n"
        "| figures | machine | recorded | problems |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    made = {r.name: (r.title, "\n\n".join(_page(r)) + "\n") for r in found}
    return {"index": ("Overview", overview), **made}


def _page(results: Results) -> Iterator[str]:
    yield f"# {results.title}"
    source = f"[benchmarks/results/{results.name}.json](../../benchmarks/results/{results.name}.json)"
    yield f"Measured on {results.machine}. Recorded on {results.recorded}. From {source}."
    drawn = next((key for key in DRAWN if any(key in groups for _, groups in results.rows)), None)
    if drawn is not None and len(results.rows) <= _MOST_BARS:
        better = "longer is better" if DRAWN[drawn] else "shorter is better"
        yield f"{UNITS[drawn]}, {better}:"
        yield bars([(name, groups[drawn]) for name, groups in results.rows if drawn in groups])
    elif drawn is not None and results.panels:
        yield f"{UNITS[drawn]} by the length of the last axis; higher is better:"
        yield lines(results.panels)
    units = list(dict.fromkeys(unit for _, groups in results.rows for unit in groups))
    for unit in units:
        yield f"## {UNITS.get(unit, unit).capitalize() if unit == 'times_as_fast_as' else UNITS.get(unit, unit)}"
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
    lines += [f"| {name} | {' | '.join(number(figures.get(c)) for c in columns)} |" for name, figures in rows]
    return "\n".join(lines)


def number(value: float | None) -> str:
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
                label = html.escape(f"{number(figures[column])} {column}")
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
        parts.append(f'<text x="{x0 - 4}" y="{y0 + 9}" text-anchor="end">{number(most)}</text>')
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
