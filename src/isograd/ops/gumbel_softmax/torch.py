"""gumbel_softmax in torch's spelling, its batches, and its derivatives beyond the first."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isograd.ops.gumbel_softmax.operation import GUMBEL_SOFTMAX, GUMBEL_SOFTMAX_BACKWARD
from isograd.torch import bind, define
from isograd.torch.tensors import normalized_dim, or_zeros, wide

Named = Mapping[str, Any]


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient; it is linear in dy, and symmetric."""
    (dim, tau), y = settings, saved["y"]
    found = {"dy": _backward.call(grads["dx"], y, dim, tau)} if needs["dy"] else {}
    if needs["y"]:
        h, g, p = wide(grads["dx"], saved["dy"], y)
        s = (p * g).sum(dim, keepdim=True)
        found["y"] = ((h * (g - s) - g * (h * p).sum(dim, keepdim=True)) / tau).to(y.dtype)
    return found


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    (dim, tau), dy, y = settings, saved["dy"], saved["y"]
    t: Tensor = _backward.call(or_zeros(tangents["dy"], dy), y, dim, tau)
    if tangents["y"] is None:
        return t
    g, p, h = wide(dy, y, tangents["y"])
    s = (p * g).sum(dim, keepdim=True)
    extra: Tensor = (h * (g - s) - p * (h * g).sum(dim, keepdim=True)) / tau
    return t + extra.to(y.dtype)


def _batch(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """The noise belongs to the place in a member, or in a member's member."""
    (logits,), (dim, *settings, batched) = _forward.split(args)
    x = define.batched(logits, in_dims[0], size)
    dim = normalized_dim(op.__name__, dim, x.shape[1:]) + 1
    whole = x.flatten(0, 1) if batched else x.unsqueeze(1) if x.dim() == 1 else x
    return op(whole, dim - batched, *settings, True).view(x.shape), 0


_backward = bind.operator(GUMBEL_SOFTMAX_BACKWARD, derivative=_second, tangent=_second_tangent)
_forward = bind.operator(GUMBEL_SOFTMAX, batch=_batch)
_gumbel_softmax = bind.function(_forward)


def gumbel_softmax(
    logits: Tensor, tau: float = 1.0, hard: bool = False, dim: int = -1, *, seed: int, offset: int = 0
) -> Tensor:
    """`torch.nn.functional.gumbel_softmax` with noise that `seed` and `offset` name, the same on every device.

    logits: rank 1 to 8; float16, bfloat16, float32 or float64. tau: positive. hard: the one-hot of the largest, with
    the gradient of the soft result. seed, offset: from 0 to 2^64 - 1; a call that goes on adds the number of logits to
    the offset. torch's own draws from torch's generator, whose numbers depend on the device: there is no default seed.

    Under vmap every member has the noise that it would have alone. Differentiable twice. Errors as for `softmax`.
    """
    y: Tensor = _gumbel_softmax((logits,), (dim, tau, hard, seed, offset, False))
    return y
