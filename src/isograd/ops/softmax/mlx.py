"""The softmax family for MLX arrays."""

from typing import Any

from isograd.core import arrays
from isograd.core.kernel import launcher
from isograd.devices import metal

_FORWARD = """
  threadgroup long part[512];
  for (long row = group; row < layout[0]; row += groups) {
    isograd::KIND_row(x + row * layout[1], 1l, y + row * layout[1], 1l, layout[1], lane, threads, part);
  }
"""
_BACKWARD = """
  threadgroup long part[512];
  for (long row = group; row < layout[0]; row += groups) {
    const long first = row * layout[1];
    isograd::backward_row<LOG>(dy + first, 1l, y + first, 1l, dx + first, 1l, layout[1], lane, threads, part);
  }
"""


@launcher("softmax")
@launcher("softmax_backward")
@launcher("log_softmax")
@launcher("log_softmax_backward")
def rows(problem: Any, call: Any, **inputs: Any) -> tuple[Any, ...]:
    """One lazy array; an axis that is not the last one is moved there and back."""
    import mlx.core as mx

    name, axis = problem.operation, problem.axis
    count, columns = arrays.size_of(problem.shape), problem.shape[axis]
    if count == 0:
        return (mx.zeros(problem.shape, getattr(mx, problem.dtype)),)
    moved = {key: mx.moveaxis(array, axis, -1) for key, array in inputs.items()}
    body = _BACKWARD if name.endswith("backward") else _FORWARD
    body = body.replace("LOG", str(name.startswith("log")).lower()).replace("KIND", name)
    rows = count // columns
    outputs = {problem.operands()[-1].name: (next(iter(moved.values())).shape, problem.dtype)}
    threads = min(rows, metal.MOST_GROUPS), metal.threads_for(columns)
    (result,) = call(name, body, moved, [rows, columns], outputs, threads)
    return (mx.moveaxis(result, -1, axis),)
