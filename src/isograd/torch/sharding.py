"""How DTensors go through the operators: which axes may be cut into shards that are computed without communication.

An axis may be cut where the operator treats it row by row, so that every shard has the bits of the whole. Everything
else is replicated: sums over shards would depend on where they were cut.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Axes of the outputs, then of the tensors among the arguments that are given; None is replicated.
Cut = tuple[Sequence[int | None], Sequence[int | None]]
_TENSOR = "torch.distributed.tensor"
_registered = False


def register() -> None:
    """Register the operators with DTensor, once its module has been imported by somebody."""
    global _registered
    if not _registered and _TENSOR in sys.modules and not torch.compiler.is_compiling():
        _registered = True
        _register()


def _register() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    def strategy(op: Any, cuts: Callable[..., Iterator[Cut]] | None) -> Callable[..., Any]:
        results = len(op._schema.returns)
        defaults = [a.default_value if a.has_default_value() else None for a in op._schema.arguments]

        def placement(axis: int | None) -> Any:
            return Replicate() if axis is None else Shard(axis)

        def shardings(*args: Any) -> list[tuple[list[Any], list[Any]]]:
            tensors = sum(isinstance(a, DTensorSpec) for a in args)
            whole: Cut = [None] * results, [None] * tensors
            found = [] if cuts is None else list(cuts(*args, *defaults[len(args) :]))
            return [
                ([placement(axis) for axis in outputs], [placement(axis) for axis in inputs])
                for outputs, given in (whole, *found)
                for inputs in ([*given, *[None] * (tensors - len(given))],)
            ]

        return shardings

    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"):
        namespace, _, short = name.partition("::")
        if namespace == "isograd":
            op = getattr(torch.ops.isograd, short).default
            register_sharding(op)(strategy(op, _CUTS.get(short)))
            # Every argument that is no tensor is part of what a choice is remembered for.
            propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, needs_pytree=True)


# --- which axes ------------------------------------------------------------------------------------------------------
def _others(x: Any, dim: int) -> Iterator[int]:
    """The axes besides dim."""
    rank = len(x.shape)
    return (d for d in range(rank) if d != dim % rank)


def _given(*pairs: tuple[Any, int | None]) -> list[int | None]:
    """The axes of the optional tensors that are there."""
    return [axis for tensor, axis in pairs if tensor is not None]


def _gather(x: Any, dim: int, index: Any) -> Iterator[Cut]:
    if len(x.shape) == len(index.shape):
        yield from (([d], [d, d]) for d in _others(x, dim) if x.shape[d] == index.shape[d])


def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Iterator[Cut]:
    if len(x.shape) == len(index.shape) == len(src.shape):
        yield from (([d], [d] * 3) for d in _others(x, dim) if x.shape[d] == index.shape[d] == src.shape[d])


def _embedding(weight: Any, indices: Any, *_: Any) -> Iterator[Cut]:
    rank = len(indices.shape)
    yield [rank], [1, None]
    yield from (([d], [None, d]) for d in range(rank))


def _class_rows(logits: Any, targets: Any, dim: int) -> Iterator[tuple[int, int, int]]:
    """Axes of the logits besides that of the classes, with those of the losses and of the targets."""
    for d in _others(logits, dim):
        row = d - (d > dim % len(logits.shape))
        yield d, row, (d if len(targets.shape) == len(logits.shape) else row)


def _cross_entropy(logits: Any, targets: Any, weight: Any, dim: int, *options: Any) -> Iterator[Cut]:
    if options[3] == "none":
        for d, row, target in _class_rows(logits, targets, dim):
            yield [row, row + 1], [d, target, *_given((weight, None))]


def _cross_entropy_backward(
    dloss: Any, logits: Any, targets: Any, weight: Any, state: Any, dim: int, *options: Any
) -> Iterator[Cut]:
    *_, reduction, count, divisor = options[:6]
    if reduction != "mean" or count is not None or divisor is not None:  # else all rows are counted
        for d, row, target in _class_rows(logits, targets, dim):
            yield [d], [row if reduction == "none" else None, d, target, *_given((weight, None)), row + 1]


def _attention_axes(*args: Any) -> Iterator[tuple[int, list[int | None], bool]]:
    """Batch and heads where they may be cut: the axis, those of the operands, and whether bias has it."""
    q, k, _, bias, mask, q_ids, k_ids, q_ends, _, sinks, seed = args[:11]
    if q_ends is not None or seed is not None:  # packed sequences are one row; what is dropped depends on the place
        return
    for d in (0, 1):
        if d == 1 and q.shape[1] != k.shape[1]:
            continue
        scores = [(t, None if t is None or t.shape[d] != q.shape[d] or q.shape[d] == 1 else d) for t in (bias, mask)]
        ids = None if d else 0
        axes = [d, d, d, *_given(*scores, (q_ids, ids), (k_ids, ids), (sinks, 0 if d else None))]
        yield d, axes, scores[0][1] is not None


def _attention(*args: Any) -> Iterator[Cut]:
    return (([d, d], axes) for d, axes, _ in _attention_axes(*args))


def _attention_backward(do: Any, dlse: Any, o: Any, lse: Any, dbias: bool, dsinks: bool, *args: Any) -> Iterator[Cut]:
    for d, axes, biased in _attention_axes(*args):
        if (dbias and not biased) or (dsinks and d == 0):  # sums over what would be cut
            continue
        results = [d, d, d, d if dbias else None, 0 if dsinks else None]
        yield results, [d, *_given((dlse, d)), d, d, *axes]


_CUTS: dict[str, Callable[..., Iterator[Cut]]] = {
    "gather": _gather,
    "scatter_add": _scatter_add,
    "index_select": lambda x, dim, index: (([d], [d, None]) for d in _others(x, dim)),
    "index_add": lambda x, dim, index, source: (([d], [d, None, d]) for d in _others(x, dim)),
    "embedding": _embedding,
    "embedding_backward": lambda grad, *_: iter([([1], [len(grad.shape) - 1, None])]),
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "scaled": lambda x, factor: (([d], [d, None if d or not factor.shape else 0]) for d in range(len(x.shape))),
    "divided": lambda x, divisor: (([d], [d, d]) for d in range(len(x.shape))),
    "attention": _attention,
    "attention_backward": _attention_backward,
}


def add(operator: str, cuts: Callable[..., Iterator[Cut]]) -> None:
    """Say how an operator may be cut; before `register` is called."""
    _CUTS[operator] = cuts
