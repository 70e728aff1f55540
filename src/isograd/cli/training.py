"""The model of `isograd demo`: handwritten digits, two layers, cross entropy, Adam; the same bits on every machine.

Matrix products, log_softmax and sums are the tape's, which have the same bits everywhere. Everything else here uses
+ - * / and square roots of NumPy, which IEEE 754 defines to the last bit, and random numbers of the library's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.cli.progress import optional
from isograd.fenv import default_environment
from isograd.numerics import random
from isograd.numerics.matmul import matmul as product
from isograd.tape import Tape, Variable, log_softmax, matmul, relu

Floats = NDArray[np.float32]
Weights = dict[str, Floats]

EPOCHS = 40
SEED = 0
HIDDEN = 128
CLASSES = 10
BATCH = 64
HELD_OUT = 360
RATE = 2e-3
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8

# Streams of the random generator; shuffling takes one an epoch, from _SHUFFLE on. The split is the same for any seed.
_SPLIT, _W1, _W2, _SHUFFLE = 0, 1, 2, 3


@dataclass(frozen=True)
class Data:
    """Images as rows of 64 intensities in [0, 1], and the digit each one shows."""

    train_x: Floats
    train_y: NDArray[np.int64]
    test_x: Floats
    test_y: NDArray[np.int64]


@dataclass
class Run:
    """A training run: the final weights, and after each epoch the mean loss and the accuracy on held-out images."""

    weights: Weights
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def load_data() -> Data:
    """The handwritten digits that scikit-learn ships: 1437 images to train on, 360 held out."""
    datasets = optional("sklearn.datasets", "scikit-learn", "demo", "The demo's data")
    images, labels = datasets.load_digits(return_X_y=True)
    x = (images / 16.0).astype(np.float32)  # sixteenths: exact
    y = labels.astype(np.int64)
    order = random.permutation(len(x), seed=SEED, stream=_SPLIT)
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return Data(x[train], y[train], x[test], y[test])


def initial_weights(inputs: int, seed: int) -> Weights:
    """He's initialisation: normal weights of variance 2 / inputs, biases of zero."""

    def layer(rows: int, columns: int, stream: int) -> Floats:
        scale = np.float32(math.sqrt(2.0 / rows))
        return np.asarray(random.normal((rows, columns), seed=seed, stream=stream) * scale)

    return {
        "w1": layer(inputs, HIDDEN, _W1),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": layer(HIDDEN, CLASSES, _W2),
        "b2": np.zeros(CLASSES, np.float32),
    }


def loss_and_gradients(weights: Weights, x: Floats, labels: NDArray[np.int64]) -> tuple[float, Weights]:
    """The mean cross entropy of a batch, and its gradient for every weight."""
    tape = Tape()
    w: dict[str, Variable] = {name: tape.leaf(value) for name, value in weights.items()}
    hidden = relu(matmul(x, w["w1"]) + w["b1"])
    scores = matmul(hidden, w["w2"]) + w["b2"]
    target = np.zeros((len(x), CLASSES), np.float32)
    target[np.arange(len(x)), labels] = 1
    loss = -(log_softmax(scores, axis=-1) * target).sum(axis=-1).mean()
    gradients = tape.backward(loss)
    return loss.item(), {name: gradients[leaf] for name, leaf in w.items()}


def accuracy(weights: Weights, x: Floats, labels: NDArray[np.int64]) -> float:
    """The share of images whose digit has the highest score."""
    hidden = np.maximum(product(x, weights["w1"]) + weights["b1"], 0)
    scores = product(hidden, weights["w2"]) + weights["b2"]
    return float(np.mean(scores.argmax(axis=-1) == labels))


class Adam:
    """Adam (Kingma and Ba, 2015) in float32. Powers of the decay rates are repeated products, not calls of pow."""

    def __init__(self, weights: Weights) -> None:
        self._mean = {name: np.zeros_like(w) for name, w in weights.items()}
        self._square = {name: np.zeros_like(w) for name, w in weights.items()}
        self._power_1 = self._power_2 = 1.0

    def step(self, weights: Weights, gradients: Weights) -> None:
        """Update the weights in place."""
        self._power_1 *= BETA_1
        self._power_2 *= BETA_2
        for name, w in weights.items():
            g, m, v = gradients[name], self._mean[name], self._square[name]
            m *= BETA_1
            m += (1 - BETA_1) * g
            v *= BETA_2
            v += (1 - BETA_2) * (g * g)
            w -= RATE * (m / (1 - self._power_1)) / (np.sqrt(v / (1 - self._power_2)) + EPSILON)


def _one_blas_thread() -> AbstractContextManager[Any]:
    """Keep a BLAS from spreading these small products over threads, where waiting takes longer than computing.

    It changes no bit. The package comes with scikit-learn.
    """
    pools = optional("threadpoolctl", "threadpoolctl", "demo", "The demo")
    limits: AbstractContextManager[Any] = pools.threadpool_limits(limits=1, user_api="blas")
    return limits


def train(data: Data, epochs: int, seed: int, after_epoch: Callable[[Run], Any] = lambda _: None) -> Run:
    """Train for some epochs; `after_epoch` sees the run as it grows."""
    weights = initial_weights(data.train_x.shape[1], seed)
    adam = Adam(weights)
    run = Run(weights)
    count = len(data.train_x)
    with default_environment(), _one_blas_thread():
        for epoch in range(epochs):
            order = random.permutation(count, seed=seed, stream=_SHUFFLE + epoch)
            total = 0.0
            for start in range(0, count, BATCH):
                chosen = order[start : start + BATCH]
                loss, gradients = loss_and_gradients(weights, data.train_x[chosen], data.train_y[chosen])
                adam.step(weights, gradients)
                total += loss * len(chosen)
            run.losses.append(total / count)
            run.accuracies.append(accuracy(weights, data.test_x, data.test_y))
            after_epoch(run)
    return run


def digest(weights: Weights) -> str:
    """SHA-256 of all weights, little-endian, in the order of their names."""
    return hashlib.sha256(b"".join(weights[name].astype("<f4").tobytes() for name in sorted(weights))).hexdigest()
