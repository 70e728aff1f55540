"""`isograd kernels`: the registry as a table."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from isograd import registry
from isograd.cli.progress import output_console
from isograd.cli.suites import SUITES
from isograd.errors import UnsupportedError
from isograd.fenv import default_environment
from isograd.plan import DTYPES, INDEX_DTYPES, Descriptor, KernelSku

_PROMISES = {
    "deterministic": "run",
    "batch_invariant": "batch",
    "order_invariant": "order",
    "bit_stable_across_hardware": "machine",
}


def kernels(
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable list.")] = False,
) -> None:
    """List the registered kernels and what each one promises."""
    entries = sorted(registry.kernels(), key=lambda e: (e.device, _position(e.operation, e.dtype)))
    skus = [sku(entry) for entry in entries]
    if as_json:
        rows = [as_dict(e, s) for e, s in zip(entries, skus, strict=True)]
        typer.echo(json.dumps({"kernels": rows}, indent=2))
        return
    table = Table(title="Registered kernels, the chosen one first", title_justify="left")
    for name in ("Operation, type", "Kernel", "Backend", "Arch"):
        table.add_column(name, no_wrap=True)
    table.add_column("Priority", justify="right")
    table.add_column("Same bits", min_width=9)
    formulas: dict[tuple[str, str, str], list[str]] = {}
    previous: tuple[str, str] | None = None
    for entry, identity in zip(entries, skus, strict=True):
        if (entry.device, entry.operation) != previous:
            table.add_section()
            table.add_row(f"[bold]{entry.operation}[/bold], {entry.device}")
            previous = (entry.device, entry.operation)
        table.add_row(
            f"  {entry.dtype}",
            entry.kernel.name,
            entry.kernel.backend,
            identity.arch if identity else "-",
            str(entry.priority),
            _promises(identity),
        )
        if identity:
            formula = identity.precision_guarantee.error_bound.formula
            formulas.setdefault((entry.operation, entry.kernel.name, formula), []).append(entry.dtype)
    console = output_console()
    console.print(table)
    console.print(
        f"Same bits: whatever the {', '.join(_PROMISES.values())}; a kernel that promises less says what.\n",
        style="dim",
        soft_wrap=True,
    )
    absent = {f"{entry.kernel.name} on {entry.device}": why for entry in entries if (why := reason(entry)) is not None}
    for kernel, why in absent.items():
        console.print(f"Not on this machine: {kernel}, since {why}.", soft_wrap=True)
    bounds = Table(title="Error bounds (absolute, for every element)", title_justify="left")
    for name in ("Operation, kernel, types", "Bound"):
        bounds.add_column(name)
    for (operation, kernel, formula), dtypes in formulas.items():
        bounds.add_section()
        bounds.add_row(f"[bold]{operation}[/bold] {kernel}\n{', '.join(dict.fromkeys(dtypes))}", formula)
    console.print(bounds)
    console.print(
        "u: half an ulp of 1 in the type computed in; q: the quantum of a sum; n: the length of the axis; "
        "η: half the smallest subnormal.",
        style="dim",
        soft_wrap=True,
    )


def _position(operation: str, dtype: str) -> tuple[int, str, int]:
    known = list(SUITES)
    return (
        known.index(operation) if operation in known else len(known),
        operation,
        (*DTYPES, *INDEX_DTYPES).index(dtype),
    )


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


def _promises(identity: KernelSku | None) -> str:
    if identity is None:
        return "-"
    kept = [word for name, word in _PROMISES.items() if getattr(identity.precision_guarantee, name)]
    return f"all {len(kept)}" if len(kept) == len(_PROMISES) else ", ".join(kept) or "none"
