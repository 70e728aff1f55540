"""What an audit found: a list of operators, a verdict, and a table of both."""

import io
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from isograd.torch.audit_classes import BATCH, DEPENDENCES, MACHINE, RUN, Class

_SEE = "Under torch.compiler.set_stance('force_eager') the same operators run uncompiled, and are seen."
_OUTSIDE = "(no module)"
_WIDTH = 160  # where there is no terminal
_MODULES = 4  # on a line
_SHORT = {Class.FIXED: "fixed", Class.UNKNOWN: "unknown"}
_STYLES = {Class.FIXED: "", Class.UNKNOWN: "red"}


class Entry(NamedTuple):
    """Operators of one kind: where they ran, what their bits may depend on, why, and what to do about it.

    module: whose call ran it, or whose forward its gradient is of; "" outside of all; the optimizer's name in its step.
    phase: "forward", "backward", "recompute" (of a checkpoint, in backward) or "optimizer".
    """

    operator: str
    module: str
    phase: str
    kind: Class
    depends: tuple[str, ...]
    reason: str
    hint: str


@dataclass
class Audit:
    """What ran in the block of an `audit`; complete after it, and readable in it. `print` shows it as a table.

    counts: how often each entry ran. graphs: how often graphs of torch.compile ran that are not seen, by module and
    phase. compiled: the modules that torch.compile has compiled.
    """

    counts: Counter[Entry] = field(default_factory=Counter)
    graphs: Counter[tuple[str, str]] = field(default_factory=Counter)
    compiled: tuple[str, ...] = ()

    def add(self, entry: Entry) -> None:
        """Count an operator."""
        self.counts[entry] += 1

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry, in the order in which it ran first."""
        return tuple(self.counts)

    @property
    def findings(self) -> tuple[Entry, ...]:
        """The entries whose bits depend on something, the worst first."""
        found = [entry for entry in self.counts if entry.depends]
        return tuple(sorted(found, key=lambda entry: -entry.kind.rank))

    @property
    def verdict(self) -> Class:
        """The worst class of all that ran: ORDER_FREE, FIXED or UNKNOWN."""
        if self.graphs:
            return Class.UNKNOWN
        return self.findings[0].kind if self.findings else Class.ORDER_FREE

    @property
    def depends(self) -> tuple[str, ...]:
        """What the result of the block may depend on."""
        found = {word for entry in self.counts for word in entry.depends}
        if self.graphs:
            found |= {RUN, BATCH, MACHINE}
        return tuple([word for word in DEPENDENCES if word in found])

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
        console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
        with console.capture() as text:
            console.print(self)
        return "\n".join([line.rstrip() for line in text.get().splitlines()])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.padding import Padding
        from rich.text import Text

        yield Text(f"{self.verdict}: {self._sentence()}", style="bold")
        for line in self._unseen():
            yield Text(line)
        if self.findings:
            yield self._table()
            yield Text("Why, and what to do:")
            for (reason, hint), operators in self._advice().items():
                yield Padding(Text(f"{', '.join(operators)}: {reason}" + (f"; {hint}" if hint else "")), (0, 0, 0, 2))
        for kind in (Class.ORDER_FREE, Class.EXACT):
            counts = self._operators(kind)
            if counts:
                named = ", ".join([f"{name} {count}" for name, count in counts.items()])
                yield Text(f"{kind}: {named}", style="dim")

    def _sentence(self) -> str:
        *others, last = self.depends or ("",)
        if not last:
            return f"the bits depend on none of {', '.join(DEPENDENCES[:-1])} and {DEPENDENCES[-1]}"
        return f"the bits may depend on {', '.join(others)}{' and ' if others else ''}{last}"

    def _unseen(self) -> Iterator[str]:
        if self.graphs:
            where = ", ".join([f"{name or _OUTSIDE} ({phase}) {n}" for (name, phase), n in self.graphs.items()])
            yield f"Not seen: {sum(self.graphs.values())} runs of graphs that torch.compile made: {where}."
            yield _SEE
        if self.compiled:
            yield f"Modules that torch.compile has compiled: {', '.join(self.compiled)}"

    def _operators(self, kind: Class) -> dict[str, int]:
        found: Counter[str] = Counter()
        for entry, count in self.counts.items():
            if entry.kind is kind and not entry.depends:
                found[entry.operator] += count
        return dict(found.most_common())

    def _advice(self) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for entry in self.findings:
            operators = found.setdefault((entry.reason, entry.hint), [])
            if entry.operator not in operators:
                operators.append(entry.operator)
        return found

    def _table(self) -> Any:
        """The findings: a line for each operator and phase, with the modules; of those that differ in a number, one."""
        from rich import box
        from rich.table import Table

        lines: dict[tuple[Class, str, str], tuple[Counter[str], set[str]]] = {}
        for entry in self.findings:
            modules, depends = lines.setdefault((entry.kind, entry.operator, entry.phase), (Counter(), set()))
            modules[entry.module or _OUTSIDE] += self.counts[entry]
            depends.update(entry.depends)
        table = Table(box=box.ASCII2, header_style="bold")
        for title in ("class", "operator", "phase", "calls", "depends on", "in"):
            table.add_column(title, justify="right" if title == "calls" else "left", overflow="fold")
        for (kind, operator, phase), (modules, depends) in lines.items():
            words = ", ".join([word.removeprefix("the ") for word in DEPENDENCES if word in depends])
            alike: dict[str, list[str]] = {}
            for name in modules:
                alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
            names = [same[0] if len(same) == 1 else pattern for pattern, same in alike.items()]
            names[_MODULES:] = [f"{len(names) - _MODULES} others"] if len(names) > _MODULES else []
            calls = str(sum(modules.values()))
            table.add_row(_SHORT[kind], operator, phase, calls, words, ", ".join(names), style=_STYLES[kind])
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has."""
        rows = [
            {**entry._asdict(), "kind": entry.kind.value, "depends": list(entry.depends), "count": count}
            for entry, count in self.counts.items()
        ]
        graphs = [{"module": module, "phase": phase, "count": n} for (module, phase), n in self.graphs.items()]
        return {
            "verdict": self.verdict.value,
            "depends": list(self.depends),
            "entries": rows,
            "graphs": graphs,
            "compiled": list(self.compiled),
        }
