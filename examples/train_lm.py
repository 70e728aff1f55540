"""Train a small mixture-of-experts character model on the text of Python's own help pages, on any number of ranks.

    python examples/train_lm.py --steps 600 --device cuda --seed 1
    torchrun --nproc-per-node 4 examples/train_lm.py --parallel fsdp2 --checkpoint run.pt --plot loss.png
    torchrun --nproc-per-node 2 examples/train_lm.py --parallel ddp --resume run.pt
    python examples/train_lm.py --products int16 --text LICENSE --steps 20 --dtype bfloat16

The model and its step are those of `isograd demo --model lm`, in `src/isograd/cli/language_model.py`; here is what
spreads them over ranks, saves and resumes. The digest of the weights that is printed at the end is the same for every
number of ranks, each way of sharding, and after a run was stopped and resumed with another number. It is that of one
`--micro-batch`, the sequences of a pass, and of one text: Python's differs between versions. By default matrix products
are torch's, and so it is that of one kind of machine with one version of torch as well. With `--products int16` they
and attention are order-free, and the digest is that of every machine. `--dtype bfloat16` computes them in bfloat16, by
torch.autocast, attention by its flash kernels.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from isograd.cli.language_model import (
    MICRO_BATCH,
    UNITS,
    DTypes,
    Model,
    Products,
    Text,
    Training,
    deterministic,
    digest,
    help_pages,
    numbered,
    sample,
)

Parallel = Literal["none", "ddp", "fsdp2"]


def read(path: Path | None) -> Text:
    """A file, or Python's help pages."""
    return numbered(path.read_text("utf-8") if path else help_pages())


class Run(Training):
    """A training on all ranks: what is saved, and what goes on from there with any number of them."""

    def __init__(
        self, steps: int, device: str, seed: int, parallel: Parallel, micro_batch: int, products: Products, text: Text,
        dtype: DTypes = "float32",
    ) -> None:  # fmt: skip
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if UNITS % ranks:
            raise typer.BadParameter(f"{ranks} ranks; accepted: a number that divides the {UNITS} units of a step")
        if parallel != "none" and not dist.is_initialized():
            raise typer.BadParameter(f"--parallel {parallel} needs torchrun")

        def wrap(model: nn.Module) -> nn.Module:
            if parallel == "ddp":
                return nn.parallel.DistributedDataParallel(model)
            if parallel == "fsdp2":
                fully_shard(model)
            return model

        place = torch.device(device, rank if device == "cuda" else None)
        super().__init__(text, steps, place, seed, products, dtype, micro_batch, rank, ranks, wrap)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, whole on the first rank."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "step": self.step, "weights": weights, "optimizer": optimizer, "schedule": self.schedule.state_dict(),
            "total": self.total.state_dict(), "losses": torch.stack(self.losses).cpu() if self.losses else None,
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the state, so that a run that is stopped meanwhile leaves the file before."""
        state = self.state()
        if self.rank == 0:
            part = path.with_suffix(".part")
            torch.save(state, part)
            part.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a state, whatever number of ranks it comes from."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["weights"], optim_state_dict=state["optimizer"],
            options=options,
        )  # fmt: skip
        self.schedule.load_state_dict(state["schedule"])
        self.total.load_state_dict(state["total"])
        self.step, self.losses = state["step"], [] if state["losses"] is None else list(state["losses"])


def plot(losses: list[float], path: Path) -> None:
    """Draw the loss of every step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a character")
    axes.plot(losses)
    figure.savefig(path, dpi=150)


def train(run: Run, steps: int, console: Console, checkpoint: Path | None = None, every: int = 100) -> None:
    """Train to a number of steps, with a state on disk now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss  ?", total=steps, completed=run.step)
        while run.step < steps:
            run.advance()
            # The loss is read now and then: reading waits for the device.
            shown = f"loss {run.losses[-1].item():.3f}" if run.step % 10 == 1 else None
            progress.update(task, advance=1, description=shown)
            if checkpoint and (run.step % every == 0 or run.step == steps):
                run.save(checkpoint)


def main(
    steps: Annotated[int, typer.Option(min=0, help="Training steps.")] = 600,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; under torchrun a rank takes the GPU of its number.")
    ] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the batches and the sample.")] = 0,
    parallel: Annotated[Parallel, typer.Option(help="How the model lies on the ranks.")] = "none",
    products: Annotated[Products, typer.Option(help="Whose matrix products.")] = "torch",
    dtype: Annotated[DTypes, typer.Option(help="Of products and attention; weights are float32.")] = "float32",
    text: Annotated[Path | None, typer.Option(help="A file to learn, in place of Python's help pages.")] = None,
    micro_batch: Annotated[
        int, typer.Option(min=1, help=f"Sequences of each of the {UNITS} units of a step.")
    ] = MICRO_BATCH,
    checkpoint: Annotated[Path | None, typer.Option(help="A file for the state, written every 100 steps.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A state to go on from.")] = None,
    stop: Annotated[int | None, typer.Option(min=0, help="Stop after this step, as if interrupted.")] = None,
    loss_plot: Annotated[Path | None, typer.Option("--plot", help="A file for a plot of the loss.")] = None,
) -> None:
    """Train a small mixture-of-experts character model and print a sample of its text."""
    if "RANK" in os.environ:  # under torchrun
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        with deterministic():
            run = Run(steps, device, seed, parallel, micro_batch, products, read(text), dtype)
            console = Console(quiet=run.rank != 0)
            if resume:
                run.resume(resume)
            train(run, min(steps, stop if stop is not None else steps), console, checkpoint)
            state = run.state()
            if run.rank == 0:
                tell(run, state, console, loss_plot)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def tell(run: Run, state: dict[str, Any], console: Console, loss_plot: Path | None) -> None:
    """Print what came of a run."""
    losses = [] if state["losses"] is None else state["losses"].tolist()
    last = losses[-max(len(losses) // 10, 1) :]
    parameters = sum(tensor.numel() for tensor in state["weights"].values())
    loss = math.fsum(last) / len(last) if last else math.nan
    console.print(f"{parameters:,} weights, {len(run.text.numbers):,} characters, step {run.step}, loss {loss:.3f}")
    model = Model(len(run.text.alphabet))
    model.load_state_dict(state["weights"])
    console.rule("sample")
    with run.switch:
        console.print(sample(model, run.text, "The ", 400, run.seed), markup=False, highlight=False)
    console.rule()
    for name, count in run.switch.report().not_replaced.items():
        console.print(f"left to torch: {name}, {count} times", highlight=False)
    console.print(f"digest of the weights: {digest(state['weights'])}", soft_wrap=True, highlight=False)
    if loss_plot:
        plot(losses, loss_plot)
        console.print(f"plot of the loss: {loss_plot}")


if __name__ == "__main__":
    typer.run(main)
