"""A switch that runs an unmodified model on isograd's kernels where it can, and keeps a list of what it did."""

import functools
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch._dynamo.eval_frame import skip_code
from torch._guards import CompileContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._contextlib import context_decorator
from torch.utils.checkpoint import checkpoint

from isograd.errors import DeviceMismatchError, IndexOutOfRangeError, InvalidProblemError, UnsupportedError
from isograd.runtime import modes
from isograd.runtime.blocks import held
from isograd.torch import checkpoints
from isograd.torch.dropping import checked_samples
from isograd.torch.replacements import (
    LEFT,
    LEFT_OF_SAMPLES,
    OPENED,
    OPENED_BACKWARDS,
    PRODUCTS,
    REPLACED,
    SAMPLED,
    is_plain,
    of_floats,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Products = Literal["int16"]


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of call: the function's name, whether isograd computed it, why not, and how often.

    graphs: of calls that torch.compile traced, in how many graphs they are; 0 for calls that ran.
    """

    function: str
    replaced: bool
    reason: str
    count: int
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a switch saw, in order of first appearance; `print` shows it as a table.

    operators: how often each of isograd's own operators ran without a function of torch's that stood for it: in code
    that torch.compile had traced before, or called by its own name. compiled: the former alone.
    """

    lines: tuple[Line, ...]
    operators: Mapping[str, int] = field(default_factory=dict)
    compiled: Mapping[str, int] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, int]:
        """How often each function was computed by isograd.

        Calls that torch.compile traced are "(compiled)", and counted once a graph. Where compiled code ran and nothing
        was traced, since that had happened before, these are the operators that it ran.
        """
        traced = any(line.graphs for line in self.lines)
        return self._sum(True) | ({} if traced else {f"{name} (compiled)": n for name, n in self.compiled.items()})

    @property
    def not_replaced(self) -> dict[str, int]:
        """How often each function was left to torch."""
        return self._sum(False)

    def _sum(self, replaced: bool) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for line in self.lines:
            if line.replaced is replaced:
                counts[line.function] += line.count
        return dict(counts)

    def __str__(self) -> str:
        rows = [(line.count, line.function, _note(line)) for line in self.lines]
        for name, count in self.operators.items():
            compiled = self.compiled.get(name, 0)
            rows += [(compiled, name, "run by compiled code")] if compiled else []
            rows += [(count - compiled, name, "called by its own name")] if count > compiled else []
        width = max([len(name) for _, name, _ in rows], default=0)
        table = [f"{count:>8} x {name:<{width}}  {note}" for count, name, note in rows]
        return "\n".join(table) or "nothing was called that isograd computes"


def _note(line: Line) -> str:
    graphs = f"; compiled, {line.graphs} graph{'s' if line.graphs > 1 else ''}" if line.graphs else ""
    return f"replaced{graphs}" if line.replaced else f"left to torch{graphs}: {line.reason}"


_CALLS = (OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__)


def _is_called_by_name() -> bool:
    """Whether the operator that a mode is asked for was called by a function of this package, or by its packet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return False  # compiled code that is no Python
    return frame.f_code is _CALLS[1] or frame.f_back.f_code.co_filename.startswith(os.path.dirname(__file__))


_lock = threading.RLock()  # a signal handler or a finalizer may call torch while it is held
# Errors after which torch computes the call, or raises an error of its own for it.
NOT_SERVED = (UnsupportedError, InvalidProblemError, IndexOutOfRangeError, DeviceMismatchError, TypeError)


class _Block(TorchFunctionMode):
    """What lies on torch's stack for one block of a switch, and lets everything pass once that is over.

    An interrupt inside a function of torch's that is written in Python may put it back on the stack after its end.
    """

    def __init__(self, switch: "Switch") -> None:
        super().__init__()
        self.switch = switch
        self.entered = self.over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        return self.switch.__torch_function__(func, types, args, kwargs)

    def end(self, *error: object) -> None:
        self.over = True
        if self.entered:
            modes.remove(self)
        elif error:  # the end was called by its name
            Switch.__exit__(self.switch)


class _Entering(threading.local):
    block: _Block | None = None


_entering = _Entering()  # what the next `__enter__` of this thread is for


class _End:
    """The `__exit__` of a switch: of the block that the interpreter asks it for."""

    def __get__(self, switch: "Switch | None", owner: type) -> Callable[..., None]:
        if switch is None:
            return self  # contextlib.ExitStack calls it with the switch
        block = _entering.block = _Block(switch)
        return held(block.end)

    def __call__(self, switch: "Switch", *error: object) -> None:
        """End the innermost block of a switch."""
        for mode in reversed(modes.stack()):
            if isinstance(mode, _Block) and mode.switch is switch and not mode.over:
                mode.end()
                return


class Switch(TorchFunctionMode):
    """What `use()` returns; `report()` lists what was replaced and what was not, also while the block runs.

    A context manager that may be entered again, also inside its own block, and a decorator.
    """

    def __init__(self, products: Products | None = None, samples: range | None = None) -> None:
        super().__init__()
        self._products, self._samples = products, samples
        self._counts: Counter[tuple[str, bool, str]] = Counter()
        self._operators: Counter[str] = Counter()
        self._compiled: Counter[str] = Counter()  # those of the operators that compiled code called
        self._graphs: list[Counter[tuple[str, bool, str]]] = []  # what each compilation traced
        self._compilation: tuple[Any, int] | None = None  # the last one, and its attempt

    def __enter__(self) -> Self:
        for mode in modes.stack():
            if isinstance(mode, _Block) and mode.over:
                modes.remove(mode)
        block, _entering.block = _entering.block, None
        if block is None or block.switch is not self or block.over:
            block = _Block(self)  # not entered by a `with` statement
        block.entered = True
        modes.push(block)
        return self

    __exit__ = _End()

    def __call__(self, function: Function) -> Function:
        """The function with a block of this switch around every call; a generator runs in it, but not its caller."""
        if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
            raise InvalidProblemError(f"use: function is {function!r}; expected a function, not a class or coroutine")
        return context_decorator(lambda: self, function)  # type: ignore[no-any-return, no-untyped-call]

    def report(self) -> Report:
        """The calls so far, over every block that this switch was used for."""
        with _lock:
            lines = [Line(*key, count) for key, count in self._counts.items()]
            for key in dict.fromkeys([key for graph in self._graphs for key in graph]):
                counts = [graph[key] for graph in self._graphs if key in graph]
                lines.append(Line(f"{key[0]} (compiled)", *key[1:], sum(counts), len(counts)))
            operators, compiled = dict(self._operators), dict(self._compiled)
        if _NOT_HELD:
            lines.insert(0, Line("torch.utils.checkpoint.checkpoint", False, f"recomputation: {_NOT_HELD}", 0))
        return Report(tuple(lines), operators, compiled)

    def _count(self, function: str, replaced: bool, reason: str = "") -> None:
        if torch.compiler.is_compiling():
            self._count_traced(function, replaced, reason)
        elif replaced or not self._comes_again():
            with _lock:
                self._counts[function, replaced, reason] += 1

    def _comes_again(self) -> bool:
        """Whether what is passed on meets this switch once more, which was entered in its own block."""
        return self in _active()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _count_traced(self, function: str, replaced: bool, reason: str) -> None:
        # torch.compile calls this while it traces, and leaves it out of the graph. A switch made inside the compiled
        # function is a stand-in without fields while that is traced.
        if getattr(self, "_graphs", None) is None:
            return
        with _lock:
            context = CompileContext.try_get()
            compilation = context, getattr(context, "attempt", 0)
            if self._compilation is None or self._compilation[0] is not context:
                self._graphs.append(Counter())
            elif self._compilation != compilation:  # it begins anew, as after a break of the graph
                self._graphs[-1].clear()
            self._compilation = compilation
            self._graphs[-1][function, replaced, reason] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            if func is checkpoint:  # which would be traced without the switch
                with self:  # changes the stack once outside of the checkpoint, in which the first change is refused
                    pass
                return func(self._entered(args[0]), *args[1:], **(kwargs or {}))
            return self._handle(func, args, kwargs or {})
        return self._handle_eagerly(func, types, args, kwargs or {})

    def _entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call

    # Not to be compiled by itself where torch.compile meets it outside of a graph: calls would be counted once.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _handle_eagerly(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(func, OpOverload) and func.namespace == "isograd":
            if not self._comes_again():
                with _lock:
                    self._operators[func._schema.name] += 1
                    if not _is_called_by_name():
                        self._compiled[func._schema.name] += 1
        elif func in OPENED_BACKWARDS and all(map(is_plain, types)):
            with self:
                return OPENED_BACKWARDS[func](*args, **kwargs)
        return self._handle(func, args, kwargs)

    def _handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._products is not None and func in PRODUCTS and of_floats(args, kwargs):
            found: tuple[str, Callable[..., Any]] | None = PRODUCTS[func]
        else:
            found = REPLACED.get(func)
        if self._samples is not None and func in SAMPLED:
            name, call = SAMPLED[func]
            found = name, functools.partial(call, samples=self._samples)
        if found is not None:
            name, call = found
            try:
                result = call(*args, **kwargs)
            except NOT_SERVED as error:
                self._count(name, False, str(error))
                return func(*args, **kwargs)
            self._count(name, True)
            return result
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        left = LEFT.get(func) if self._samples is None else LEFT_OF_SAMPLES.get(func, LEFT.get(func))
        if left is not None and left.counts(args, kwargs):
            self._count(left.name, False, left.reason)
        return func(*args, **kwargs)


# As a frame of its own it would be taken for a graph; inlined into one it is traced as ever.
skip_code(Switch.__torch_function__.__code__)
skip_code(_Block.__torch_function__.__code__)


class _Traced(Switch):
    """A switch that is made in code that torch.compile traces, which knows the ends of torch's own modes only."""

    __enter__ = TorchFunctionMode.__enter__
    __exit__ = TorchFunctionMode.__exit__


def _active() -> list[Switch]:
    """The switches whose blocks this thread is in, from the outermost."""
    found = [mode.switch if isinstance(mode, _Block) and not mode.over else mode for mode in modes.stack()]
    return [mode for mode in found if isinstance(mode, Switch)]


_NOT_HELD = checkpoints.hold(_active)


def checked_products(name: str, products: Any) -> None:
    """Raise for another value of `products` than there is."""
    if products not in (None, "int16"):
        raise InvalidProblemError(f"{name}: products is {products!r}; accepted: int16, None")


@overload
def use(function: None = None, *, products: Products | None = None, samples: range | None = None) -> Switch: ...
@overload
def use(function: Function, *, products: Products | None = None, samples: range | None = None) -> Function: ...


def use(
    function: Function | None = None, *, products: Products | None = None, samples: range | None = None
) -> Switch | Function:
    """A context manager inside which torch's functions run on isograd's kernels where those can serve the call.

    Replaced: `torch.softmax`, `torch.log_softmax`, the same in `torch.special` and `torch.nn.functional`, the tensor
    methods, and so `nn.Softmax`, `nn.LogSoftmax`, `softmin`, and attention modules that return weights;
    `scaled_dot_product_attention`, and so `nn.MultiheadAttention` and the layers of `nn.Transformer`; `gather`,
    `take_along_dim`, `scatter_add`, `index_add`, `index_select` and `topk` of `torch` and of tensors (in place too);
    `embedding`, `cross_entropy`, `kl_div`, `layer_norm`, `rms_norm`, `silu` and `gelu` of `torch.nn.functional`, and so
    their modules.
    `gumbel_softmax` keeps torch's generator, whose numbers a seed of isograd's could not continue, and runs its softmax
    on isograd; a dropout inside attention takes a seed from that generator and drops elsewhere than torch does.

    What torch leaves open is defined: among equal elements topk takes the lower index first. Negative indices of
    gather and scatter_add, an error to torch, count from the end; where kl_div's target is 0 its term is 0 for any
    input. A query that sees no key gives 0, and of is_causal beside a mask, an error to torch, both count.

    Left to torch and listed: what isograd cannot serve (other dtypes, a device without a kernel, tensor subclasses,
    `out`, the smallest elements in topk, options of embedding such as max_norm, head dimensions above 256), operations
    that compute a softmax inside one kernel (the backends of attention when called by their own names,
    `F.linear_cross_entropy` without `products`), sums of other kinds over repeated indices (`embedding_bag`,
    `scatter_reduce`, `scatter_` with `reduce`, `index_put` with `accumulate`, `bincount` with weights, `w[ids]` where w
    has a gradient), and what adds up in an order of torch's own: products, convolutions, other norms, sums, means and
    other losses.
    `flex_attention` is not seen, nor are the sums that a gradient of torch's own makes, of a broadcast operand for
    example.

        with isograd.torch.use() as switch:
            model(batch)
        print(switch.report())

        @isograd.torch.use()      # around every call
        def step(batch): ...

    products: "int16" replaces products of float16, bfloat16 and float32 too, by `isograd.torch.matmul` and `linear`
    with that precision: `@`, `matmul`, `mm`, `bmm`, `mv`, `dot`, `addmm`, `addmv`, `baddbmm`, `linear`, `einsum` of two
    operands, and so `nn.Linear` and the layers of `nn.Transformer`; `scaled_dot_product_attention` is computed by them
    as well, all scores at once, and `F.linear_cross_entropy` of class indices: in 16 bits a chunk of logits at a time,
    by `isograd.torch.linear_cross_entropy` with `preference="order_free"`. Forward and backward no order shows then. An
    addition is one after the product's rounding. Where nothing is summed, in an `einsum` or in a product of float32
    with a single term, elements are multiplied and rounded once. An inner block says anew what it replaces: in one
    without products attention is computed by the ordinary kernels.

    samples: which samples of a step the block's tensors hold, `range(first, stop)`, for dropout that does not depend on
    how the step is split. Then `torch.nn.functional.dropout` and `nn.Dropout` are `isograd.torch.dropout`: element e of
    a sample, counted in C order, has the number `sample * elements of a sample + e`, and the seed of every call is
    drawn from torch's generator on the CPU, so that checkpoints drop alike when they recompute. Seed it alike before
    every micro-batch of a step, on every rank:

        for samples in (range(0, 4), range(4, 8)):
            torch.manual_seed(step)
            with isograd.torch.use(samples=samples):
                loss = model(batch[samples.start : samples.stop])
                loss.backward()

    Tensors have to hold one sample after the other: [B, ...] or [B * L, ...], not [L, B, ...]. Left to torch and
    listed: a number of elements that the samples do not divide, other dropouts (`dropout2d`, `alpha_dropout`,
    `torch.dropout_`), members of vmap, and what torch.compile traces or a CUDA graph captures. Attention's own dropout
    counts the sequences of a call from 0, in every block.

    The block is this thread's. It holds for gradients that are computed in it, and for the recomputation of a
    checkpoint of `torch.utils.checkpoint` that was made in it, wherever the gradient is computed; for checkpoints of
    other libraries compute the gradient in the block.

    What torch.compile traces inside it, checkpoints included, is replaced too and counted once for each graph; what
    compiled code runs is counted by the operators' names, also where another block's switch met the trace. Inductor
    fuses the elementwise operations between those to other bits than eager mode has. TorchScript is out of reach and
    not listed.
    """
    checked_products("use", products)
    checked_samples("use", samples)
    switch = _Traced(products, samples) if torch.compiler.is_compiling() else Switch(products, samples)
    return switch if function is None else switch(function)
