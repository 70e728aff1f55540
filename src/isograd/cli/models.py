"""The two models of `isograd demo`: a teacher of two layers, and the mixture of experts that learns from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import random
from isograd.tape import (
    Tape,
    Variable,
    distillation_loss,
    load_balancing_loss,
    log_softmax,
    matmul,
    relu,
    renormalize,
    softmax,
    take_along_axis,
    top_k,
    transpose,
)

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Weights = dict[str, Floats]

CLASSES = 10
TEACHER_HIDDEN = 128
EXPERTS = 8
CHOSEN = 2  # experts for every image
EXPERT_HIDDEN = 32
TEMPERATURE = 2.0
BALANCE = 0.2  # weight of the load-balancing loss, without which a few experts learn everything

# Streams of the random generator, one for every matrix.
_W1, _W2, _ROUTER, _EXPERT_1, _EXPERT_2 = 1, 2, 3, 4, 5


def _normal(shape: tuple[int, ...], seed: int, stream: int) -> Floats:
    """He's initialisation: variance 2 / inputs."""
    scale = np.float32(math.sqrt(2.0 / shape[-2]))
    return np.asarray(random.normal(shape, seed=seed, stream=stream) * scale)


def teacher_weights(inputs: int, seed: int) -> Weights:
    """Two layers; biases of zero."""
    return {
        "w1": _normal((inputs, TEACHER_HIDDEN), seed, _W1),
        "b1": np.zeros(TEACHER_HIDDEN, np.float32),
        "w2": _normal((TEACHER_HIDDEN, CLASSES), seed, _W2),
        "b2": np.zeros(CLASSES, np.float32),
    }


def student_weights(inputs: int, seed: int) -> Weights:
    """A router and EXPERTS small networks of two layers."""
    return {
        "router": _normal((inputs, EXPERTS), seed, _ROUTER),
        "w1": _normal((EXPERTS, inputs, EXPERT_HIDDEN), seed, _EXPERT_1),
        "b1": np.zeros((EXPERTS, 1, EXPERT_HIDDEN), np.float32),
        "w2": _normal((EXPERTS, EXPERT_HIDDEN, CLASSES), seed, _EXPERT_2),
        "b2": np.zeros((EXPERTS, 1, CLASSES), np.float32),
    }


def _leaves(weights: Weights) -> tuple[Tape, dict[str, Variable]]:
    tape = Tape()
    return tape, {name: tape.leaf(value) for name, value in weights.items()}


def _teacher(w: dict[str, Variable], x: Floats) -> Variable:
    hidden = relu(matmul(x, w["w1"], precision="int16") + w["b1"])
    return matmul(hidden, w["w2"], precision="int16") + w["b2"]


def _student(w: dict[str, Variable], x: Floats) -> tuple[Variable, Variable, Labels]:
    """The scores [B, CLASSES], the router's probabilities [B, EXPERTS] and the experts chosen [B, CHOSEN]."""
    probabilities = softmax(matmul(x, w["router"], precision="int16"))
    _, experts = top_k(probabilities, CHOSEN)
    shares = renormalize(take_along_axis(probabilities, experts))
    # Every expert sees every image: at this size that is faster than sending each image to its experts.
    hidden = relu(matmul(x, w["w1"], precision="int16") + w["b1"])
    outputs = transpose(matmul(hidden, w["w2"], precision="int16") + w["b2"], (1, 0, 2))
    picked = take_along_axis(outputs, experts[:, :, None], axis=1)
    return (picked * shares.reshape((len(x), CHOSEN, 1))).sum(axis=1), probabilities, experts


def teacher_scores(weights: Weights, x: Floats) -> Floats:
    """The teacher's score of every class."""
    return _teacher(_leaves(weights)[1], x).value


def student_scores(weights: Weights, x: Floats) -> tuple[Floats, Labels]:
    """The student's score of every class, and the experts that were asked, the first choice first."""
    scores, _, experts = _student(_leaves(weights)[1], x)
    return scores.value, experts


def _step(tape: Tape, leaves: dict[str, Variable], loss: Variable) -> tuple[float, Weights]:
    gradients = tape.backward(loss)
    return loss.item(), {name: gradients[leaf] for name, leaf in leaves.items()}


def teacher_loss(weights: Weights, x: Floats, labels: Any) -> tuple[float, Weights]:
    """The mean cross entropy of a batch, and its gradient for every weight."""
    tape, w = _leaves(weights)
    target = np.zeros((len(x), CLASSES), np.float32)
    target[np.arange(len(x)), labels] = 1
    return _step(tape, w, -(log_softmax(_teacher(w, x)) * target).sum(axis=-1).mean())


def student_loss(weights: Weights, x: Floats, scores: Any) -> tuple[float, Weights]:
    """How far a batch is from the teacher's scores and from an even load, and the gradient for every weight."""
    tape, w = _leaves(weights)
    own, probabilities, experts = _student(w, x)
    loss = distillation_loss(own, scores, TEMPERATURE) + load_balancing_loss(probabilities, experts) * BALANCE
    return _step(tape, w, loss)
