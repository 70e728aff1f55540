"""Train a small mixture-of-experts character model on the text of Python's own help pages, on any number of ranks.

    python examples/train_lm.py --steps 600 --device cuda --seed 1
    torchrun --nproc-per-node 4 examples/train_lm.py --parallel fsdp2 --checkpoint run.pt --plot loss.png
    torchrun --nproc-per-node 2 examples/train_lm.py --parallel ddp --resume run.pt
    python examples/train_lm.py --products int16 --text LICENSE --steps 20

Norms, attention, the router, the way of the tokens to their experts and back, embeddings, loss, clipping and optimizer
run on isograd, and gradients are added up in integers: a step is UNITS backward passes, spread over the ranks. The
digest of the weights that is printed at the end is the same for every number of ranks, each way of sharding, and after
a run was stopped and resumed with another number. It is that of one `--micro-batch`, the sequences of a pass, and of
one text: Python's differs between versions. By default matrix products are torch's, and so it is that of one kind of
machine with one version of torch as well. With `--products int16` they are order-free, attention is made of them, and
the digest is that of every machine.
"""

import hashlib
import itertools
import math
import os
from pathlib import Path
from pydoc_data import topics
from typing import Annotated, Any, Literal, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products on a GPU ask for

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import isograd.torch as igt

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2
EXPERTS, CHOSEN, HIDDEN = 8, 2, 96
UNITS, LEARNING_RATE = 8, 3e-3
Parallel = Literal["none", "ddp", "fsdp2"]
Products = Literal["torch", "int16"]


class Text(NamedTuple):
    """A text as numbers, and the characters that they stand for."""

    numbers: Tensor
    alphabet: str


def read(path: Path | None) -> Text:
    """A file, or the help topics that ship with Python; rare characters are left out."""
    text = path.read_text("utf-8") if path else "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = "".join(c for c in text if c == "\n" or " " <= c <= "~")
    alphabet = "".join(sorted(set(text)))
    numbers = {c: i for i, c in enumerate(alphabet)}
    return Text(torch.tensor([numbers[c] for c in text]), alphabet)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, WIDTH]."""
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(o.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A layer whose tokens each visit the CHOSEN experts that the router gives the largest weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.into = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.back = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, WIDTH]. The result, and what keeps the experts evenly busy."""
        logits = self.gate(x)
        weights, experts = igt.moe_router(logits, CHOSEN, renormalize=True)
        order, offsets = igt.expert_permutation(experts, EXPERTS)
        rows = igt.moe_permute(x, order, CHOSEN)
        ends = offsets.tolist()
        parts = []
        for e, (start, end) in enumerate(itertools.pairwise(ends)):
            gate, up = nn.functional.linear(rows[start:end], self.into[e]).chunk(2, dim=-1)
            parts.append(nn.functional.linear(igt.silu_mul(gate, up), self.back[e]))
        balance = igt.load_balancing_loss(igt.softmax(logits, -1), experts)
        return igt.moe_combine(torch.cat(parts), weights, order), 0.01 * balance + 1e-3 * igt.router_z_loss(logits)


class Model(nn.Module):
    """A transformer over characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Parameter(torch.empty(characters, WIDTH))
        self.places = nn.Parameter(torch.empty(CONTEXT, WIDTH))
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(LAYERS))
        self.norms = nn.ParameterList(torch.ones(WIDTH) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """numbers: [batch, length]. Logits [batch, length, characters], and the auxiliary loss."""
        places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
        x = igt.embedding(numbers, self.characters) + igt.embedding(places, self.places)
        auxiliary = x.new_zeros(())
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(igt.rms_norm(x, (WIDTH,), self.norms[2 * i]))
            y, extra = experts(igt.rms_norm(x, (WIDTH,), self.norms[2 * i + 1]).flatten(0, 1))
            x, auxiliary = x + y.view_as(x), auxiliary + extra
        return self.head(igt.rms_norm(x, (WIDTH,), self.norms[-1])), auxiliary

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw the weights on the CPU: integers and IEEE operations, where a normal draw takes a logarithm."""
        for name, p in self.named_parameters():
            if name == "head.bias":
                p.zero_()
            elif p.dim() > 1:
                spread = 0.1 if name in ("characters", "places") else 1 / math.sqrt(p.shape[-1])
                p.copy_((torch.rand(p.shape, generator=generator) - 0.5) * (math.sqrt(12) * spread))


@torch.no_grad()
def sample(model: Model, text: Text, start: str, length: int, seed: int) -> str:
    """Let the model go on from `start`; the noise belongs to the seed and the place, on every device."""
    device = model.places.device
    numbers = [text.alphabet.index(c) for c in start]
    for step in range(length):
        window = torch.tensor([numbers[-CONTEXT:]], device=device)
        logits = model(window)[0][0, -1]
        noisy = igt.gumbel_softmax(logits / 0.7, hard=True, seed=seed, offset=step * len(text.alphabet))
        numbers.append(int(noisy.argmax()))
    return "".join(text.alphabet[n] for n in numbers)


def digest(weights: dict[str, Tensor]) -> str:
    """SHA-256 over the bits of all weights."""
    bits = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        bits.update(name.encode())
        bits.update(tensor.cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


class Run:
    """A model in training: what is saved, and what goes on from there with any number of ranks."""

    def __init__(
        self, steps: int, device: str, seed: int, parallel: Parallel, micro_batch: int, products: Products, text: Text
    ) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if UNITS % self.ranks:
            raise typer.BadParameter(f"{self.ranks} ranks; accepted: a number that divides the {UNITS} units of a step")
        if parallel != "none" and not dist.is_initialized():
            raise typer.BadParameter(f"--parallel {parallel} needs torchrun")
        self.text, self.seed, self.micro_batch, self.step = text, seed, micro_batch, 0
        self.switch = igt.use(products=None if products == "torch" else products)
        self.losses: list[Tensor] = []
        self.device = torch.device(device, self.rank if device == "cuda" else None)
        self.model = Model(len(text.alphabet))
        self.model.initialize(torch.Generator().manual_seed(seed))
        self.model.to(self.device)
        self.wrapped: nn.Module = self.model
        if parallel == "ddp":
            self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        elif parallel == "fsdp2":
            fully_shard(self.model)
        self.total = igt.distributed.GradientSum(self.wrapped, units=UNITS // self.ranks)
        self.optimizer = igt.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        warm = max(steps // 10, 1)  # a rate of IEEE operations, the same everywhere
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(steps - warm, 1))
        )

    def advance(self) -> None:
        """Take a step. What a unit is depends on the step alone, not on the rank that computes it."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.text.numbers) - CONTEXT, (UNITS, self.micro_batch), generator=generator)
        losses = []
        for unit in starts[self.rank :: self.ranks]:
            window = self.text.numbers[unit[:, None] + torch.arange(CONTEXT + 1)].to(self.device)
            with self.switch:
                logits, auxiliary = self.wrapped(window[:, :-1])
                loss = igt.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
                (loss + auxiliary).backward()
            losses.append(loss.detach())
        self.total.finish()
        igt.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.losses.append(torch.stack(losses).mean())

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
    text: Annotated[Path | None, typer.Option(help="A file to learn, in place of Python's help pages.")] = None,
    micro_batch: Annotated[int, typer.Option(min=1, help=f"Sequences of each of the {UNITS} units of a step.")] = 2,
    checkpoint: Annotated[Path | None, typer.Option(help="A file for the state, written every 100 steps.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A state to go on from.")] = None,
    stop: Annotated[int | None, typer.Option(min=0, help="Stop after this step, as if interrupted.")] = None,
    loss_plot: Annotated[Path | None, typer.Option("--plot", help="A file for a plot of the loss.")] = None,
) -> None:
    """Train a small mixture-of-experts character model and print a sample of its text."""
    torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:  # under torchrun
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        run = Run(steps, device, seed, parallel, micro_batch, products, read(text))
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
