"""The members of a vmapped batch as more of the batch, or of the heads, of one attention."""

from typing import Any

from torch import Tensor

from isograd.torch import define

# What has no such axis: the members share it.
_SHARED = (("cu_seqlens_q", "cu_seqlens_k", "sinks", "seed"), ("q_segment_ids", "k_segment_ids", "cu_seqlens_q",
           "cu_seqlens_k", "seed"))  # fmt: skip
_BROADCAST = ("bias", "mask")

Dims = dict[str, int | None]


def fold_axis(size: int, dims: Dims, call: Any, dbias: bool = False, dsinks: bool = False) -> int | None:
    """The axis that members are folded into: 0 or 1, or None where each is a problem of its own.

    A gradient that is a sum over an axis must not be one over members; what is dropped depends on the place.
    """
    if size == 0 or call.dropout_p:
        return None
    axes = [axis for axis in (0, 1) if all(dims[name] is None for name in _SHARED[axis])]
    if dsinks or call.cu_seqlens_q is not None:
        axes = [axis for axis in axes if axis == 1]
    if dbias:
        bias, q = (define.batched(getattr(call, name), dims[name], size) for name in ("bias", "q"))
        axes = [axis for axis in axes if bias.shape[axis + 1] == q.shape[axis + 1]]
    return axes[0] if axes else None


def folded(axis: int, size: int, dims: Dims, call: Any) -> Any:
    """Arguments whose tensors have the members of all in an axis."""
    full = define.batched(call.q, dims["q"], size).shape[axis + 1] if hasattr(call, "q") else 0
    whole = {}
    for name, value in call._asdict().items():
        if not isinstance(value, Tensor) or name in _SHARED[axis]:
            continue
        members = define.batched(value, dims[name], size)
        if name in _BROADCAST:
            members = members.expand(*members.shape[: axis + 1], full, *members.shape[axis + 2 :])
        at = 0 if name == "sinks" else axis
        whole[name] = members.movedim(0, at).flatten(at, at + 1)
    return call._replace(**whole)


def parted(axis: int, size: int, result: Tensor) -> Tensor:
    """A result, the members in front; that for sinks has no axis but the heads'."""
    at = min(axis, result.dim() - 1)
    parts: Tensor = result.unflatten(at, (size, result.shape[at] // size))  # type: ignore[no-untyped-call]
    return parts.movedim(at, 0)
