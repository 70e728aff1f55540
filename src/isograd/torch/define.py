"""How an operator of the library is defined for torch.

    GATHER = define.operator(
        "gather(Tensor input, int dim, Tensor index) -> Tensor",
        run=...,                                   # computes, on any device that a kernel is registered for
        fake=...,                                  # shapes and dtypes alone: meta and fake tensors, torch.compile
        gradient=define.Gradient(save, backward, tangent),
        batch=...,                                 # vmap
        autocast={"CUDA": ...},
    )

All take the schema's arguments in its order. Operators are differentiated by their kernels at the Autograd key. A call
with ordinary tensors outside of torch's modes and transforms goes straight to the implementation or its node, which the
dispatcher would find after two more turns through Python; what implementations do on a GPU is replayed (`replay.py`).
Where torch.compile traces symbols for arguments of type float, a tensor of their values goes along: see `Numbered`.
`torch.library.register_autograd` would be shorter, but refuses torch.func's transforms. A single-level function is a
node for the one level that the kernel serves, so that torch.func, double backward and forward mode compose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from isograd.errors import InvalidProblemError
from isograd.torch.replay import replayed

# A fragment, so that every family can add operators to the namespace.
_library: Any = torch.library.Library("isograd", "FRAGMENT")  # type: ignore[no-untyped-call]


class Gradient(NamedTuple):
    """The derivatives of an operator.

    save: (node, inputs, output) -> the tensors that the derivatives read, each an input, an output or None; anything
    else that they need becomes an attribute of the node. `node.mark_non_differentiable(output)` where one has none.
    backward: (node, saved, *gradients of the outputs) -> the gradients of the inputs, None for what has none; those at
    the end may be left out. `node.needs_input_grad` says which are asked for. The gradient of an output that nothing
    used is zeros, or None where the operator has several outputs.
    tangent: (node, saved, *tangents of the inputs) -> those of the outputs, for forward mode; a tangent is None for
    what is not a tensor or has none.
    """

    save: Callable[..., Sequence[Tensor | None]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    tangent: Callable[..., Any]


def operator(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    batch: Callable[..., Any],
    gradient: Gradient | None = None,
    autocast: Mapping[str, Callable[..., Any]] | None = None,
) -> Operator:
    """Define `isograd::<schema>` and return it.

    batch: (operator, size, in_dims, *inputs) -> (outputs, their batch dimensions). autocast: for "CUDA" or "CPU", what
    is called in the operator's place under autocast, which is off in there.
    """
    name = schema.partition("(")[0]
    numbered = "float" in schema
    run = replayed(run)
    tags = (torch.Tag.pt2_compliant_tag, *(_READS_THE_CPU if numbered else ()))
    _library.define(_with_numbers(schema) if numbered else schema, tags=tags)
    op: Any = getattr(torch.ops.isograd, name).default
    autocast = autocast or {}
    call = Numbered(op, run, autocast) if numbered else Operator(op, run, autocast)
    if isinstance(call, Numbered):
        run, fake, gradient, batch, autocast = call.adapted(run, fake, gradient, batch, autocast)
    # One implementation for all devices: the registry knows which have a kernel, and says so where none does.
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"isograd::{name}", fake, lib=_library)
    if gradient is not None:
        call.apply = _node(op, gradient, call.plain).apply
        _library.impl(name, _differentiated(call), "Autograd", with_keyset=True)

    def members(size: int, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return batch(call, size, in_dims, *args)

    torch.library.register_vmap(
        f"isograd::{name}", lambda info, in_dims, *args: members(info.batch_size, in_dims, *args), lib=_library
    )
    _library.impl(name, _batched_gradients(members), "Batched")
    for device, rule in autocast.items():
        _library.impl(name, _without_autocast(device, rule), f"Autocast{device}")
    return call


# --- calls -----------------------------------------------------------------------------------------------------------
_PLAIN = (Tensor, torch.nn.Parameter)


def _is_unresolved(t: Tensor) -> bool:
    """Whether the dispatcher has something to do before an implementation sees the tensor."""
    return torch._C._dispatch_isTensorSubclassLike(t) or t.is_neg() or t._is_zerotensor()


def _direct() -> bool:
    """Whether no mode, transform or trace is between a caller and an implementation."""
    c = torch._C
    return not (
        torch.compiler.is_compiling()
        or c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or transforms_active()
        or forward_ad._current_level >= 0
        or c._get_tracing_state()
    )


def repeated(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of positional arguments whose calls with ordinary tensors on a GPU are replayed, and no others."""
    fast = replayed(run)

    def call(*args: Any) -> Any:
        if not _direct():
            return run(*args)
        recording = torch.is_grad_enabled()
        for t in args:
            if isinstance(t, Tensor) and (
                type(t) not in _PLAIN or not t.is_cuda or _is_unresolved(t) or (recording and t.requires_grad)
            ):
                return run(*args)
        return fast(*args)

    return call


class Operator:
    """An operator as the library calls it.

    `overload` is torch's; `plain` is the implementation, `apply` the node that records a gradient.
    """

    apply: Callable[..., Any] | None = None

    def __init__(self, op: Any, run: Callable[..., Any], autocast: Mapping[str, Any]) -> None:
        self.overload, self.plain = op, run
        self._schema, self._name, self.__name__ = op._schema, op._name, op.__name__
        arguments = op._schema.arguments
        self.tensors = tuple([i for i, a in enumerate(arguments) if "Tensor" in str(a.type)])  # optional ones too
        # Calls arrive without the arguments at the end that have their default.
        self.every = tuple([a.default_value if a.has_default_value() else None for a in arguments])
        self._autocast = tuple([device.lower() for device in autocast])

    def __call__(self, *args: Any) -> Any:
        """Call the operator; arguments at the end that have a default may be left out."""
        return self._called(args) if _direct() else self.overload(*args)

    def without_autocast(self, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """A block in which autocast leaves the operator's arguments as they are."""
        if self._is_autocast(args):
            return torch.autocast(args[self.tensors[0]].device.type, enabled=False)
        return nullcontext()

    def _called(self, args: tuple[Any, ...]) -> Any:
        """Call it where nothing but the tensors could be in between."""
        if self._autocast and torch._C._is_any_autocast_enabled() and self._is_autocast(args):
            return self.overload(*args)
        recorded, given = False, len(args)
        for i in self.tensors:
            if i < given and (t := args[i]) is not None:
                if type(t) not in _PLAIN or not (t.is_cuda or t.is_cpu) or _is_unresolved(t):
                    return self.overload(*args)
                recorded = recorded or t.requires_grad
        if not recorded or not torch.is_grad_enabled():
            return self.plain(*args)
        if self.apply is not None:
            return self.apply(*args, *self.every[given:], None)
        with torch._C._AutoDispatchBelowAutograd():
            return self.plain(*args)

    def _is_autocast(self, args: tuple[Any, ...]) -> bool:
        device = args[self.tensors[0]].device.type
        return device in self._autocast and torch.is_autocast_enabled(device)


# --- numbers ---------------------------------------------------------------------------------------------------------
_PLACEHOLDER = 0.5  # which every check of an argument of type float lets pass
# A captured CUDA graph would repeat the numbers, or the seed, of the call that was captured; older versions of torch
# make none where a tensor is on the CPU.
_READS_THE_CPU = tuple([getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)])


def _with_numbers(schema: str) -> str:
    return schema.replace(") ->", ", Tensor? numbers=None) ->", 1)


def _known(value: Any) -> bool:
    """Whether a number is the same whenever a trace is run: no tensor, and no symbol of torch.compile's."""
    if isinstance(value, Tensor):
        return False
    if value is None or not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def _number(value: Any) -> Tensor:
    """A number as a tensor; a sum is what torch.compile turns into one that has the symbol as its input."""
    if isinstance(value, Tensor):
        return value
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return zero.add(value)


class Numbered(Operator):
    """An operator with arguments of type float, which may also be tensors without dimensions: float64, on the CPU.

    AOTAutograd makes a graph for every value of a symbol that reaches an argument of type float. Where one is not
    `_known`, all those that are not None travel in a last argument, `numbers`, and implementations find them there.
    """

    def __init__(self, op: Any, run: Callable[..., Any], autocast: Mapping[str, Any]) -> None:
        super().__init__(op, run, autocast)
        self.defaults = self.every[:-1]
        self.tensors = self.tensors[:-1]
        self.floats = tuple([i for i, a in enumerate(op._schema.arguments) if "float" in str(a.type)])

    def __call__(self, *args: Any) -> Any:
        """Call the operator; arguments at the end that have a default may be left out."""
        if _direct():
            return self._called(args)
        for i in self.floats:
            if i < len(args) and not _known(args[i]):
                return self.overload(*self._collected(args))
        return self.overload(*args)

    def _collected(self, args: tuple[Any, ...]) -> list[Any]:
        collected = [*args, *self.defaults[len(args) :]]
        given = [i for i in self.floats if collected[i] is not None]
        numbers = torch.stack([_number(collected[i]) for i in given])
        for i in given:
            if not _known(collected[i]):
                collected[i] = _PLACEHOLDER
        return [*collected, numbers]

    def _replaced(self, args: tuple[Any, ...], read: Callable[[Tensor], Sequence[Any]]) -> tuple[Any, ...]:
        """The arguments without `numbers`, which have taken their places."""
        if len(args) <= len(self.defaults):
            return args
        *found, numbers = args
        if numbers is not None:
            given = [i for i in self.floats if found[i] is not None]
            for i, value in zip(given, read(numbers), strict=True):
                if found[i] == _PLACEHOLDER:  # what is known stays a float
                    found[i] = value
        return tuple(found)

    def _spread(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._replaced(args, Tensor.unbind)

    def adapted(
        self,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: Gradient | None,
        batch: Callable[..., Any],
        autocast: Mapping[str, Callable[..., Any]],
    ) -> tuple[Any, ...]:
        """What `operator` takes, for an operator with `numbers`."""
        count = len(self.defaults)

        def fake_adapted(*args: Any, numbers: Tensor | None = None, **kwargs: Any) -> Any:
            return fake(*args[:count], **kwargs)

        def batch_adapted(op: Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            return batch(op, size, in_dims[:count], *self._spread(args))

        if gradient is not None:
            save, backward, tangent = gradient
            gradient = Gradient(
                lambda node, inputs, output: save(node, self._spread(inputs), output),
                backward,
                lambda node, saved, *tangents: tangent(node, saved, *tangents[:count]),
            )
        return (
            lambda *args: run(*self._replaced(args, Tensor.tolist)),
            fake_adapted,
            gradient,
            batch_adapted,
            {device: lambda *args, rule=rule: rule(*self._spread(args)) for device, rule in autocast.items()},
        )


# --- gradients -------------------------------------------------------------------------------------------------------
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
transforms_active = torch._C._are_functorch_transforms_active


@contextmanager
def _differentiable() -> Iterator[None]:
    """Undo what torch does to a node's own code: cut it off from differentiation, which other levels still need."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def _primal(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else forward_ad.unpack_dual(tensor, level=0).primal  # type: ignore[no-untyped-call]


def _node(op: Any, gradient: Gradient, plain: Callable[..., Any]) -> Any:
    """The operator's node in autograd's graph.

    The dispatcher's keyset travels as an additional last input; without one the implementation `plain` is called.
    """
    save, differentiate, push = gradient
    count = len(op._schema.arguments) + 1
    given = count - 1 - ("float" in str(op._schema))  # what an implementation takes: without `numbers`
    padding = tuple([(None,) * (count - given) for given in range(count + 1)])
    several = len(op._schema.returns) > 1
    redispatch = op._handle.redispatch_boxed

    # Not a Function, whose `apply` is for several levels at once.
    class Node(_SingleLevelFunction):
        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            keyset, args = args[-1], args[:-1]
            if several:
                ctx.set_materialize_grads(False)
            if keyset is None:
                output = plain(*args[:given])
                ctx.save_for_backward(*save(ctx, args, output))
                return output
            with torch._C._AutoDispatchBelowAutograd():
                if transforms_active():
                    with _differentiable():
                        output = redispatch(keyset & _AFTER_AUTOGRAD, *args)
                else:
                    output = redispatch(keyset & _AFTER_AUTOGRAD, *args)
            saved = save(ctx, args, output)
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors  # which a checkpoint may compute again here, under its modes
            with torch._C.DisableTorchFunction():  # modes may be on, unlike in forward: `use()`, or a default device
                gradients = differentiate(ctx, saved, *grads)
            return gradients + padding[len(gradients)]

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            saved = [_primal(t) for t in ctx.saved_tensors]
            with _differentiable():
                return push(ctx, saved, *tangents[:-1])

    Node.__name__ = Node.__qualname__ = f"isograd_{op._schema.name.partition('::')[2]}"
    return Node


def _differentiated(call: Operator) -> Callable[..., Any]:
    """The kernel at the Autograd key."""
    apply: Any = call.apply
    redispatch = call.overload._handle.redispatch_boxed
    tensors, defaults = call.tensors, call.every
    count = len(defaults)

    def recorded(args: tuple[Any, ...]) -> bool:
        if torch.is_grad_enabled():
            for i in tensors:
                if i < len(args) and (t := args[i]) is not None and t.requires_grad:
                    return True
        if forward_ad._current_level >= 0 or transforms_active():
            return True
        # A graph of torch.compile enters levels of forward mode that Python's counter does not know.
        first = args[tensors[0]]
        return isinstance(first, FunctionalTensor)

    def kernel(keyset: Any, *args: Any) -> Any:
        if not recorded(args):
            with torch._C._AutoDispatchBelowAutograd():
                return redispatch(keyset & _AFTER_AUTOGRAD, *args)
        if len(args) < count:
            args += defaults[len(args) :]
        if not transforms_active():
            return apply(*args, keyset)
        with enable_single_level_autograd_function():
            return apply(*args, keyset)

    return kernel


# --- autocast --------------------------------------------------------------------------------------------------------
def _without_autocast(device: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel at a device's autocast key."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return rule(*args)

    return kernel


# --- vmap ------------------------------------------------------------------------------------------------------------
def batched(tensor: Tensor, batch_dim: int | None, size: int) -> Tensor:
    """The batch in front; where there is none, every member reads the same memory."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _batched_gradients(members: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel at the key of torch's older vmap, which batched gradients (`is_grads_batched`) still take."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor

    def kernel(*args: Any) -> Any:
        deepest = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and is_batched(a)]
        for level in range(deepest, 0, -1):
            # What has no batch at the level gets one without members here.
            parts = {i: torch._remove_batch_dim(args[i], level, 0, 0) for i in places}
            parts = {i: part for i, part in parts.items() if part.shape[0]}
            if parts:
                break
        else:
            raise InvalidProblemError("vmap over an empty batch")
        size = next(iter(parts.values())).shape[0]
        in_dims = tuple([0 if i in parts else None for i in range(len(args))])
        outputs, dims = members(size, in_dims, *[parts.get(i, a) for i, a in enumerate(args)])
        if isinstance(outputs, Tensor):
            return torch._add_batch_dim(outputs, dims, level)
        return tuple(
            [o if d is None else torch._add_batch_dim(o, d, level) for o, d in zip(outputs, dims, strict=True)]
        )

    return kernel


def one_by_one(op: Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """The batching rule of an operator that has no faster one: its results for every member, stacked."""
    if size == 0:
        raise InvalidProblemError(f"{op._name}: vmap over an empty batch")
    results = [
        op(*[a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)])
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple([torch.stack(outputs) for outputs in zip(*results, strict=True)])
    return stacked, (0,) * len(stacked)
