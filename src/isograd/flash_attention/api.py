"""What a user calls: attention, the row sums that its backward needs, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from numpy.typing import NDArray

from isograd.core import arrays, encoder, functional
from isograd.core.checks import checked_preference
from isograd.core.faults import named
from isograd.core.plan import Plan
from isograd.errors import InvalidProblemError
from isograd.flash_attention import problem as steps
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDeltaDescriptor,
    AttentionDescriptor,
    work_type,
)
from isograd.flash_attention.options import AttentionOptions, Window
from isograd.flash_attention.plans import AttentionBackwardPlan, AttentionDeltaPlan, AttentionPlan
from isograd.flash_attention.reference import AttentionGradients
from isograd.typing import Alignment, AttentionKeywords, DataT, Layout

if TYPE_CHECKING:
    from isograd.tape.variable import Variable


def _plan(plan_type: type[Plan], descriptor: AttentionDescriptor, device: str, preference: str | None) -> Any:
    # Not through the cache of plans with dropout: a seed that changes with every call would fill it.
    if descriptor.options.dropout_p:
        return plan_type.select(descriptor, device, preference)
    return functional.plan(plan_type, descriptor, device, preference)


def _seed(operation: str, dropout_p: float, seed: int | None) -> int:
    """The seed, which dropout has to have: a default one would drop the same at every call."""
    if seed is None and dropout_p:
        raise InvalidProblemError(f"{operation}: dropout_p is {dropout_p} and seed is None; expected a seed")
    return 0 if seed is None else seed


@overload
def attention(  # type: ignore[overload-overlap]  # arrays alone match here
    q: DataT,
    k: DataT,
    v: DataT,
    *,
    return_lse: Literal[False] = ...,
    out: DataT | None = ...,
    **options: Unpack[AttentionKeywords],
) -> DataT: ...
@overload
def attention(  # type: ignore[overload-overlap]  # arrays alone match here
    q: DataT,
    k: DataT,
    v: DataT,
    *,
    return_lse: Literal[True],
    out: DataT | None = ...,
    **options: Unpack[AttentionKeywords],
) -> tuple[DataT, DataT]: ...
@overload
def attention(
    q: Variable | NDArray[Any],
    k: Variable | NDArray[Any],
    v: Variable | NDArray[Any],
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionKeywords],
) -> Variable: ...
@overload
def attention(
    q: Variable | NDArray[Any],
    k: Variable | NDArray[Any],
    v: Variable | NDArray[Any],
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionKeywords],
) -> tuple[Variable, Variable]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window | None = None,
    alignment: Alignment = "lower_right",
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    segment_ids: tuple[Any, Any] | None = None,
    cu_seqlens: tuple[Any, Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: Layout = "BHLD",
    preference: str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention: `o_i = Σ_j P_ij v_j` with P the softmax over the visible keys of `scale · q_i·k_j`.

    q: [B, Hq, Lq, D], k: [B, Hkv, Lk, D], v: [B, Hkv, Lk, Dv], float16, bfloat16 or float32 (float64 on the CPU), in
    any strides: NumPy arrays, torch tensors, arrays with DLPack, or tape variables; o [B, Hq, Lq, Dv] is of q's kind
    and dtype. With layout="BLHD" the axes are [B, L, H, D], of o too. Query head h reads head `h // (Hq // Hkv)` of k
    and v. D and Dv: 16 to 256 in steps of 8.

    causal, window, alignment: query i is level with key i + offset, offset = Lk - Lq ("lower_right") or 0
    ("upper_left"). causal hides the keys after that one; window = (left, right) those more than left before and right
    after it, None leaves a side open. scale: 1 / sqrt(D) by default. softcap: scores s become
    `softcap · tanh(s / softcap)`, 0 for none. bias: added to the scores, of at most four axes that broadcast to
    [B, Hq, Lq, Lk], q's dtype or float32; -inf hides a key. mask: likewise, boolean, True where a key is visible.
    segment_ids: ([B, Lq], [B, Lk]), int32; a query sees keys of its own segment. cu_seqlens: (of q, of k), int32
    [N + 1]; B is 1 and holds N sequences one after the other, n in the rows cu_seqlens[n] to cu_seqlens[n + 1]; not
    together with bias, mask and segment_ids. sinks: [Hq], q's dtype or float32, one more score of each row that takes
    its share of the probabilities and has no value. dropout_p: probabilities are set to 0 with that probability and
    else divided by 1 - dropout_p; which ones is a function of (seed, sequence, head, i, j) alone. seed: from 0 to
    2^64 - 1; it has no default with dropout, which would drop the same at every call.

    return_lse: return (o, lse) with lse = log Σ_j exp(s_ij), [B, Hq, Lq] in the work type (float32 for 16 bits), what
    `attention_backward` needs. out: where o goes. preference: the name of a kernel (`isograd kernels`).

    `preference="order_free"`, for float16 and bfloat16, takes exact products of 16-bit integers in blocks of 128 keys
    (rule 23 of `docs/arithmetic.md`): the same bits on every machine, for a row by itself, in a batch, packed, and in a
    step of decoding. It has no gradient of a bias. There a query, key or value that is not finite makes NaN of the rows
    that see it.

    A row that sees nothing is 0 and its lse -inf. A row's bits depend on its own sequence alone, whatever else is in
    the batch (`docs/attention.md`). A NaN in q makes its row NaN; NaN and infinities in v reach all rows that see some
    key of the same tile.

    Raises InvalidProblemError for arguments that do not fit together and, on the CPU, for cu_seqlens that do not start
    at 0, decrease or exceed the tokens, UnsupportedError for other dtypes and head dimensions, DeviceMismatchError for
    arrays on different devices.
    """
    name = "attention"
    preference = checked_preference(name, preference)
    options = AttentionOptions(causal, alignment, window, scale, softcap, dropout_p, _seed(name, dropout_p, seed))
    tape = functional.tape_of(q, k, v, bias, sinks)
    if tape is not None:
        if out is not None:
            raise InvalidProblemError(f"{name}: out is given with tape variables; expected None")
        given = steps.Given(bias, mask, segment_ids, cu_seqlens, sinks, layout, preference)
        return tape.attention(q, k, v, options, given, return_lse)
    extra = steps.named(name, steps.Given(bias, mask, segment_ids, cu_seqlens, sinks))
    taken, restore = functional.inputs(name, q=q, k=k, v=v, **extra)
    q, k, v = taken[:3]
    call = steps.problem(name, q, k, v, dict(zip(extra, taken[3:], strict=True)), options, layout)
    descriptor = AttentionDescriptor(**call.fields)
    plan = _plan(AttentionPlan, descriptor, call.device, preference)
    o = call.empty(plan.descriptor.o_shape, descriptor.dtype) if out is None else out
    lse = functional.empty(plan.descriptor.lse_shape, descriptor.work, call.like)
    with named(name, o="out"):
        arrays.describe(encoder.unwrapped(o), name, "o")
        functional.run(plan, **call.inputs, o=call.view(o), lse=lse)
    o = restore(functional.promised(name, o)) if out is None else out
    return (o, restore(functional.promised(name, lse))) if return_lse else o


@overload
def attention_delta(o: NDArray[Any], do: NDArray[Any], *, layout: Layout = ...) -> NDArray[Any]: ...
@overload
def attention_delta(o: DataT, do: DataT, *, layout: Layout = ...) -> DataT: ...
def attention_delta(o: Any, do: Any, *, layout: str = "BHLD") -> Any:
    """The row sums of o · do, [B, H, L] in the work type: `delta_i = Σ_d RN(o_id · do_id)`, order-free.

    o: the result of `attention`, [B, H, L, Dv] (layout "BLHD": [B, L, H, Dv]). do: its gradient, of the same shape and
    dtype. The same bits everywhere (`docs/arithmetic.md`, rule 4).

    Raises InvalidProblemError for arguments that do not fit together, UnsupportedError for other dtypes and head
    dimensions, DeviceMismatchError for arrays on different devices.
    """
    name = "attention_delta"
    layout = steps.checked_layout(name, layout)
    (o, do), restore = functional.inputs(name, o=o, do=do)
    device, dtype = arrays.describe(o, name, "o")
    views = [steps.rows(name, argument, x, layout) for argument, x in (("o", o), ("do", do))]
    batch, heads, length, v_dim = views[0].shape
    descriptor = AttentionDeltaDescriptor(batch, heads, length, v_dim, dtype)
    plan = functional.plan(AttentionDeltaPlan, descriptor, device)
    delta = functional.empty((batch, heads, length), work_type(dtype), o)
    return restore(functional.run(plan, o=views[0], do=views[1], delta=delta))


@overload
def attention_backward(
    do: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    o: NDArray[Any],
    lse: NDArray[Any],
    *,
    dlse: NDArray[Any] | None = ...,
    bias_gradient: bool = ...,
    **options: Unpack[AttentionKeywords],
) -> AttentionGradients[NDArray[Any]]: ...
@overload
def attention_backward(
    do: DataT,
    q: DataT,
    k: DataT,
    v: DataT,
    o: DataT,
    lse: DataT,
    *,
    dlse: DataT | None = ...,
    bias_gradient: bool = ...,
    **options: Unpack[AttentionKeywords],
) -> AttentionGradients[DataT]: ...
def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    window: Window | None = None,
    alignment: Alignment = "lower_right",
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    segment_ids: tuple[Any, Any] | None = None,
    cu_seqlens: tuple[Any, Any] | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: Layout = "BHLD",
    preference: str | None = None,
    bias_gradient: bool = True,
) -> AttentionGradients[Any]:
    """The gradients of `attention`: (dq, dk, dv, dbias, dsinks), the last two None without a bias, without sinks.

    do: the gradient of o. q, k, v, o: as given to and returned by `attention`, all of one layout. lse: as returned with
    return_lse, [B, Hq, Lq]. dlse: the gradient of lse, if it was used. The other arguments as given to `attention`;
    bias_gradient=False leaves dbias out, which costs two more products a tile. dbias has the bias's shape. With
    `preference="order_free"`, that of the forward pass, the bits are those of every machine, for any o and lse.

        P = exp(s - lse),  D = Σ o·do - dlse,  dS = P (do vᵀ - D),  dq = scale · dS k,  dk = scale · dSᵀ q,  dv = Pᵀ do

    Errors as for `attention`.
    """
    name = "attention_backward"
    preference = checked_preference(name, preference)
    options = AttentionOptions(causal, alignment, window, scale, softcap, dropout_p, _seed(name, dropout_p, seed))
    extra = steps.named(name, steps.Given(bias, mask, segment_ids, cu_seqlens, sinks))
    if dlse is not None:
        extra["dlse"] = dlse
    taken, restore = functional.inputs(name, do=do, q=q, k=k, v=v, o=o, lse=lse, **extra)
    do, q, k, v, o, lse = taken[:6]
    given = steps.problem(name, q, k, v, dict(zip(extra, taken[6:], strict=True)), options, layout)
    for argument, array in (("do", do), ("o", o)):
        given.inputs[argument] = steps.rows(name, argument, array, given.layout)
    given.inputs["lse"] = lse
    given.fields["dlse"], given.fields["dsinks"] = dlse is not None, sinks is not None
    given.fields["dbias"] = bias is not None and bool(bias_gradient)
    descriptor = AttentionBackwardDescriptor(**given.fields)
    plan = _plan(AttentionBackwardPlan, descriptor, given.device, preference)
    results, outputs = {}, {}
    for operand in plan.descriptor.operands():
        if operand.output and len(operand.shape) == 4 and operand.name != "dbias":
            results[operand.name] = given.empty(operand.shape, operand.dtype)
            outputs[operand.name] = given.view(results[operand.name])
        elif operand.output:
            results[operand.name] = outputs[operand.name] = functional.empty(operand.shape, operand.dtype, given.like)
    functional.run(plan, **given.inputs, **outputs)
    if "dbias" in results:
        shape = tuple(taken[6 + list(extra).index("bias")].shape)
        results["dbias"] = functional.reshaped(name, "dbias", results["dbias"], shape)
    return AttentionGradients(**{key: restore(functional.promised(name, x)) for key, x in results.items()})
