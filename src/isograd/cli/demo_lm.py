"""`isograd demo --model lm`: a transformer by order-free products, to the same bits as on every other machine."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from isograd.cli.check import published
from isograd.cli.devices import DEVICES
from isograd.cli.files import OutputError, checked_folder, save
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

if TYPE_CHECKING:
    from isograd.cli.language_model import DTypes, Training

STEPS = 20
DTYPES: tuple[DTypes, ...] = ("float32", "bfloat16")
_SEEDS = 1 << 32  # that torch's generator tells apart


def license_text() -> str:
    """The text that the model learns: the license, which is the same wherever isograd is installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if text := importlib.metadata.distribution("isograd").read_text("licenses/LICENSE"):
            return text
    try:
        return (Path(__file__).parents[3] / "LICENSE").read_text("utf-8")
    except OSError as error:
        raise InvalidProblemError(
            "the license's text, which the model learns, was not installed with isograd"
        ) from error


def _text_digest() -> str:
    return hashlib.sha256(license_text().encode()).hexdigest()


@contextlib.contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """Keep torch from spreading these small operations over threads, where waiting takes longer than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    steps: int,
    device: str,
    seed: int,
    after_step: Callable[[Training], Any] = lambda _: None,
    dtype: DTypes = "float32",
) -> Training:
    """A training by order-free products that has come to its end; `after_step` sees it as it goes on."""
    torch = optional("torch", "PyTorch", "torch", "The language model")
    from isograd.cli import language_model

    text = language_model.numbered(license_text())
    with language_model.deterministic(), _one_thread(torch):
        run = language_model.Training(text, steps, torch.device(device), seed, dtype=dtype)
        for _ in range(steps):
            run.advance()
            after_step(run)
    return run


def digest(run: Training) -> str:
    """SHA-256 of all weights."""
    from isograd.cli import language_model

    return language_model.digest(run.model.state_dict())


def published_entry(lengths: list[int]) -> dict[str, Any]:
    """What is published: the digests after trainings of so many steps on this text."""
    weights = {d: {str(n): digest(train(n, "cpu", 0, dtype=d)) for n in lengths} for d in DTYPES}
    return {"seed": 0, "text": _text_digest(), "weights": weights}


def _published(steps: int, seed: int, dtype: DTypes) -> str | None:
    entry = published()["language_model"]
    known = (entry["seed"], entry["text"]) == (seed, _text_digest())
    return entry["weights"][dtype].get(str(steps)) if known else None


def demo(output: Path, steps: int, device: str, seed: int, dtype: DTypes, as_json: bool) -> None:
    """Train, show what came of it, and end with the command's exit status."""
    if seed >= _SEEDS:
        raise InvalidProblemError(f"--seed is {seed}; --model lm takes one below {_SEEDS}")
    console, messages = output_console(), message_console()
    optional("torch", "PyTorch", "torch", "The language model")
    if not DEVICES[device].available():
        raise InvalidProblemError(f"--device is {device!r}, which this machine does not have")
    from isograd.cli import language_model as lm

    text = lm.numbered(license_text())
    checked_folder(output)
    if not as_json:
        console.print(
            f"Training a character model of {lm.LAYERS} layers on the {len(text.numbers):,} characters of isograd's "
            f"license; {device}, {steps} steps of {lm.UNITS * lm.MICRO_BATCH} sequences, AdamW, seed {seed}.\n"
            f"Width {lm.WIDTH}, {lm.HEADS} heads of attention, {lm.CHOSEN} of {lm.EXPERTS} experts a character; "
            f"{dtype}, all matrix products by 16-bit integers."
        )
    began = time.perf_counter()
    try:
        with Activity(messages, "Training", steps) as activity:
            activity.step("first step", advance=0)
            run = train(steps, device, seed, lambda run: activity.step(f"loss {run.losses[-1].item():.3f}"), dtype)
    except KeyboardInterrupt:  # the activity has said how far it came
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - began
    losses = [float(loss) for loss in run.losses]
    plot, lost = None, None
    try:
        plot = _plot(losses, output)
    except MissingPackageError as error:
        messages.print(f"{error}", markup=False)
    except OutputError as error:
        lost = error
    weights, expected = digest(run), _published(steps, seed, dtype)
    if as_json:
        report = {
            "model": "lm",
            "steps": steps,
            "seed": seed,
            "device": device,
            "dtype": dtype,
            "seconds": round(seconds, 2),
            "losses": losses,
            "sha256": weights,
            "published_sha256": expected,
            "agrees": None if expected is None else weights == expected,
            "plot": None if plot is None else str(plot),
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        table = Table(title="The training", title_justify="left")
        for name in ("Step", "Loss, nats a character"):
            table.add_column(name, justify="right")
        for step in range(steps, 0, -max(steps // 10, 1))[::-1]:
            table.add_row(str(step), f"{losses[step - 1]:.4f}")
        console.print(table)
        console.print(f"Trained in {seconds:.1f} s.")
        if plot is not None:
            console.print(f"Curve of the loss: {plot}", soft_wrap=True)
        others = ", ".join(published()["language_model"]["weights"][dtype])
        tell_digest(
            console, weights, expected,
            f"{steps} steps with this seed; the one above is still the same on every machine. The published ones are "
            f"for {others} steps and seed 0.",
        )  # fmt: skip
    if lost is not None:
        raise lost
    if expected is not None and weights != expected:
        raise typer.Exit(1)


def _plot(losses: list[float], folder: Path) -> Path:
    pyplot = optional("matplotlib.pyplot", "matplotlib", "demo", "The picture")
    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots(figsize=(6.5, 4), dpi=150, layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#c44e52", linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a character")
    axes.grid(alpha=0.25)
    axes.set_title("isograd demo: a language model by order-free products")
    path = folder / "isograd-demo-lm.png"
    save(path, figure.savefig)
    pyplot.close(figure)
    return path
