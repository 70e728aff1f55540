"""Train a classifier of handwritten digits with Lightning, with the same bits on any number of ranks.

    python examples/train_lightning.py --steps 60
    torchrun --nproc-per-node 2 examples/train_lightning.py --steps 60

A step is UNITS backward passes over images that depend on the step and the unit alone; a rank makes those of its
number. `GradientSum` adds the gradients as integers, so the digest that is printed at the end is the same for every
number of ranks that divides UNITS. With `--products int16` matrix products are order-free too, and with weights that
are drawn from integers nothing is left to the machine: that digest is the same everywhere.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products on a GPU ask for

import lightning
import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

import isograd.torch as igt

UNITS, MICRO_BATCH, WIDTH, CLASSES = 4, 16, 64, 10
Products = Literal["torch", "int16"]


class Units:
    """The images of each of this rank's units, step by step: a batch sampler."""

    def __init__(self, images: int, steps: int, seed: int, rank: int, ranks: int) -> None:
        self.images, self.steps, self.seed, self.rank, self.ranks = images, steps, seed, rank, ranks

    def __len__(self) -> int:
        return self.steps * (UNITS // self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
            units = torch.randint(self.images, (UNITS, MICRO_BATCH), generator=generator)
            yield from units[self.rank :: self.ranks].tolist()


class Classifier(lightning.LightningModule):
    """Two layers, in Lightning's manual optimization: a batch is a unit, and UNITS of them a step."""

    def __init__(self, seed: int, products: Products) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(
            nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # integers and IEEE operations, the same everywhere
            for layer in (self.layers[0], self.layers[4]):
                bound = math.sqrt(3 / layer.in_features)
                layer.weight.copy_((torch.rand(layer.weight.shape, generator=generator) * 2 - 1) * bound)
                layer.bias.zero_()
        self.products = None if products == "torch" else products
        igt.convert(self, products=self.products)
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with the same bits on CPUs and GPUs."""
        return igt.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_start(self) -> None:
        """Make the sum: now Lightning has wrapped the model."""
        self.units = UNITS // self.trainer.world_size
        self.total = igt.distributed.GradientSum(self.trainer.strategy.model, units=self.units)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """A unit, and the optimizer after the last one of a step."""
        images, digits = batch
        step, unit = divmod(index, self.units)
        unit = unit * self.trainer.world_size + self.global_rank
        torch.manual_seed(step)  # of the dropout, which then belongs to the samples of the step
        samples = range(unit * MICRO_BATCH, (unit + 1) * MICRO_BATCH)
        with igt.use(products=self.products, samples=samples):
            loss = nn.functional.cross_entropy(self.layers(images), digits)
            self.manual_backward(loss)
        self.losses.append(loss.detach())
        if (index + 1) % self.units == 0:
            self.total.finish()
            igt.clip_grad_norm_(self.parameters(), 1.0)
            self.optimizers().step()
            self.optimizers().zero_grad()


def trained(steps: int, seed: int, products: Products, device: str) -> Classifier:
    """The classifier after so many steps."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if UNITS % ranks:
        raise typer.BadParameter(f"{ranks} ranks; accepted: a number that divides the {UNITS} units of a step")
    images, digits = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    loader = torch.utils.data.DataLoader(data, batch_sampler=Units(len(data), steps, seed, rank, ranks))
    options: dict[str, Any] = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {"devices": 1}
    trainer = lightning.Trainer(
        accelerator=device, max_epochs=1, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    model = Classifier(seed, products)
    trainer.fit(model, loader)
    return model


def digest(model: nn.Module) -> str:
    """SHA-256 over the bits of all weights."""
    bits = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        bits.update(name.encode())
        bits.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batches.")] = 0,
    products: Annotated[Products, typer.Option(help="Whose matrix products.")] = "torch",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where.")] = "cpu",
) -> None:
    """Train a classifier of handwritten digits and print the digest of its weights."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.use_deterministic_algorithms(True)
    model = trained(steps, seed, products, device)
    if model.global_rank == 0:
        typer.echo(f"loss of this rank's last units: {torch.stack(model.losses[-UNITS:]).mean():.3f}")
        typer.echo(f"digest of the weights: {digest(model)}")


if __name__ == "__main__":
    typer.run(main)
