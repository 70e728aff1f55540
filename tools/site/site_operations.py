"""Operations, a table each, from declarations and registry: arrays, attributes, gradient, bound, guarantee, kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from isograd.cli.suites import SUITES
from isograd.core import registry
from isograd.core.attributes import Attribute, Choice, Measured
from isograd.core.operands import AlongAxis, AlongOrLike, Array, Chosen, Like, Loss, PerRow, Sized, Total
from isograd.core.operation import Operation
from isograd.ops import OPERATIONS
from isograd.runtime.fenv import default_environment

LEGEND = """\
??? note "How to read these tables"

    *same bits*: whatever the run, the batch, the order of what is summed, the machine. *bound*: of the absolute error
    of every element of a result. u: half an ulp of 1 in the type that is computed in; q: the quantum of a sum; n: the
    length of the axis; η: half the smallest subnormal; `ulp(y)`: an ulp of the result's type.
    `isograd kernels --operation NAME` says the same on your machine, and why a kernel does not run there.
"""
_PROMISES = {
    "deterministic": "run",
    "batch_invariant": "batch",
    "order_invariant": "order",
    "bit_stable_across_hardware": "machine",
}
_DEVICES = ("cpu", "cuda", "mps", "mlx")
# What an array's shape is, for the name of the array that has the problem's.
_SHAPES: dict[type[Array], str] = {
    Like: "the shape of `{problem}`",
    PerRow: "the shape of `{problem}` without the axis",
    AlongAxis: "as long as the axis",
    Chosen: "the shape of `{problem}` with some elements along the axis",
    AlongOrLike: "as long as the axis, or the shape of `{problem}`",
    Sized: "a shape of its own, see the function",
    Total: "one number",
    Loss: "the losses, or one number where they are reduced",
}


class Table(NamedTuple):
    """An operation's table. home: what is defined where its page's names are."""

    name: str
    text: str
    home: Any
    vjp: str
    devices: tuple[str, ...]
    bits: str


def tables() -> list[Table]:
    """Of every operation that the registry knows."""
    by_name: dict[str, list[registry.Entry]] = {}
    for entry in registry.kernels():
        by_name.setdefault(entry.operation, []).append(entry)
    return [_table(name, found) for name, found in sorted(by_name.items()) if name in SUITES]


def overview(tables: dict[str, list[Table]]) -> str:
    """All operations, a line each."""
    rows = [
        f"| [`{t.name}`]({page}.md#operation-{t.name}) "
        f"| {f'`{t.vjp}`' if t.vjp else ''} | {', '.join(t.devices)} | {t.bits} |"
        for page, found in tables.items()
        for t in found
    ]
    return "| operation | gradient | devices | same bits |\n|---|---|---|---|\n" + "\n".join(sorted(rows))


def _table(name: str, entries: list[registry.Entry]) -> Table:
    op = OPERATIONS.get(name)
    rows: list[tuple[str, str]] = []
    if op is not None:
        rows += [("reads", _arrays(op, op.inputs)), ("returns", _arrays(op, op.outputs))]
        if op.attributes:
            rows.append(("attributes", "<br>".join(_attribute(key, a) for key, a in op.attributes.items())))
        rows.append(("dtypes", ", ".join(op.dtypes)))
    else:
        rows += _of_a_case(entries)
        rows.append(("dtypes", ", ".join(dict.fromkeys(e.dtype for e in entries))))
    vjp = op.vjp if op is not None and op.vjp else f"{name}_backward" if f"{name}_backward" in SUITES else ""
    if op is not None and not op.vjp and op.pullback:
        vjp = ""
        rows.append(("gradient", "by the tape and by autograd"))
    elif vjp:
        rows.append(("gradient", f"`{vjp}`"))
    kernels, bounds, kept = _kernels(entries)
    rows += [("bound", "<br>".join(code(b) for b in bounds)), ("same bits", kept[0])]
    lines = [f"| **{key}** | {value} |" for key, value in rows]
    text = "| | |\n|---|---|\n" + "\n".join(lines)
    text += "\n\n| device | kernel | dtypes | same bits |\n|---|---|---|---|\n" + "\n".join(kernels)
    devices = sorted({e.device for e in entries}, key=_place)
    return Table(name, text, _home(name), vjp, tuple(devices), kept[0])


def _home(name: str) -> Any:
    """The plan of an operation, which is defined beside it."""
    return SUITES[name].plan


def code(text: str) -> str:
    """Text as code in the cell of a table, where backticks leave the escapes of bars visible."""
    return f"<code>{''.join(f'&#{ord(c)};' if c in '|*_<&`' else c for c in text)}</code>"


def _arrays(op: Operation, arrays: Mapping[str, Array]) -> str:
    parts = []
    for key, a in arrays.items():
        said = [_SHAPES.get(type(a), _SHAPES[Sized]).format(problem=op.problem)]
        if key == op.problem:
            said = ["any shape" if op.least_rank == 0 else f"rank {op.least_rank} to 8"]
        said += ["in the type computed in"] if a.compute else [f"dtype: {a.dtype}"] if a.dtype else []
        said += ["optional"] if a.optional else []
        said += [f"may be {' or '.join(f'`{o}`' for o in a.over)} itself"] if a.over else []
        parts.append(f"`{key}`: {', '.join(said)}")
    return "<br>".join(parts)


def _attribute(key: str, a: Attribute) -> str:
    if isinstance(a, Measured):
        return f"`{key}`: measured from `{a.of}`"
    accepted = f", one of {', '.join(f'`{c}`' for c in a.accepted)}" if isinstance(a, Choice) else ""
    default = "" if a.required else f", default `{a.default!r}`"
    return f"`{key}`: {type(a).__name__.lower()}{accepted}{default}"


@functools.cache
def _ordinary(operation: str, dtype: str) -> Any:
    """The problem of a case of the operation: among the first ones the one whose smallest size is largest."""
    suite = SUITES[operation]

    def smallest(problem: Any) -> int:
        return min((size for size in problem.operands()[0].shape), default=0)

    with default_environment():
        cases = itertools.islice(suite.cases(dtype), 6)
        return max([suite.descriptor(case, dtype).validated() for case in cases], key=smallest)


def _of_a_case(entries: list[registry.Entry]) -> list[tuple[str, str]]:
    """The arrays of an operation without a declaration, in a case."""
    problem = _ordinary(entries[0].operation, entries[0].dtype)
    rows = []
    for word, output in (("reads", False), ("returns", True)):
        shown = [
            f"`{o.name}`: {o.dtype} {list(o.shape)}"
            + (f", may be {' or '.join(o.aliases)} itself" if o.aliases else "")
            for o in problem.operands()
            if o.output is output
        ]
        rows.append((f"{word}, for example", "<br>".join(shown)))
    return rows


def _place(device: str) -> int:
    """Where a device stands among the others."""
    return _DEVICES.index(device) if device in _DEVICES else len(_DEVICES)


def _kernels(entries: list[registry.Entry]) -> tuple[list[str], list[str], list[str]]:
    """A row for every kernel, their bounds, and what they keep; the CPU's first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    bounds: list[str] = []
    for entry in sorted(entries, key=lambda e: _place(e.device)):
        guarantee = entry.kernel.sku(_ordinary(entry.operation, entry.dtype)).precision_guarantee
        kept = ", ".join(word for key, word in _PROMISES.items() if getattr(guarantee, key)) or "not promised"
        if guarantee.error_bound.formula not in bounds:
            bounds.append(guarantee.error_bound.formula)
        name, backend = entry.kernel.name, entry.kernel.backend
        named = name if name == backend else f"{name} ({backend})"
        groups.setdefault((entry.device, named, kept), []).append(entry.dtype)
    rows = [f"| {device} | {name} | {', '.join(dtypes)} | {kept} |" for (device, name, kept), dtypes in groups.items()]
    return rows, bounds, [kept for _, _, kept in groups]
