"""Tables of figures in texts: what stands between two comments is generated from `benchmarks/results`.

    <!-- figures: NAME UNIT WORDS -->       the rows of NAME.json that have the unit, and every word in their names
    <!-- figures: NAME copy -->             isograd's bandwidth as a share of a copy's, by problem
    <!-- figures: NAME others -->           the same beside the fastest of the others
    <!-- figures: NAME picture -->          NAME.png, which the script drew
    <!-- figures: overview -->              the README's
    <!-- end of figures -->

`tools/update_figures.py` writes them. The site is not built while one has other figures than the files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import site_overview
import site_results
from site_figures import table

PLACE = re.compile(r"(?s)(<!-- figures: ([^\n]+?) -->\n).*?(<!-- end of figures -->)")
_OPEN = re.compile(r"<!-- figures: [^\n]+? -->")
_CODE = re.compile(r"(?ms)^```.*?^```$")
# A number with a unit in which only measurements come.
_TYPED = re.compile(
    r"\d\s?(?:TB/s|GB/s|TFLOP/s|TOP/s|ms|µs|microseconds|milliseconds|nats|%(?! ?confidence))(?!\w)"
    r"|\d times (?:as (?:fast|slow|large|long)|faster|slower|torch|its speed)"
)


# What is not "in" a unit.
_UNITS = {
    "picture": "Drawn by the script",
    "copy": "As a share of a copy's",
    "others": "Times as fast as the fastest other",
    "times_as_fast_as": "Times as fast as each",
}


class StaleFiguresError(ValueError):
    """A text has other figures than the files, or figures that somebody typed."""


def texts(root: Path) -> list[Path]:
    """The texts that may have figures: README, the pages of the site, and how it was measured."""
    return [root / "README.md", root / "benchmarks/README.md", *sorted((root / "docs").rglob("*.md"))]


def updated(path: Path, root: Path) -> str:
    """A text with every table as the files have it."""
    text = path.read_text(encoding="utf-8")
    if len(_OPEN.findall(text)) != len(PLACE.findall(text)):
        raise StaleFiguresError(f"{path.relative_to(root)}: a table of figures has no `<!-- end of figures -->`")

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{_block(found[2].split(), path, root)}\n{found[3]}"

    return PLACE.sub(block, text)


def typed(text: str) -> list[str]:
    """Lines of a text that have figures outside of tables and code."""
    rest = _CODE.sub("", PLACE.sub("", text))
    return [line for line in rest.splitlines() if _TYPED.search(line)]


def require_current(path: Path, root: Path) -> None:
    """Raise StaleFiguresError where a text's tables are not those of the files, or a figure is typed."""
    name, text = path.relative_to(root), path.read_text(encoding="utf-8")
    if updated(path, root) != text:
        raise StaleFiguresError(f"{name} has other figures than benchmarks/results: run python tools/update_figures.py")
    if lines := typed(text):
        raise StaleFiguresError(f"{name} has a figure that is not generated: {lines[0]}")


def _block(words: list[str], path: Path, root: Path) -> str:
    """What stands between two comments."""
    where = path.relative_to(root)
    results = root / "benchmarks/results"
    if words == ["overview"]:
        return site_overview.table(results)
    if len(words) < 2:
        raise StaleFiguresError(f"{where}: a table of figures names a file and a unit, not {' '.join(words)!r}")
    name, kind, *chosen = words
    file = results / f"{name}.json"
    if not file.exists():
        raise StaleFiguresError(f"{where} asks for figures of {name}; there is no benchmarks/results/{name}.json")
    found = site_results.read(file)
    if kind == "picture":
        picture = file.with_suffix(".png")
        made = f"![{found.title}]({os.path.relpath(picture, path.parent)})" if picture.exists() else ""
    elif kind in _SHARES:
        made = _shares(json.loads(file.read_text(encoding="utf-8")), _SHARES[kind])
    else:
        rows = [(row, groups[kind]) for row, groups in found.rows if kind in groups and all(w in row for w in chosen)]
        made = table(rows) if rows else ""
    if not made:
        raise StaleFiguresError(f"{where} asks for {' '.join(words[1:])} of {name}, which has none")
    said = f"measured on {found.machine}, recorded on {found.recorded} ([file]({os.path.relpath(file, path.parent)}))."
    unit = _UNITS.get(kind) or f"In {site_results.UNITS.get(kind, kind)}"
    return f"{made}\n\n{unit}, {said}"


def _copied(figures: Mapping[str, float], row: Mapping[str, Any]) -> float | None:
    return figures.get("copy") or row.get("copy_gb_per_s")


def _fastest(figures: Mapping[str, float], row: Mapping[str, Any]) -> float | None:
    return max((figure for who, figure in figures.items() if who not in ("isograd", "copy")), default=None)


_SHARES: dict[str, Callable[[Mapping[str, float], Mapping[str, Any]], float | None]] = {
    "copy": _copied,
    "others": _fastest,
}


def _shares(content: Mapping[str, Any], beside: Callable[..., float | None]) -> str:
    """Bandwidths of isograd beside another's, an operation and dtype a line, a column for each problem."""
    lines: dict[str, dict[str, float]] = {}
    for problem, row, figures in _bandwidths(content):
        if (other := beside(figures, row)) is not None:
            lines.setdefault(f"{row['operation']}, {row['dtype']}", {})[problem] = figures["isograd"] / other
    columns = list(dict.fromkeys(problem for line in lines.values() for problem in line))
    head = f"| | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|\n"
    body = [
        f"| {name} | {' | '.join(f'{line[c]:.2f}' if c in line else '' for c in columns)} |"
        for name, line in lines.items()
    ]
    return head + "\n".join(body) if lines else ""


def _bandwidths(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, float]]]:
    for row in content["results"]:
        unit = next((u for u in ("terabytes_per_second", "gb_per_s") if u in row), None)
        if unit is not None and "operation" in row:
            shape, axis = row["shape"], row["axis"]
            problem = (
                f"{shape[-1]:,}" if axis == len(shape) - 1 else " x ".join(f"{n:,}" for n in shape) + f", axis {axis}"
            )
            yield problem, row, row[unit]
