"""`isograd bench`: every operation beside what else is installed, in one run, with a plot."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from isograd.cli import measure
from isograd.cli.files import checked_folder, save
from isograd.cli.measure import Bench, Result
from isograd.cli.options import require_accepted
from isograd.cli.progress import (
    INTERRUPTED,
    Activity,
    MissingPackageError,
    message_console,
    optional,
    output_console,
    until_interrupted,
)
from isograd.devices.cuda import unavailable
from isograd.errors import UnsupportedError

_COLOURS = {"isograd": "#2f6db3", "torch": "#e07b39", "NumPy": "#8a8a8a"}
_QUICK = "Quick run: small inputs and three turns, not a comparison"


def bench(
    output: Annotated[Path, typer.Option(help="Folder for the JSON file and the plot.")] = Path(),
    quick: Annotated[bool, typer.Option(help="Small inputs, few repetitions: a try, not a comparison.")] = False,
    device: Annotated[str, typer.Option(help="What to measure. Accepted: cpu, cuda.")] = "cpu",
) -> None:
    """Time softmax, log_softmax and their gradients beside PyTorch and NumPy, and draw a plot.

    Everything is measured in one run and in turns, with the same number of threads, into outputs that exist already.
    GB/s counts each input once and the output once. The ceiling is a copy of memory in the same run. Ctrl-C ends it
    with what was measured by then and exit status 130.
    """
    require_accepted("bench: --device", [device], ("cpu", "cuda"))
    console, messages = output_console(), message_console()
    missing = unavailable() if device == "cuda" else None
    if missing is not None:
        raise UnsupportedError(f"bench: no measurement on cuda, since {missing}")
    (_bench_cuda if device == "cuda" else _bench_cpu)(checked_folder(output), quick, console, messages)


def _bench_cpu(output: Path, quick: bool, console: Console, messages: Console) -> None:
    torch = _torch(messages)
    repetitions = measure.QUICK_REPETITIONS if quick else measure.REPETITIONS
    problems = list(measure.problems(quick))
    setting = Bench(torch)
    results: list[Result] = []
    with until_interrupted() as interrupted, Activity(messages, "Measuring", len(problems)) as activity:
        for operation, dtype, shape, axis in problems:
            activity.step(f"{operation} {dtype} {list(shape)}")
            results.append(setting.measure(operation, dtype, shape, axis, repetitions))
    if results:
        machine = measure.machine(torch)
        _show(console, results, machine, quick)
        _keep(output, results, machine, quick, repetitions, bool(interrupted), console, messages)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _keep(
    output: Path,
    results: list[Result],
    machine: dict[str, Any],
    quick: bool,
    repetitions: int,
    interrupted: bool,
    console: Console,
    messages: Console,
) -> None:
    """Write the JSON file and the plot."""
    stem = output / measure.file_stem(machine["cpu"])
    report = {
        "machine": machine,
        "quick": quick,
        "interrupted": interrupted,
        "repetitions": repetitions,
        "copy_gb_per_s": statistics.median(r.copy_bandwidth for r in results),
        "results": [_as_dict(r) for r in results],
    }
    text = json.dumps(report, indent=1) + "\n"
    save(stem.with_name(stem.name + ".json"), lambda path: path.write_text(text, "utf-8"))
    console.print(f"Results: {stem}.json", soft_wrap=True)
    if _plot(results, machine, quick, stem.with_name(stem.name + ".png"), messages):
        console.print(f"Plot:    {stem}.png", soft_wrap=True)


def _bench_cuda(output: Path, quick: bool, console: Console, messages: Console) -> None:
    from isograd.cli import bench_cuda

    lines: list[str] = []
    results: list[dict[str, Any]] = []
    with until_interrupted() as interrupted, Activity(messages, "Measuring", bench_cuda.steps(quick)) as activity:
        bench_cuda.run(quick, activity, lines, results)
    console.print("TB/s of algorithmic bytes")
    for line in lines:
        console.print(line, soft_wrap=True)
    if results:
        path = bench_cuda.keep(output, quick, results, bool(interrupted))
        console.print(f"Results: {path}", soft_wrap=True)
        bench_cuda.plot(results, quick, path.with_suffix(".png"))
        console.print(f"Plot:    {path.with_suffix('.png')}", soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _torch(messages: Console) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        messages.print("PyTorch is not installed, so the comparison is with NumPy alone.")
        return None


def _as_dict(result: Result) -> dict[str, Any]:
    contenders = [name for name in result.seconds if name != "copy"]
    return {
        "operation": result.operation,
        "dtype": result.dtype,
        "shape": list(result.shape),
        "axis": result.axis,
        "bytes": result.bytes,
        "seconds": {name: round(value, 9) for name, value in result.seconds.items()},
        "gb_per_s": {name: _rounded(result.bandwidth(name)) for name in contenders},
        "copy_gb_per_s": _rounded(result.copy_bandwidth),
        "copy_spread": _rounded(result.copy_spread),
        "times_as_fast_as": {name: _rounded(result.ratio(name)) for name in contenders if name != "isograd"},
        "fraction_of_copy": _rounded(_fraction(result)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _fraction(result: Result) -> float:
    return (result.bandwidth("isograd") or 0.0) / result.copy_bandwidth


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _show(console: Console, results: list[Result], machine: dict[str, Any], quick: bool) -> None:
    rival = "torch" if machine["torch"] is not None else "NumPy"
    table = Table(title=f"{machine['cpu']}, {machine['threads']} threads; GB/s", title_justify="left")
    table.add_column("Shape", no_wrap=True)
    for name in ("isograd", *dict.fromkeys((rival, "NumPy")), f"x {rival}", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ("", "")
    for r in results:
        if (r.operation, r.dtype) != previous:
            table.add_section()
            table.add_row(f"[bold]{r.operation}, {r.dtype}[/bold]")
            previous = (r.operation, r.dtype)
        others = [_number(r.bandwidth(name), ".2f") for name in dict.fromkeys((rival, "NumPy"))]
        table.add_row(
            label(r),
            _number(r.bandwidth("isograd"), ".2f"),
            *others,
            "busy" if r.busy else _number(r.ratio(rival), ".2f"),
            "busy" if r.busy else f"{_fraction(r):.0%}",
        )
    console.print(table)
    console.print(
        "GB/s: inputs read once and the output written once. 'of copy': the share of the bandwidth of copying 128 MiB "
        f"in the same run; 'x {rival}': how many times as fast; small arrays stay in the cache and can exceed it.",
        style="dim",
        soft_wrap=True,
    )
    if busy := [r for r in results if r.busy]:
        console.print(
            f"The machine was busy: in {len(busy)} of {len(results)} rows copying took between the fastest and the "
            f"slowest tenth of its runs up to {max(r.copy_spread for r in busy):.1f} times as long (idle: below "
            f"{measure.BUSY}). Those rows compare nothing; repeat the run when nothing else is running.",
            style="yellow",
            soft_wrap=True,
        )
    if quick:
        console.print(f"{_QUICK}; leave out --quick for figures that say something.", style="yellow", soft_wrap=True)


def label(result: Result) -> str:
    """The shape, and the axis where it is not the last."""
    shape = " x ".join(str(size) for size in result.shape)
    return shape if result.axis in (-1, len(result.shape) - 1) else f"{shape}, axis {result.axis}"


def _plot(results: list[Result], machine: dict[str, Any], quick: bool, path: Path, messages: Console) -> bool:
    try:
        pyplot = optional("matplotlib.pyplot", "matplotlib", "bench", "The plot")
    except MissingPackageError as error:
        messages.print(f"{error}", markup=False)
        return False
    pyplot.switch_backend("agg")
    contenders = [name for name in _COLOURS if name in results[0].seconds]
    rows, columns = measure.OPERATIONS, measure.DTYPES
    figure, axes = pyplot.subplots(
        len(rows), len(columns), figsize=(14, 15), dpi=110, sharey=True, layout="constrained", squeeze=False
    )
    width = 0.8 / len(contenders)
    for row, operation in enumerate(rows):
        for column, dtype in enumerate(columns):
            panel = axes[row][column]
            shown = [r for r in results if (r.operation, r.dtype) == (operation, dtype)]
            for position, name in enumerate(contenders):
                places = [i + (position - (len(contenders) - 1) / 2) * width for i in range(len(shown))]
                bars = panel.bar(
                    places, [r.bandwidth(name) or 0 for r in shown], width, color=_COLOURS[name], label=name
                )
                panel.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
            for i, r in enumerate(shown):
                (line,) = panel.plot([i - 0.45, i + 0.45], [r.copy_bandwidth] * 2, color="black", linewidth=1.2)
                line.set_label("copying memory" if i == 0 else "_")
            panel.set_title(f"{operation}, {dtype}")
            panel.set_xticks(range(len(shown)), [label(r).replace(", ", "\n") for r in shown], fontsize=8)
            panel.grid(axis="y", alpha=0.25)
            panel.set_axisbelow(True)
            panel.margins(y=0.1)
            if column == 0:
                panel.set_ylabel("GB/s (more is better)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    versions = f"isograd {machine['isograd']}, NumPy {machine['numpy']}"
    if machine["torch"] is not None:
        versions += f", torch {machine['torch']}"
    title = f"isograd bench on {machine['cpu']}, {machine['threads']} threads: bandwidth of inputs and output"
    if quick:
        versions += f". {_QUICK}"
    figure.suptitle(f"{title}\n{versions}", x=0.01, ha="left")
    save(path, figure.savefig)
    pyplot.close(figure)
    return True
