"""Problems of every operation of the router family: random values in random layouts, and how they are run."""

import ml_dtypes
import numpy as np

from isograd.cli import suites
from isograd.core import arrays, kernel
from isograd.core.cases import Case
from isograd.numerics.storage import compute_dtype
from isograd.ops.router import operation as declared
from isograd.ops.router import reference

SUITES = {name: suite for name, suite in suites.SUITES.items() if suite.plan.__module__ == declared.__name__}
DTYPES = ["float16", "bfloat16", "float32", "float64"]
INDEX_DTYPES = ["int32", "int64", "uint32"]
FLAVOURS = ["normal", "ties", "spread", "special", "zeros", "masked"]


def raw(x):
    x = np.asarray(x)
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def values(rng, flavour, shape, dtype):
    """Numbers of a kind in a dtype, given by name."""
    dtype = arrays.numpy_dtype(dtype)
    x = rng.standard_normal(shape)
    if flavour == "ties":
        x = np.rint(x)
    elif flavour == "spread":
        x = x * np.exp2(rng.uniform(-160, 140, shape))
    elif flavour == "special":
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, tiny, -3 * tiny, 3e38, -3e38, 6e4, -6e4])
        x = np.where(rng.random(shape) < 0.3, rng.choice(pool, shape), x)
    elif flavour == "zeros":
        x = np.where(rng.random(shape) < 0.8, rng.choice([0.0, -0.0], shape), x)
    elif flavour == "masked":
        x = np.where(rng.random(shape) < 0.6, -np.inf, x)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def laid_out(rng, x):
    """The same array with its dimensions stored in another order, some backwards or with gaps."""
    if x.ndim == 0:
        return x.copy()
    order = rng.permutation(x.ndim)
    steps = rng.choice([1, 1, 1, 2, -1, -2], x.ndim)
    base = np.full([x.shape[d] * abs(steps[d]) for d in order], np.array(7, x.dtype))
    view = base[tuple(slice(None, None, steps[d]) for d in order)].transpose(np.argsort(order))
    view[...] = x
    return view


def routed(rng, tokens, experts, k, dtype):
    """Distinct experts for every token."""
    chosen = [rng.permutation(experts)[:k] for _ in range(tokens)]
    return np.array(chosen, dtype).reshape(tokens, k)


def permutation(rng, count):
    return rng.permutation(count).astype(np.int64)


def router_options(rng, experts):
    """(k, options) of moe_router."""
    groups = int(rng.choice([g for g in range(1, experts + 1) if experts % g == 0]))
    group_k = int(rng.integers(1, groups + 1))
    options = {
        "scoring": str(rng.choice(["softmax", "sigmoid"])),
        "renormalize": bool(rng.integers(2)),
        "groups": groups,
        "group_k": group_k,
        "scale": float(rng.choice([1.0, 1.0, 2.5, -0.3])),
    }
    return int(rng.integers(1, experts // groups * group_k + 1)), options


def problem(operation, rng, dtype, flavour):
    """A case of an operation with arrays in C order."""
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 5, 7, 12], rng.integers(1, 5)))
    axis = int(rng.integers(-len(shape), len(shape)))
    tokens, k, width = int(rng.integers(0, 6)), int(rng.choice([1, 2, 3, 8])), int(rng.choice([0, 1, 5, 40]))
    experts = int(rng.choice([1, 2, 6, 12, 40]))
    work = compute_dtype(dtype)

    def new(size, of=dtype):
        return values(rng, flavour, size, of)

    if operation == "top_k":
        return Case("", {"x": new(shape)}, {"k": int(rng.integers(1, shape[axis] + 1)), "axis": axis})
    if operation == "renormalize":
        return Case("", {"w": new(shape)}, {"axis": axis})
    if operation == "renormalize_backward":
        return Case("", {"dt": new(shape), "w": new(shape)}, {"axis": axis})
    if operation == "moe_router":
        k, options = router_options(rng, experts)
        inputs = {"logits": new((*shape[:2], experts))}
        if rng.integers(2):
            inputs["bias"] = new((experts,), work)
        return Case("", inputs, {"k": k, **options})
    if operation == "moe_router_backward":
        k, options = router_options(rng, experts)
        options = {name: options[name] for name in ("scoring", "renormalize", "scale")}
        chosen = routed(rng, tokens, experts, k, str(rng.choice(INDEX_DTYPES)))
        inputs = {"dweights": new((tokens, k), work), "logits": new((tokens, experts)), "experts": chosen}
        return Case("", inputs, options)
    if operation in ("expert_counts", "expert_permutation"):
        return Case("", {"experts": rng.integers(0, experts, shape).astype(dtype)}, {"num_experts": experts})
    order = permutation(rng, tokens * k)
    rows, entries, weights = (tokens, width), (tokens * k, width), new((tokens, k), work)
    if operation == "moe_permute":
        return Case("", {"x": new(rows), "order": order}, {"k": k})
    if operation == "moe_permute_backward":
        return Case("", {"dy": new(entries), "order": order}, {"k": k})
    if operation == "moe_combine":
        return Case("", {"expert_out": new(entries), "weights": weights, "order": order})
    if operation == "moe_combine_backward":
        return Case("", {"dy": new(rows), "expert_out": new(entries), "weights": weights, "order": order})
    chosen = rng.integers(0, experts, (tokens, k)).astype(str(rng.choice(INDEX_DTYPES)))
    if operation == "load_balancing_loss":
        return Case("", {"probabilities": new((tokens, experts)), "experts": chosen})
    if operation == "load_balancing_loss_backward":
        return Case("", {"dloss": new((), work), "experts": chosen}, {"shape": (tokens, experts), "dtype": dtype})
    if operation == "router_z_loss":
        return Case("", {"logits": new((*shape[:2], experts))})
    assert operation == "router_z_loss_backward"
    return Case("", {"dloss": new((), work), "logits": new((*shape[:2], experts))})


def with_layouts(rng, case):
    """The case with every array stored in some other way."""
    return Case(case.name, {name: laid_out(rng, a) for name, a in case.inputs.items()}, case.options)


def plan_of(operation, case, dtype, **options):
    suite = SUITES[operation]
    return suite.plan.select(suite.descriptor(case, dtype), **options)


def run(operation, case, dtype, layout=lambda a: a, plan=None):
    """The results of an operation's plan, in arrays that `layout` makes from empty ones."""
    plan = plan_of(operation, case, dtype) if plan is None else plan
    outputs = {}
    for operand in plan.descriptor.operands():
        if operand.output:
            outputs[operand.name] = layout(np.full(operand.shape, 7, arrays.numpy_dtype(operand.dtype)))
    plan.run(**case.inputs, **outputs)
    return tuple(outputs.values())


def expected(operation, case):
    """What the definition says."""
    with np.errstate(all="ignore"):
        results = getattr(reference, operation)(**case.inputs, **case.options)
    return results if isinstance(results, tuple) else (results,)


def launch(descriptor, tensors):
    """Run the Triton kernels of a descriptor's operation."""
    from isograd.ops.router import triton

    kernel.functions[descriptor.operation, triton.__name__].launch(descriptor.validated(), **tensors)


def dtypes_of(operation):
    return SUITES[operation].dtypes


EACH = [(operation, dtype) for operation in SUITES for dtype in dtypes_of(operation)]
