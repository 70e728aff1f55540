"""torch's stacks of modes, which belong to a thread: those of functions, and those of operators."""

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

stack: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
push: Callable[[Any], None] = torch._C._push_on_torch_function_stack


push_dispatch: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack


def remove(mode: TorchFunctionMode) -> None:
    """Take a mode off this thread's stack wherever it lies on it; nothing if it does not.

    An interrupt inside a function of torch's may have lost the mode, so that the uppermost one is another's.
    """
    _remove(mode, stack(), _pop, push)


def remove_dispatch(mode: Any) -> None:
    """The same for a mode that `push_dispatch` put on the stack of those that see operators."""
    found = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    _remove(mode, found, partial(torch._C._pop_torch_dispatch_stack, None), push_dispatch)


def _remove(mode: Any, modes: list[Any], pop: Callable[[], Any], put: Callable[[Any], None]) -> None:
    if mode not in modes:
        return
    above = modes[modes.index(mode) :]
    steps: list[Callable[[], Any]] = [pop] * len(above)
    steps += [partial(put, other) for other in above if other is not mode]
    list(map(call, steps))  # one call into C, which no interrupt divides
