"""LossAccumulator under threads, signal handlers and interrupts: a call has added its losses or not."""

import pickle
import sys
import threading

import numpy as np
import pytest
from steps import at_step, interrupt

import isograd as ig
from isograd.losses import accumulator

X = np.arange(1, 9, dtype=np.float32)
SUM = 36


def filled(parts):
    total = ig.LossAccumulator()
    for _ in range(parts):
        total.add(X)
    return total


@pytest.fixture(params=[1000, 3], ids=["kept", "folded"])
def before(request, monkeypatch):
    """How many calls came before the one in question, which puts parts together or does not."""
    monkeypatch.setattr(accumulator, "_MOST_PARTS", request.param)
    return 4


@pytest.mark.parametrize("call", ["add", "merge", "total", "pickle"])
def test_an_interrupt_at_any_step(call, before):
    calls = {
        "add": lambda total: total.add(X),
        "merge": lambda total: total.merge(filled(1)),
        "total": lambda total: total.total(),
        "pickle": pickle.dumps,
    }
    added = call in ("add", "merge")
    seen, number = set(), 1
    while True:
        total = filled(before)
        try:
            if not at_step(number, lambda: calls[call](total), interrupt, accumulator.__file__):  # noqa: B023 - called at once
                break
        except KeyboardInterrupt:
            pass
        found = total.total() / SUM
        assert found in ((before, before + 1) if added else (before,))
        seen.add(found)
        # Another thread goes on with it.
        thread = threading.Thread(target=total.add, args=(X,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert total.total() == (found + 1) * SUM
        number += 1
    assert number > 20
    assert len(seen) == 1 + added


@pytest.mark.parametrize("call", ["add", "total"])
def test_a_handler_that_adds_at_any_step(call, before):
    number = 1
    while True:
        total = filled(before)
        inside = lambda: (total.add(X), total.total())  # noqa: B023, E731 - called at once
        function = lambda: total.add(X) if call == "add" else total.total()  # noqa: B023, E731
        if not at_step(number, function, inside, accumulator.__file__):
            break
        assert total.total() == (before + 1 + (call == "add")) * SUM
        number += 1
    assert number > 20


def test_threads_that_add_and_read(monkeypatch):
    monkeypatch.setattr(accumulator, "_MOST_PARTS", 7)
    total, rounds, threads = ig.LossAccumulator(), 100, 4
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [threading.Thread(target=lambda: [total.add(X) for _ in range(rounds)]) for _ in range(threads)]
        for thread in work:
            thread.start()
        seen = [total.total()]
        while any(thread.is_alive() for thread in work):
            seen.append(total.total())
        for thread in work:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert total.total() == threads * rounds * SUM
    assert seen == sorted(seen)


def test_parts_are_put_together(monkeypatch):
    monkeypatch.setattr(accumulator, "_MOST_PARTS", 5)
    total = ig.LossAccumulator()
    for _ in range(100):
        total.add(X)
        assert len(total._parts) <= 5
    assert total.total() == 100 * SUM
