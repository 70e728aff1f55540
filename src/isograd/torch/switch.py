"""A switch that runs an unmodified model on isograd's kernels where it can, and keeps a list of what it did."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isograd.errors import DeviceMismatchError, IndexOutOfRangeError, InvalidProblemError, UnsupportedError
from isograd.torch import dot_product, functional, indexing, losses


def _plain(kind: str) -> Callable[..., Tensor]:
    """torch.softmax, torch.special.softmax and the tensor method."""

    def call(input: Any, dim: Any, dtype: Any = None, *, out: Any = None) -> Tensor:  # noqa: A002
        return functional.forward(kind, _servable(kind, input), dim, dtype, out, ("input", "dim"))

    return call


def _functional(kind: str) -> Callable[..., Tensor]:
    """torch.nn.functional.softmax, which modules call; without a dim torch guesses one and warns."""

    def call(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:  # noqa: A002
        tensor = _servable(kind, input)
        if dim is None:
            dim = F._get_softmax_dim(kind, tensor.dim(), _stacklevel)  # type: ignore[attr-defined]
        return functional.forward(kind, tensor, dim, dtype, None, ("input", "dim"))

    return call


def _plainly(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of isograd.torch with torch's arguments, for plain tensors only."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                _servable(name, value)
        return call(*args, **kwargs)

    return checked


def _in_place(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method that writes into its tensor; torch sees a copy, which it differentiates and may refuse."""

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(call(self, *args, **kwargs))

    return method


_REPLACED: dict[Any, tuple[str, Callable[..., Any]]] = {}
for _kind in ("softmax", "log_softmax"):
    for _module, _name in ((torch, "torch"), (torch.special, "torch.special"), (Tensor, "torch.Tensor")):
        _REPLACED[getattr(_module, _kind)] = (f"{_name}.{_kind}", _plain(_kind))
    _REPLACED[getattr(F, _kind)] = (f"torch.nn.functional.{_kind}", _functional(_kind))

_INDEXING: tuple[Callable[..., Any], ...] = (
    indexing.gather,
    indexing.take_along_dim,
    indexing.scatter_add,
    indexing.index_add,
    indexing.index_select,
    indexing.topk,
)
_FUNCTIONAL: tuple[Callable[..., Any], ...] = (
    dot_product.scaled_dot_product_attention,
    indexing.embedding,
    losses.cross_entropy,
    losses.kl_div,
)
for _call in _INDEXING:
    _kind = _call.__name__
    for _module, _name in ((torch, "torch"), (Tensor, "torch.Tensor")):
        _REPLACED[getattr(_module, _kind)] = (f"{_name}.{_kind}", _plainly(_kind, _call))
    if hasattr(Tensor, f"{_kind}_"):
        _method = _plainly(_kind, _in_place(_call))
        _REPLACED[getattr(Tensor, f"{_kind}_")] = (f"torch.Tensor.{_kind}_", _method)
for _call in _FUNCTIONAL:
    _kind = _call.__name__
    _REPLACED[getattr(F, _kind)] = (f"torch.nn.functional.{_kind}", _plainly(_kind, _call))

_FUSED = "computes its softmax inside one fused operation of torch's"
_SUMS = "adds up repeated indices in a way that isograd has no operator for"
_NOT_REPLACED: dict[Any, tuple[str, str]] = {}
for _module, _name, _kind, _reason in (
    (F, "torch.nn.functional", "linear_cross_entropy", _FUSED),
    (torch._C._nn, "torch._C._nn", "cross_entropy_loss", _FUSED),
    (torch, "torch", "_native_multi_head_attention", _FUSED),
    (torch, "torch", "_transformer_encoder_layer_fwd", _FUSED),
    (torch, "torch", "_scaled_dot_product_attention_math", _FUSED),
    (torch, "torch", "_scaled_dot_product_cudnn_attention", _FUSED),
    (torch, "torch", "_scaled_dot_product_efficient_attention", _FUSED),
    (torch, "torch", "_scaled_dot_product_flash_attention", _FUSED),
    (torch, "torch", "_scaled_dot_product_flash_attention_for_cpu", _FUSED),
    (torch, "torch", "_softmax", _FUSED),
    (torch, "torch", "_log_softmax", _FUSED),
    (torch, "torch", "_masked_softmax", _FUSED),
    (torch.sparse, "torch.sparse", "softmax", _FUSED),
    (torch.sparse, "torch.sparse", "log_softmax", _FUSED),
    (F, "torch.nn.functional", "embedding_bag", _SUMS),
    (torch, "torch", "scatter_reduce", _SUMS),
    (torch, "torch", "index_reduce", _SUMS),
    (Tensor, "torch.Tensor", "scatter_reduce", _SUMS),
    (Tensor, "torch.Tensor", "scatter_reduce_", _SUMS),
    (Tensor, "torch.Tensor", "index_reduce", _SUMS),
    (Tensor, "torch.Tensor", "index_reduce_", _SUMS),
):
    if hasattr(_module, _kind):  # some are younger than the oldest torch that is served
        _NOT_REPLACED[getattr(_module, _kind)] = (f"{_name}.{_kind}", _reason)


def _opened(function: FunctionType) -> FunctionType:
    """A copy of a torch function written in Python whose inner calls meet the mode.

    The original hands itself to the mode first, and a mode is off while it handles a function.
    """

    def nobody_overrides(*tensors: Any) -> bool:
        return False

    scope = dict(function.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = nobody_overrides
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPENED: dict[Any, FunctionType] = {
    function: _opened(function)
    for function in (F.softmin, F.gumbel_softmax, F.multi_head_attention_forward)
    if isinstance(function, FunctionType)
}


def _servable(kind: str, input: Any) -> Tensor:  # noqa: A002
    """The tensor, or UnsupportedError for what would lose its meaning on the way."""
    if type(input) not in (Tensor, torch.nn.Parameter) and not _is_fake(input):
        raise UnsupportedError(f"{kind}: input is a {type(input).__name__}; accepted: plain tensors")
    tensor: Tensor = input
    return tensor


def _is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of call: the function's name, whether isograd computed it, why not, and how often."""

    function: str
    replaced: bool
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a switch saw, in order of first appearance; `print` shows it as a table."""

    lines: tuple[Line, ...]

    @property
    def replaced(self) -> dict[str, int]:
        """How often each function was computed by isograd."""
        return self._sum(True)

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
        if not self.lines:
            return "nothing was called that isograd computes"
        width = max(len(line.function) for line in self.lines)
        return "\n".join(
            f"{line.count:>8} x {line.function:<{width}}  "
            + ("replaced" if line.replaced else f"left to torch: {line.reason}")
            for line in self.lines
        )


_lock = threading.RLock()  # a signal handler or a finalizer may call torch while it is held
# Errors after which torch computes the call, or raises an error of its own for it.
_NOT_SERVED = (UnsupportedError, InvalidProblemError, IndexOutOfRangeError, DeviceMismatchError, TypeError)


class Switch(TorchFunctionMode):
    """What `use()` returns; `report()` lists what was replaced and what was not, also while the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, bool, str]] = Counter()

    def report(self) -> Report:
        """The calls so far, over every block that this switch was used for."""
        with _lock:
            counts = list(self._counts.items())
        return Report(tuple([Line(*key, count) for key, count in counts]))

    def _count(self, function: str, replaced: bool, reason: str = "") -> None:
        if torch.compiler.is_compiling():
            self._count_traced(function, replaced, reason)
            return
        with _lock:
            self._counts[function, replaced, reason] += 1

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _count_traced(self, function: str, replaced: bool, reason: str) -> None:
        # torch.compile calls this while it traces, and leaves it out of the graph. A switch made inside the compiled
        # function is a stand-in without fields while that is traced.
        counts = getattr(self, "_counts", None)
        if counts is not None:
            with _lock:
                counts[f"{function} (compiled)", replaced, reason] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REPLACED:
            name, call = _REPLACED[func]
            try:
                result = call(*args, **kwargs)
            except _NOT_SERVED as error:
                self._count(name, False, str(error))
                return func(*args, **kwargs)
            self._count(name, True)
            return result
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if func in _NOT_REPLACED:
            self._count(_NOT_REPLACED[func][0], False, _NOT_REPLACED[func][1])
        return func(*args, **kwargs)


def use() -> Switch:
    """A context manager inside which torch's functions run on isograd's kernels where those can serve the call.

    Replaced: `torch.softmax`, `torch.log_softmax`, the same in `torch.special` and `torch.nn.functional`, the tensor
    methods, and so `nn.Softmax`, `nn.LogSoftmax`, `softmin`, and attention modules that return weights;
    `scaled_dot_product_attention`, and so `nn.MultiheadAttention` and the layers of `nn.Transformer`; `gather`,
    `take_along_dim`, `scatter_add`, `index_add`, `index_select` and `topk` of `torch` and of tensors (in place too);
    `embedding`, `cross_entropy` and `kl_div` of `torch.nn.functional`, and so their modules. `gumbel_softmax` keeps
    torch's generator, whose numbers a seed of isograd's could not continue, and runs its softmax on isograd; a dropout
    inside attention takes a seed from that generator and drops elsewhere than torch does.

    What torch leaves open is defined: among equal elements topk takes the lower index first. Negative indices of
    gather and scatter_add, an error to torch, count from the end; where kl_div's target is 0 its term is 0 for any
    input. A query that sees no key gives 0, and of is_causal beside a mask, an error to torch, both count.

    Left to torch and listed: what isograd cannot serve (other dtypes, a device without a kernel, tensor subclasses,
    `out`, the smallest elements in topk, options of embedding such as max_norm, head dimensions above 256), operations
    that compute a softmax inside one kernel (the backends of attention when called by their own names,
    `F.linear_cross_entropy`), and sums of other kinds over repeated indices (`embedding_bag`, `scatter_reduce`).
    Indexing with brackets and `flex_attention` are not seen.

        with isograd.torch.use() as switch:
            model(batch)
        print(switch.report())

    The block is this thread's. What torch.compile traces inside it is replaced too and counted once for each trace;
    TorchScript is out of reach and not listed.
    """
    return Switch()
