"""Torch operators from declarations: schema, implementation, fake, autograd, vmap, autocast, sharding.

    bind.operator(SPARSEMAX_BACKWARD)
    _sparsemax = bind.function(bind.operator(SPARSEMAX))

In torch's spelling `x` is `input` and `axis` is `dim`. An operator takes the inputs, the attributes, and for each
optional output whether it is asked for; what is not asked for comes as an empty tensor. The gradient of an operation is
its vjp; what does not follow from the declaration is an argument of `operator`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isograd.core import call as core_call
from isograd.core import encoder, faults, functional
from isograd.core.attributes import DtypeOf, Measured, SizeOf, Word, signed
from isograd.core.checks import INDEX_DTYPES, real_number
from isograd.core.operands import Array, Like, Loss
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError, IsogradError, UnsupportedError
from isograd.runtime.memory import with_huge_pages
from isograd.torch import batching, define, derivatives, sharding
from isograd.torch.batching import OF_ELEMENTS
from isograd.torch.tensors import (
    DTYPES,
    NAMES,
    Described,
    checked_index,
    empty,
    integer,
    launch,
    normalized_dim,
    require_dense,
    require_device,
    require_index,
    require_storage,
    require_tensor,
    usable,
    usable_index,
    wide,
    work_dtype,
)

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_SPELLED = {"x": "input", "axis": "dim", "shape": "size"}
_WORD = (1 << 64) - 1
Values = tuple[Any, ...]
Named = Mapping[str, Any]
_bound: dict[str, "Bound"] = {}


def _measure(a: Measured) -> Callable[[str, Any], Any]:
    """How an attribute is measured from a tensor; a dtype without a look at what else may be wrong with it."""
    if not isinstance(a, DtypeOf):
        return a.measure
    return lambda name, t: a.default if t is None else NAMES.get(t.dtype) or a.measure(name, t)


class Bound:
    """The operator of an operation, and what is said of its arguments: inputs, then settings."""

    call: define.Operator
    function: Callable[..., Any]  # see `function`

    def __init__(self, op: Operation) -> None:
        self.op = op
        self.flags = tuple([key for key, a in op.outputs.items() if a.optional])
        self.has_loss = any(isinstance(a, Loss) for a in op.outputs.values())
        if self.has_loss:
            self.flags += ("narrow",)  # whether it is rounded to the inputs' dtype, as torch's are
        self.names = tuple([_SPELLED.get(key, key) for key in (*op.inputs, *op.arguments, *self.flags)])
        settings = [*[a.default for a in op.arguments.values()], *[False] * len(self.flags)]
        self._defaults = (*[None] * len(op.inputs), *settings)
        self._inputs, self.problem = len(op.inputs), None if op.shaped else list(op.inputs).index(op.problem)
        self.axis, self.reduction_place = (
            list(op.arguments).index(key) if key in op.given else None for key in ("axis", "reduction")
        )
        self.kinds = tuple(zip(self.names, op.inputs.values(), strict=False))
        self._optional = tuple([i for i, key in enumerate(op.inputs) if key in op.optional])
        self._words = tuple([i for i, a in enumerate(op.arguments.values()) if isinstance(a, Word)])
        measured = [
            (key, list(op.inputs).index(a.of), a) for key, a in op.attributes.items() if isinstance(a, Measured)
        ]
        self._sizes = tuple([(key, i, isinstance(a, SizeOf)) for key, i, a in measured if not isinstance(a, DtypeOf)])
        # For each attribute its place among those that are given, or how it is measured and from which input.
        self._found: list[tuple[int, Any, int]] = (
            [(list(op.given).index(key), None, 0) for key in op.given] if measured else []
        )
        for key, i, a in measured:
            self._found.insert(list(op.attributes).index(key), (0, _measure(a), i))
        dtypes = [op.attributes.get(a.dtype) for a in op.inputs.values()]
        fixed = [i for i, a in enumerate(op.inputs.values()) if a.dtype in INDEX_DTYPES]
        fixed += [self.problem] if op.integral and self.problem is not None else []
        self.indices = (*fixed, *[i for i, of in enumerate(dtypes) if isinstance(of, DtypeOf) and of.index])

    def schema(self) -> str:
        """The operator's schema."""
        op, names = self.op, iter(self.names)
        none = "" if any(a.required for a in op.arguments.values()) else "=None"
        arguments = [
            f"Tensor? {next(names)}{none}" if a.optional else f"Tensor {next(names)}" for a in op.inputs.values()
        ]
        arguments += [
            f"{a.kind} {next(names)}"
            + ("" if a.required else f'="{a.default}"' if a.kind == "str" else f"={a.default}")
            for a in op.arguments.values()
        ]
        arguments += [f"bool {name}=False" for name in names]
        returns = ", ".join(["Tensor"] * len(op.outputs))
        return f"{op.name}({', '.join(arguments)}) -> {f'({returns})' if len(op.outputs) > 1 else returns}"

    def split(self, args: Values, named: Named | None = None) -> tuple[Values, Values]:
        """(inputs, settings) of a call, with what was left out or came by name."""
        if len(args) < len(self.names):
            args = (*args, *self._defaults[len(args) :])
        if named:
            args = tuple([named.get(name, value) for name, value in zip(self.names, args, strict=True)])
        return args[: self._inputs], args[self._inputs : len(self.names)]

    def asked(self, settings: Values) -> list[tuple[str, Array, bool]]:
        """(name, array, whether it is computed) of every output."""
        flags = dict(zip(self.flags, settings[len(self.op.arguments) :], strict=False))
        return [(key, a, flags.get(key, True)) for key, a in self.op.outputs.items()]

    def narrow(self, settings: Values) -> bool:
        """Whether the loss is rounded to the inputs' dtype."""
        return self.has_loss and bool(settings[-1])

    def has_parts(self, settings: Values) -> bool:
        """Whether rows, or elements, are computed alone."""
        return self.op.has_parts(dict(zip((*self.op.arguments, *self.flags), settings, strict=False)))

    def like(self, inputs: Values, settings: Values) -> Any:
        """What has the problem's shape, dtype and device."""
        if self.problem is None:
            return Described(tuple(settings[0]), settings[1], inputs[0].device)
        like = inputs[self.problem]
        if self.op.shape_of is None:
            return like
        named = dict(zip(self.op.inputs, inputs, strict=True))
        return Described(self.op.shape_of(self.op.name, named, self.named(inputs, settings)), like.dtype, like.device)

    def named(self, inputs: Values, settings: Values) -> Named:
        """The attributes that shapes follow from."""
        found = dict(zip(self.op.arguments, settings, strict=False))
        for key, i, size in self._sizes:
            if (tensor := inputs[i]) is None:
                found[key] = None
            elif size:
                found[key] = tensor.shape[-1] if len(tensor.shape) else 0
            else:
                found[key] = len(tensor.shape) > 1
        return found

    def along(self, settings: Values, shape: Any) -> int:
        """The axis counted from the front; the last one where there is none."""
        return normalized_dim(self.op.name, -1 if self.axis is None else settings[self.axis], shape)

    def reduction(self, settings: Values) -> str:
        """What becomes of losses."""
        return "none" if self.reduction_place is None else str(settings[self.reduction_place])

    def moved(self, settings: Values, axis: int) -> Values:
        """The settings for another axis."""
        return settings if self.axis is None else (*settings[: self.axis], axis, *settings[self.axis + 1 :])

    def unsigned(self, settings: Values) -> Values:
        """The settings with words, which a schema holds as signed integers, as they are."""
        return tuple([v & _WORD if i in self._words else v for i, v in enumerate(settings)])

    def fields(self, inputs: Values, settings: Values) -> Values:
        """The fields of the descriptor behind shape and dtype."""
        if self._words:
            settings = self.unsigned(settings)
        if self.has_loss:
            settings = settings[:-1]
        if self.problem is None:
            settings = settings[2:]
        name, count, given = self.op.name, len(self.op.given), [inputs[i] is not None for i in self._optional]
        if not self._found:
            return (*settings[:count], *given, *settings[count:]) if given else settings
        values = [settings[p] if measure is None else measure(name, inputs[i]) for p, measure, i in self._found]
        return (*values, *given, *settings[count:])

    def check(self, inputs: Values, settings: Values) -> int:
        """The axis, for tensors that go together, perhaps fake ones; else an error."""
        name, like = self.op.name, self.like(inputs, settings)
        of = "dtype" if self.problem is None else self.names[self.problem]
        if len(inputs) > 1:
            require_device(name, **dict(zip(self.names, inputs, strict=False)))
            for (key, array), tensor in zip(self.kinds, inputs, strict=True):
                if tensor is None or tensor is like:
                    continue
                if array.dtype in INDEX_DTYPES and NAMES.get(tensor.dtype) != array.dtype:
                    raise InvalidProblemError(f"{name}: {key} has dtype {tensor.dtype}; expected {array.dtype}")
                if not array.dtype and tensor.dtype is not (
                    dtype := work_dtype(like.dtype) if array.compute else like.dtype
                ):
                    raise InvalidProblemError(
                        f"{name}: {key} has dtype {tensor.dtype} and {of} {like.dtype}; expected "
                        f"{dtype if array.compute else 'the same'}"
                    )
                if isinstance(array, Like) and tensor.shape != like.shape:
                    raise InvalidProblemError(
                        f"{name}: {key} has shape {tuple(tensor.shape)} and {of} {tuple(like.shape)}; expected the same"
                    )
        (require_index if self.op.integral else require_storage)(name, like, of)
        axis, known = self.along(settings, like.shape), self.named(inputs, settings)
        for (key, array), tensor in zip(self.kinds, inputs, strict=True):
            if tensor is not None and not isinstance(array, Like):
                expected = array.shape(tuple(like.shape) or (1,) * self.op.least_rank, axis, known)
                if tuple(tensor.shape) != expected:
                    raise InvalidProblemError(f"{name}: {key} has shape {tuple(tensor.shape)}; expected {expected}")
        return axis

    def results(self, outputs: list[Tensor]) -> Any:
        """Outputs as the operator returns them."""
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    # --- implementations ---------------------------------------------------------------------------------------------
    def fake(self, *args: Any, **named: Any) -> Any:
        """The outputs without their contents."""
        inputs, settings = self.split(args, named)
        axis, like = self.check(inputs, settings), self.like(inputs, settings)
        shape, known = like.shape or (1,) * self.op.least_rank, self.named(inputs, settings)
        outputs = []
        for key, a, asked in self.asked(settings):
            if asked and key in self.op.alike:
                outputs.append(torch.empty_like(like))
                continue
            scalar = isinstance(a, OF_ELEMENTS) and not len(like.shape)
            size = (0,) if not asked else like.shape if scalar else a.shape(shape, axis, known)
            wider = a.compute and not self.narrow(settings)
            dtype = work_dtype(like.dtype) if wider else _DTYPES.get(a.dtype, like.dtype)
            outputs.append(empty(size, like, dtype))
        return self.results(outputs)

    def run(self, *args: Any, **named: Any) -> Any:
        """Compute, on any device that a kernel is registered for."""
        op = self.op
        inputs, settings = self.split(args, named)
        like = self.like(inputs, settings)
        if like.dim() < op.least_rank:
            return self._run_scalar(inputs, settings)
        device = like.device
        try:
            plan, expected, made = op.planned(
                device.type, like.shape, NAMES[like.dtype], *self.fields(inputs, settings)
            )
        except (IsogradError, KeyError):
            self.check(inputs, settings)  # which says it in torch's words
            raise
        operands: dict[str, Tensor] = {}
        given = inputs if len(expected) == len(inputs) else [t for t in inputs if t is not None]
        for (key, shape, dtype), tensor in zip(expected, given, strict=True):
            if tensor is not like and (
                tensor.shape != shape or NAMES.get(tensor.dtype) != dtype or tensor.device != device
            ):
                self.check(inputs, settings)
            taken = (usable_index if dtype in INDEX_DTYPES else usable)(op.name, key, tensor)
            operands[key] = taken if shape else taken.view(())
        for key, shape, dtype in made:
            if key in op.alike:
                operands[key] = with_huge_pages(torch.empty_like(like))
            else:
                operands[key] = with_huge_pages(torch.empty(shape, dtype=_DTYPES[dtype], device=device))
        launch(plan, **operands)
        if len(op.outputs) == 1:
            return operands[key].to(like.dtype) if self.narrow(settings) else operands[key]
        return tuple([operands[key] if key in operands else like.new_empty(0) for key in op.outputs])

    def rows_of_one(self, inputs: Values) -> Values:
        """Tensors without dimensions as rows of one element."""
        return tuple([t.reshape(1) if isinstance(a, Like) else t for (_, a), t in zip(self.kinds, inputs, strict=True)])

    def _run_scalar(self, inputs: Values, settings: Values) -> Any:
        self.check(inputs, settings)
        rows = self.rows_of_one(inputs)
        found = self.run(*rows, *self.moved(settings, 0))
        outputs = zip(self.asked(settings), found if isinstance(found, tuple) else (found,), strict=True)
        shaped = [t.view(()) if isinstance(a, OF_ELEMENTS) else t for (_, a, _), t in outputs]
        return self.results(shaped)

    def cast(self, *args: Any) -> Any:
        """As `run` under autocast: narrow inputs become float32."""
        inputs, settings = self.split(args)
        if self.has_loss:
            settings = settings[:-1]
        return self.call(*[t if t is None or t.dtype not in DTYPES else wide(t)[0] for t in inputs], *settings)

    def cuts(self, *args: Any) -> Iterator[tuple[list[int | None], list[int | None]]]:
        """The axes besides that of the rows, in every output and in every input that is given."""
        inputs, settings = self.split(args)
        shape, known = self.like(inputs, settings).shape, self.named(inputs, settings)
        axis = self.along(settings, shape)
        if self.has_parts(settings):
            for d in range(len(shape)):
                if d != axis or self.op.elementwise:
                    outputs = [a.place(axis, d, known) if asked else None for _, a, asked in self.asked(settings)]
                    given = zip(self.kinds, inputs, strict=True)
                    yield outputs, [a.place(axis, d, known) for (_, a), tensor in given if tensor is not None]


def operator(
    op: Operation,
    *,
    gradient: define.Gradient | None = None,
    derivative: Callable[..., Named] | None = None,
    tangent: Callable[..., Any] | None = None,
    batch: Callable[..., tuple[Any, Any]] | None = None,
    autocast: tuple[str, ...] = (),
    cuts: Callable[..., Iterator[Any]] | None = None,
) -> Bound:
    """Define the operator of an operation, after that of its vjp.

    gradient: what is saved and how both derivatives are taken, where no operation is the vjp. derivative: (inputs,
    settings, whether a gradient is needed, gradients of the outputs), all but the settings by name -> gradients of the
    inputs by name; for an operation without a vjp, which is differentiated a second time.
    tangent: (saved tensors, settings, tangents of the inputs) -> those of the outputs; where the Jacobian is not
    symmetric. batch: (operator, size, batch dimensions, *arguments) -> (outputs, theirs), where a batch is no dimension
    like the others. autocast: the devices under whose autocast narrow inputs become float32. cuts: where
    DTensors may be cut, for other arrays than rows.
    """
    bound = Bound(op)
    if gradient is not None:
        pass
    elif op.linear is not None:
        gradient = derivatives.linear(bound, op.linear)
    elif op.vjp is not None:
        gradient = derivatives.by_vjp(bound, _bound[op.vjp], tangent)
    else:
        gradient = derivatives.by_function(bound, derivative, tangent)
    bound.call = define.operator(
        bound.schema(),
        run=bound.run,
        fake=bound.fake,
        gradient=gradient,
        batch=batch or partial(batching.of_rows, bound),
        autocast=dict.fromkeys(autocast, bound.cast),
    )
    bound.function = function(bound)
    if not op.ordered:
        sharding.add(op.name, cuts or bound.cuts)
    _bound[op.name] = bound
    return bound


# --- functions -------------------------------------------------------------------------------------------------------
_PLAIN = {"float": float}  # which needs no look; integers have a range
_CHECKS: dict[str, Callable[[str, str, Any], Any]] = {
    "int": integer,
    "SymInt": integer,
    "float": real_number,
    "bool": lambda name, key, value: bool(value),
    "SymInt[]": lambda name, key, value: list(value),
    "ScalarType": lambda name, key, value: value if isinstance(value, torch.dtype) else getattr(torch, value),
}


def _word(name: str, key: str, value: Any) -> int:
    return signed(Word().plain(name, key, value))


def function(bound: Bound, called: str | None = None) -> Callable[..., Any]:
    """The function (inputs, attributes, optional outputs, out, dtype) -> outputs, which looks at what users bring.

    wanted: the names of the optional outputs that are asked for. out: where the output of an operation that has one
    goes, without a gradient. dtype: what inputs are converted to first. called: another name of the function. Inside an
    encoder the plan is recorded.
    """
    op, call, count = bound.op, bound.call, len(bound.op.inputs)
    name, arguments = called or op.name, bound.names[:count]
    required = [not a.optional for a in op.inputs.values()]
    kinds = zip(bound.names[count:], op.arguments.values(), strict=False)
    checks = [
        (_word if isinstance(a, Word) else _CHECKS.get(a.kind, a.plain), key, _PLAIN.get(a.kind)) for key, a in kinds
    ]
    flags, indices = bound.flags, bound.indices
    differentiable = op.gradients(_bound[op.vjp].op) if op.vjp else op.inputs
    constants = [i for i, key in enumerate(op.inputs) if key not in differentiable and i not in indices]

    def run(
        inputs: Values,
        attributes: Values,
        wanted: tuple[str, ...] = (),
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        if indices:
            inputs = tuple(
                [
                    checked_index(name, t, key) if i in indices and t is not None else t
                    for i, (key, t) in enumerate(zip(arguments, inputs, strict=True))
                ]
            )
        for i, (argument, tensor, needed) in enumerate(zip(arguments, inputs, required, strict=True)):
            if (needed or tensor is not None) and i not in indices:
                require_dense(name, tensor, argument, dtype)
        for i in constants:
            if inputs[i] is not None and inputs[i].requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(f"{name}: {arguments[i]} requires a gradient and gets none; detach() it")
        values = attributes
        for (_, _, plain), value in zip(checks, attributes, strict=True):
            if type(value) is not plain:
                values = tuple([check(name, key, v) for (check, key, _), v in zip(checks, attributes, strict=True)])
                break
        try:
            if out is None and not (encoder.recordings and _recorded()):
                if dtype is None:
                    return (
                        call(*inputs, *values, *[key in wanted for key in flags]) if flags else call(*inputs, *values)
                    )
                with call.without_autocast(inputs):
                    return call(*[t.to(dtype) for t in inputs], *values)
            return _into(bound, inputs, values, wanted, out, dtype)
        except IsogradError as error:
            if called is None:
                raise
            raise faults.named(called).renamed(error) from None

    return run


def _recorded() -> bool:
    """Whether an encoder records this thread's calls."""
    return not torch.compiler.is_compiling() and encoder.current() is not None


def _into(
    bound: Bound, inputs: Values, values: Values, wanted: tuple[str, ...], out: Tensor | None, dtype: torch.dtype | None
) -> Any:
    """Compute by the plan, into memory that was brought or for a recording."""
    op, like = bound.op, bound.like(inputs, values)
    if torch.compiler.is_compiling():
        assert out is not None
        return out.copy_(bound.function(inputs, values, wanted, None, dtype))
    if dtype not in (None, like.dtype):
        if encoder.recordings and _recorded():
            raise UnsupportedError(f"{op.name}: dtype is {dtype} for {like.dtype}; a recording contains no conversion")
        inputs = tuple([t.to(dtype) for t in inputs])
    if out is not None:
        require_tensor(op.name, out, "out")
    values = bound.unsigned(bound.moved(values, bound.along(values, like.shape)))
    with functional.unguarded():
        try:
            if like.dim() >= op.least_rank:
                return core_call.planned(op)(inputs, values, wanted, out)
            of_elements = isinstance(next(iter(op.outputs.values())), OF_ELEMENTS)
            row = out.view(1) if out is not None and of_elements and not out.dim() else out
            found = core_call.planned(op)(bound.rows_of_one(inputs), values, wanted, row)
        except IsogradError as error:
            raise faults.named(op.name, at=None, **_SPELLED).renamed(error) from None
        shaped = zip(op.outputs.values(), found if isinstance(found, tuple) else (found,), strict=False)
        return (
            out
            if out is not None
            else bound.results([t.view(()) if isinstance(a, OF_ELEMENTS) else t for a, t in shaped])
        )


def applied(op: Operation, inputs: Values, attributes: Values, wanted: tuple[str, ...], out: Any) -> Any:
    """The function of arrays for tensors: in its words, and without outputs that were not asked for."""
    bound = _bound[op.name]
    try:
        found = bound.function(inputs, attributes, wanted, out)
    except IsogradError as error:
        spelled = {_SPELLED[key]: key for key in (*op.inputs, *op.given) if key in _SPELLED}
        raise faults.named(op.name, at=None, **spelled).renamed(error) from None
    if isinstance(found, tuple):
        asked = [key for key, a in op.outputs.items() if not a.optional or key in wanted]
        found = tuple([t for key, t in zip(op.outputs, found, strict=False) if key in asked])
        return found if len(found) > 1 else found[0]
    return found
