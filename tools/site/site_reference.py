"""The reference: every public name, from what the modules hold once they are imported.

Names of operations are made from declarations as the package loads, so nothing is read from sources here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import site_operations

from isograd.core.descriptor import Descriptor
from isograd.core.plan import Plan

MODULES = (
    "isograd",
    "isograd.torch",
    "isograd.torch.distributed",
    "isograd.optim",
    "isograd.torch.optim",
    "isograd.tape",
    "isograd.mlx",
)
_WIDTH = 76
# (page, its title, the modules that its names come from); the first that fits. A folder of `isograd.ops` that is not
# named here gets a page of its own, and so does all that fits nowhere.
_PAGES = (
    ("softmax", "Softmax", ("isograd.ops.softmax",)),
    ("cross_entropy", "Cross entropy", ("isograd.losses", "isograd.torch.losses")),
    ("kl_div", "KL divergence", ("isograd.ops.kl_div",)),
    ("distillation_loss", "Distillation loss", ("isograd.ops.distillation_loss",)),
    ("gumbel_softmax", "Gumbel softmax", ("isograd.ops.gumbel_softmax",)),
    ("sparsemax", "Sparsemax", ("isograd.ops.sparsemax",)),
    ("rmsnorm", "RMS norm", ("isograd.ops.rmsnorm",)),
    ("layernorm", "Layer norm", ("isograd.ops.layernorm",)),
    ("activations", "Activations", ("isograd.ops.gated", "isograd.ops.activation")),
    ("dropout", "Dropout", ("isograd.ops.dropout",)),
    ("rotary", "Rotary positions", ("isograd.ops.rotary", "isograd.rotary")),
    ("router", "Mixture of experts", ("isograd.ops.router",)),
    (
        "attention",
        "Attention",
        ("isograd.flash_attention", "isograd.torch.dot_product", "isograd.torch.decoding", "isograd.torch.huggingface"),
    ),
    ("gather", "Gather, scatter, embedding", ("isograd.gather", "isograd.torch.indexing")),
    ("matmul", "Matrix products", ("isograd.products", "isograd.torch.products")),
    ("elementwise", "Elementwise functions and sums", ("isograd.array_functions",)),
    ("tape", "The tape", ("isograd.tape",)),
    ("optim", "Optimizers (NumPy)", ("isograd.optim",)),
    ("torch_optim", "Optimizers and clipping (PyTorch)", ("isograd.torch.optim", "isograd.torch.clipping")),
    ("torch_distributed", "Many ranks (PyTorch)", ("isograd.torch.distributed",)),
    ("torch_models", "Whole models (PyTorch)", ("isograd.torch",)),
    ("mlx", "MLX", ("isograd.mlx",)),
    ("errors", "Errors", ("isograd.errors",)),
    ("kernels", "Plans, kernels, recording, threads", ("isograd.core", "isograd.runtime")),
)


class Entry(NamedTuple):
    """A public name: the module that gives it, itself, and the page it is on."""

    module: str
    name: str
    value: Any
    page: str

    @property
    def path(self) -> str:
        """How a program spells it."""
        return f"{self.module}.{self.name}"


def _page_of(value: Any) -> str:
    """The page of a name: that of the module which defines it."""
    place = f"{getattr(value, '__module__', '')}."
    for page, _, modules in _PAGES:
        if any(place.startswith(f"{module}.") for module in modules):
            return page
    return place.split(".")[2] if place.startswith("isograd.ops.") else "more"


def entries() -> list[Entry]:
    """Every public name, once a module."""
    found = []
    for module in MODULES:
        values = importlib.import_module(module)
        for name in sorted(set(values.__all__), key=str.lower):
            value = getattr(values, name)
            if not inspect.ismodule(value):
                found.append(Entry(module, name, value, _page_of(value)))
    found += [Entry(kind.__module__, kind.__name__, kind, "kernels") for kind in (Plan, Descriptor)]  # what all have
    own = {id(e.value) for e in found if e.module == "isograd"}
    # The tape hands many functions of isograd's on; they are described where they come from.
    return [e for e in found if e.module != "isograd.tape" or id(e.value) not in own]


def pages() -> dict[str, tuple[str, str]]:
    """(title, text) of every page of the reference, by its name; the index first."""
    every = entries()
    titles = {page: title for page, title, _ in _PAGES}
    for entry in every:
        titles.setdefault(entry.page, entry.page.replace("_", " ").capitalize())
    tables = site_operations.tables()
    of_page: dict[str, list[site_operations.Table]] = {}
    for table in tables:
        of_page.setdefault(_page_of(table.home), []).append(table)
    links = {e.path: f"{e.page}.md#{e.path}" for e in reversed(every)}
    made = {"index": ("All names", _index(every, titles, of_page))}
    for page, title in titles.items():
        if named := [e for e in every if e.page == page]:
            made[page] = (title, "\n\n".join(_page(title, named, of_page.get(page, []), links)) + "\n")
    made["command_line"] = ("The command line", command_line())
    return made


def _index(every: list[Entry], titles: dict[str, str], tables: dict[str, list[site_operations.Table]]) -> str:
    lines = [
        "# Reference",
        "Every public name. `igt` is `isograd.torch`. The command has [a page of its own](command_line.md).",
        "## Operations",
        site_operations.LEGEND,
        site_operations.overview(tables),
    ]
    for module in MODULES:
        named = [e for e in every if e.module == module]
        lines += [f"## {module}", "| name | what it is | page |\n|---|---|---|"]
        rows = [
            f"| [`{e.name}`]({e.page}.md#{e.path}) | {_cell(_first_sentence(e.value))} "
            f"| [{titles[e.page]}]({e.page}.md) |"
            for e in named
        ]
        lines[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(lines) + "\n"


def _page(title: str, named: list[Entry], tables: list[site_operations.Table], links: dict[str, str]) -> Iterator[str]:
    yield f"# {title}"
    made = [e for e in named if inspect.isclass(e.value) and issubclass(e.value, (Plan, Descriptor))]
    made = [e for e in made if e.value not in (Plan, Descriptor)]
    for entry in named:
        if entry not in made:
            yield from _described(entry, links)
    if tables:
        yield "## Operations"
        yield site_operations.LEGEND
        for table in tables:
            yield f"### Operation {table.name} {{ #operation-{table.name} }}"
            yield table.text
    if made:
        yield "## Descriptors and plans"
        yield (
            "A descriptor is a problem, and a plan is a kernel for it. "
            "[Guarantees and bounds](../explanation/guarantees.md#what-a-plan-says-about-itself) shows their use, "
            "and [what every plan has](kernels.md#isograd.core.plan.Plan) is the same for all."
        )
        for entry in made:
            yield from _described(entry, links, level="###", members=False)


def _described(entry: Entry, links: dict[str, str], level: str = "##", members: bool = True) -> Iterator[str]:
    """A name's heading, signature, overloads, text and, of a class, what it holds."""
    value = entry.value
    yield f"{level} {entry.path} {{ #{entry.path} }}"
    yield f"```python\n{signature(entry.path, value)}\n```"
    if overloads := typing.get_overloads(value) if inspect.isfunction(value) else []:
        shown = "\n".join(signature(entry.name, overload) for overload in overloads)
        block = "\n".join(f"    {line}" for line in f"```python\n{shown}\n```".splitlines())
        yield f'??? note "Types of arguments and result"\n\n{block}'
    yield docstring(value, links)
    if members and inspect.isclass(value) and not issubclass(value, Exception):
        for name, member in _members(value):
            spelled = f"{entry.name}.{name}"
            yield f"{level}# {spelled} {{ #{entry.path}.{name} }}"
            if not isinstance(member, property):
                yield f"```python\n{signature(spelled, member)}\n```"
            yield docstring(member, links)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the package wrote and described."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("isograd"):
            continue
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            public = not name.startswith("_") and (inspect.isfunction(function) or isinstance(function, property))
            if public and name not in seen and inspect.getdoc(function):
                seen.add(name)
                yield name, function


def signature(name: str, value: Any) -> str:
    """How something is called, with defaults and types that say something."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"class {name}({value.__bases__[0].__name__})"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    parts, star = [], False
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or p.kind is p.VAR_POSITIONAL
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = _annotation(p.annotation)
        default = "" if p.default is p.empty else _default(p.default)
        equals = f" = {default}" if kind and default else f"={default}" if default else ""
        parts.append(f"{mark}{p.name}{f': {kind}' if kind else ''}{equals}")
        if p.kind is p.POSITIONAL_ONLY and (i + 1 == len(parameters) or parameters[i + 1].kind is not p.kind):
            parts.append("/")
    kind = "" if inspect.isclass(value) else _annotation(found.return_annotation)
    end = f") -> {kind}" if kind else ")"
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


def _annotation(kind: Any) -> str:
    """A type as a user writes it; nothing for one that says nothing."""
    if kind is inspect.Parameter.empty or kind is Any:
        return ""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_]\w*)", "", text).replace("~", "")
    return "" if text == "Any" else text


def _default(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, tuple, type(None))) or value is ...:
        return "..." if value is ... else repr(value)
    return "..."  # a factory, or an object whose text is no code


def _first_sentence(value: Any) -> str:
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.])\s", paragraph)[0]


def _cell(text: str) -> str:
    """Text as the cell of a table."""
    parts = re.split(r"`([^`]*)`", text)
    return "".join(
        [site_operations.code(p) if i % 2 else _escaped(p).replace("|", "&#124;") for i, p in enumerate(parts)]
    )


def _escaped(text: str) -> str:
    """Text whose stars and angles are no markup, outside of what stands between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join([p if p.startswith("`") else p.replace("*", "\\*").replace("<", "&lt;") for p in parts])


def docstring(value: Any, links: dict[str, str]) -> str:
    """A docstring in Markdown: its arguments as a list, code as it is, files and names as links."""
    text = inspect.getdoc(value) or ""
    names = _argument_names(value)
    return "\n\n".join(_paragraph(p, names, links) for p in text.split("\n\n"))


def _argument_names(value: Any) -> set[str]:
    names = {"out", "returns"}
    with contextlib.suppress(TypeError, ValueError):
        names |= set(inspect.signature(value).parameters)
    if inspect.isclass(value):
        names |= {name for kind in value.__mro__ for name in getattr(kind, "__annotations__", ())}
    return names


def _paragraph(paragraph: str, names: set[str], links: dict[str, str]) -> str:
    """A paragraph: code, or a list where it begins with an argument, or text.

    In a list an argument begins a sentence, and a line begins with an argument or a result.
    """
    if paragraph.startswith("    "):
        return paragraph
    marked = "\n".join(line.strip() for line in paragraph.splitlines())
    found = [
        m
        for m in re.finditer(r"(?:^|(?<=\n)|(?<=[.;][ \n]))((?:\w+, )*\w+): ", marked)
        if m.start() == 0 or marked[m.start() - 1] == "\n" or set(m[1].split(", ")) & names
    ]
    if not found or found[0].start() > 0 or not set(found[0][1].split(", ")) & names:
        return _linked(_escaped(marked.replace("\n", " ")), links)
    ends = [m.start() for m in found[1:]] + [len(marked)]
    items = []
    for m, end in zip(found, ends, strict=True):
        text = marked[m.end() : end].replace("\n", " ").strip()
        items.append(f"- **{', '.join(f'`{name}`' for name in m[1].split(', '))}**: {_linked(_escaped(text), links)}")
    return "\n".join(items)


def _linked(text: str, links: dict[str, str]) -> str:
    text = re.sub(r"`docs/(\w+\.md)`", r"[\1](../\1)", text)
    for short, long in (("igt.", "isograd.torch."), ("ig.", "isograd.")):
        text = re.sub(
            rf"`({re.escape(short)}|{re.escape(long)})([\w.]+)`",
            lambda m, long=long: f"[{m[0]}]({links[long + m[2]]})" if long + m[2] in links else m[0],
            text,
        )
    return text


def command_line() -> str:
    """The command's page, from the command itself."""
    import typer

    from isograd.cli.main import app

    group = typer.main.get_command(app)
    lines = ["# The command line", f"{_escaped(group.help or '')}", "`isograd --version` prints the version."]
    for name, command in sorted(group.commands.items()):
        lines += [f"## isograd {name}", _escaped(inspect.cleandoc(command.help or ""))]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join([f"isograd {name}", *(p.name.upper() for p in arguments), *(["[OPTIONS]"] if options else [])])
        lines.append(f"```text\n{usage}\n```")
        rows = [
            f"| {', '.join(f'`{o}`' for o in (p.opts if p in options else [p.name.upper()]))} "
            f"| {_cell(getattr(p, 'help', None) or '')} | {_shown_default(p)} |"
            for p in [*arguments, *options]
        ]
        if rows:
            lines.append("| option | what it does | default |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(lines) + "\n"


def _shown_default(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or value in ((), [], False, "") or "Sentinel" in type(value).__name__:
        return ""
    return f"`{value}`"
