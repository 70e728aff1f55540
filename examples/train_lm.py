"""Train a small mixture-of-experts character model on the text of Python's own help pages.

    python examples/train_lm.py --steps 600 --device cuda --seed 1

Attention's softmax, the router, the way of the tokens to their experts and back, the embeddings and the loss run on
isograd: every sum over repeated indices has the same bits on every run. Matrix products are torch's, so the digest of
the weights that is printed at the end is the same for every run on one kind of machine with one version of torch (and
of Python, whose text differs), not between kinds.
"""

import hashlib
import itertools
import os
from pydoc_data import topics
from typing import Annotated, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products on a GPU ask for

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import isograd.torch as igt

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2
EXPERTS, CHOSEN, HIDDEN = 8, 2, 128
BATCH, LEARNING_RATE = 16, 3e-3


class Text(NamedTuple):
    """A text as numbers, and the characters that they stand for."""

    numbers: Tensor
    alphabet: str


def help_pages() -> Text:
    """The help topics that ship with Python; rare characters are left out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = "".join(c for c in text if c == "\n" or " " <= c <= "~")
    alphabet = "".join(sorted(set(text)))
    numbers = {c: i for i, c in enumerate(alphabet)}
    return Text(torch.tensor([numbers[c] for c in text]), alphabet)


class Attention(nn.Module):
    """Causal self-attention, spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, WIDTH]."""
        length = x.shape[1]
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.future[:length, :length], -torch.inf)
        return self.output((igt.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A layer whose tokens each visit the CHOSEN experts that the router gives the largest weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.back = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, WIDTH]. The result, and what keeps the experts evenly busy."""
        logits = self.gate(x)
        weights, experts = igt.moe_router(logits, CHOSEN, renormalize=True)
        order, offsets = igt.expert_permutation(experts, EXPERTS)
        rows = igt.moe_permute(x, order, CHOSEN)
        ends = offsets.tolist()
        parts = [
            nn.functional.gelu(rows[start:end] @ self.into[e]) @ self.back[e]
            for e, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        balance = igt.load_balancing_loss(igt.softmax(logits, -1), experts)
        return igt.moe_combine(torch.cat(parts), weights, order), 0.01 * balance + 1e-3 * igt.router_z_loss(logits)


class Model(nn.Module):
    """A transformer over characters."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Parameter(torch.randn(characters, WIDTH) * 0.1)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """numbers: [batch, length]. Logits [batch, length, characters], and the auxiliary loss."""
        x = igt.embedding(numbers, self.characters) + self.places[: numbers.shape[1]]
        auxiliary = x.new_zeros(())
        for i, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            y, extra = experts(self.norms[2 * i + 1](x).flatten(0, 1))
            x, auxiliary = x + y.view_as(x), auxiliary + extra
        return self.head(self.norms[-1](x)), auxiliary


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


def digest(model: Model) -> str:
    """SHA-256 over the bits of all weights."""
    bits = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        bits.update(name.encode())
        bits.update(tensor.cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def train(steps: int, device: str, seed: int, console: Console) -> tuple[Model, Text, float]:
    """The trained model, its text, and the mean loss over the last tenth of the steps."""
    torch.manual_seed(seed)
    text = help_pages()
    model = Model(len(text.alphabet)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss  ?", total=steps)
        for step in range(steps):
            starts = torch.randint(len(text.numbers) - CONTEXT, (BATCH,), generator=generator)
            window = text.numbers[starts[:, None] + torch.arange(CONTEXT + 1)].to(device)
            logits, auxiliary = model(window[:, :-1])
            loss = igt.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            (loss + auxiliary).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            # The loss is read now and then: reading waits for the device.
            shown = f"loss {loss.item():.3f}" if step % 10 == 0 else None
            progress.update(task, advance=1, description=shown)
    last = torch.stack(losses[-max(steps // 10, 1) :]).mean().item() if losses else float("nan")
    return model, text, last


def main(
    steps: Annotated[int, typer.Option(min=0, help="Training steps.")] = 600,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the batches and the sample.")] = 0,
) -> None:
    """Train a small mixture-of-experts character model on Python's help pages and print a sample of its text."""
    torch.use_deterministic_algorithms(True)
    console = Console()
    model, text, loss = train(steps, device, seed, console)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} weights, {len(text.numbers):,} characters, loss {loss:.3f}")
    console.rule("sample")
    console.print(sample(model, text, "The ", 400, seed), markup=False, highlight=False)
    console.rule()
    console.print(f"digest of the weights: {digest(model)}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    typer.run(main)
