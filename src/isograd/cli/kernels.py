"""`isograd kernels`: the registry, at a glance or an operation at a time."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from isograd.cli.options import TYPES, Operations, Types, require_accepted
from isograd.cli.progress import output_console
from isograd.cli.suites import SUITES
from isograd.core import registry
from isograd.core.descriptor import Descriptor, KernelSku
from isograd.errors import UnsupportedError
from isograd.runtime.fenv import default_environment

DEVICES = ("cpu", "cuda", "mps", "mlx")
_WIDTH = 80
_PROMISES = {
    "deterministic": "run",
    "batch_invariant": "batch",
    "order_invariant": "order",
    "bit_stable_across_hardware": "machine",
}
_AT_A_GLANCE = (
    "Where there are several kernels, the first that takes a problem is chosen. `--operation softmax`, say, shows what "
    "each one promises, its error bounds, and why it does not run on this machine."
)
_IN_DETAIL = (
    "same bits: whatever the run, the batch, the order of what is summed, the machine. bound: of the absolute error of "
    "every element; u: half an ulp of 1 in the type computed in; q: the quantum of a sum; n: the length of the axis; "
    "η: half the smallest subnormal."
)

Pair = tuple[registry.Entry, KernelSku | None]


def kernels(
    device: Annotated[
        str | None, typer.Option(help=f"Only kernels of this device. Accepted: {', '.join(DEVICES)}.")
    ] = None,
    operation: Operations = None,
    dtype: Types = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable list with everything.")] = False,
) -> None:
    """List the registered kernels: by operation and device, or with --operation all about those of an operation.

    The lines are plain text of at most 80 characters where names allow it, for a pager as for a terminal.
    """
    entries = _select(device, operation or [], dtype or [])
    if as_json:
        rows = [as_dict(e, sku(e)) for e in sorted(entries, key=_position)]
        typer.echo(json.dumps({"kernels": rows}, indent=2))
        return
    lines = _details(entries) if operation else _glance(entries) if entries else ["No kernel is registered for these."]
    output_console().print("\n".join(lines), markup=False, soft_wrap=True)


def _select(device: str | None, operations: list[str], dtypes: list[str]) -> list[registry.Entry]:
    """The entries of the registry that the options name, in the order of choice."""
    everything = registry.kernels()
    require_accepted("--device", [device] if device else [], dict.fromkeys([*DEVICES, *(e.device for e in everything)]))
    require_accepted("--operation", operations, dict.fromkeys([*SUITES, *(e.operation for e in everything)]))
    require_accepted("--dtype", dtypes, TYPES)
    return [
        e
        for e in everything
        if device in (None, e.device)
        and (not operations or e.operation in operations)
        and (not dtypes or e.dtype in dtypes)
    ]


def _position(entry: registry.Entry) -> tuple[int, str, int, str, int]:
    known, devices = list(SUITES), list(DEVICES)
    return (
        known.index(entry.operation) if entry.operation in known else len(known),
        entry.operation,
        devices.index(entry.device) if entry.device in devices else len(devices),
        entry.device,
        TYPES.index(entry.dtype),
    )


def _glance(entries: list[registry.Entry]) -> Iterator[str]:
    """A line for every operation, with the names of the kernels that each device has for it."""
    devices = list(dict.fromkeys(e.device for e in sorted(entries, key=lambda e: _position(e)[2:])))
    rows = {e.operation: {d: list[str]() for d in devices} for e in sorted(entries, key=_position)}
    for e in entries:
        if e.kernel.name not in (names := rows[e.operation][e.device]):
            names.append(e.kernel.name)
    table = [["operation", *devices]]
    table += [[name, *(",".join(names) or "-" for names in row.values())] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    yield from textwrap.wrap(_AT_A_GLANCE, _WIDTH)


def _details(entries: list[registry.Entry]) -> Iterator[str]:
    """All about every kernel, a few lines each: its types together where what it says is the same for them."""
    groups: dict[tuple[str, str, str], dict[tuple[str, ...], list[str]]] = {}
    for e in sorted(entries, key=_position):
        said = groups.setdefault((e.operation, e.device, e.kernel.name), {})
        said.setdefault(tuple(_about(e, sku(e))), []).append(e.dtype)
    previous = ""
    for (operation, device, name), said in groups.items():
        if operation != previous:
            yield operation
            previous = operation
        for about, dtypes in said.items():
            yield f"  {device}, {name}: {' '.join(dtypes)}"
            for line in about:
                yield from textwrap.wrap(line, _WIDTH, initial_indent="    ", subsequent_indent="      ")
    yield ""
    yield from textwrap.wrap(_IN_DETAIL, _WIDTH)


def _about(entry: registry.Entry, identity: KernelSku | None) -> Iterator[str]:
    where = entry.kernel.backend if identity is None else f"{entry.kernel.backend} for {identity.arch}"
    yield f"backend: {where}" + (f", priority {entry.priority}" if entry.priority else "")
    if identity is not None:
        guarantee = identity.precision_guarantee
        kept = [word for field, word in _PROMISES.items() if getattr(guarantee, field)]
        yield f"same bits: {', '.join(kept) or 'not promised'}"
        yield f"bound: {guarantee.error_bound.formula}"
    if (why := reason(entry)) is not None:
        yield f"not on this machine: {why}"


def reason(entry: registry.Entry) -> str | None:
    """Why a registered kernel cannot serve an ordinary problem here; None if it can or the command cannot ask."""
    suite = SUITES.get(entry.operation)
    if suite is None:
        return None
    answer: str | None = entry.kernel.reject(_ordinary(entry).validated())
    return answer


def _ordinary(entry: registry.Entry) -> Descriptor:
    """The operation's first case."""
    suite = SUITES[entry.operation]
    with default_environment():
        return suite.descriptor(next(suite.cases(entry.dtype)), entry.dtype)


def sku(entry: registry.Entry) -> KernelSku | None:
    """The identity of a registered kernel; None for an operation the command does not know or cannot ask about."""
    suite = SUITES.get(entry.operation)
    if suite is None:
        return None
    try:
        return suite.plan.select(_ordinary(entry), entry.device, entry.kernel.name).sku
    except UnsupportedError:
        return None


def as_dict(entry: registry.Entry, identity: KernelSku | None) -> dict[str, Any]:
    """One kernel of `--json`."""
    row: dict[str, Any] = {
        "operation": entry.operation,
        "dtype": entry.dtype,
        "device": entry.device,
        "kernel": entry.kernel.name,
        "backend": entry.kernel.backend,
        "priority": entry.priority,
    }
    if (why := reason(entry)) is not None:
        row["unavailable"] = why
    if identity is not None:
        guarantee = identity.precision_guarantee
        values = {f.name: getattr(guarantee, f.name) for f in dataclasses.fields(guarantee)}
        values["error_bound"] = guarantee.error_bound.formula
        row |= {"arch": identity.arch, "layout": identity.layout, "precision_guarantee": values}
    return row
