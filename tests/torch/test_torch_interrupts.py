"""Blocks of `isograd.torch.use()` that an interrupt ends, at any step: nothing stays on torch's stack of modes."""

import contextlib
import threading

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from steps import at_step, interrupt
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import isograd as ig
import isograd.torch as igt
from isograd.core import encoder, guard
from isograd.runtime import blocks, modes
from isograd.torch import switch

FILES = (__file__, blocks.__file__, modes.__file__, switch.__file__, guard.__file__, encoder.__file__)
X = torch.zeros(2, 3)


class Other(TorchFunctionMode):
    """A mode of somebody else's, whose end takes the uppermost one off."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def plain():
    with switched:
        pass


def nested():
    with switched, switched:
        pass


def with_an_error():
    with switched:
        raise KeyError


def recording():
    with ig.Encoder():
        pass


def under_another():
    switched.__enter__()
    with Other():
        switched.__exit__(None, None, None)


switched = igt.use()


@pytest.fixture(autouse=True)
def alone():
    yield
    while left := _get_current_function_mode_stack():
        modes.remove(left[-1])


@pytest.mark.parametrize("function", [plain, nested, with_an_error, recording])
@pytest.mark.parametrize("kept", [False, True], ids=["", "traceback kept"])
def test_an_interrupt_at_any_step_of_entry_and_end(function, kept):
    number, tracebacks = 1, []
    outer = Other()
    while True:
        with outer:
            try:
                done = not at_step(number, function, interrupt, *FILES)
            except KeyError:
                done = True
            except KeyboardInterrupt as error:
                done = False
                if kept:
                    tracebacks.append(error)
            assert _get_current_function_mode_stack() == [outer], number
            assert encoder.current() is None
        assert not _get_current_function_mode_stack()
        if done:
            break
        number += 1
    assert number > 20


def test_the_end_leaves_the_modes_above_it():
    under_another()
    assert not _get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        stack.enter_context(switched)
        stack.enter_context(switched)
        assert len(_get_current_function_mode_stack()) == 2
    assert not _get_current_function_mode_stack()


def test_a_block_that_torch_puts_back_after_its_end_lets_everything_pass():
    # torch takes a mode off its stack for the time of a call; interrupted there, it puts it back as the traceback dies.
    counting = igt.use()
    with counting:
        (block,) = _get_current_function_mode_stack()
    modes.push(block)
    assert not torch.softmax(X, -1).isnan().any()
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="eager", fullgraph=True)
    compiled(X)
    assert not counting.report().lines
    with counting:
        assert block not in _get_current_function_mode_stack()
        compiled(X)
        torch.softmax(X, -1)
    assert counting.report().replaced == {"torch.softmax (compiled)": 1, "torch.softmax": 1}


def test_a_mode_that_an_interrupt_inside_torch_has_lost():
    with igt.use() as outer:
        with igt.use():
            modes._pop()  # as where torch is interrupted before it has put the mode back
        torch.softmax(X, -1)
    assert outer.report().replaced == {"torch.softmax": 1}
    assert not _get_current_function_mode_stack()


def test_an_end_that_another_thread_lets_go_of():
    held = []

    def block():
        with switched:
            yield

    def make():
        held.append(block())
        next(held[0])
        found.extend(_get_current_function_mode_stack())

    found = []
    worker = threading.Thread(target=make)
    worker.start()
    worker.join()
    held.clear()
    assert found[0].over
    assert not _get_current_function_mode_stack()
