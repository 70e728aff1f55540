"""A call of the attention API whose arguments were looked at: what the plan is for, and its inputs as views."""

from typing import Any, NamedTuple

from isograd.core import arrays, functional
from isograd.core.checks import checked_shape
from isograd.errors import InvalidProblemError
from isograd.flash_attention.options import AttentionOptions

LAYOUTS = {"BHLD": (0, 1, 2, 3), "BLHD": (0, 2, 1, 3)}


class Given(NamedTuple):
    """The arguments besides q, k and v that both directions have, as the user gave them."""

    bias: Any = None
    mask: Any = None
    segment_ids: Any = None
    cu_seqlens: Any = None
    sinks: Any = None
    layout: Any = "BHLD"
    preference: str | None = None


class Problem(NamedTuple):
    """The fields of a descriptor, the inputs by the names of its operands, and what results are made like."""

    operation: str
    fields: dict[str, Any]
    inputs: dict[str, Any]
    layout: str
    device: str
    like: Any

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An output [B, H, L, D] in memory of the layout, as the user sees it."""
        order = LAYOUTS[self.layout]
        return functional.empty(tuple([shape[axis] for axis in order]), dtype, self.like)

    def view(self, array: Any) -> Any:
        """An array of the layout as [B, H, L, D]."""
        return functional.permuted(array, LAYOUTS[self.layout])


def checked_layout(operation: str, layout: Any) -> str:
    """The name of a layout, or InvalidProblemError."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidProblemError(f"{operation}: layout is {layout!r}; accepted: {', '.join(LAYOUTS)}")
    return layout


def rows(operation: str, argument: str, array: Any, layout: str) -> Any:
    """An array of four axes as [B, H, L, D]."""
    if len(array.shape) != 4:
        shape = checked_shape(operation, argument, array.shape)
        raise InvalidProblemError(f"{operation}: {argument} has shape {shape}; expected four axes, {layout}")
    return functional.permuted(array, LAYOUTS[layout])


def pair(operation: str, argument: str, value: Any) -> tuple[Any, Any]:
    """Two arrays, of q and of k."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidProblemError(f"{operation}: {argument} is {type(value).__name__}; expected a pair, of q and of k")
    for name, part in zip("qk", value, strict=True):
        if part is None:
            raise InvalidProblemError(f"{operation}: {argument} of {name} is None; expected an array for q and for k")
    return value[0], value[1]


def _four_axes(operation: str, argument: str, array: Any) -> Any:
    shape = tuple(array.shape)
    if len(shape) > 4:
        raise InvalidProblemError(f"{operation}: {argument} has shape {shape}; expected at most four axes")
    return functional.reshaped(operation, argument, array, (1,) * (4 - len(shape)) + shape)


def named(operation: str, given: Given) -> dict[str, Any]:
    """The optional arguments that are there, by the names of their operands."""
    found = {"bias": given.bias, "mask": given.mask, "sinks": given.sinks}
    if given.segment_ids is not None:
        ids = pair(operation, "segment_ids", given.segment_ids)
        found |= dict(zip(("q_segment_ids", "k_segment_ids"), ids, strict=True))
    if given.cu_seqlens is not None:
        ends = pair(operation, "cu_seqlens", given.cu_seqlens)
        found |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    return {name: value for name, value in found.items() if value is not None}


def sizes(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The sizes of a descriptor from arrays [B, H, L, D]."""
    batch, heads, q_length, head_dim = q.shape
    _, kv_heads, k_length, _ = k.shape
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "q_length": q_length,
        "k_length": k_length,
        "head_dim": head_dim,
        "v_dim": v.shape[3],
    }


def problem(
    operation: str, q: Any, k: Any, v: Any, extra: dict[str, Any], options: AttentionOptions, layout: Any
) -> Problem:
    """Check what plans do not see and describe the rest to them; the arrays are NumPy's or tensors."""
    layout = checked_layout(operation, layout)
    device, dtype = arrays.describe(q, operation, "q")
    inputs = {name: rows(operation, name, x, layout) for name, x in (("q", q), ("k", k), ("v", v))}
    fields = sizes(*inputs.values())
    fields |= {"dtype": dtype, "options": options.validated(operation, max(fields["head_dim"], 1))}
    inputs |= extra
    for name in ("bias", "mask"):
        if name in extra:
            inputs[name] = _four_axes(operation, name, extra[name])
            fields[f"{name}_shape"] = tuple(inputs[name].shape)
    if "bias" in extra:
        fields["bias_dtype"] = arrays.describe(extra["bias"], operation, "bias")[1]
    if "mask" in extra:
        arrays.describe_mask(extra["mask"], operation, "mask")
    if "sinks" in extra:
        fields["sinks_dtype"] = arrays.describe(extra["sinks"], operation, "sinks")[1]
    fields["segments"] = "q_segment_ids" in extra
    if "cu_seqlens_q" in extra:
        count = checked_shape(operation, "cu_seqlens_q", extra["cu_seqlens_q"].shape)[0]
        if not count:
            raise InvalidProblemError(f"{operation}: cu_seqlens of q is empty; expected the N + 1 ends of N sequences")
        fields["sequences"] = count - 1
    return Problem(operation, fields, inputs, layout, device, q)
