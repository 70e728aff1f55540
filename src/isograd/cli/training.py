"""The training of `isograd demo`: handwritten digits and Adam; the same bits on every machine.

What the models compute (`models.py`) is the tape's, which has the same bits everywhere, as have the optimizer and the
random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd import optim
from isograd.cli import models
from isograd.cli.models import Floats, Weights
from isograd.cli.progress import optional
from isograd.numerics import random
from isograd.runtime.fenv import default_environment

EPOCHS = 40
SEED = 0
BATCH = 64
HELD_OUT = 360
RATE = 2e-3

# Streams of the random generator, beside those of the models; shuffling takes one an epoch, from _SHUFFLE on. The split
# is the same for any seed.
_SPLIT, _SHUFFLE = 0, 16


@dataclass(frozen=True)
class Data:
    """Images as rows of 64 intensities in [0, 1], and the digit each one shows."""

    train_x: Floats
    train_y: NDArray[np.int64]
    test_x: Floats
    test_y: NDArray[np.int64]


@dataclass
class Run:
    """A training run: the weights of both models, and what was measured on the way.

    teacher_losses, losses: the mean loss of each epoch of the teacher and of the student. teacher_accuracy: of the
    teacher on held-out images after its last epoch. accuracies: the student's after each epoch. experts: those that
    the student asked for each held-out image, the first choice first.
    """

    teacher: Weights
    student: Weights
    teacher_losses: list[float] = field(default_factory=list)
    teacher_accuracy: float = 0.0
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    experts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, models.CHOSEN), np.int64))


def load_data() -> Data:
    """The handwritten digits that scikit-learn ships: 1437 images to train on, 360 held out."""
    datasets = optional("sklearn.datasets", "scikit-learn", "demo", "The demo's data")
    images, labels = datasets.load_digits(return_X_y=True)
    x = (images / 16.0).astype(np.float32)  # sixteenths: exact
    y = labels.astype(np.int64)
    order = random.permutation(len(x), seed=SEED, stream=_SPLIT)
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return Data(x[train], y[train], x[test], y[test])


def _one_blas_thread() -> AbstractContextManager[Any]:
    """Keep a BLAS from spreading these small products over threads, where waiting takes longer than computing.

    It changes no bit. The package comes with scikit-learn.
    """
    pools = optional("threadpoolctl", "threadpoolctl", "demo", "The demo")
    limits: AbstractContextManager[Any] = pools.threadpool_limits(limits=1, user_api="blas")
    return limits


def _fit(
    weights: Weights,
    loss: Callable[[Weights, Floats, Any], tuple[float, Weights]],
    x: Floats,
    targets: NDArray[Any],
    orders: Iterator[NDArray[np.int64]],
) -> Iterator[float]:
    """Train in place; yields the mean loss after each epoch, which takes the rows in the next of the orders."""
    adam = optim.Adam(weights, lr=RATE)
    for order in orders:
        total = 0.0
        for start in range(0, len(x), BATCH):
            chosen = order[start : start + BATCH]
            value, gradients = loss(weights, x[chosen], targets[chosen])
            adam.step(gradients)
            total += value * len(chosen)
        yield total / len(x)


def _accuracy(scores: Floats, labels: NDArray[np.int64]) -> float:
    return float(np.mean(scores.argmax(axis=-1) == labels))


def train(data: Data, epochs: int, seed: int, after_epoch: Callable[[Run], Any] = lambda _: None) -> Run:
    """Train the teacher, then the student on its scores, some epochs each; `after_epoch` sees the run as it grows."""
    inputs = data.train_x.shape[1]
    run = Run(models.teacher_weights(inputs, seed), models.student_weights(inputs, seed))

    def orders(first: int) -> Iterator[NDArray[np.int64]]:
        return (random.permutation(len(data.train_x), seed=seed, stream=first + epoch) for epoch in range(epochs))

    with default_environment(), _one_blas_thread():
        for loss in _fit(run.teacher, models.teacher_loss, data.train_x, data.train_y, orders(_SHUFFLE)):
            run.teacher_losses.append(loss)
            run.teacher_accuracy = _accuracy(models.teacher_scores(run.teacher, data.test_x), data.test_y)
            after_epoch(run)
        scores = models.teacher_scores(run.teacher, data.train_x)
        for loss in _fit(run.student, models.student_loss, data.train_x, scores, orders(_SHUFFLE + epochs)):
            run.losses.append(loss)
            own, run.experts = models.student_scores(run.student, data.test_x)
            run.accuracies.append(_accuracy(own, data.test_y))
            after_epoch(run)
    return run


def digest(run: Run) -> str:
    """SHA-256 of all weights, little-endian, the teacher's first, each model's in the order of their names."""
    parts = [w[name].astype("<f4").tobytes() for w in (run.teacher, run.student) for name in sorted(w)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def service(run: Run, data: Data) -> NDArray[np.float64]:
    """For every digit, the share of its held-out images that each expert is the first choice for."""
    counts = np.zeros((models.CLASSES, models.EXPERTS))
    np.add.at(counts, (data.test_y, run.experts[:, 0]), 1)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))
