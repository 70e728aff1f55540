"""`isograd warmup`: compiles kernels ahead of their first use, in several processes at once."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from isograd.cli import ahead
from isograd.cli.devices import DEVICES
from isograd.cli.options import Operations, Types
from isograd.cli.progress import INTERRUPTED, Activity, message_console, output_console, until_interrupted
from isograd.cli.verify import select
from isograd.runtime import parallel


def warmup(
    device: Annotated[
        str, typer.Option(help=f"Whose kernels to compile. Accepted: {', '.join(sorted(DEVICES))}.")
    ] = "cpu",
    operation: Operations = None,
    dtype: Types = None,
) -> None:
    """Compile kernels ahead of their first use, in as many processes as calls may use threads.

    They are kept on disk and found by every later process. On a GPU they are those of the shapes that `isograd verify`
    tries; others are compiled when they are met. Ctrl-C ends it, and what was compiled by then stays.
    """
    entries, _ = select(device, operation or [], dtype or [])
    # The longest to compile stand last in the tables.
    problems = list(reversed(ahead.problems(entries)))
    began = time.perf_counter()
    failed: list[str] = []
    done = 0
    with (
        until_interrupted() as caught,
        Activity(message_console(), "Compiling kernels", len(problems)) as activity,
        ahead.Pool(parallel.get_num_threads()) as pool,
    ):
        for problem, wrong in ahead.outcomes(pool.start(problems)):
            activity.step(str(problem))
            done += 1
            if wrong:
                failed.append(f"{problem}: {wrong}")
    console = output_console()
    seconds = time.perf_counter() - began
    console.print(
        f"Kernels of {done - len(failed)} of {len(problems)} operations and dtypes are compiled, in {seconds:.1f} s.",
        soft_wrap=True,
    )
    for line in failed:
        console.print(f"  not compiled: {line}", markup=False, style="red", soft_wrap=True)
    if caught:
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(1)
