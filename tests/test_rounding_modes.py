"""Every public operation has the same bits under every rounding mode of the caller, and under flush-to-zero."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from choices import thorough
from conformance.operations import arrays_of
from modes import MODES, environment

import isograd as ig
from isograd.elementwise import api as elementwise
from isograd.numerics import random
from isograd.ops import OPERATIONS
from isograd.reduction import api as sums
from isograd.tape import Tape, silu

each_mode = pytest.mark.parametrize("mode", MODES)
each_dtype = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, thorough(np.float16), np.float64])

UNARY = ("exp", "tanh", "sigmoid", "relu", "silu", "gelu")

# Operations whose calls are written out.
ROUTING = (
    "top_k", "renormalize", "moe_router", "expert_counts", "expert_permutation", "moe_permute", "moe_combine",
    "load_balancing_loss", "router_z_loss",
)  # fmt: skip
# What decides nothing about numbers.
OTHERS = {"check", "get_num_threads", "kernels", "prefer", "register_kernel", "set_num_threads", "unregister_kernel"}


def tape_gradients(x):
    """A composite whose constants are rounded, and a value as a Python number."""
    tape = Tape()
    v = tape.leaf(x)
    loss = (silu(v * 0.1 + 0.3) / 1.7).mean() + tape.checkpoint(lambda u: (u * 0.7).exp().sum() * 1e-3, v)
    return tape.backward(loss)[v], loss.item(), (v * 1e-40).sum().item()


def accumulated(losses):
    total = ig.LossAccumulator(losses.dtype.name)
    total.add(losses)
    return total.total(), total.mean(3.3)


def recorded(x, targets):
    with ig.Encoder() as encoder:
        loss = ig.cross_entropy(x, targets, label_smoothing=0.3, z_loss=0.1, reduction="none")
    encoder.replay()
    return loss.result()


def composed(x, other, upstream, mask):
    """The gradient of each function of arrays, which meets subnormal elements and values."""
    tape = Tape()
    a, b = tape.leaf(x), tape.leaf(other)
    parts = [getattr(ig, name)(a) for name in UNARY] + [ig.gelu(a, "tanh"), ig.log(b * b), ig.sqrt(b * b)]
    parts += [ig.power(a * a, 1.3), ig.power(a * a, b), ig.maximum(a, b), ig.minimum(a, b), ig.where(mask, a, b)]
    parts += [ig.max(a, 1, True) * b, ig.min(a, 1, True) * b, ig.mean(a, 0) * b]
    found = []
    for part in parts:
        gradients = tape.backward((part * upstream).sum())
        found += [gradients[leaf] for leaf in (a, b) if leaf in gradients]
    return tuple(found)


def trained(optimizer, x, upstream, **options):
    """Parameters and states after three steps."""
    w = {"w": x.copy(), "b": x[0].copy()}
    made = getattr(ig.optim, optimizer)(w, **options)
    for number in range(3):
        made.step({"w": upstream, "b": x[number]})
    return w["w"], w["b"], *(array for state in made.state_dict()["state"].values() for array in state.values())


def array_calls(x, other, upstream, tiny):
    """The calls of what is computed element by element or added up, of optimizers and of the tape's rules."""
    row = np.array([-tiny, -0.0, 0.0, tiny, 2 * tiny]).astype(x.dtype)
    column = np.array([tiny, 1.0])[:, None].astype(x.dtype) * row
    for name in (*UNARY, "log", "sqrt"):
        for operand in (x, row, abs(other)):
            yield name, getattr(ig, name), (operand,), {}
    yield "gelu", ig.gelu, (x, "tanh"), {}
    slopes = (elementwise.sigmoid_backward, elementwise.tanh_backward, ig.silu_backward, ig.gelu_backward)
    for name, slope in zip(("sigmoid", "tanh", "silu_backward", "gelu_backward"), slopes, strict=True):
        for operand in (x, np.broadcast_to(row[[0, 3, 4]].repeat(3), x.shape)):
            yield name, slope, (upstream, operand), {}
    for exponent in (2.7, 3, -0.5, 1e-320, other):
        yield "power", ig.power, (abs(x), exponent), {}
    yield "power", elementwise.power_backward, (upstream, abs(x), other), {}
    yield "power", elementwise.power_backward_exponent, (upstream, abs(x), other), {}
    for name in ("maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
        for pair in ((x, other), (row, column), (row, 0.0), (row, float(row[3]))):
            yield name, getattr(ig, name), pair, {}
    yield "where", ig.where, (x > other, x, 0.1), {}
    yield "where", ig.where, (np.array([True, False]), row[:2], float(tiny)), {}
    for name in ("sum", "mean", "max", "min"):
        for operand in (x, column, row[::-1] + row):
            yield name, getattr(ig, name), (operand, operand.ndim - 1), {}
    yield "tape", composed, (x, other, upstream, x > 0), {}
    yield "optim", trained, ("SGD", x, upstream), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}
    for name in ("Adam", "AdamW"):
        yield "optim", trained, (name, x, upstream), {"lr": 0.003, "weight_decay": 0.01}


def calls(dtype):
    """(name, function, arguments, options): numbers that have to be rounded, and terms that are subnormal."""
    rng = np.random.default_rng(61)
    work = np.float64 if dtype is np.float64 else np.float32
    tiny = work(np.finfo(work).smallest_subnormal * 1000)
    small = work(np.finfo(work).smallest_normal)

    def normal(*shape):
        x = rng.standard_normal(shape)
        return np.where(rng.random(shape) < 0.2, x * float(small), x).astype(dtype)

    x, other, upstream = normal(6, 9), normal(6, 9), normal(6, 9)
    p = ig.softmax(other)
    targets, few = rng.integers(0, 9, 6), rng.integers(0, 4, 6)
    weight = np.where(np.arange(9) % 3 == 0, tiny, rng.random(9)).astype(work)
    q, k, v = (normal(1, heads, 20, 24) for heads in (2, 1, 1))
    bias, sinks = normal(1, 1, 1, 20).astype(work), np.array([0.3, 0.1 * tiny], work)
    hidden, layer, layer_bias = normal(6, 7), normal(4, 7), normal(4)
    experts = rng.integers(0, 9, (6, 2))
    order, _ = ig.expert_permutation(experts, 9)
    rows, weights = normal(12, 5), rng.random((6, 2)).astype(work)
    one, tenth, losses = np.array(1, work), np.array(0.1, work), normal(6).astype(work)
    named = np.argsort(rng.random((6, 9)), axis=1)[:, :3]
    log_p = np.take_along_axis(ig.log_softmax(other), named, 1)
    odd = {"return_gradient": True, "dloss": 0.1, "label_smoothing": 0.3, "z_loss": 0.1}
    gradients = {"scale": 0.3, "dropout_p": 0.3, "seed": 1, "softcap": 0.7}
    o, lse = ig.attention(q, k, v, return_lse=True)
    bent, bent_lse = ig.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **gradients)

    yield "rotary_table", ig.rotary_table, (9, 6), {"base": 1234.5}
    for kind in ("softmax", "log_softmax"):
        yield kind, getattr(ig, kind), (x,), {}
        yield f"{kind}_backward", getattr(ig, f"{kind}_backward"), (upstream, getattr(ig, kind)(x)), {}
    for smoothing in (0.3, 4 * float(tiny), 36 * tiny):
        options = odd | {"label_smoothing": smoothing}
        yield "cross_entropy", ig.cross_entropy, (x, targets, weight), options | {"count": 3.3}
        yield "cross_entropy", ig.cross_entropy, (x, targets), options | {"z_loss": tiny, "dloss": tiny}
    yield "cross_entropy", ig.cross_entropy, (x, p, weight), odd
    for z_loss in (0.0, 1e-320):  # which flush-to-zero takes for one
        yield "cross_entropy", ig.cross_entropy, (np.full_like(x, 3e4), targets), odd | {"z_loss": z_loss}
    yield "cross_entropy_backward", ig.cross_entropy_backward, (0.1, x, targets), {"label_smoothing": 0.3}
    for preference in ("order_free", "blas"):
        linear = (hidden, layer, few, layer_bias)
        yield "linear_cross_entropy", ig.linear_cross_entropy, linear, odd | {"preference": preference}
    for reduction_ in ("mean", "batchmean", "none"):
        yield "kl_div", ig.kl_div, (ig.log_softmax(x), p, reduction_), {}
        dloss = losses[:, None] + 0 * x.astype(work) if reduction_ == "none" else one
        for wrt in ("input", "target"):
            arguments = (dloss, ig.log_softmax(x), p, reduction_, False, wrt)
            yield "kl_div_backward", ig.kl_div_backward, arguments, {}
    for teacher, indices in ((other, None), (log_p, named)):
        yield "distillation_loss", ig.distillation_loss, (x, teacher, 0.3, indices), {}
        yield "distillation_loss", ig.distillation_loss, (x, teacher, np.float32(0.3), indices, "mean"), {}
        arguments = (one, x, teacher, 0.3, indices)
        yield "distillation_loss_backward", ig.distillation_loss_backward, arguments, {}
    yield "gumbel_softmax", ig.gumbel_softmax, (x, 0.7), {"seed": 1}
    yield "gumbel_softmax_backward", ig.gumbel_softmax_backward, (upstream, p, 0.7), {}
    yield "dropout", ig.dropout, (x, 0.3), {"seed": 1}
    listed = ("softmax", "log_softmax", "kl_div", "distillation_loss", "gumbel_softmax", "dropout", *ROUTING)
    for name, op in OPERATIONS.items():
        if name.removesuffix("_backward") not in listed:
            yield name, getattr(ig, name), arrays_of(op, np.dtype(dtype).name), {}
    yield "top_k", ig.top_k, (x, 3), {}
    yield "renormalize", ig.renormalize, (p,), {}
    yield "renormalize_backward", ig.renormalize_backward, (upstream, p), {}
    for scale in (0.1, 1e-40, float(tiny)):
        routing = {"scale": scale, "renormalize": True}
        yield "moe_router", ig.moe_router, (x, 2), routing
        yield "moe_router_backward", ig.moe_router_backward, (weights, x, experts), routing
    yield "expert_counts", ig.expert_counts, (experts, 9), {}
    yield "expert_permutation", ig.expert_permutation, (experts, 9), {}
    yield "moe_permute", ig.moe_permute, (rows[:6], order, 2), {}
    yield "moe_permute_backward", ig.moe_permute_backward, (rows, order, 2), {}
    yield "moe_combine", ig.moe_combine, (rows, weights, order), {}
    yield "moe_combine_backward", ig.moe_combine_backward, (rows[:6], rows, weights, order), {}
    yield "load_balancing_loss", ig.load_balancing_loss, (p, experts), {}
    yield "load_balancing_loss_backward", ig.load_balancing_loss_backward, (tenth, experts, (6, 9)), {}
    yield "router_z_loss", ig.router_z_loss, (x,), {}
    yield "router_z_loss_backward", ig.router_z_loss_backward, (tenth, x), {}
    places = rng.integers(0, 6, (8, 9))
    values = normal(8, 9)
    yield "take_along_axis", ig.take_along_axis, (x, places, 0), {}
    yield "take_along_axis_backward", ig.take_along_axis_backward, (values, places, (6, 9), 0), {}
    yield "scatter_sum", ig.scatter_sum, (x, places, values, 0), {}
    yield "segment_sum", ig.segment_sum, (values, places[:, 0], 6), {}
    yield "embedding", ig.embedding, (x, places), {}
    yield "embedding_backward", ig.embedding_backward, (values, places[:, 0], 6), {}
    yield "attention", ig.attention, (q, k, v), {}
    yield "attention", ig.attention, (q, k, v), {"bias": bias, "sinks": sinks, **gradients}
    if dtype is np.float64:
        yield "attention", ig.attention, (q * 1e300, k, v), {"scale": 1e-310}
    lengths, newest = np.array([17], np.int32), {"window": (9, None), "sinks": sinks, "scale": 0.3, "softcap": 0.7}
    yield "attention_with_cache", ig.attention_with_cache, (q[:, :, :2], k, v, lengths), newest
    pages = {"block_table": np.arange(20, dtype=np.int32)[None]}
    paged = (q[:, :, :2], k.transpose(2, 1, 0, 3), v.transpose(2, 1, 0, 3), lengths)
    yield "attention_with_cache", ig.attention_with_cache, paged, pages
    yield "attention_delta", ig.attention_delta, (o, q), {}
    yield "attention_backward", ig.attention_backward, (q, q, k, v, o, lse), {}
    bent_call = (q, q, k, v, bent, bent_lse)
    yield "attention_backward", ig.attention_backward, bent_call, {"bias": bias, "sinks": sinks, **gradients}
    yield from array_calls(x, other, upstream, tiny)
    yield "matmul", ig.matmul, (x, other.T), {}
    if dtype is np.float32:
        yield "matmul", ig.matmul, (x, other.T), {"precision": "int16"}
    yield "random", random.normal, (50,), {"seed": 1, "dtype": work}
    yield "random", random.uniform, (50,), {"seed": 1, "dtype": work}
    yield "LossAccumulator", accumulated, (losses,), {}
    yield "tape", tape_gradients, (x,), {}
    yield "Encoder", recorded, (x, targets), {}


def results(found):
    """The bits of a result, or of several."""
    if isinstance(found, tuple):
        return [part for each in found if each is not None for part in results(each)]
    return [np.asarray(found).tobytes()]


@pytest.fixture(scope="module")
def expected():
    """The results of every call under the default mode, by dtype."""
    made = {}

    def of(dtype):
        if dtype not in made:
            listed = list(calls(dtype))
            made[dtype] = listed, [results(f(*arguments, **options)) for _, f, arguments, options in listed]
        return made[dtype]

    return of


@each_mode
@each_dtype
def test_every_operation(mode, dtype, expected):
    listed, usual = expected(dtype)
    with environment(mode):
        found = [results(f(*arguments, **options)) for _, f, arguments, options in listed]
    wrong = [(call[0], call[3]) for call, a, b in zip(listed, found, usual, strict=True) if a != b]
    assert wrong == []


def test_no_operation_is_left_out():
    public = {name for name in ig.__all__ if inspect.isfunction(getattr(ig, name)) or name == "optim"}
    assert public - OTHERS <= {call[0] for call in calls(np.float32)}


@each_mode
def test_counts_that_a_work_type_has_to_round(mode):
    ones = np.broadcast_to(np.float32(1), (2**24 + 1,))
    with environment(mode):
        assert sums.mean(ones) == 1
