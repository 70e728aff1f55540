"""Which module is being called, for those who watch a step: `audit` and `trace`.

Hooks of every module report its calls. Where no model is given, a module that is called and not known is a root, and
its tree is hooked. A module that torch.compile has compiled is watched from outside and nothing in it is hooked, which
would change what is compiled; `compiled` names such modules. Under the stance "force_eager" of `torch.compiler`
nothing is compiled, and all modules are seen.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._dynamo import eval_frame
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

Function = TypeVar("Function", bound=Callable[..., Any])
# Steps of a name that wrappers add; without them a wrapped model has the names of a plain one.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
not_compiled: Callable[[Function], Function] = torch.compiler.disable
_PARALLEL = (DataParallel, DistributedDataParallel)  # which add `module`


def unwrapped(name: str, root: Module) -> str:
    """The name of a module or a parameter within a root, without what wrappers add to it."""
    steps = [step for step in name.split(".") if step not in _WRAPPERS]
    if steps[0:1] == ["module"] and isinstance(root, _PARALLEL):
        del steps[0]
    return ".".join(steps)


def _innermost(module: Module) -> Module:
    """A module without its wrappers."""
    for step in (*_WRAPPERS, "module"):
        inner = module._modules.get(step)
        if inner is not None and (step != "module" or isinstance(module, _PARALLEL)):
            return _innermost(inner)
    return module


def _type_name(module: Module) -> str:
    """The name of a module's type, without what `fully_shard` makes of it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


def _is_compiled(module: Module) -> bool:
    """Whether a call of a module runs what torch.compile made of it."""
    if eval_frame._stance.stance == "force_eager" or torch._dynamo.config.disable:
        return False
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module. number: how many came before; recompute: whether a backward makes it."""

    module: Module
    name: str
    number: int
    recompute: bool
    raised: BaseException | None  # what was being handled as it began


class ModuleCalls:
    """Hooks on modules between `install` and `remove`.

    entered, left: called with each call, and with its inputs (positional ones, those by name) or its output; `left` not
    where the module raises, which `failed` is told. found: called with every module tree that is hooked and its prefix.
    """

    def __init__(
        self,
        model: Module | None,
        *,
        entered: Callable[[Call, tuple[Any, ...], dict[str, Any]], None],
        left: Callable[[Call, Any], None],
        failed: Callable[[Call], None] = lambda call: None,
        found: Callable[[Module, str], None] = lambda module, prefix: None,
    ) -> None:
        self._model, self._entered, self._left, self._failed, self._found = model, entered, left, failed, found
        self._handles: list[Any] = []
        self._wrapped: list[tuple[Module, Any]] = []
        self._numbers: dict[tuple[Module, bool], int] = {}
        self._stacks: dict[int, list[Call]] = {}
        self._roots = 0
        self._over = False
        self.names: dict[Module, str] = {}
        self.compiled: list[str] = []

    # --- hooks -------------------------------------------------------------------------------------------------------
    def install(self) -> None:
        """Hook the model, or wait for one."""
        if self._model is not None:
            self._hook(self._model)
        else:
            self._handles.append(register_module_forward_pre_hook(self._hook_function(self._met)))

    def remove(self) -> None:
        """Take every hook away, for good."""
        self._over = True
        for handle in self._handles:
            handle.remove()
        while self._wrapped:
            module, original = self._wrapped.pop()
            module._compiled_call_impl = original

    def _hook_function(self, method: Callable[..., None]) -> Callable[..., None]:
        """A hook that compiled code has nothing of, and that nothing is compiled of."""
        quiet = not_compiled(method)

        def hook(*args: Any) -> None:
            if not torch.compiler.is_compiling() and not self._over:
                quiet(*args)

        skip_code(hook.__code__)
        return hook

    def _hook(self, root: Module) -> str:
        """Hook a tree of modules; the name of its root."""
        name, prefix = _type_name(_innermost(root)), ""
        if self._roots:
            taken = set(self.names.values())
            number = next(n for n in range(1, len(taken) + 2) if (f"{name}#{n}" if n > 1 else name) not in taken)
            name = f"{name}#{number}" if number > 1 else name
            prefix = f"{name}."
        self._roots += 1
        inside: set[Module] = set()
        for path, module in root.named_modules():
            if module in self.names:
                continue
            path = unwrapped(path, root)
            self.names[module] = prefix + path if path else name
            if module in inside:
                continue
            if _is_compiled(module):
                self.compiled.append(self.names[module])
                inside.update(module.modules())
            self._watch(module)
        self._found(root, prefix)
        return name

    def _watch(self, module: Module) -> None:
        """See the calls of a module."""
        before, after = self._hook_function(self._on_entry), self._hook_function(self._on_exit)
        original = module._compiled_call_impl
        if original is None or not _is_compiled(module):
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                after(module, args, kwargs, output)
            return output

        skip_code(call.__code__)
        self._wrapped.append((module, original))
        module._compiled_call_impl = call

    # --- calls -------------------------------------------------------------------------------------------------------
    @property
    def _stack(self) -> list[Call]:
        return self._stacks.setdefault(threading.get_ident(), [])

    @property
    def current(self) -> Call | None:
        """The innermost call of this thread."""
        stack = self._stacks.get(threading.get_ident())
        return stack[-1] if stack else None

    def _met(self, module: Module, args: tuple[Any, ...]) -> None:
        """Before any module's call where no model was given."""
        if module in self.names or isinstance(module, GraphModule):  # the latter: what torch.compile traced
            return
        self._hook(module)
        self._on_entry(module, args, {})  # its own hooks come too late for this call

    def _on_entry(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recompute = torch._C._current_graph_task_id() != -1
        number = self._numbers.get((module, recompute), 0)
        self._numbers[module, recompute] = number + 1
        call = Call(module, self.names[module], number, recompute, sys.exception())
        self._stack.append(call)
        self._entered(call, args, kwargs)

    def _on_exit(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stack = self._stack
        while stack:
            call = stack.pop()
            if call.module is not module:
                self._failed(call)
            elif output is None and sys.exception() is not call.raised:
                self._failed(call)
                return
            else:
                self._left(call, output)
                return
