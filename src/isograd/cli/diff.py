"""`isograd diff`: the first place where two traces part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from isograd import trace_file
from isograd.cli.progress import output_console
from isograd.trace_file import KINDS, Difference, Key, Trace

_SHOWN = 12  # characters of a digest
_COMPILED = "Inside of what torch.compile compiled no module is seen: "


def diff(
    a: Annotated[Path, typer.Argument(help="A file that isograd.torch.trace wrote.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one, of a run that should be the same.", show_default=False)],
    most: Annotated[int, typer.Option("--list", min=0, help="List this many of the records that differ.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable comparison.")] = False,
) -> None:
    """Show the first place where two runs part, from the traces that they wrote.

    Exit status: 0 where every record is the same, 1 where one differs, 2 for a file that cannot be read.
    """
    one, other = trace_file.read(a), trace_file.read(b)
    found = trace_file.compare(one, other)
    if as_json:
        typer.echo(json.dumps(as_dict(one, other, found), indent=2))
    else:
        output_console().print("\n".join(_lines(one, other, found, most)), markup=False, soft_wrap=True)
    if not found.same:
        raise typer.Exit(1)


def _lines(a: Trace, b: Trace, found: Difference, most: int) -> Iterator[str]:
    for name, trace in (("a", a), ("b", b)):
        yield f"{name}: {trace.path}, {len(trace.records)} records{_ending(trace)}"
    if found.header:
        yield "The headers differ:"
        yield from (f"  {key}: {_text(x)} in a, {_text(y)} in b" for key, x, y in found.header)
    if found.same:
        yield f"The runs are the same: {len(found.common)} records."
    else:
        yield from _first(a, b, found, most)
    if compiled := sorted({name for trace in (a, b) for name in (trace.end or {}).get("compiled", ())}):
        yield _COMPILED + ", ".join(compiled)


def _ending(trace: Trace) -> str:
    if trace.end is None:
        return "; the program was stopped before the block's end"
    error = trace.end.get("error")
    return f"; {error} ended the block" if error else ""


def _text(value: Any) -> str:
    return value[:_SHOWN] if isinstance(value, str) and len(value) == 64 else str(value)


def _first(a: Trace, b: Trace, found: Difference, most: int) -> Iterator[str]:
    """The place, what is around it, and how much differs after it."""
    assert found.first is not None
    keys = list(a.records)
    yield ""
    if found.order and found.order[0] == found.first:
        place, one, other = found.order
        yield f"The runs part at record {place + 1}, where they do other things:"
        yield f"  a: {one or 'ends'}"
        yield f"  b: {other or 'ends'}"
        if found.differ:
            yield "Of those that both have the first with another value is:"
            yield from _compared(a, b, found.differ[0])
    else:
        yield f"The runs part at record {found.first + 1}:"
        yield from _compared(a, b, keys[found.first])
        if found.order:
            yield f"From record {found.order[0] + 1} on they do other things as well."
    yield f"The last record that is the same: {keys[found.first - 1] if found.first else 'none'}"
    yield ""
    yield (
        f"Of {len(found.common)} records that both have {len(found.differ)} differ; {len(found.only_a)} are in a alone "
        f"and {len(found.only_b)} in b alone."
    )
    yield from _by_kind(found)
    if most > 1 and found.differ:
        yield "Those that differ:"
        for key in found.differ[:most]:
            yield from _compared(a, b, key)


def _compared(a: Trace, b: Trace, key: Key) -> Iterator[str]:
    one, other = a.records[key], b.records[key]
    yield f"  {key}"
    yield f"    a: {one.value}  {one.digest[:_SHOWN]}"
    yield f"    b: {other.value}  {other.digest[:_SHOWN]}"


def _by_kind(found: Difference) -> Iterator[str]:
    every, differ = (Counter(key.kind for key in keys) for keys in (found.common, found.differ))
    width = max([len(KINDS.get(kind, kind)) for kind in every], default=0)
    for kind, count in every.items():
        yield f"  {KINDS.get(kind, kind):<{width}}  {differ[kind]} of {count} differ"


def as_dict(a: Trace, b: Trace, found: Difference) -> dict[str, Any]:
    """The comparison of `--json`."""

    def key(of: Key | None) -> dict[str, Any] | None:
        return of and of._asdict()

    def record(of: Key) -> dict[str, Any]:
        return {**of._asdict(), "a": a.records[of]._asdict(), "b": b.records[of]._asdict()}

    return {
        "same": found.same,
        "first": None if found.first is None else found.first + 1,
        "records": {"a": len(a.records), "b": len(b.records), "both": len(found.common)},
        "ended": {"a": a.end, "b": b.end},
        "header": {name: {"a": x, "b": y} for name, x, y in found.header},
        "order": found.order and {"record": found.order[0] + 1, "a": key(found.order[1]), "b": key(found.order[2])},
        "differ": [record(of) for of in found.differ],
        "only_a": [key(of) for of in found.only_a],
        "only_b": [key(of) for of in found.only_b],
    }
