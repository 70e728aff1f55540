"""Distill a mixture of experts into one whose weights have few bits, in NumPy, to the same bits on every machine.

    python examples/distil.py --steps 100 --bits 3

The teacher is a layer of experts with weights of float32. The student has the same shape, and its weights are rounded
to a few bits in the forward pass; gradients go straight through the rounding. It learns from the teacher's scores, by
`distillation_loss`, and from the teacher's router, by `kl_div`. Everything is differentiated by the tape: products,
router and sums are order-free, so the digest that is printed is the same on every machine.
"""

import hashlib
from typing import Annotated

import numpy as np
import typer

import isograd as ig
from isograd import tape as it

FACTORS, WIDTH, CLASSES, EXPERTS, CHOSEN, ROWS = 8, 32, 16, 4, 2, 256
TEMPERATURE, LEARNING_RATE = 2.0, 1e-3


def uniform(shape, generator):
    """Numbers from -1 to 1 that are multiples of 2^-10, so that no library's rounding shows."""
    return (generator.integers(-1024, 1025, shape) / 1024).astype(np.float32)


def rounded(weights, bits):
    """Each column at one of 2^bits - 1 levels, which its largest magnitude sets."""
    levels = np.float32(2 ** (bits - 1) - 1)
    scale = np.abs(weights).max(axis=-2, keepdims=True) / levels
    return np.rint(weights / scale) * scale


def forward(w, x):
    """The scores [rows, CLASSES] and the logarithms of the router's probabilities [rows, EXPERTS]."""
    logits = it.matmul(x, w["router"])
    shares, experts = it.moe_router(logits, CHOSEN, renormalize=True)
    order, offsets = ig.expert_permutation(experts, EXPERTS)
    rows = it.moe_permute(x, order, CHOSEN)
    parts = [it.matmul(rows[offsets[e] : offsets[e + 1]], w["experts"][e]) for e in range(EXPERTS)]
    return it.moe_combine(it.concatenate(parts), shares, order), it.log_softmax(logits)


def loss_of(weights, bits, x, scores, router):
    """How far the rounded student is from the teacher, and the gradient for every weight."""
    tape = ig.Tape()
    leaves = {name: tape.leaf(value) for name, value in weights.items()}
    # The value is the rounded one, and the derivative that of the leaf.
    student = {name: leaf + (rounded(weights[name], bits) - weights[name]) for name, leaf in leaves.items()}
    own, own_router = forward(student, x)
    loss = it.distillation_loss(own, scores, TEMPERATURE)
    loss = loss + it.kl_div(own_router, router, reduction="batchmean", log_target=True)
    gradients = tape.backward(loss)
    return loss.item(), {name: gradients[leaf] for name, leaf in leaves.items()}


def distilled(steps, bits, seed):
    """The student's weights, and the loss of each step."""
    generator = np.random.default_rng(seed)
    teacher = {
        "router": uniform((WIDTH, EXPERTS), generator) / 4,
        "experts": uniform((EXPERTS, WIDTH, CLASSES), generator) / 4,
    }
    mixing = uniform((FACTORS, WIDTH), generator)  # what the student can use: its inputs hang together
    weights, losses = {name: value.copy() for name, value in teacher.items()}, []
    adam = ig.optim.Adam(weights, lr=LEARNING_RATE)
    for _ in range(steps):
        x = ig.matmul(uniform((ROWS, FACTORS), generator), mixing)
        tape = ig.Tape()
        scores, router = forward({name: tape.leaf(value) for name, value in teacher.items()}, x)
        loss, gradients = loss_of(weights, bits, x, scores.value, router.value)
        adam.step(gradients)
        losses.append(loss)
    return weights, losses


def digest(weights):
    """SHA-256 of all weights, little-endian."""
    return hashlib.sha256(b"".join(weights[name].astype("<f4").tobytes() for name in sorted(weights))).hexdigest()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    bits: Annotated[int, typer.Option(min=2, max=8, help="Bits of a student's weight.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the teacher and the rows.")] = 0,
) -> None:
    """Distill a mixture of experts into one whose weights have few bits."""
    weights, losses = distilled(steps, bits, seed)
    typer.echo(f"loss at first {losses[0]:.4f}, in the end {losses[-1]:.4f}")
    typer.echo(f"digest of the weights: {digest(weights)}")


if __name__ == "__main__":
    typer.run(main)
