"""The router family in torch's spelling, and its derivatives beyond the first.

    weights, experts = igt.moe_router(logits, k, renormalize=True)          # [T, k]
    order, offsets = igt.expert_permutation(experts, num_experts)
    rows = igt.moe_permute(x, order, k)                                     # [T k, D]; expert e: from offsets[e] on
    y = igt.moe_combine(rows, weights, order)                               # [T, D]

The choice itself has no derivative. First derivatives have the library's bits, and so have all those of the
permutation, the combination and the load-balancing loss, which are linear in each argument; others are written with
torch's own sums.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.ops.router import operation as ops
from isograd.ops.router.results import Permutation, Routing, TopK
from isograd.ops.softmax.torch import BACKWARD, FORWARD
from isograd.torch import bind, define, members
from isograd.torch.ops_gather import GATHER, GATHER_BACKWARD
from isograd.torch.tensors import Shape, integer, or_zeros, require_tensor, wide
from isograd.typing import Scoring

Named = Mapping[str, Any]


def _save_top_k(node: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    input, _, node.dim = inputs  # noqa: A001
    node.size = input.shape
    return (output[1],)


def _differentiate_top_k(node: Any, saved: tuple[Tensor], dvalues: Tensor | None, _: Any) -> tuple[Tensor | None]:
    if dvalues is None:
        return (None,)
    return (GATHER_BACKWARD(dvalues, node.dim, saved[0], node.size, True),)


# --- renormalize -----------------------------------------------------------------------------------------------------
def _reciprocal(total: Tensor) -> Tensor:
    return torch.where(total == 0, torch.zeros_like(total), 1 / total)


class _Quotients:
    """w / S along an axis, in the work type."""

    def __init__(self, w: Tensor, dim: int) -> None:
        (self.w,), self.dim = wide(w), dim
        self.r = _reciprocal(self._sum(self.w))
        self.dtype = w.dtype

    def _sum(self, x: Tensor) -> Tensor:
        return x.sum(self.dim, keepdim=True)

    def tangent(self, t: Tensor) -> Tensor:
        """The derivative of the quotients along t."""
        (t,) = wide(t)
        return ((t - self.w * self.r * self._sum(t)) * self.r).to(self.dtype)

    def gradient(self, h: Tensor) -> Tensor:
        """Their gradient for the gradient h."""
        (h,) = wide(h)
        return ((h - self._sum(h * self.w) * self.r) * self.r).to(self.dtype)

    def curvature(self, dt: Tensor, h: Tensor) -> Tensor:
        """The Hessian of Σ dt · quotients, times h."""
        dt, h = wide(dt, h)
        along, total = self._sum(dt * self.w), self._sum(h)
        inner = 2 * self.r * along * total - self._sum(h * dt) - total * dt
        return (inner * self.r * self.r).to(self.dtype)


def _renormalize_second(saved: Named, settings: Any, needs: Named, grads: Named) -> Named:
    quotients, h = _Quotients(saved["w"], settings[0]), grads["dw"]
    # The result is linear in dt, by the transpose of the Jacobian.
    found = {"dt": quotients.tangent(h)} if needs["dt"] else {}
    return found | ({"w": quotients.curvature(saved["dt"], h)} if needs["w"] else {})


def _renormalize_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    return _Quotients(saved["w"], settings[0]).tangent(tangents["w"])


def _renormalize_second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    t: Tensor = _renormalize_backward.call(or_zeros(tangents["dt"], saved["dt"]), saved["w"], *settings)
    if tangents["w"] is None:
        return t
    return t + _Quotients(saved["w"], settings[0]).curvature(saved["dt"], tangents["w"])


# --- the router ------------------------------------------------------------------------------------------------------
def _scores(logits: Tensor, scoring: str) -> Tensor:
    (x,) = wide(logits)
    return FORWARD["softmax"](x, -1) if scoring == "softmax" else x.sigmoid()


def _score_tangent(s: Tensor, t: Tensor, scoring: str) -> Tensor:
    """The directional derivative of the scores; their Jacobian is symmetric, so it is their gradient as well."""
    return BACKWARD["softmax"](t, s, -1) if scoring == "softmax" else s * (1 - s) * t


def _weight_tangent(
    logits: Tensor, experts: Tensor, t: Tensor, scoring: str, renormalize: bool, scale: float
) -> Tensor:
    """The directional derivative of the weights along t."""
    s = _scores(logits, scoring)
    a = GATHER(_score_tangent(s, t.to(s.dtype), scoring), -1, experts)
    if renormalize:
        w = GATHER(s, -1, experts)
        r = _reciprocal(w.sum(-1, keepdim=True))
        a = (a - w * r * a.sum(-1, keepdim=True)) * r
    return a * scale  # type: ignore[no-any-return]


def _curvature(
    dweights: Tensor, logits: Tensor, experts: Tensor, t: Tensor, scoring: str, renormalize: bool, scale: float
) -> Tensor:
    """The Hessian of Σ dweights · weights with respect to the logits, times t."""
    s = _scores(logits, scoring)
    t = t.to(s.dtype)
    p, q = dweights * scale, torch.zeros_like(dweights)  # the derivatives by the tangents of the weights, and by them
    if renormalize:
        a, w = GATHER(_score_tangent(s, t, scoring), -1, experts), GATHER(s, -1, experts)
        r = _reciprocal(w.sum(-1, keepdim=True))
        total, along = a.sum(-1, keepdim=True), (p * w).sum(-1, keepdim=True)
        q = (2 * r * along * total - (p * a).sum(-1, keepdim=True) - p * total) * r * r
        p = (p - along * r) * r
    p, q = (GATHER_BACKWARD(v, -1, experts, s.shape) for v in (p, q))
    if scoring == "softmax":
        m = (s * t).sum(-1, keepdim=True)
        inner = p * (t - m) - t * (p * s).sum(-1, keepdim=True) + q
    else:
        inner = p * (1 - 2 * s) * t + q
    return _score_tangent(s, inner, scoring).to(logits.dtype)


def _router_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, None]:
    _, scoring, renormalize, _, _, scale = settings
    t = _weight_tangent(saved["logits"], saved["experts"], tangents["logits"], scoring, renormalize, scale)
    return t, None


def _router_second(saved: Named, settings: Any, needs: Named, grads: Named) -> Named:
    logits, experts, h, found = saved["logits"], saved["experts"], grads["dlogits"], {}
    if needs["dweights"]:
        found["dweights"] = _weight_tangent(logits, experts, h, *settings)
    if needs["logits"]:
        found["logits"] = _curvature(saved["dweights"], logits, experts, h, *settings)
    return found


def _router_second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    dweights, logits, experts = saved["dweights"], saved["logits"], saved["experts"]
    t: Tensor = _router_backward.call(or_zeros(tangents["dweights"], dweights), logits, experts, *settings)
    if tangents["logits"] is not None:  # the Hessian is symmetric
        t = t + _curvature(dweights, logits, experts, tangents["logits"], *settings)
    return t


def _batch_router(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    x, bias = define.batched(args[0], in_dims[0], size), args[1]
    if bias is not None and (in_dims[1] is not None or bias.dim() > 1):  # one for each: as one for every token
        if x.is_mps:  # whose kernels take none
            return define.one_by_one(op, size, in_dims, *args)
        bias = define.batched(bias, in_dims[1], size)
        missing = (1,) * (x.dim() - bias.dim())
        bias = bias.reshape(size, *missing, *bias.shape[1:]).expand(x.shape)
    return op(x, bias, *args[2:]), (0, 0)


# --- the way to the experts and back ---------------------------------------------------------------------------------
def _batch_counts(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], experts: Tensor, num_experts: int
) -> tuple[Tensor, int]:
    entries = members.placed(define.batched(experts, in_dims[0], size), num_experts)
    return members.parted(op(entries, size * num_experts), size, num_experts), 0


def _batch_permutation(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], experts: Tensor, num_experts: int
) -> tuple[Any, tuple[int, int]]:
    """Over a batch: sorted by expert, the entries of a member stay together, from its first expert's on."""
    entries = members.lines(members.placed(define.batched(experts, in_dims[0], size), num_experts))
    order, offsets = op(entries, size * num_experts)
    first = torch.arange(size, device=order.device).unsqueeze(1) * entries.shape[1]
    return (order.view(entries.shape) - first, offsets.unfold(0, num_experts + 1, num_experts) - first), (0, 0)


def _batch_tokens(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Over a batch, whose members' tokens lie one behind the other; `order` counts from those of its own member."""
    place = next(i for i, a in enumerate(op._schema.arguments) if a.name == "order")
    batches = [a if d is None and not isinstance(a, Tensor) else define.batched(a, d, size)
               for a, d in zip(args, in_dims, strict=True)]  # fmt: skip
    order = batches[place]
    step = order.shape[1]
    if size == 0 or step == 0 or any(isinstance(b, Tensor) and b.dim() != (2 if b is order else 3) for b in batches):
        return define.one_by_one(op, size, in_dims, *args)
    batches[place] = members.placed(order, step)
    result = op(*[b.flatten(0, 1) if isinstance(b, Tensor) else b for b in batches])
    parts = [t.unflatten(0, (size, -1)) for t in ((result,) if isinstance(result, Tensor) else result)]
    return (parts[0], 0) if isinstance(result, Tensor) else (tuple(parts), (0,) * len(parts))


def _columns(op: Any) -> Any:
    """Parts of the rows' width, which need no others."""
    outputs, inputs = (
        [1 if key in ("x", "y", "dx", "dy", "expert_out") else None for key in of] for of in (op.outputs, op.inputs)
    )
    return lambda *args: iter([(outputs, inputs)])


def _combine_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    rows, weights, order = saved["expert_out"], saved["weights"], saved["order"]
    t: Tensor = _combine.call(or_zeros(tangents["expert_out"], rows), weights, order)
    return t if tangents["weights"] is None else t + _combine.call(rows, tangents["weights"], order)


def _combine_second(saved: Named, settings: Any, needs: Named, grads: Named) -> Named:
    dy, rows, weights, order = saved["dy"], saved["expert_out"], saved["weights"], saved["order"]
    if grads["d_expert_out"] is None and grads["dweights"] is None:
        return {}
    g_rows, g_weights = or_zeros(grads["d_expert_out"], rows), or_zeros(grads["dweights"], weights)
    # With <a, combine(b, w)> = <rows of combine_backward(a, b, w), b> = <weights of combine_backward(a, b, w), w>.
    return {
        "dy": _combine.call(g_rows, weights, order) + _combine.call(rows, g_weights, order),
        "expert_out": _combine_backward.call(dy, rows, g_weights, order)[0],
        "weights": _combine_backward.call(dy, g_rows, weights, order)[1],
    }


def _combine_second_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, Tensor]:
    dy, rows, weights, order = saved["dy"], saved["expert_out"], saved["weights"], saved["order"]
    d_rows, d_weights = _combine_backward.call(or_zeros(tangents["dy"], dy), rows, weights, order)
    if tangents["weights"] is not None:
        d_rows = d_rows + _combine_backward.call(dy, rows, tangents["weights"], order)[0]
    if tangents["expert_out"] is not None:
        d_weights = d_weights + _combine_backward.call(dy, tangents["expert_out"], weights, order)[1]
    return d_rows, d_weights


# --- auxiliary losses ------------------------------------------------------------------------------------------------
def _problems(tensor: Tensor, batched: bool) -> Tensor:
    """A batch of problems, or of batches of them, as one of problems."""
    return tensor.flatten(0, 1) if batched else tensor


def _batch_balance(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    probabilities: Tensor,
    experts: Tensor,
    batched: bool = False,
) -> tuple[Tensor, int]:
    p, chosen = (define.batched(t, d, size) for t, d in zip((probabilities, experts), in_dims, strict=False))
    return op(_problems(p, batched), _problems(chosen, batched), True).view(p.shape[: 1 + batched]), 0


def _batch_balance_backward(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    dloss: Tensor,
    experts: Tensor,
    shape: Shape,
    dtype: torch.dtype,
    batched: bool = False,
) -> tuple[Tensor, int]:
    g, chosen = (define.batched(t, d, size) for t, d in zip((dloss, experts), in_dims, strict=False))
    sizes = [size * shape[0], *shape[1:]] if batched else [size, *shape]
    return op(g.flatten(), _problems(chosen, batched), sizes, dtype, True).view(size, *shape), 0


class _Tokens:
    """Logsumexp, softmax and the factor 2 / tokens, for the derivatives that no kernel has."""

    def __init__(self, logits: Tensor, batched: bool) -> None:
        (x,) = wide(logits)
        self.lse, self.p = x.logsumexp(-1, keepdim=True), FORWARD["softmax"](x, -1)
        self.batched = batched
        self.factor = 2.0 / max((self.lse[0] if batched else self.lse).numel(), 1)

    def slope(self, t: Tensor) -> Tensor:
        """The derivatives of the losses along t."""
        terms = (self.p * wide(t)[0]).sum(-1, keepdim=True) * self.lse
        return (terms.flatten(1).sum(1) if self.batched else terms.sum()) * self.factor

    def curvature(self, dloss: Tensor, t: Tensor) -> Tensor:
        """The Hessian of Σ dloss · loss times t, in t's dtype."""
        (t_wide,) = wide(t)
        along = (self.p * t_wide).sum(-1, keepdim=True)
        g = dloss.view(-1, *(1,) * (t.dim() - 1)) if self.batched else dloss
        return (self.factor * g * self.p * (along + self.lse * (t_wide - along))).to(t.dtype)


def _z_second(saved: Named, settings: Any, needs: Named, grads: Named) -> Named:
    tokens, h = _Tokens(saved["logits"], *settings), grads["dlogits"]
    found = {"dloss": tokens.slope(h)} if needs["dloss"] else {}
    return found | ({"logits": tokens.curvature(saved["dloss"], h)} if needs["logits"] else {})


def _z_second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    dloss, logits = saved["dloss"], saved["logits"]
    t: Tensor = _z_loss_backward.call(or_zeros(tangents["dloss"], dloss), logits, *settings)
    return t if tangents["logits"] is None else t + _Tokens(logits, *settings).curvature(dloss, tangents["logits"])


def _batch_z(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], logits: Tensor, batched: bool = False
) -> tuple[Tensor, int]:
    x = define.batched(logits, in_dims[0], size)
    x = x.unsqueeze(1) if x.dim() == 1 else x
    return op(_problems(x, batched), True).view(x.shape[: 1 + batched]), 0


def _batch_z_backward(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    dloss: Tensor,
    logits: Tensor,
    batched: bool = False,
) -> tuple[Tensor, int]:
    g, x = (define.batched(t, d, size) for t, d in zip((dloss, logits), in_dims, strict=False))
    whole = _problems(x.unsqueeze(1) if x.dim() == 1 else x, batched)
    return op(g.flatten(), whole, True).view(x.shape), 0


# --- operators -------------------------------------------------------------------------------------------------------
_top_k = bind.operator(
    ops.TOP_K,
    gradient=define.Gradient(
        _save_top_k,
        _differentiate_top_k,
        lambda node, saved, t, *rest: (GATHER(t, node.dim, saved[0]), None),
    ),
)
_renormalize_backward = bind.operator(
    ops.RENORMALIZE_BACKWARD, derivative=_renormalize_second, tangent=_renormalize_second_tangent
)
_renormalize = bind.operator(ops.RENORMALIZE, tangent=_renormalize_tangent)
_router_backward = bind.operator(ops.MOE_ROUTER_BACKWARD, derivative=_router_second, tangent=_router_second_tangent)
_router = bind.operator(ops.MOE_ROUTER, tangent=_router_tangent, batch=_batch_router)
_counts = bind.operator(ops.EXPERT_COUNTS, batch=_batch_counts)
_permutation = bind.operator(ops.EXPERT_PERMUTATION, batch=_batch_permutation)
_permute_backward: bind.Bound = bind.operator(
    ops.MOE_PERMUTE_BACKWARD,
    derivative=lambda saved, settings, needs, grads: {"dy": _permute.call(grads["dx"], saved["order"], *settings)},
    tangent=lambda saved, settings, t: _permute_backward.call(t["dy"], saved["order"], *settings),
    batch=_batch_tokens,
    cuts=_columns(ops.MOE_PERMUTE_BACKWARD),
)
_permute: bind.Bound = bind.operator(
    ops.MOE_PERMUTE,
    tangent=lambda saved, settings, t: _permute.call(t["x"], saved["order"], *settings),
    batch=_batch_tokens,
    cuts=_columns(ops.MOE_PERMUTE),
)
_combine_backward = bind.operator(
    ops.MOE_COMBINE_BACKWARD, derivative=_combine_second, tangent=_combine_second_tangent, batch=_batch_tokens
)
_combine = bind.operator(ops.MOE_COMBINE, tangent=_combine_tangent, batch=_batch_tokens, cuts=_columns(ops.MOE_COMBINE))
_balance_backward: bind.Bound = bind.operator(
    ops.LOAD_BALANCING_LOSS_BACKWARD,
    derivative=lambda saved, settings, needs, grads: {
        "dloss": _balance.call(grads["dprobabilities"], saved["experts"], settings[-1])
    },
    tangent=lambda saved, settings, t: _balance_backward.call(t["dloss"], saved["experts"], *settings),
    batch=_batch_balance_backward,
)
_balance: bind.Bound = bind.operator(
    ops.LOAD_BALANCING_LOSS,
    tangent=lambda saved, settings, t: _balance.call(t["probabilities"], saved["experts"], *settings),
    batch=_batch_balance,
)
_z_loss_backward = bind.operator(
    ops.ROUTER_Z_LOSS_BACKWARD, derivative=_z_second, tangent=_z_second_tangent, batch=_batch_z_backward
)
_z_loss = bind.operator(
    ops.ROUTER_Z_LOSS,
    tangent=lambda saved, settings, t: _Tokens(saved["logits"], *settings).slope(t["logits"]),
    batch=_batch_z,
)
_topk = bind.function(_top_k, "topk")


# --- functions -------------------------------------------------------------------------------------------------------
def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> TopK[Tensor, Tensor]:  # noqa: A002
    """`torch.topk`: the k largest elements along `dim`, in descending order whatever `sorted` says, and their places.

    k: 1 to the size along dim. Of equal elements the one with the lower index comes first (torch leaves that open), NaN
    counts as larger than everything, as in torch. The values keep their bits. Differentiable as `gather`.

    Raises UnsupportedError for `largest=False`, otherwise as `gather`.
    """
    if not largest:
        raise UnsupportedError("topk: largest is False; accepted: True, or topk of -input where NaN may come first")
    return TopK(*_topk((input,), (k, dim)))


def renormalize(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    """The elements along `dim` divided by their order-free sum, 0 where that is 0; bits and errors as `isograd`'s.

    Differentiable twice.
    """
    result: Tensor = _renormalize.function((input,), (dim,))
    return result


def moe_router(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Routing[Tensor, Tensor]:
    """The k experts of every token and their weights; arguments, results and bits as `isograd.moe_router`.

    The weights [..., k] are in the work type (float32 for 16-bit logits) and differentiable twice with respect to the
    logits [..., E]; the choice itself has no gradient, and bias, which serves the choice alone, gets none.

    Raises InvalidProblemError for arguments that do not fit together, DeviceMismatchError for two devices,
    UnsupportedError for another dtype or a device without a kernel.
    """
    name = "moe_router"
    if isinstance(logits, Tensor) and not logits.dim():
        raise InvalidProblemError(f"{name}: logits has shape (); accepted: rank 1 to 8")
    if isinstance(bias, Tensor):
        if bias.dim() != 1:
            raise InvalidProblemError(
                f"{name}: bias has shape {tuple(bias.shape)}; expected one number for each expert"
            )
        bias = bias.detach()
    return Routing(*_router.function((logits, bias), (k, scoring, renormalize, groups, group_k, scale)))


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """How many entries every expert has: [num_experts], int64; arguments and errors as `isograd.expert_counts`."""
    counts: Tensor = _counts.function((experts,), (num_experts,))
    return counts


def expert_permutation(experts: Tensor, num_experts: int) -> Permutation[Tensor]:
    """Sort entries by expert, stably: (order, offsets); arguments and errors as `isograd.expert_permutation`."""
    return Permutation(*_permutation.function((experts,), (num_experts,)))


def moe_permute(x: Tensor, order: Tensor, k: int) -> Tensor:
    """The tokens' rows in the order of the experts: `y[i] = x[order[i] // k]`.

    x: [T, D]. order: [T k], int64, from `expert_permutation`. The gradient is an order-free sum over each token's k
    rows. Differentiable any number of times.
    """
    y: Tensor = _permute.function((x, order), (k,))
    return y


def moe_combine(expert_out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum of every token's k rows, order-free.

    expert_out: [T k, D] in the order of the experts. weights: [T, k] in the work type (float32 for 16 bits). order:
    [T k], int64, a permutation. Differentiable any number of times with respect to expert_out and weights.
    """
    y: Tensor = _combine.function((expert_out, weights, order), ())
    return y


def load_balancing_loss(probabilities: Tensor, experts: Tensor, num_experts: int | None = None) -> Tensor:
    """The load-balancing loss `E Σ_e f_e P_e`; arguments and bits as `isograd.load_balancing_loss`.

    A scalar in the work type, linear in the probabilities; the counts have no gradient.
    """
    name = "load_balancing_loss"
    if num_experts is not None:
        require_tensor(name, probabilities, "probabilities")
        if integer(name, "num_experts", num_experts) != probabilities.shape[-1]:
            raise InvalidProblemError(
                f"{name}: num_experts is {num_experts} for probabilities of shape {tuple(probabilities.shape)}"
            )
    loss: Tensor = _balance.function((probabilities, experts), (False,))
    return loss


def router_z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of the squared logsumexp of the logits [..., E], a scalar in the work type.

    Differentiable twice.
    """
    loss: Tensor = _z_loss.function((logits,), (False,))
    return loss
