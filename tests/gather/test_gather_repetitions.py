"""A thousand repetitions beside a thread that loads the memory, each with the sources in another order."""

import threading

import numpy as np
import pytest

import isograd as ig
from isograd.runtime import parallel

COUNT, ROWS, WIDTH = 1200, 40, 48


@pytest.fixture
def loaded_memory():
    source, target, stop = np.ones(1 << 24, np.uint8), np.zeros(1 << 24, np.uint8), threading.Event()

    def copy():
        while not stop.is_set():
            np.copyto(target, source)
            stop.wait(1e-3)

    thread = threading.Thread(target=copy)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_thousand_repetitions_have_the_same_bits(loaded_memory, dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((COUNT, WIDTH)) * 10.0 ** rng.integers(-6, 6, (COUNT, 1))).astype(dtype)
    tokens = rng.integers(0, ROWS, COUNT)
    tokens[rng.random(COUNT) < 0.25] = 7  # a hot row
    expected = ig.embedding_backward(values, tokens, ROWS).tobytes()
    in_order = np.zeros((ROWS, WIDTH), dtype)
    np.add.at(in_order, tokens, values)
    assert in_order.tobytes() != expected, "these sums would not show an order"
    before = parallel.get_num_threads()
    try:
        for repetition in range(1000):
            parallel.set_num_threads(1 + repetition % 2)
            order = rng.permutation(COUNT)
            assert ig.embedding_backward(values[order], tokens[order], ROWS).tobytes() == expected, repetition
    finally:
        parallel.set_num_threads(before)
