"""`isograd demo`: trains a model on real data, to the same bits as on every other machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from isograd.cli import demo_lm, models, training
from isograd.cli.check import published
from isograd.cli.files import OutputError, checked_folder, save
from isograd.cli.options import require_accepted
from isograd.cli.progress import (
    INTERRUPTED,
    Activity,
    MissingPackageError,
    message_console,
    optional,
    output_console,
    tell_digest,
)
from isograd.errors import InvalidProblemError

TARGET = 0.96  # what a right run reaches on held-out images
_MODELS = ("digits", "lm")
_ACCEPTED = f"Accepted: {', '.join(_MODELS)}."


def demo(
    model: Annotated[
        str, typer.Option(help=f"What to train: experts on handwritten digits, or a language model. {_ACCEPTED}")
    ] = "digits",
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path(),
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"digits: passes over the images, of each model. [{training.EPOCHS}]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"lm: training steps. [{demo_lm.STEPS}]")] = None,
    device: Annotated[str, typer.Option(help="lm: where to train. Accepted: cpu, cuda.")] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            help="lm: of products and attention; weights are float32. Accepted: float32, bfloat16 (by torch.autocast)."
        ),
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial weights and shuffling.")] = training.SEED,
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable report.")] = False,
) -> None:
    """Train a model on real data and compare its final weights with the published ones.

    digits: a teacher of two layers learns handwritten digits first, then a mixture of experts learns from the teacher's
    scores; NumPy alone. lm: a small transformer with experts learns the text of isograd's license in PyTorch, all its
    matrix products order-free, on a CPU or a GPU. The exit status is 0 if the SHA-256 of all weights is the published
    one, 1 if it differs, and 130 after Ctrl-C. Other numbers of epochs or steps and another seed may have no published
    one.
    """
    require_accepted("--model", [model], _MODELS)
    require_accepted("--device", [device], ("cpu", "cuda"))
    require_accepted("--dtype", [dtype], demo_lm.DTYPES)
    if model == "lm":
        if epochs is not None:
            raise InvalidProblemError(f"--epochs is {epochs}, which --model digits has; --model lm takes --steps")
        chosen = next(d for d in demo_lm.DTYPES if d == dtype)
        demo_lm.demo(output, steps or demo_lm.STEPS, device, seed, chosen, as_json)
        return
    if steps is not None:
        raise InvalidProblemError(f"--steps is {steps}, which --model lm has; --model digits takes --epochs")
    if device != "cpu":
        raise InvalidProblemError(f"--device is {device!r}; --model digits trains on the CPU, --model lm on both")
    if dtype != "float32":
        raise InvalidProblemError(f"--dtype is {dtype!r}; --model digits computes in float32, --model lm in both")
    _digits(output, epochs or training.EPOCHS, seed, as_json)


def _digits(output: Path, epochs: int, seed: int, as_json: bool) -> None:
    console, messages = output_console(), message_console()
    data = training.load_data()
    checked_folder(output)
    if not as_json:
        console.print(
            f"Training on {len(data.train_x)} images of handwritten digits, {len(data.test_x)} held out; {epochs} "
            f"epochs each, Adam, seed {seed}.\n"
            f"Teacher: 64 -> {models.TEACHER_HIDDEN} -> {models.CLASSES}, cross entropy.\n"
            f"Student: {models.EXPERTS} experts 64 -> {models.EXPERT_HIDDEN} -> {models.CLASSES}, {models.CHOSEN} for "
            "each image, distillation."
        )
    began = time.perf_counter()
    try:
        with Activity(messages, "Training", 2 * epochs) as activity:
            activity.step("first epoch", advance=0)

            def show(run: training.Run) -> None:
                if run.losses:
                    activity.step(f"student: loss {run.losses[-1]:.4f}, held-out accuracy {run.accuracies[-1]:.1%}")
                else:
                    activity.step(f"teacher: loss {run.teacher_losses[-1]:.4f}, accuracy {run.teacher_accuracy:.1%}")

            run = training.train(data, epochs, seed, show)
    except KeyboardInterrupt:  # the activity has said how far it came
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - began
    plot, lost = None, None
    try:
        plot = _plot(run, training.service(run, data), output, messages)
    except OutputError as error:
        lost = error
    digest, expected = training.digest(run), _published(epochs, seed)
    if as_json:
        typer.echo(json.dumps(_as_dict(run, epochs, seed, seconds, digest, expected, plot), indent=2))
    else:
        _show(console, run, seconds, digest, expected, plot)
    if lost is not None:
        raise lost
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
        "teacher_losses": run.teacher_losses,
        "teacher_held_out_accuracy": run.teacher_accuracy,
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
    table = Table(title="The student's training", title_justify="left")
    for name in ("Epoch", "Loss", "Held-out accuracy"):
        table.add_column(name, justify="right")
    count = len(run.losses)
    # Some ten rows, evenly spaced, the last epoch among them.
    step = -(-count // 10)
    for epoch in range(count, 0, -step)[::-1]:
        table.add_row(str(epoch), f"{run.losses[epoch - 1]:.4f}", f"{run.accuracies[epoch - 1]:.2%}")
    console.print(table)
    console.print(
        f"Trained in {seconds:.1f} s; held-out accuracy {run.accuracies[-1]:.2%}, the teacher's "
        f"{run.teacher_accuracy:.2%}."
    )
    if plot is not None:
        console.print(f"Training curve, and which expert serves which digit: {plot}", soft_wrap=True)
    tell_digest(
        console, digest, expected,
        f"{count} epochs with this seed; the one above is still the same on every machine. The published one is for "
        f"{training.EPOCHS} epochs and seed {training.SEED}.",
    )  # fmt: skip


def _plot(run: training.Run, service: NDArray[np.float64], folder: Path, messages: Console) -> Path | None:
    try:
        pyplot = optional("matplotlib.pyplot", "matplotlib", "demo", "The picture")
    except MissingPackageError as error:
        messages.print(f"{error}", markup=False)
        return None
    pyplot.switch_backend("agg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=150, layout="constrained")
    _draw_curve(left, run)
    _draw_service(figure, right, service)
    figure.suptitle(
        f"isograd demo: a mixture of {models.EXPERTS} experts on handwritten digits, {run.accuracies[-1]:.2%} held out"
    )
    path = folder / "isograd-demo.png"
    save(path, figure.savefig)
    pyplot.close(figure)
    return path


def _draw_curve(left: Any, run: training.Run) -> None:
    epochs = range(1, len(run.losses) + 1)
    right = left.twinx()
    (loss,) = left.plot(epochs, run.losses, color="#c44e52", linewidth=2, label="training loss")
    percent = [100 * a for a in run.accuracies]
    (share,) = right.plot(epochs, percent, color="#4c72b0", linewidth=2, label="held-out accuracy")
    teacher = right.axhline(100 * run.teacher_accuracy, color="#55a868", linewidth=1, linestyle="--", label="teacher")
    goal = right.axhline(100 * TARGET, color="#4c72b0", linewidth=1, linestyle=":", label=f"{TARGET:.0%}")
    left.set_yscale("log")
    left.set_xlabel("epoch of the student")
    left.set_ylabel("distillation and balance loss (log scale)", color=loss.get_color())
    right.set_ylabel(f"accuracy on {training.HELD_OUT} held-out images (%)", color=share.get_color())
    right.set_ylim(min(90.0, *percent) - 1, 100)
    left.set_xlim(1, max(len(run.losses), 2))
    left.grid(alpha=0.25)
    left.legend(handles=[loss, share, teacher, goal], loc="center right", frameon=True)


def _draw_service(figure: Any, axes: Any, service: NDArray[np.float64]) -> None:
    image = axes.imshow(100 * service.T, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for digit, expert in np.ndindex(service.shape):
        share = service[digit, expert]
        if share >= 0.05:
            colour = "white" if share > 0.6 else "black"
            axes.text(digit, expert, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(models.CLASSES))
    axes.set_yticks(range(models.EXPERTS))
    axes.set_xlabel("digit on the held-out image")
    axes.set_ylabel("expert")
    axes.set_title("First choice of the router")
    figure.colorbar(image, ax=axes, label="share of the digit's images (%)")
