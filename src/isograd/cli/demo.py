"""`isograd demo`: trains a small classifier on real data, to the same bits as on every other machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from isograd.cli import training
from isograd.cli.check import published
from isograd.cli.progress import Activity, MissingPackageError, message_console, optional, output_console
from isograd.cli.verify import ISSUES

TARGET = 0.96  # what a right run reaches on held-out images


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the plot of the training curve.")] = Path(),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = training.EPOCHS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial weights and shuffling.")] = training.SEED,
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable report.")] = False,
) -> None:
    """Train a two-layer classifier of handwritten digits and compare the final weights with the published ones.

    The exit status is 0 if the SHA-256 of the weights is the published one, and 1 if it differs. Another number of
    epochs or another seed has no published one.
    """
    console, messages = output_console(), message_console()
    data = training.load_data()
    if not as_json:
        console.print(
            f"Training on {len(data.train_x)} images of handwritten digits, {len(data.test_x)} held out: "
            f"64 -> {training.HIDDEN} -> {training.CLASSES}, cross entropy, Adam, {epochs} epochs, seed {seed}."
        )
    began = time.perf_counter()
    with Activity(messages, "Training", epochs) as activity:
        activity.step("", advance=0)

        def show(run: training.Run) -> None:
            activity.step(f"loss {run.losses[-1]:.4f}, held-out accuracy {run.accuracies[-1]:.1%}")

        run = training.train(data, epochs, seed, show)
    seconds = time.perf_counter() - began
    plot = _plot(run, output, messages)
    digest, expected = training.digest(run.weights), _published(epochs, seed)
    if as_json:
        typer.echo(json.dumps(_as_dict(run, epochs, seed, seconds, digest, expected, plot), indent=2))
    else:
        _show(console, run, seconds, digest, expected, plot)
    if expected is not None and digest != expected:
        raise typer.Exit(1)


def _published(epochs: int, seed: int) -> str | None:
    entry = published()["demo"]
    return str(entry["weights"]) if (entry["epochs"], entry["seed"]) == (epochs, seed) else None


def _as_dict(
    run: training.Run, epochs: int, seed: int, seconds: float, digest: str, expected: str | None, plot: Path | None
) -> dict[str, Any]:
    return {
        "epochs": epochs,
        "seed": seed,
        "seconds": round(seconds, 2),
        "losses": run.losses,
        "held_out_accuracies": run.accuracies,
        "sha256": digest,
        "published_sha256": expected,
        "agrees": None if expected is None else digest == expected,
        "plot": None if plot is None else str(plot),
    }


def _show(
    console: Console, run: training.Run, seconds: float, digest: str, expected: str | None, plot: Path | None
) -> None:
    table = Table(title="Training", title_justify="left")
    for name in ("Epoch", "Loss", "Held-out accuracy"):
        table.add_column(name, justify="right")
    count = len(run.losses)
    # Some ten rows, evenly spaced, the last epoch among them.
    step = -(-count // 10)
    for epoch in range(count, 0, -step)[::-1]:
        table.add_row(str(epoch), f"{run.losses[epoch - 1]:.4f}", f"{run.accuracies[epoch - 1]:.2%}")
    console.print(table)
    console.print(f"Trained in {seconds:.1f} s; held-out accuracy {run.accuracies[-1]:.2%}.")
    if plot is not None:
        console.print(f"Training curve: {plot}", soft_wrap=True)
    console.print(f"\nSHA-256 of the final weights: {digest}", soft_wrap=True)
    if expected is None:
        console.print(
            f"There is no published digest for {count} epochs with this seed; the one above is still the same on every "
            f"machine. The published one is for {training.EPOCHS} epochs and seed {training.SEED}."
        )
        return
    console.print(f"published:                    {expected}", soft_wrap=True)
    if digest == expected:
        console.print("[green]They agree:[/green] every weight has the same bits as on every other machine.")
    else:
        console.print(
            "[red]They differ.[/red] `isograd verify` tells which kernel is at fault; please report its output at "
            f"{ISSUES}."
        )


def _plot(run: training.Run, folder: Path, messages: Console) -> Path | None:
    try:
        pyplot = optional("matplotlib.pyplot", "matplotlib", "demo", "The plot of the training curve")
    except MissingPackageError as error:
        messages.print(f"{error}", markup=False)
        return None
    pyplot.switch_backend("agg")
    epochs = range(1, len(run.losses) + 1)
    figure, left = pyplot.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    right = left.twinx()
    (loss,) = left.plot(epochs, run.losses, color="#c44e52", linewidth=2, label="training loss")
    percent = [100 * a for a in run.accuracies]
    (share,) = right.plot(epochs, percent, color="#4c72b0", linewidth=2, label="held-out accuracy")
    goal = right.axhline(100 * TARGET, color="#4c72b0", linewidth=1, linestyle=":", label=f"{TARGET:.0%}")
    left.set_yscale("log")
    left.set_xlabel("epoch")
    left.set_ylabel("mean cross entropy (log scale)", color=loss.get_color())
    right.set_ylabel(f"accuracy on {training.HELD_OUT} held-out images (%)", color=share.get_color())
    right.set_ylim(min(90.0, *percent) - 1, 100)
    left.set_xlim(1, max(len(run.losses), 2))
    left.grid(alpha=0.25)
    left.set_title(f"isograd demo: handwritten digits, {percent[-1]:.2f} % after {len(percent)} epochs")
    left.legend(handles=[loss, share, goal], loc="center right", frameon=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "isograd-demo.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path
