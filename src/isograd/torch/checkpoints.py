"""Activation checkpoints that recompute under the modes of their forward.

torch recomputes without the modes that were active in forward, on whatever thread the backward runs. All that recompute
through `torch.utils.checkpoint` meet in two of its classes, whatever name they were imported by: the function that
`CheckpointFunction` (reentrant) and `_CheckpointFrame` (not reentrant) are given is wrapped. Where no mode is active
both are as before.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from torch.utils import checkpoint

# The parameters that are relied upon, up to the wrapped function.
_PLACES = (("CheckpointFunction", "forward", "run_function", 1), ("_CheckpointFrame", "__init__", "recompute_fn", 1))


def hold(active: Callable[[], Sequence[AbstractContextManager[Any]]]) -> str:
    """Let recomputation enter what `active` returned in forward; say what keeps this torch from that, if anything."""
    found = []
    for kind, method, parameter, place in _PLACES:
        original = getattr(getattr(checkpoint, kind, None), method, None)
        names = list(inspect.signature(original).parameters) if original is not None else []
        if names[place : place + 1] != [parameter]:
            return f"torch.utils.checkpoint.{kind}.{method} has no {parameter} at place {place}"
        found.append((getattr(checkpoint, kind), method, original))
    for kind, method, original in found:
        replacement = _passing_on(original, active)
        setattr(kind, method, staticmethod(replacement) if method == "forward" else replacement)
    return ""


def _passing_on(original: Any, active: Callable[[], Sequence[AbstractContextManager[Any]]]) -> Callable[..., Any]:
    @wraps(original)
    def call(context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        modes = active()
        return original(context, _under(modes, active, function) if modes else function, *args, **kwargs)

    return call


def _under(
    modes: Sequence[AbstractContextManager[Any]],
    active: Callable[[], Sequence[AbstractContextManager[Any]]],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        present = active()
        return _within([mode for mode in modes if mode not in present], partial(function, *args, **kwargs))

    return call


def _within(modes: Sequence[AbstractContextManager[Any]], function: Callable[[], Any]) -> Any:
    """Call a function in the modes' blocks, which are statements: an interrupt skips the end of an ExitStack."""
    if not modes:
        return function()
    with modes[0]:
        return _within(modes[1:], function)
