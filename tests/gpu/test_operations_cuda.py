"""Every operation of `isograd.ops` on a real GPU: the bits of the NumPy reference, streams, and torch's machinery."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from operations import (  # noqa: E402
    FLAVOURS,
    NAMES,
    NUMPY,
    descriptor,
    expected,
    fits,
    inputs,
    options,
    refused,
    settings_of,
    spelled,
)

import isograd.torch  # noqa: E402, F401
from isograd.ops import OPERATIONS  # noqa: E402

INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64, 1024), 1), ((3, 5), 1), ((7, 1), 1), ((33, 4097), 1), ((300, 40), 0), ((4, 129, 30), 1), ((2, 70_000), 1),
    ((2, 3, 1, 4, 2, 2), 3), ((0, 4), 1), ((3, 0), 1), ((9,), 0),
)  # fmt: skip


def cuda(x: Any) -> Any:
    array = np.array(x, order="C")
    return torch.from_numpy(array.view(INTEGER[array.itemsize])).cuda().view(getattr(torch, x.dtype.name))


def leaves(op: Any, made: Any, to: Any) -> list[Any]:
    """The inputs as tensors, of which those that have a gradient require it."""
    tensors = [to(made[key]) if key in made else None for key in op.inputs]
    for key in op.gradients(OPERATIONS[op.vjp]):
        if (tensor := tensors[list(op.inputs).index(key)]) is not None:
            tensor.requires_grad_()
    return tensors


def bits(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        whole = x.contiguous().view(getattr(torch, np.dtype(INTEGER[x.element_size()]).name))
        return tuple(x.shape), whole.cpu().numpy().tobytes()
    return x.shape, np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_the_reference(name: str, dtype: str) -> None:
    op = OPERATIONS[name]
    for i, (shape, axis) in enumerate(SHAPES):
        if not fits(op, shape, axis):
            continue
        settings, given = settings_of(op, axis, i), options(op, i)
        made = inputs(op, np.random.default_rng(i), FLAVOURS[i % 5], shape, dtype, settings, given)
        problem = descriptor(op, shape, dtype, settings, given)
        if refused(problem) is not None:  # rows that are too long for its kernels
            continue
        plan = op.plan_type.select(problem, "cuda")
        right = [bits(r) for r in expected(op, made, settings, given)]
        arrays = {key: cuda(a) for key, a in made.items()}
        for stream in (None, torch.cuda.Stream()):
            outputs = {
                o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype), device="cuda")
                for o in plan.descriptor.operands()
                if o.output
            }
            torch.cuda.synchronize()
            plan.run(**arrays, **outputs, stream=stream)
            torch.cuda.synchronize()
            assert [bits(outputs[key]) for key in plan.outputs] == right, (shape, axis, given)


@pytest.mark.parametrize("name", [name for name in NAMES if OPERATIONS[name].vjp])
def test_gradients_have_the_bits_of_the_cpu(name: str) -> None:
    op = OPERATIONS[name]
    settings = settings_of(op, 1)
    made = inputs(op, np.random.default_rng(3), "normal", (50, 96), "float32", settings, op.optional)
    found = []
    for device in ("cpu", "cuda"):
        tensors = leaves(op, made, lambda a, device=device: torch.from_numpy(a.copy()).to(device))
        result = getattr(torch.ops.isograd, name)(*tensors, *spelled(op, settings))
        first = result[0] if isinstance(result, tuple) else result
        upstream = torch.arange(first.numel(), dtype=torch.float32).sin().view(first.shape).to(device)
        first.backward(upstream)
        found.append([bits(first.detach()), *[bits(t.grad) for t in tensors if t is not None and t.requires_grad]])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [name for name in NAMES if OPERATIONS[name].vjp])
def test_compiled_has_the_bits_of_eager(name: str) -> None:
    op = OPERATIONS[name]
    settings = settings_of(op, 1)
    made = inputs(op, np.random.default_rng(4), "normal", (40, 64), "bfloat16", settings, op.optional)
    torch._dynamo.reset()  # it stops compiling after some variants of one function

    def step(*tensors: Any) -> Any:
        result = getattr(torch.ops.isograd, name)(*tensors, *spelled(op, settings))
        return (result[0] if isinstance(result, tuple) else result).float().square().sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True)):
        tensors = leaves(op, made, cuda)
        run(*tensors).backward()
        found.append([bits(t.grad) for t in tensors if t is not None and t.requires_grad])
    assert found[0] == found[1]
