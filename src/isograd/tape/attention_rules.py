"""Attention on the tape, as `rules.py` has the other operations: one rule for o and one for lse.

Gradients reach q, k, v, a bias and sinks; masks, segment ids and cu_seqlens have none.
"""

from typing import Any, NamedTuple

import numpy as np

from isograd.flash_attention import api
from isograd.tape.rules import Array, Result


class Computed(NamedTuple):
    """What both rules are given: the names of the operands after v, the results, and the other arguments."""

    names: tuple[str, ...]
    o: Array
    lse: Array
    options: dict[str, Any]


def _gradients(operands: tuple[Array, ...], done: Computed, do: Array, dlse: Array | None) -> tuple[Array, ...]:
    q, k, v = operands[:3]
    options: dict[str, Any] = {**dict(zip(done.names, operands[3:], strict=True)), **done.options}
    result = api.attention_backward(do, q, k, v, done.o, done.lse, dlse=dlse, **options)
    return (*result[:3], *(getattr(result, f"d{name}") for name in done.names))


def _rule(operands: tuple[Array, ...], value: Array, compute: Any) -> Result:
    """A value whose gradients are computed together when the first one is due."""
    latest: list[tuple[Array, tuple[Array, ...]]] = []

    def gradient(which: int, g: Array) -> Array:
        if not latest or latest[0][0] is not g:
            latest[:] = [(g, compute(g))]
        return latest[0][1][which]

    return value, tuple(lambda g, i=i: gradient(i, g) for i in range(len(operands)))


def attention(*operands: Array, done: Computed) -> Result:
    """The result o."""
    return _rule(operands, done.o, lambda g: _gradients(operands, done, g, None))


def attention_lse(*operands: Array, done: Computed) -> Result:
    """The logarithm of the sums."""
    return _rule(operands, done.lse, lambda g: _gradients(operands, done, np.zeros_like(done.o), g))
