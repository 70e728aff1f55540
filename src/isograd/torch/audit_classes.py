"""The class of one call of an operator: what its bits may depend on."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from isograd.torch import audit_table as table
from isograd.torch.audit_table import ROWS


class Class(StrEnum):
    """What is known of an operator's bits, from the best to the worst."""

    ORDER_FREE = "order-free"
    EXACT = "exact"
    FIXED = "fixed on this kind of machine"
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        """Its place among the classes; the worst has the highest."""
        return list(Class).index(self)


# What bits may depend on.
RUN, BATCH, MACHINE, RANKS = "the run", "the batch split", "the machine", "the number of GPUs"
DEPENDENCES = (RUN, BATCH, MACHINE, RANKS)


class Finding(NamedTuple):
    """The class of a call, what its bits may depend on, why, and what to do about it."""

    kind: Class
    depends: tuple[str, ...] = ()
    reason: str = ""
    hint: str = ""


_POWERS = (-2, -1, 0, 0.5, 1, 2, 3)
_FREE = Finding(Class.ORDER_FREE)
_EXACT = Finding(Class.EXACT)
_KINDS = {
    table.ELEMENTWISE: (Class.FIXED, (MACHINE,)),
    table.TIES: (Class.FIXED, (MACHINE,)),
    table.SUM: (Class.FIXED, (BATCH, MACHINE)),
    table.PRODUCT: (Class.FIXED, (BATCH, MACHINE)),
}


def classify(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, plans: Iterable[Any], accumulates: bool
) -> Finding:
    """What is known of a call that has run.

    plans: of the library's that it launched. accumulates: whether autograd adds to a gradient that is there.
    """
    if not isinstance(func, OpOverload):
        return Finding(Class.UNKNOWN, (RUN, BATCH, MACHINE), "what is called in it is not seen", table.UNKNOWN_HINT)
    if func.namespace == "isograd":
        return _of_plans(plans)
    name = func._schema.name.partition("::")[2]
    if func.namespace in table.COLLECTIVES:
        return _of_collective(func.namespace, name, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and not _is_deterministic_attention(name, args, kwargs):
        return Finding(Class.UNKNOWN, (RUN, BATCH, MACHINE, RANKS), table.RANDOM, table.SEED)
    if func.namespace not in ("aten", "prims"):
        return Finding(Class.UNKNOWN, (RUN, BATCH, MACHINE), table.UNKNOWN, table.UNKNOWN_HINT)
    floats = [t for t in _tensors((args, tuple(kwargs.values()), output)) if t.is_floating_point() or t.is_complex()]
    if func.is_view or not floats:
        return _EXACT
    if accumulates and name in ("add", "add_"):
        return Finding(Class.FIXED, (BATCH, RANKS), table.ACCUMULATION, table.ACCUMULATION_HINT)
    return _of_row(func, _base(name), args, kwargs, floats)


def _base(name: str) -> str:
    """An operator's name without what it says of where its result goes."""
    name = name.removeprefix("_foreach_")
    return name if name.endswith("__") else name.removesuffix("_")


def _of_plans(plans: Iterable[Any]) -> Finding:
    """By the guarantees of the plans; an operator that launched none had nothing to sum."""
    worst = _FREE
    for plan in plans:
        guarantee = plan.precision_guarantee
        if guarantee.bit_stable_across_hardware and guarantee.batch_invariant and guarantee.deterministic:
            continue
        depends = [
            word
            for word, holds in (
                (RUN, guarantee.deterministic),
                (BATCH, guarantee.batch_invariant),
                (MACHINE, guarantee.bit_stable_across_hardware),
            )
            if not holds
        ]
        kind = Class.FIXED if guarantee.deterministic else Class.UNKNOWN
        reason = f"the guarantee of the kernel {plan.kernel.name} in {plan.sku.dtype} goes no further"
        found = Finding(kind, tuple(depends), reason, f"see `isograd kernels --operation {plan.sku.op}`")
        worst = max(worst, found, key=lambda finding: finding.kind.rank)
    return worst


def _of_collective(namespace: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Finding:
    if name not in table.COLLECTIVES[namespace].split():
        return _EXACT
    if not any(t.is_floating_point() or t.is_complex() for t in _tensors((args, tuple(kwargs.values())))):
        return _EXACT
    if any(isinstance(a, str) and a.lower() in ("max", "min") for a in (*args, *kwargs.values())):
        return _EXACT
    return Finding(Class.FIXED, (MACHINE, RANKS), table.COLLECTIVE, table.COLLECTIVE_HINT)


def _is_deterministic_attention(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is one of the attentions, all of which torch calls random, without a dropout."""
    return "attention" in name and not any(isinstance(a, float) and 0 < a < 1 for a in args[3:])


def _of_row(
    func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[Tensor]
) -> Finding:
    row = ROWS.get(name)
    kind, hint = (row.kind, row.hint) if row else (None, "")
    pointwise = torch.Tag.pointwise in func.tags
    if name == "sort" and (kwargs.get("stable") or (len(args) > 1 and func._overloadname == "stable" and args[1])):
        return _EXACT
    if kind == table.SCALED:
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        kind = table.EXACT if not isinstance(alpha, Tensor) and alpha in (1, -1) else table.ELEMENTWISE
    if name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] in _POWERS:
        kind = table.EXACT  # which torch computes by multiplications, divisions and square roots
    if kind == table.EXACT and pointwise and any(t.is_complex() for t in floats):
        kind = table.ELEMENTWISE
    if kind == table.ACCUMULATED and not (kwargs.get("accumulate") or any(a is True for a in args)):
        kind = table.EXACT
    if kind == table.EXACT:
        return _EXACT
    if kind is None and pointwise:
        kind = table.ELEMENTWISE
    if kind is None:
        return Finding(Class.UNKNOWN, (RUN, BATCH, MACHINE), table.UNKNOWN, table.UNKNOWN_HINT)
    if kind in _KINDS:
        found, depends = _KINDS[kind]
    elif _is_ordered(kind, any(t.is_cuda for t in floats)):
        found, depends = Class.FIXED, (BATCH, MACHINE)
    else:
        found, depends = Class.UNKNOWN, (RUN, BATCH, MACHINE)
    return Finding(found, depends, kind, hint)


def _is_ordered(kind: str, cuda: bool) -> bool:
    """Whether the order of an operator's additions is fixed by settings of torch's, or by its device."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    if kind == table.ALGORITHM:
        cudnn = torch.backends.cudnn
        return not cuda or (cudnn.deterministic and not cudnn.benchmark)
    return kind == table.ATOMIC and not cuda


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
