"""Train one mixture-of-experts layer on rows of several kinds, and see which expert serves which kind.

    python examples/train_moe.py --steps 200

Each kind of row has a center of its own and is mapped to its result by a matrix of its own, which the layer does not
know. Router, permutation, experts' products, gated activation, combination, losses, clipping and optimizer are
isograd's, and the weights and rows are drawn from integers. So the digest that is printed at the end is the same on
every machine, CPU or GPU, with any number of threads.
"""

import hashlib
import math
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from torch import Tensor, nn

import isograd.torch as igt

KINDS, WIDTH, HIDDEN, EXPERTS, CHOSEN, ROWS = 6, 16, 32, 6, 2, 256
PRECISION = "int16"  # of the matrix products, which then have no order


def uniform(shape: tuple[int, ...], generator: torch.Generator, spread: float = 1.0) -> Tensor:
    """Numbers of mean 0 and a standard deviation of `spread`, from integers and IEEE operations alone."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * (math.sqrt(3) * spread)


class Losses(NamedTuple):
    """What a step minimizes: the error, and what keeps the experts busy and the logits small."""

    error: Tensor
    balance: Tensor
    size: Tensor


class Mixture(nn.Module):
    """A layer each of whose rows visits the CHOSEN experts that the router gives the largest weights."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = nn.Parameter(uniform((EXPERTS, WIDTH), generator, WIDTH**-0.5))
        self.into = nn.Parameter(uniform((EXPERTS, 2 * HIDDEN, WIDTH), generator, WIDTH**-0.5))
        self.back = nn.Parameter(uniform((EXPERTS, WIDTH, HIDDEN), generator, HIDDEN**-0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [rows, WIDTH]. The result [rows, WIDTH], the router's logits and the chosen experts of each row."""
        logits = igt.linear(x, self.gate, precision=PRECISION)
        weights, experts = igt.moe_router(logits, CHOSEN, renormalize=True)
        order, offsets = igt.expert_permutation(experts, EXPERTS)
        rows = igt.moe_permute(x, order, CHOSEN)
        hidden = igt.swiglu(igt.grouped_linear(rows, self.into, offsets, precision=PRECISION))
        rows = igt.grouped_linear(hidden, self.back, offsets, precision=PRECISION)
        return igt.moe_combine(rows, weights, order), logits, experts


class Task:
    """Rows of KINDS kinds, and what becomes of them."""

    def __init__(self, generator: torch.Generator, device: str) -> None:
        self.generator, self.device = generator, device
        self.centers = uniform((KINDS, WIDTH), generator, 2.0).to(device)
        self.maps = uniform((KINDS, WIDTH, WIDTH), generator, WIDTH**-0.5).to(device)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the results that are asked for, and the kinds, sorted."""
        kinds = torch.randint(KINDS, (ROWS,), generator=self.generator).sort().values
        noise = uniform((ROWS, WIDTH), self.generator).to(self.device)
        ends = [0, *torch.bincount(kinds, minlength=KINDS).cumsum(0).tolist()]
        kinds = kinds.to(self.device)
        return self.centers[kinds] + noise, igt.grouped_linear(noise, self.maps, ends, precision=PRECISION), kinds


def losses(layer: Mixture, x: Tensor, y: Tensor) -> Losses:
    """The losses of a batch. Sums of squares are products: a mean of torch's has an order."""
    found, logits, experts = layer(x)
    difference = (found - y).view(1, -1)
    error = igt.linear(difference, difference, precision=PRECISION).view(()) / difference.numel()
    return Losses(error, igt.load_balancing_loss(igt.softmax(logits, -1), experts), igt.router_z_loss(logits))


def trained(steps: int, seed: int, device: str) -> tuple[Mixture, Task, list[float]]:
    """The layer after so many steps, its task, and the error of each step."""
    generator = torch.Generator().manual_seed(seed)
    task, layer = Task(generator, device), Mixture(generator).to(device)
    optimizer = igt.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
    errors = []
    for _ in range(steps):
        x, y, _ = task.rows()
        loss = losses(layer, x, y)
        (loss.error + 0.01 * loss.balance + 1e-3 * loss.size).backward()
        igt.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        errors.append(loss.error.item())
    return layer, task, errors


@torch.no_grad()
def served(layer: Mixture, task: Task) -> Tensor:
    """How many rows of each kind visit each expert: [KINDS, EXPERTS]."""
    x, _, kinds = task.rows()
    _, _, experts = layer(x)
    pairs = kinds[:, None] * EXPERTS + experts
    return torch.bincount(pairs.flatten(), minlength=KINDS * EXPERTS).view(KINDS, EXPERTS)


def digest(model: nn.Module) -> str:
    """SHA-256 over the bits of all weights."""
    bits = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        bits.update(name.encode())
        bits.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the rows.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where.")] = "cpu",
) -> None:
    """Train a mixture of experts, and print what its experts do and the digest of its weights."""
    layer, task, errors = trained(steps, seed, device)
    typer.echo(f"error: {errors[0]:.3f} in the first step, {errors[-1]:.3f} in the last")
    typer.echo("rows of each kind (down) that visit each expert (across):")
    for kind, counts in enumerate(served(layer, task).tolist()):
        typer.echo(f"  {kind}  " + " ".join(f"{count:4}" for count in counts))
    typer.echo(f"digest of the weights: {digest(layer)}")


if __name__ == "__main__":
    typer.run(main)
