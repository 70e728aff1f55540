"""`isograd verify`: every registered kernel on this machine against its oracle, its promises and its digests."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import isograd
from isograd.cli import ahead
from isograd.cli.check import INVARIANCES, WIDE_ORACLE, Report, published, verify_kernel
from isograd.cli.devices import DEVICES
from isograd.cli.options import TYPES, Operations, Types, require_accepted
from isograd.cli.progress import INTERRUPTED, ISSUES, Activity, message_console, output_console, until_interrupted
from isograd.cli.suites import SUITES, cases
from isograd.core import registry
from isograd.errors import InvalidProblemError
from isograd.runtime import compilation, parallel

_SHOWN_FAILURES = 12
_LONG = 1.0  # seconds of compiling after which other processes help
_REQUEST = (
    "\nThe Metal kernels were written without a Mac and checked in an emulator. Please report what they do on yours, "
    f"failures or not, at {ISSUES}: the chip's name, the version of macOS, and the output of `isograd verify --device "
    "mps --json`. What matters most is which of the results marked * have the published digests."
)


def verify(
    device: Annotated[
        str, typer.Option(help=f"Whose kernels to verify. Accepted: {', '.join(sorted(DEVICES))}.")
    ] = "cpu",
    operation: Operations = None,
    dtype: Types = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable report.")] = False,
) -> None:
    """Check every kernel on this machine: its error, its promises, and its bits against the published ones.

    The exit status is 0 if all is as promised and 1 if anything differs. Ctrl-C ends it with what was found by then
    and exit status 130.
    """
    entries, unknown = select(device, operation or [], dtype or [])
    began = time.perf_counter()
    reports: list[Report] = []
    with until_interrupted() as caught:
        _run(entries, published(), message_console(), reports)
    interrupted = bool(caught)
    seconds = time.perf_counter() - began
    if as_json:
        typer.echo(json.dumps(as_dict(reports, device, seconds, unknown, interrupted), indent=2))
    else:
        _show(output_console(), reports, device, seconds, unknown, interrupted)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(r.failures for r in reports):
        raise typer.Exit(1)


def select(device: str, operations: list[str], dtypes: list[str]) -> tuple[list[registry.Entry], list[str]]:
    """The registered kernels to verify, and the operations of the device that have no cases here."""
    require_accepted("--device", [device], sorted(DEVICES))
    require_accepted("--operation", operations, SUITES)
    require_accepted("--dtype", dtypes, TYPES)
    if not DEVICES[device].available():
        raise InvalidProblemError(f"--device is {device!r}, which this machine does not have")
    here = [e for e in registry.kernels() if e.device == device]
    unknown = sorted({e.operation for e in here} - set(SUITES))
    entries = [
        e
        for e in here
        if e.operation in SUITES and (not operations or e.operation in operations) and (not dtypes or e.dtype in dtypes)
    ]
    # The order of the tables; kernels of one problem stay in the order of choice.
    order = list(SUITES)
    return sorted(entries, key=lambda e: (order.index(e.operation), TYPES.index(e.dtype))), unknown


def _run(entries: list[registry.Entry], digests: Any, console: Console, reports: list[Report]) -> None:
    problems = {problem: list(same) for problem, same in groupby(entries, key=lambda e: (e.operation, e.dtype))}
    # Where kernels have to be compiled, other processes begin with those that come last here.
    waiting = ahead.problems(entries)
    others = parallel.get_num_threads() - 1
    compiled = compilation.seconds()
    with Activity(console, "Verifying kernels", len(entries)) as activity, ahead.Pool(others) as pool:
        for (operation, dtype), same in problems.items():
            del waiting[0]
            activity.step(f"{operation} {dtype}: inputs", advance=0)
            inputs = cases(operation, dtype)
            for entry in same:

                def step(case: str, name: str = f"{operation} {dtype}") -> None:
                    activity.step(f"{name}: {case}", advance=0)

                verify_kernel(entry, inputs, digests, step, reports)
                activity.step(f"{operation} {dtype}")
            if others and waiting and not pool.started and compilation.seconds() - compiled > _LONG:
                pool.start(reversed(waiting))


def as_dict(
    reports: list[Report], device: str, seconds: float, unknown: list[str], interrupted: bool = False
) -> dict[str, Any]:
    """The report of `--json`."""
    results = []
    for report in reports:
        values = dataclasses.asdict(report)
        # JSON has no infinity; the failure's message says that a special value is wrong.
        if report.worst is not None and math.isinf(report.worst):
            values["worst"] = None
        values["bound_kept"] = report.bound_kept
        results.append(values)
    return {
        "isograd": isograd.__version__,
        "device": device,
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        "threads": isograd.get_num_threads(),
        "passed": not interrupted and not any(r.failures for r in reports),
        "interrupted": interrupted,
        "seconds": round(seconds, 2),
        "not_verified": unknown,
        "kernels": results,
    }


def _error(report: Report) -> str:
    if report.worst is None:
        return "-"
    text = "wrong" if math.isinf(report.worst) else f"{report.worst:.2f}"
    return text if report.bound_kept else f"[red]{text}[/red]"


def _invariances(report: Report) -> str:
    broken = [name for name, held in report.invariances.items() if not held]
    if broken:
        return f"[red]{', '.join(broken)}[/red]"
    return f"all {len(report.invariances)}" if report.invariances else "none promised"


def _digests(report: Report) -> str:
    if report.unpromised_checked and not report.digests_checked:
        return f"{report.unpromised_equal} of {report.unpromised_checked}*"
    text = f"{report.digests_equal} of {report.digests_checked}"
    return text if report.digests_equal == report.digests_checked else f"[red]{text}[/red]"


def _show(
    console: Console, reports: list[Report], device: str, seconds: float, unknown: list[str], interrupted: bool
) -> None:
    table = Table(title=f"isograd {isograd.__version__}: kernels on this machine ({device})", title_justify="left")
    for name in ("Operation, type", "Kernel"):
        table.add_column(name, no_wrap=True)
    for name in ("Cases", "Error/bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Same bits", min_width=9)
    table.add_column("Digests", justify="right", no_wrap=True)
    previous = ""
    for report in reports:
        if report.operation != previous:
            table.add_section()
            table.add_row(f"[bold]{report.operation}[/bold]")
        table.add_row(
            f"  {report.dtype}",
            report.kernel,
            str(report.cases),
            _error(report),
            _invariances(report),
            _digests(report),
        )
        previous = report.operation
    console.print(table)
    console.print(
        "Error/bound: the largest error as a fraction of the promised bound; up to 1 is as promised.\n"
        f"Same bits: under changes of {', '.join(INVARIANCES)}.\n"
        "Digests: results whose SHA-256 is the published one, so the same bits as on other machines.",
        style="dim",
        soft_wrap=True,
    )
    if any(r.unpromised_checked for r in reports):
        console.print(
            "*: the bits of other machines are not promised here; how many are the same all the same.", style="dim"
        )
    if not WIDE_ORACLE:
        console.print("This machine has no float wider than 64 bits, so float64 errors were not measured.", style="dim")
    if unknown:
        console.print(f"Registered here but without cases, so not verified: {', '.join(unknown)}.", style="yellow")
    failures = [(r, f) for r in reports for f in r.failures]
    if not failures:
        total = sum(r.cases for r in reports)
        if interrupted:
            console.print(f"[yellow]Interrupted:[/yellow] as promised so far, {total} cases in {seconds:.1f} s.")
            return
        console.print(f"[green]All as promised:[/green] {total} cases in {seconds:.1f} s.")
        if device == "mps":
            console.print(_REQUEST, markup=False, soft_wrap=True)
        return
    console.print(f"\n[red]Failed checks: {len(failures)}[/red]")
    for report, failure in failures[:_SHOWN_FAILURES]:
        console.print(
            f"  {report.operation}, {report.dtype}, kernel {report.kernel}, case '{failure.case}', {failure.check}: "
            f"{failure.message}",
            markup=False,
            soft_wrap=True,
        )
    if len(failures) > _SHOWN_FAILURES:
        console.print(f"  and {len(failures) - _SHOWN_FAILURES} more; --json lists them all.")
    console.print(
        "\nResults of this machine are not what isograd promises. If the kernel is the library's own, please report it "
        f"at {ISSUES} with the output of `isograd verify --json` and the processor's model.",
        markup=False,
        soft_wrap=True,
    )
