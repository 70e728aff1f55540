"""A small mixture-of-experts character model and its training: `isograd demo --model lm` and `examples/train_lm.py`.

Norms, attention, the router, the way of the tokens to their experts and back, embeddings, loss, clipping and optimizer
run on isograd, and gradients are added up in integers: a step is UNITS backward passes, spread over the ranks. With
products="int16" matrix products are order-free, and so is attention: dense in float32, and in bfloat16, where the
forward pass runs under torch.autocast, by the kernels of flash attention. Then the weights have the same bits on every
machine. Weights and batches are drawn on the CPU, from integers.
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pydoc_data import topics
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import isograd.torch as igt

CONTEXT, WIDTH, HEADS, LAYERS = 64, 96, 4, 2
EXPERTS, CHOSEN, HIDDEN = 8, 2, 96
UNITS, LEARNING_RATE = 8, 3e-3
MICRO_BATCH = 2  # sequences of a unit
Products = Literal["torch", "int16"]
DTypes = Literal["float32", "bfloat16"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """A block in which torch's own operations have one order on one machine."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products on a GPU ask for
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Text(NamedTuple):
    """A text as numbers, and the characters that they stand for."""

    numbers: Tensor
    alphabet: str


def help_pages() -> str:
    """The help topics that ship with Python."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def numbered(text: str) -> Text:
    """A text without its rare characters."""
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
        found: Tensor = self.output(o.transpose(1, 2).flatten(2))
        return found


class Experts(nn.Module):
    """A layer whose tokens each visit the CHOSEN experts that the router gives the largest weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.into = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.back = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, WIDTH]. The result, and what keeps the experts evenly busy."""
        logits = self.gate(x).float()  # autocast would leave a softmax in bfloat16 on a CPU, and not on a GPU
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


class Training:
    """A model in training: the whole of each step, or one rank's share of its units.

    wrap: what makes of the model what the units run through, on its device.
    """

    def __init__(
        self,
        text: Text,
        steps: int,
        device: torch.device,
        seed: int = 0,
        products: Products = "int16",
        dtype: DTypes = "float32",
        micro_batch: int = MICRO_BATCH,
        rank: int = 0,
        ranks: int = 1,
        wrap: Callable[["Model"], nn.Module] = lambda model: model,
    ) -> None:
        self.text, self.seed, self.micro_batch, self.step = text, seed, micro_batch, 0
        self.rank, self.ranks, self.device = rank, ranks, device
        self.switch = igt.use(products=None if products == "torch" else products)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
        self.losses: list[Tensor] = []
        self.model = Model(len(text.alphabet))
        self.model.initialize(torch.Generator().manual_seed(seed))
        self.model.to(self.device)
        self.wrapped = wrap(self.model)
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
                with self.autocast:
                    logits, auxiliary = self.wrapped(window[:, :-1])
                loss = igt.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
                (loss + auxiliary).backward()
            losses.append(loss.detach())
        self.total.finish()
        igt.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.losses.append(torch.stack(losses).mean())
