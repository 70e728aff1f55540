"""torch's stack of function modes, which belongs to a thread."""

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

stack: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
push: Callable[[Any], None] = torch._C._push_on_torch_function_stack


def remove(mode: TorchFunctionMode) -> None:
    """Take a mode off this thread's stack wherever it lies on it; nothing if it does not.

    An interrupt inside a function of torch's may have lost the mode, so that the uppermost one is another's.
    """
    modes = stack()
    if mode not in modes:
        return
    above = modes[modes.index(mode) :]
    steps: list[Callable[[], Any]] = [_pop] * len(above)
    steps += [partial(push, other) for other in above if other is not mode]
    list(map(call, steps))  # one call into C, which no interrupt divides
