"""Run under TRITON_INTERPRET=1: compare the router family's Triton kernels with the reference in Triton's interpreter.

    python interpreted_router.py [--exhaustive] SUITE...

A suite is an operation, separated, members, top_k_sorted, blocks or faults. Prints the number of cases of each and of
those that differ. Not a test itself: the variable acts when triton is imported.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import router_problems as problems
from choices import few
from interpreter_patches import report
from router_problems import SUITES

import isograd as d
from isograd import IndexOutOfRangeError, check
from isograd.core.arrays import numpy_dtype
from isograd.core.cases import Case
from isograd.ops.router import triton_kernels, triton_launch

FLAVOURS = problems.FLAVOURS
INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
ORDERS = (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, lambda t: torch.stack([t, t], -1)[..., 0])


def to_torch(x: Any) -> torch.Tensor:
    """A tensor with the bits of an array."""
    bits = torch.from_numpy(np.array(x, order="C").view(INTEGER[x.dtype.itemsize]).copy())
    return bits.view(getattr(torch, x.dtype.name))


def to_numpy(t: torch.Tensor) -> Any:
    dtype = numpy_dtype(str(t.dtype).removeprefix("torch."))
    integer = getattr(torch, np.dtype(INTEGER[dtype.itemsize]).name)
    return t.contiguous().view(integer).numpy().view(dtype)


def compute(operation: str, case: Case, dtype: str, order: int = 0) -> tuple[Any, ...]:
    """The results of the Triton kernels; `order` chooses the strides of inputs and outputs."""
    suite = SUITES[operation]
    descriptor = suite.descriptor(case, dtype).validated()
    tensors = {name: ORDERS[order](to_torch(a)) for name, a in case.inputs.items()}
    outputs = {}
    for operand in descriptor.operands():
        if operand.output:
            outputs[operand.name] = ORDERS[order](torch.full(operand.shape, 7, dtype=getattr(torch, operand.dtype)))
    problems.launch(descriptor, {**tensors, **outputs})
    return tuple(to_numpy(t) for t in outputs.values())


def agree(operation: str, case: Case, dtype: str, order: int = 0) -> bool:
    with np.errstate(all="ignore"):
        got = compute(operation, case, dtype, order)
    return [problems.raw(x) for x in got] == [problems.raw(x) for x in problems.expected(operation, case)]


def random_problems(operation: str) -> Iterator[tuple[str, bool]]:
    # A router has more options than the others.
    dtypes = problems.dtypes_of(operation)
    every = 2 if operation.startswith("moe_router") else len(dtypes)
    for seed, dtype in few(every, range(12), dtypes):
        rng = np.random.default_rng(seed)
        flavour = FLAVOURS[seed % len(FLAVOURS)]
        case = problems.problem(operation, rng, dtype, flavour)
        shapes = {name: a.shape for name, a in case.inputs.items()}
        what = f"{operation} {dtype} {flavour} seed {seed} {shapes} {case.options}"
        yield what, agree(operation, case, dtype, seed % 3)


def separated() -> Iterator[tuple[str, bool]]:
    """The short cut: that it is taken where logits are apart, and what happens where they are not."""
    taken = []
    choose = triton_kernels._choose
    sizes: list[tuple[int, int, dict[str, Any]]] = [
        (128, 8, {}),
        (200, 1, {"renormalize": True}),
        (256, 8, {"renormalize": True, "scale": 2.5}),
        (300, 31, {}),
    ]
    flavours = ("apart", "normal", "ties", "close", "special", "masked")
    for dtype, (seed, (n, k, options)), flavour in few(
        5, ("bfloat16", "float16", "float32"), list(enumerate(sizes)), flavours
    ):
        rng = np.random.default_rng(seed)
        x = 3 * rng.standard_normal((5, n))
        if flavour == "apart":
            logits = (rng.permuted(np.tile(np.arange(n), (5, 1)), axis=1) / 8 - 9).astype(numpy_dtype(dtype))
        elif flavour == "close":
            logits = (1 + np.round(x) * 2.0**-20).astype(numpy_dtype(dtype))
        else:
            logits = problems.values(rng, flavour, (5, n), dtype)
        case = Case("", {"logits": logits}, {"k": k, **options})
        taken.clear()

        def general(*arguments: Any) -> Any:
            taken.append(True)
            return choose(*arguments)

        with mock.patch.object(triton_kernels, "_choose", general):
            right = agree("moe_router", case, dtype)
        way = bool(taken)
        expected_way = {"apart": False, "close": True, "special": True}.get(flavour)
        if k == 31 or (k == 1 and flavour == "close"):  # a matter of chance
            expected_way = None
        yield f"separated {dtype} {n} {k} {flavour} general {way}", right and expected_way in (None, way)


def results(descriptor: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results of the Triton kernels."""
    outputs = {o.name: torch.full(o.shape, 7, dtype=getattr(torch, o.dtype)) for o in descriptor.operands() if o.output}
    problems.launch(descriptor, {**inputs, **outputs})
    return list(outputs.values())


def members() -> Iterator[tuple[str, bool]]:
    """Several problems in one launch, and a bias for every token: the bits of each alone."""
    rng = np.random.default_rng(0)
    sizes = [(3, 5, 8), (2, 300, 70), (1, 4, 3)]
    for dtype, shape, order in few(3, ("bfloat16", "float32", "float64"), sizes, ORDERS):
        size, _, n = shape
        work = torch.float64 if dtype == "float64" else torch.float32
        x = order(torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype)))
        experts = torch.from_numpy(rng.integers(n, size=(*shape[:-1], 2)))
        losses, biases = (torch.from_numpy(rng.standard_normal(s)).to(work) for s in ((size,), (size, 1, n)))
        routed = (2, dtype, "sigmoid", False, 1, 1, 1.0)
        for descriptor, fields, inputs in (
            (d.RouterZLossDescriptor, (dtype,), {"logits": x}),
            (d.RouterZLossBackwardDescriptor, (dtype,), {"dloss": losses, "logits": x}),
            (d.LoadBalancingLossDescriptor, (2, dtype, "int64"), {"probabilities": x, "experts": experts}),
            (d.LoadBalancingLossBackwardDescriptor, (2, dtype, "int64"), {"dloss": losses, "experts": experts}),
            (d.MoeRouterDescriptor, routed, {"logits": x, "bias": biases.expand(shape)}),
        ):
            biased = {"bias": True} if "bias" in inputs else {}
            whole = results(descriptor(shape, *fields, True, **biased), inputs)
            alone = [{name: t[i, 0] if name == "bias" else t[i] for name, t in inputs.items()} for i in range(size)]
            parts = zip(*[results(descriptor(shape[1:], *fields, **biased), each) for each in alone], strict=True)
            same = all(torch.equal(a, torch.stack(b)) for a, b in zip(whole, parts, strict=True))
            yield f"members {descriptor.__name__} {dtype} {shape}", same


def top_k_sorted() -> Iterator[tuple[str, bool]]:
    sizes = [((3, 1500), 9, -1), ((2, 200), 150, 1), ((1100, 2), 3, 0)]
    for dtype, (seed, (shape, k, axis)), flavour in few(
        3, problems.DTYPES, list(enumerate(sizes)), ("ties", "special")
    ):
        x = problems.values(np.random.default_rng(seed), flavour, shape, dtype)
        case = Case("", {"x": x}, {"k": k, "axis": axis})
        yield f"top_k {dtype} {shape} {k} {flavour}", agree("top_k", case, dtype, seed)


def blocks() -> Iterator[tuple[str, bool]]:
    """Sizes that are cut into several blocks, tiles that hold no whole row, many terms."""
    rng = np.random.default_rng(0)
    for count, bound in ((700, 5), (129, 40), (400, 300)):
        case = Case("", {"experts": rng.integers(0, bound, count)}, {"num_experts": bound})
        with mock.patch.object(triton_launch, "_STRETCH", 2):
            yield f"permutation {count} {bound}", agree("expert_permutation", case, "int64")
        yield f"counts {count} {bound}", agree("expert_counts", case, "int64")
    for dtype, flavour in few(2, ("bfloat16", "float32", "float64"), ("normal", "special")):
        order = problems.permutation(rng, 2 * 37)
        rows, weights = (problems.values(rng, flavour, (74, 5), dtype), np.ones((2, 37), "float32"))
        weights = weights.astype("float64" if dtype == "float64" else "float32")
        case = Case("", {"expert_out": rows, "weights": weights, "order": order})
        yield f"combine {dtype} {flavour}", agree("moe_combine", case, dtype)
        wide = problems.values(rng, flavour, (2, 5000), dtype)
        case = Case("", {"dy": wide[:1], "expert_out": wide, "weights": weights[:1, :2], "order": np.array([1, 0])})
        yield f"combine_backward {dtype} {flavour}", agree("moe_combine_backward", case, dtype)
        for operation in ("renormalize", "router_z_loss"):
            name = "w" if operation == "renormalize" else "logits"
            case = Case("", {name: wide}, {"axis": -1} if operation == "renormalize" else {})
            if operation == "router_z_loss":
                case = Case("", {name: wide[:, :2000]})
            yield f"{operation} {dtype} {flavour}", agree(operation, case, dtype)
        logits = problems.values(rng, flavour, (3, 1500), dtype)
        case = Case("", {"logits": logits}, {"k": 3, "renormalize": True})
        yield f"many experts {dtype} {flavour}", agree("moe_router", case, dtype)
        experts = problems.expected("moe_router", case)[1]
        inputs = {"dweights": np.ones((3, 3), weights.dtype), "logits": logits, "experts": experts}
        case = Case("", inputs, {"renormalize": True})
        yield f"many experts backward {dtype} {flavour}", agree("moe_router_backward", case, dtype)


def faults() -> Iterator[tuple[str, bool]]:
    logits = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    experts = np.array([[0, 1], [2, 3], [6, 5], [0, -1]])
    work = np.ones((4, 2), np.float32)
    rows = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)
    order = np.array([3, 1, 9, 0, 2, 5, 7, 6])

    def fault(operation: str, case: Case, message: str, dtype: str = "float32") -> tuple[str, bool, tuple[Any, ...]]:
        got = compute(operation, case, dtype)
        try:
            check()
        except IndexOutOfRangeError as error:
            return f"{operation}: {error}", str(error) == f"{operation}: {message}", got
        return f"{operation}: no error", False, got

    said = "experts has 6 at flat position 4; accepted: 0 to 5"
    for scoring in ("softmax", "sigmoid"):
        inputs = {"dweights": work, "logits": logits, "experts": experts}
        what, right, (dx,) = fault("moe_router_backward", Case("", inputs, {"scoring": scoring}), said)
        yield what, right and np.isnan(dx[2:]).all() and np.isfinite(dx[:2]).all()
    case = Case("", {"experts": experts}, {"num_experts": 6})
    what, right, (counts,) = fault("expert_counts", case, said, "int64")
    yield what, right and counts.tolist() == [2, 1, 1, 1, 0, 1]
    what, right, (found, offsets) = fault("expert_permutation", case, said, "int64")
    yield what, right and found.tolist() == [0, 6, 1, 2, 3, 5, 4, 7] and offsets.tolist() == [0, 2, 3, 4, 5, 5, 6]
    what, right, (loss,) = fault("load_balancing_loss", Case("", {"probabilities": logits, "experts": experts}), said)
    yield what, right and np.isnan(loss)
    options = {"shape": (4, 6), "dtype": "float32"}
    case = Case("", {"dloss": np.array(1, np.float32), "experts": experts}, options)
    what, right, (dp,) = fault("load_balancing_loss_backward", case, said)
    yield what, right and np.isnan(dp).all()
    said = "order has 9 at flat position 2; accepted: 0 to 7"
    what, right, (y,) = fault("moe_permute", Case("", {"x": rows[:4], "order": order}, {"k": 2}), said)
    expected = rows[order % 8 // 2]
    expected[2] = np.nan
    yield what, right and np.array_equal(y, expected, equal_nan=True)
    # Entry 4 of token 2 is missing.
    what, right, (y,) = fault("moe_combine", Case("", {"expert_out": rows, "weights": work, "order": order}), said)
    yield what, right and np.isnan(y).any(axis=1).tolist() == [False, False, True, False]
    inputs = {"dy": rows[:4], "expert_out": rows, "weights": work, "order": order}
    what, right, (dx, dw) = fault("moe_combine_backward", Case("", inputs), said)
    yield what, right and np.isnan(dw).sum() == 1 and np.isnan(dw[2, 0]) and (dx[2] == 7).all()


SUITES_HERE: dict[str, Any] = {f.__name__: f for f in (separated, members, top_k_sorted, blocks, faults)}


if __name__ == "__main__":
    report({operation: partial(random_problems, operation) for operation in SUITES} | SUITES_HERE)
