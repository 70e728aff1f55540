"""Every operator that a step runs, with what its bits may depend on, and what to do about it."""

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.errors import InvalidProblemError
from isograd.runtime import launches, modes
from isograd.runtime.blocks import BlockEnd
from isograd.torch import audit_table, unseen
from isograd.torch.audit_classes import BATCH, MACHINE, RUN, Class, classify
from isograd.torch.audit_report import Audit, Entry
from isograd.torch.module_calls import Call, ModuleCalls, not_compiled

_TORCHS = (Tensor, torch.nn.Parameter)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that the dispatcher calls."""

    supports_higher_order_operators = True

    def __init__(self, audit: "Auditing") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._audit = audit

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it would without the mode, and what it calls by the dispatcher is seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _TORCHS for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)  # shapes alone: nothing is computed
            return NotImplemented  # the subclass, a DTensor for example, calls what it consists of
        with launches.planning() as plans:
            output = func(*args, **kwargs)
        self._audit.ran(func, args, kwargs, output, plans)
        return output


class _Places:
    """The module whose call made a node of autograd's graph, by the numbers that a thread gives to nodes.

    task: of autograd's, in which the thread began to call modules; -1 outside of all.
    """

    def __init__(self) -> None:
        self.task: int = torch._C._current_graph_task_id()
        self._numbers: list[int] = []
        self._names: list[str] = []

    def mark(self, name: str) -> None:
        """Say whose the nodes are that this thread makes from now on."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._names.append(name)

    def of(self, node: Any) -> str:
        """The module that made a node."""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._names[place] if place >= 0 else ""


class Auditing:
    """What `audit` returns; a context manager for one block, that gives its `Audit`."""

    def __init__(self, model: Module | None = None) -> None:
        if model is not None and not isinstance(model, Module):
            raise InvalidProblemError(f"audit: model is a {type(model).__name__}; expected a torch.nn.Module")
        self.report = Audit()
        self._began = self._over = False
        self._lock = threading.RLock()  # a signal handler may call torch while it is held
        self._handles: list[Any] = []
        self._parameters: dict[Tensor, str] = {}
        self._optimizers: list[str] = []
        self._places: dict[int, _Places] = {}
        self._thread = threading.get_ident()
        self._mode = _Mode(self)
        self._calls = ModuleCalls(model, entered=self._entered, left=self._left, failed=self._left, found=self._found)

    # --- the block ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Audit:
        if self._began:
            raise InvalidProblemError("audit: the block has begun before; expected a new audit for every block")
        self._began, self._thread = True, threading.get_ident()
        self._handles.append(register_optimizer_step_pre_hook(not_compiled(self._before_step)))
        self._handles.append(register_optimizer_step_post_hook(not_compiled(self._after_step)))
        self._calls.install()
        unseen.watch(self)
        modes.push_dispatch(self._mode)
        return self.report

    def _end(self, *error: object) -> None:
        self._over = True
        modes.remove_dispatch(self._mode)
        unseen.unwatch(self)
        self._calls.remove()
        for handle in self._handles:
            handle.remove()
        self.report.compiled = tuple(self._calls.compiled)

    __exit__ = BlockEnd(_end)

    # --- what runs ---------------------------------------------------------------------------------------------------
    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, plans: Iterable[Any]) -> None:
        """An operator ran."""
        if self._over or getattr(func, "namespace", "") == "profiler":
            return
        module, phase, accumulates = self._place()
        finding = classify(func, args, kwargs, output, plans, accumulates)
        name = func._schema.name if isinstance(func, OpOverload) else f"higher order: {func}"
        with self._lock:
            self.report.add(Entry(name, module, phase, *finding))

    def kernel_ran(self, name: str) -> None:
        """A Triton kernel ran, in an operator that is counted or outside of all."""
        if launches.plans() is None and not self._over:
            module, phase, _ = self._place()
            finding = Class.UNKNOWN, (RUN, BATCH, MACHINE), audit_table.UNKNOWN, audit_table.UNKNOWN_HINT
            with self._lock:
                self.report.add(Entry(f"triton::{name}", module, phase, *finding))

    def graph_ran(self) -> None:
        """A graph of Inductor's ran."""
        module, phase, _ = self._place()
        with self._lock:
            self.report.graphs[module, phase] += 1

    def _place(self) -> tuple[str, str, bool]:
        """(module, phase, whether a gradient is being accumulated) of what runs on this thread now."""
        call, node = self._calls.current, torch._C._current_autograd_node()
        if call is not None and call.recompute:
            return call.name, "recompute", False
        if node is not None:
            if hasattr(node, "variable"):
                return self._parameters.get(node.variable, ""), "backward", True
            return self._maker(node), "backward", False
        if call is None and self._optimizers:
            return self._optimizers[-1], "optimizer", False
        return call.name if call else "", "forward", False

    def _maker(self, node: Any) -> str:
        places = self._places.get(threading.get_ident())
        if places is None or places.task == torch._C._current_graph_task_id():
            places = self._places.get(self._thread)
        return places.of(node) if places else ""

    # --- where it runs -----------------------------------------------------------------------------------------------
    def _entered(self, call: Call, args: Any, kwargs: Any) -> None:
        self._mark(call.name)

    def _left(self, call: Call, output: Any = None) -> None:
        outer = self._calls.current
        self._mark(outer.name if outer else "")

    def _mark(self, name: str) -> None:
        ident = threading.get_ident()
        places = self._places.get(ident)
        if places is None:
            places = self._places[ident] = _Places()
            if ident != self._thread and places.task != -1:
                # A recomputation on a thread of autograd's, which goes on with nodes of the forward's thread after it;
                # what a backward within this one meets was made here.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: self._places.pop(ident, None))
        places.mark(name)

    def _found(self, root: Module, prefix: str) -> None:
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                self._parameters.setdefault(parameter, self._calls.names[module])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.append(type(optimizer).__name__)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizers:
            self._optimizers.pop()


def audit(model: Module | None = None) -> Auditing:
    """A context manager that lists every operator that a step runs, and what its bits may depend on.

        with igt.audit() as report:
            step()
        print(report)                   # a verdict, a table of findings, and what to do about each
        report.verdict, report.entries, report.to_dict()

    model: whose modules are named; without one, those of every module that is called outside of known ones. What runs
    in backward is named by the module whose forward made it.

    The classes: *order-free*, isograd's operators whose kernel guarantees equal bits on every run, batch split and
    machine; *exact*, copies, views, comparisons, integers and single operations of IEEE 754; *fixed on this kind of
    machine*, sums and products in an order that shapes, a library or the machine decide, and functions of a library;
    *unknown*, what adds in the order in which threads come, what draws random numbers, and operators that nothing is
    known of, of other packages for example. The verdict is the worst of them. That a micro-batch's gradient is added
    to one that is there counts as well.

    The block is this thread's, with the gradients that are computed in it. Every operator goes through Python in it,
    and no bit changes. Not seen: what graphs of torch.compile's Inductor compute themselves, which the report counts by
    module, and kernels that are launched outside of torch's dispatcher, but for Triton's, which are listed as unknown.
    """
    return Auditing(model)
