"""The operators of attention.

    attention(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, Tensor? q_segment_ids=None,
              Tensor? k_segment_ids=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sinks=None,
              Tensor? seed=None, bool causal=False, str alignment="lower_right", SymInt? left=None, SymInt? right=None,
              float? scale=None, float softcap=0.0, float dropout_p=0.0, str? preference=None) -> (Tensor, Tensor)
    attention_backward(Tensor do, Tensor? dlse, Tensor o, Tensor lse, bool dbias, bool dsinks, ...the same)
              -> (Tensor, Tensor, Tensor, Tensor, Tensor)

They take [B, H, L, D] in any strides; o, dq, dk and dv lie in memory as q, q, k and v do, heads outside or inside the
length. (left, right) is the window. The seed is an int64 tensor without axes on the CPU, so that it is drawn from
torch's generator like any other random number and read without waiting for a GPU. preference: the name of a kernel. The
gradients of bias and sinks are empty where they are not asked for. Second derivatives are those of `attention_dense`.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isograd.core.plan import Plan
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.flash_attention.descriptors import DIM_STEP, LEAST_DIM, MOST_DIM
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.plans import AttentionBackwardPlan, AttentionPlan
from isograd.torch import attention_members as members
from isograd.torch import define
from isograd.torch.attention_dense import Operands, Tangents, gradient_tangents, tangents
from isograd.torch.tensors import (
    NAMES,
    empty,
    launch,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    work_dtype,
)

Saved = tuple[Any, ...]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_WORD = (1 << 64) - 1


class Call(NamedTuple):
    """The arguments of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    q_segment_ids: Tensor | None = None
    k_segment_ids: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    causal: bool = False
    alignment: str = "lower_right"
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    preference: str | None = None

    @property
    def tensors(self) -> Operands:
        """The arguments that are tensors."""
        given: Any = self[: len(Operands._fields)]
        return Operands(*given)


_TENSORS = len(Operands._fields)


def options_of(
    operation: str, head_dim: int, causal: bool, alignment: str, left: int | None, right: int | None, *numbers: Any
) -> AttentionOptions:
    """The arguments that are not tensors, checked."""
    if torch.compiler.is_compiling() or not all(side is None or type(side) is int for side in (left, right)):
        left = right = None  # symbols, which a check would make constants: the call that computes has numbers
    window = None if left is None and right is None else (left, right)
    return AttentionOptions(causal, alignment, window, *numbers).validated(operation, head_dim)


# For calls that compute; what traces may pass symbols for numbers.
known_options = functools.lru_cache(maxsize=1024)(options_of)


class BackwardCall(NamedTuple):
    """The arguments of `attention_backward` before those of `attention`."""

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    lse: Tensor
    dbias: bool
    dsinks: bool


_BEFORE = len(BackwardCall._fields)


# --- what fits together ----------------------------------------------------------------------------------------------
def require_shape(operation: str, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise for another shape."""
    if tuple(tensor.shape) != expected:
        raise InvalidProblemError(f"{operation}: {name} has shape {tuple(tensor.shape)}; expected {expected}")


def require_dtype(operation: str, name: str, tensor: Tensor, *accepted: torch.dtype) -> None:
    """Raise for another dtype."""
    if tensor.dtype not in accepted:
        names = ", ".join([str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(accepted)])
        raise UnsupportedError(f"{operation}: {name} has dtype {tensor.dtype}; accepted: {names}")


def _require_rows(operation: str, x: Operands) -> None:
    require_storage(operation, x.q, "q")
    for name, tensor in (("k", x.k), ("v", x.v)):
        require_same_dtype(operation, tensor, name, x.q, "q")
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.dim() != 4:
            raise InvalidProblemError(f"{operation}: {name} has shape {tuple(tensor.shape)}; expected four axes")
    batch, heads, _, head_dim = x.q.shape
    kv_heads, k_length = x.k.shape[1:3]
    require_shape(operation, "k", x.k, (batch, kv_heads, k_length, head_dim))
    require_shape(operation, "v", x.v, (batch, kv_heads, k_length, x.v.shape[3]))
    require_heads(operation, heads, kv_heads)


def require_heads(operation: str, heads: int, kv_heads: int) -> None:
    """Raise unless as many heads of q share each of k and v."""
    if heads % kv_heads if kv_heads else heads:
        raise InvalidProblemError(
            f"{operation}: q has {heads} heads and k and v have {kv_heads}; expected a multiple of the heads of k and v"
        )


def require_head_dims(operation: str, **rows: Tensor) -> None:
    """Raise for head dimensions that no kernel has."""
    for name, tensor in rows.items():
        size = tensor.shape[3]
        if not LEAST_DIM <= size <= MOST_DIM or size % DIM_STEP:
            raise UnsupportedError(
                f"{operation}: the head dimension of {name} is {size}; accepted: {LEAST_DIM} to {MOST_DIM} in steps of "
                f"{DIM_STEP}"
            )


def _require_scores(operation: str, name: str, tensor: Tensor | None, scores: tuple[int, ...]) -> None:
    if tensor is None:
        return
    if tensor.dim() != 4 or any(size not in (1, full) for size, full in zip(tensor.shape, scores, strict=True)):
        raise InvalidProblemError(
            f"{operation}: {name} has shape {tuple(tensor.shape)}; expected one that broadcasts to {scores}"
        )


def _require_pair(operation: str, argument: str, q: Tensor | None, k: Tensor | None) -> None:
    if (q is None) is not (k is None):
        raise InvalidProblemError(f"{operation}: {argument} is given for one of q and k; expected both or neither")
    for end, tensor in (("q", q), ("k", k)):
        if tensor is not None:
            require_dtype(operation, f"{argument} of {end}", tensor, torch.int32)


def require_operands(operation: str, x: Operands) -> None:
    """Raise for tensors that do not fit together, whatever the head dimension."""
    require_device(operation, **{name: t for name, t in x._asdict().items() if name != "seed"})
    _require_rows(operation, x)
    batch, heads, q_length, _ = x.q.shape
    k_length = x.k.shape[2]
    scores, work = (batch, heads, q_length, k_length), work_dtype(x.q.dtype)
    _require_scores(operation, "bias", x.bias, scores)
    _require_scores(operation, "mask", x.mask, scores)
    if x.bias is not None:
        require_dtype(operation, "bias", x.bias, x.q.dtype, work)
    if x.mask is not None:
        require_dtype(operation, "mask", x.mask, torch.bool)
    if x.sinks is not None:
        require_dtype(operation, "sinks", x.sinks, x.q.dtype, work)
        require_shape(operation, "sinks", x.sinks, (heads,))
    _require_pair(operation, "segment_ids", x.q_segment_ids, x.k_segment_ids)
    _require_pair(operation, "cu_seqlens", x.cu_seqlens_q, x.cu_seqlens_k)
    if x.q_segment_ids is not None and x.k_segment_ids is not None:
        require_shape(operation, "segment_ids of q", x.q_segment_ids, (batch, q_length))
        require_shape(operation, "segment_ids of k", x.k_segment_ids, (batch, k_length))
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is not None:
        if x.cu_seqlens_q.dim() != 1 or x.cu_seqlens_q.shape[0] == 0:
            raise InvalidProblemError(
                f"{operation}: cu_seqlens of q has shape {tuple(x.cu_seqlens_q.shape)}; expected (sequences + 1,)"
            )
        require_shape(operation, "cu_seqlens of k", x.cu_seqlens_k, tuple(x.cu_seqlens_q.shape))
        if batch != 1:
            raise InvalidProblemError(
                f"{operation}: q has batch size {batch}; cu_seqlens are for packed sequences, batch 1"
            )
        for name, given in (("bias", x.bias), ("mask", x.mask), ("segment_ids", x.q_segment_ids)):
            if given is not None:
                raise InvalidProblemError(f"{operation}: {name} and cu_seqlens are both given; accepted: one of them")


def _require(operation: str, call: Call, *, known: bool = False) -> AttentionOptions:
    """Raise for what does not fit together; the checked options, whose seed is not read."""
    x = call.tensors
    require_operands(operation, x)
    require_head_dims(operation, q=x.q, k=x.k, v=x.v)
    checked: Any = known_options if known else options_of
    options: AttentionOptions = checked(operation, x.q.shape[3], *call[_TENSORS:-1])
    if options.dropout_p and (x.seed is None or x.seed.dtype is not torch.int64 or x.seed.dim()):
        raise InvalidProblemError(f"{operation}: dropout_p is {options.dropout_p} without a seed; expected an integer")
    return options


def rows_like(x: Tensor, size: int | None = None, length: int | None = None) -> Tensor:
    """A result [B, H, length, size], by default of x's sizes, that lies in memory as x does."""
    batch, heads, own_length, own = x.shape
    size, length = own if size is None else size, own_length if length is None else length
    if heads > 1 and own_length > 1 and x.stride(1) < x.stride(2):
        return empty((batch, length, heads, size), x).transpose(1, 2)
    return empty((batch, heads, length, size), x)


def _results(x: Operands) -> tuple[Tensor, Tensor]:
    return rows_like(x.q, x.v.shape[3]), empty(x.q.shape[:3], x.q, work_dtype(x.q.dtype))


# --- running ---------------------------------------------------------------------------------------------------------
def _seed(seed: Tensor | None) -> int:
    # Where torch.compile moved it to a GPU, as before CUDA graphs, the operator is outside these and waits for it.
    return 0 if seed is None else int(seed) & _WORD


def _run(
    plan_type: type[Plan], operation: str, call: Call, options: AttentionOptions, wanted: Saved, **operands: Tensor
) -> None:
    """Run the plan for checked operands; `wanted` are the last fields of its descriptor."""
    x = call.tensors
    batch, heads, q_length, head_dim = x.q.shape
    sizes = (batch, heads, x.k.shape[1], q_length, x.k.shape[2], head_dim, x.v.shape[3], NAMES[x.q.dtype])
    fields = (
        *((None, None) if x.bias is None else (tuple(x.bias.shape), NAMES[x.bias.dtype])),
        None if x.mask is None else tuple(x.mask.shape),
        x.q_segment_ids is not None,
        None if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1,
        None if x.sinks is None else NAMES[x.sinks.dtype],
        *wanted,
    )
    operands |= _inputs(operation, x)
    if not options.dropout_p:
        run(plan_type, x.q.device, (*sizes, options, *fields), call.preference, **operands)
        return
    # Not through the cache of plans: a seed that changes with every call would fill it.
    options = replace(options, seed=_seed(x.seed))
    descriptor: Any = plan_type.descriptor_type
    launch(plan_type.select(descriptor(*sizes, options, *fields), x.q.device.type, call.preference), **operands)


def _inputs(operation: str, x: Operands) -> dict[str, Tensor]:
    """The operands of a plan, those of storage types aligned to their elements."""
    given = {name: tensor for name, tensor in x._asdict().items() if tensor is not None and name != "seed"}
    return {
        name: usable(operation, name, tensor) if tensor.dtype in NAMES and tensor.is_floating_point() else tensor
        for name, tensor in given.items()
    }


def _forward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **kwargs)
    _require("attention", call)
    return _results(call.tensors)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    name, call = "attention", Call(*args)
    options = _require(name, call, known=True)
    x = call.tensors
    o, lse = _results(x)
    _run(AttentionPlan, name, call, options, (), o=o, lse=lse)
    return o, lse


def _backward_problem(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, known: bool = False
) -> tuple[BackwardCall, Call, AttentionOptions]:
    name = "attention_backward"
    before = {key: kwargs.pop(key) for key in BackwardCall._fields if key in kwargs}
    given, call = BackwardCall(*args[:_BEFORE], **before), Call(*args[_BEFORE:], **kwargs)
    options = _require(name, call, known=known)
    x = call.tensors
    require_device(name, do=given.do, dlse=given.dlse, o=given.o, lse=given.lse, q=x.q)
    shape = tuple(x.q.shape[:3])
    for argument, tensor in (("do", given.do), ("o", given.o)):
        require_same_dtype(name, tensor, argument, x.q, "q")
        require_shape(name, argument, tensor, (*shape, x.v.shape[3]))
    sums: Tensor | None
    for argument, sums in (("lse", given.lse), ("dlse", given.dlse)):
        if sums is not None:
            require_dtype(name, argument, sums, work_dtype(x.q.dtype))
            require_shape(name, argument, sums, shape)
    for argument, wanted, source in (("dbias", given.dbias, x.bias), ("dsinks", given.dsinks, x.sinks)):
        if wanted and source is None:
            raise InvalidProblemError(f"{name}: {argument} is wanted without what it is the gradient of")
    return given, call, options


def _backward_results(given: BackwardCall, x: Operands) -> Gradients:
    none = (0,)
    return (
        rows_like(x.q),
        rows_like(x.k),
        rows_like(x.v),
        empty(x.bias.shape, x.bias) if given.dbias and x.bias is not None else empty(none, x.q),
        empty(x.sinks.shape, x.sinks) if given.dsinks and x.sinks is not None else empty(none, x.q),
    )


def _backward_fake(*args: Any, **kwargs: Any) -> Gradients:
    given, call, _ = _backward_problem(args, kwargs)
    return _backward_results(given, call.tensors)


def _backward(*args: Any) -> Gradients:
    name = "attention_backward"
    given, call, options = _backward_problem(args, {}, known=True)
    x = call.tensors
    results = _backward_results(given, x)
    operands = {"do": given.do, "o": given.o, "lse": given.lse}
    if given.dlse is not None:
        operands["dlse"] = given.dlse
    operands = {argument: usable(name, argument, tensor) for argument, tensor in operands.items()}
    operands |= dict(zip(("dq", "dk", "dv"), results, strict=False))
    for argument, wanted, result in (("dbias", given.dbias, results[3]), ("dsinks", given.dsinks, results[4])):
        if wanted:
            operands[argument] = result
    flags = (given.dlse is not None, given.dbias, given.dsinks)
    _run(AttentionBackwardPlan, name, call, options, flags, **operands)
    return results


# --- derivatives -----------------------------------------------------------------------------------------------------
_BIAS, _SINKS = Call._fields.index("bias"), Call._fields.index("sinks")


def _spread(dq: Any, dk: Any, dv: Any, dbias: Any, dsinks: Any) -> tuple[Any, ...]:
    """The gradients at the places of the operator's arguments."""
    found: list[Any] = [None] * _TENSORS
    found[:3], found[_BIAS], found[_SINKS] = (dq, dk, dv), dbias, dsinks
    return tuple(found)


def _directions(values: tuple[Any, ...]) -> Tangents:
    q, k, v = values[:3]
    return Tangents(q, k, v, values[_BIAS], values[_SINKS])


def _node_options(node: Any, x: Operands) -> AttentionOptions:
    return options_of("attention", x.q.shape[3], *node.options[:-1])


def _save_forward(node: Any, inputs: Saved, output: tuple[Tensor, Tensor]) -> Saved:
    node.options = inputs[_TENSORS:]
    return (*inputs[:_TENSORS], *output)


def _differentiate_forward(node: Any, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *x, o, lse = saved
    if do is None and dlse is None:
        return (None,)
    do = torch.zeros_like(o) if do is None else do
    wanted = [node.needs_input_grad[place] for place in (_BIAS, _SINKS)]
    gradients = ATTENTION_BACKWARD(do, dlse, o, lse, *wanted, *x, *node.options)
    return _spread(*gradients[:3], *[g if w else None for g, w in zip(gradients[3:], wanted, strict=True)])


def _push_forward(node: Any, saved: Saved, *moved: Tensor | None) -> tuple[Tensor, Tensor]:
    x = Operands(*saved[:_TENSORS])
    return tangents(x, _node_options(node, x), _directions(moved))


def _save_backward(node: Any, inputs: Saved, output: Gradients) -> Saved:
    do, dlse, o, lse, *node.wanted = inputs[:_BEFORE]
    node.options = inputs[_BEFORE + _TENSORS :]
    node.mark_non_differentiable(*[g for g, wanted in zip(output[3:], node.wanted, strict=True) if not wanted])
    return (do, dlse, o, lse, *inputs[_BEFORE : _BEFORE + _TENSORS])


def _differentiate_backward(node: Any, saved: Saved, *h: Tensor | None) -> tuple[Any, ...]:
    do, dlse, _, _, *rest = saved
    x = Operands(*rest)
    options, along = _node_options(node, x), Tangents(*h)
    needed = node.needs_input_grad
    by_do = by_dlse = None
    if needed[0] or needed[1]:
        by_do, by_dlse = tangents(x, options, along)
    by_x: tuple[Any, ...] = ()
    if any(needed[_BEFORE:]):
        by_x = _spread(*gradient_tangents(x, options, do, dlse, along))
    # o and lse are functions of the rest, through which these derivatives have gone already.
    return by_do, (None if dlse is None else by_dlse), None, None, None, None, *by_x


def _push_backward(
    node: Any, saved: Saved, t_do: Tensor | None, t_dlse: Tensor | None, _o: Any, _lse: Any, _b: Any, _s: Any, *t: Any
) -> tuple[Tensor | None, ...]:
    do, dlse, o, lse, *rest = saved
    x = Operands(*rest)
    t_do = torch.zeros_like(do) if t_do is None else t_do
    linear = ATTENTION_BACKWARD(t_do, t_dlse, o, lse, *node.wanted, *x, *node.options)
    moved = gradient_tangents(x, _node_options(node, x), do, dlse, _directions(t))
    differentiable = (True, True, True, *node.wanted)
    return tuple([a + b if wanted else None for a, b, wanted in zip(linear, moved, differentiable, strict=True)])


# --- vmap and autocast -----------------------------------------------------------------------------------------------
def _padded(in_dims: tuple[int | None, ...], args: tuple[Any, ...], before: int = 0) -> tuple[Any, ...]:
    """Dimensions and arguments with the defaults that a call leaves out."""
    call = Call(*args[before:])
    return (*in_dims, *[None] * (before + len(call) - len(in_dims))), (*args[:before], *call)


def _batch_forward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    dims, args = _padded(in_dims, args)
    call, places = Call(*args), dict(zip(Call._fields, dims, strict=True))
    axis = members.fold_axis(size, places, call)
    if axis is None:
        return define.one_by_one(op, size, dims, *args)
    o, lse = op(*members.folded(axis, size, places, call))
    return (members.parted(axis, size, o), members.parted(axis, size, lse)), (0, 0)


def _batch_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    dims, args = _padded(in_dims, args, _BEFORE)
    given, call = BackwardCall(*args[:_BEFORE]), Call(*args[_BEFORE:])
    places = dict(zip((*BackwardCall._fields, *Call._fields), dims, strict=True))
    axis = members.fold_axis(size, places, call, given.dbias, given.dsinks)
    if axis is None:
        return define.one_by_one(op, size, dims, *args)
    results = op(*members.folded(axis, size, places, given), *members.folded(axis, size, places, call))
    wanted = (True, True, True, given.dbias, given.dsinks)
    parts = [members.parted(axis, size, g) if w else g for g, w in zip(results, wanted, strict=True)]
    return tuple(parts), tuple([0 if w else None for w in wanted])


def as_autocast(device: str, tensor: Any, *welcome: torch.dtype) -> Any:
    """An operand as attention takes it under a device's autocast: in its dtype, unless it has a welcome one."""
    if tensor is None or tensor.device.type != device or tensor.dtype in (torch.float64, *welcome):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if tensor.is_floating_point() else tensor


def _autocast(device: str, *args: Any) -> tuple[Tensor, Tensor]:
    """As torch's attention under autocast: q, k and v in its dtype; bias and sinks may stay in float32."""
    call = Call(*args)
    rows: Any = {name: as_autocast(device, getattr(call, name)) for name in ("q", "k", "v")}
    extra: Any = {name: as_autocast(device, getattr(call, name), torch.float32) for name in ("bias", "sinks")}
    return ATTENTION(*call._replace(**rows, **extra))  # type: ignore[no-any-return]


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, Tensor? q_segment_ids=None, "
    "Tensor? k_segment_ids=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sinks=None, "
    'Tensor? seed=None, bool causal=False, str alignment="lower_right", SymInt? left=None, SymInt? right=None, '
    "float? scale=None, float softcap=0.0, float dropout_p=0.0, str? preference=None"
)
ATTENTION: define.Operator = define.operator(
    f"attention({_ARGUMENTS}) -> (Tensor, Tensor)",
    run=_forward,
    fake=_forward_fake,
    gradient=define.Gradient(_save_forward, _differentiate_forward, _push_forward),
    batch=_batch_forward,
    autocast={name: functools.partial(_autocast, name.lower()) for name in ("CUDA", "CPU")},
)
ATTENTION_BACKWARD: define.Operator = define.operator(
    f"attention_backward(Tensor do, Tensor? dlse, Tensor o, Tensor lse, bool dbias, bool dsinks, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run=_backward,
    fake=_backward_fake,
    gradient=define.Gradient(_save_backward, _differentiate_backward, _push_backward),
    batch=_batch_backward,
)
