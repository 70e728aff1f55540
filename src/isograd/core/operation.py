"""What an operation is, declared once; plans, front ends, `isograd verify` and tests read it.

    SPARSEMAX = Operation(
        "sparsemax",
        attributes={"axis": Axis()},
        inputs={"x": Like()},
        outputs={"y": Like(over=("x",))},
        reference=reference.sparsemax, oracle=reference.oracle_sparsemax,
        bound=bounds.sparsemax, formula="ulp(y) + 2^-42",
        vjp="sparsemax_backward",
    )

Names say what belongs together. The vjp of an operation is another one, whose inputs are called like inputs and outputs
of the first, or `d` and the name of an output for its gradient; its outputs are `d` (or `d_`) and the names of inputs.
An attribute that both have is handed on. An output without a gradient among them has none. A vjp of one input may call
its output as it likes, and so may one that computes a single gradient, of the input that its attribute `wrt` names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from isograd.core import registry
from isograd.core.attributes import Attribute, Choice, Measured, SizeOf, Sizes, StorageDtype
from isograd.core.checks import DTYPES, INDEX_DTYPES, checked_dtype, checked_shape, integer_within
from isograd.core.descriptor import Descriptor, ErrorBound, Operand, PrecisionGuarantee
from isograd.core.operands import AlongAxis, Array, Like, Loss, Sized, Total
from isograd.core.plan import Plan
from isograd.errors import InvalidProblemError
from isograd.numerics.storage import compute_dtype
from isograd.runtime.fenv import default_environment


class OperationDescriptor(Descriptor):
    """The descriptor of an `Operation`: shape and dtype of the problem, its attributes, and what of it is optional.

    The fields behind the attributes say whether an optional input is given, or an optional output asked for.
    """

    __slots__ = ()
    declared: ClassVar[Operation]
    shape: tuple[int, ...]

    @property
    def operation(self) -> str:
        """The operation's name."""
        return self.declared.name

    def operands(self) -> tuple[Operand, ...]:
        """The inputs and the outputs."""
        return self.declared.operands(self)

    def validated(self) -> Self:
        """Return the descriptor with plain fields and a non-negative axis, or raise what is wrong with it."""
        op = self.declared
        dtype = checked_dtype(op.name, self.dtype, op.dtypes)
        shape = checked_shape(op.name, "shape", self.shape, op.least_rank)
        if op.least_size:
            integer_within(op.name, f"the last size of {op.problem}", shape[-1], op.least_size)
        values = [a.checked(op.name, key, getattr(self, key), shape, dtype) for key, a in op.attributes.items()]
        given = [getattr(self, key) for key in op.optional]
        for key, value in zip(op.optional, given, strict=True):
            if not isinstance(value, bool):
                raise InvalidProblemError(f"{op.name}: {key} is {value!r}; it takes True or False")
        make: Callable[..., Self] = type(self)
        checked: Self = op.described(make, shape, dtype, *values, *given)
        if op.check is not None:
            op.check(checked)
        return checked


class Planned(NamedTuple):
    """A plan, and (name, shape, dtype) of every array that it reads and of every one that it writes."""

    plan: Plan
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]


class Operation:
    """An operation on rows along an attribute `axis`, or on elements.

    name: of the function, of the descriptor in the registry and of the torch operator. attributes, inputs, outputs:
    by name, in the order of the function's arguments and results. reference: the definition in NumPy, whose bits
    every kernel returns, and oracle: the same formula in the widest float, both called with inputs and attributes
    by name and returning the outputs, those of an optional output only where it is asked for. bound: (dtype,
    inputs, attributes) -> a bound on the error of every output; formula: the same for people. vjp: the operation
    that computes the gradients of the inputs; pullback: (gradient of the first output, inputs, outputs, attributes)
    -> gradients of the inputs by name, in NumPy, for the tape, where no operation is the vjp. problem: the array
    that has the problem's shape and dtype; where it is an output, these are the first two arguments after the
    inputs. shape_of: (operation's name, inputs, attributes) -> the problem's shape where no input has it; sizes:
    what a descriptor calls the two numbers of this shape. least_size: of the last axis. check: raises what is wrong
    with a descriptor whose attributes are each accepted. same: the inputs whose gradient is that of another one.
    symmetric: whether its Jacobian is, so that the vjp serves as the jvp too. linear: the input of a gradient that
    it is linear in, with a symmetric Jacobian, while nothing else has a derivative. straight_through: the
    attributes whose other values change the outputs and leave the gradient as it is: the vjp reads the outputs for
    these. ordered: whether the place of an element matters, as it does to noise that belongs to places. padding:
    what a row may be made longer with. least_rank, dtypes: of the problem.
    """

    def __init__(
        self,
        name: str,
        *,
        attributes: Mapping[str, Attribute],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        reference: Callable[..., Any],
        oracle: Callable[..., Any],
        bound: Callable[..., Any],
        formula: str,
        vjp: str | None = None,
        problem: str | None = None,
        shape_of: Callable[..., tuple[Any, ...]] | None = None,
        sizes: tuple[str, ...] = (),
        least_size: int = 0,
        check: Callable[[Any], None] | None = None,
        pullback: Callable[..., Mapping[str, Any]] | None = None,
        same: Mapping[str, str] | None = None,
        symmetric: bool = False,
        linear: str | None = None,
        straight_through: Mapping[str, Any] | None = None,
        ordered: bool = False,
        padding: float | None = None,
        least_rank: int = 1,
        dtypes: tuple[str, ...] = DTYPES,
    ) -> None:
        self.name, self.attributes, self.inputs, self.outputs = name, attributes, inputs, outputs
        self.reference, self.oracle, self.bound, self.formula = reference, oracle, bound, formula
        self.vjp, self.symmetric, self.linear = vjp, symmetric, linear
        self.check, self.pullback, self.shape_of, self._same = check, pullback, shape_of, same or {}
        self.sizes, self.least_size = sizes, least_size
        self.straight_through, self.ordered = straight_through or {}, ordered
        self.padding, self.least_rank, self.dtypes = padding, least_rank, dtypes
        # What is given of the attributes; the others are measured.
        self.given = {key: a for key, a in attributes.items() if not isinstance(a, Measured)}
        self._measures = [(a.measure, a.of) if isinstance(a, Measured) else (None, "") for a in attributes.values()]
        sized = {a.of: key for key, a in attributes.items() if isinstance(a, SizeOf)}
        arrays = {**inputs, **outputs}
        # By what is optional the field of the descriptor that says whether it is there: a flag, or its size.
        self.present = {key: sized.get(key, key) for key, a in arrays.items() if a.optional}
        self.optional = tuple([key for key, field in self.present.items() if key == field])
        every = [a for a in arrays.values() if isinstance(a, Loss)]
        self.elementwise = "axis" not in attributes and all(isinstance(a, (Like, Loss)) for a in arrays.values())
        self.elementwise = self.elementwise and not any(a.rows for a in every)
        # The last one, as a gradient may be expanded.
        self.problem = problem or [key for key, a in inputs.items() if isinstance(a, Like) and not a.optional][-1]
        # What a call is given besides arrays.
        self.shaped, self.integral = self.problem in outputs, dtypes[0] in INDEX_DTYPES
        self.arguments: dict[str, Attribute] = {"shape": Sizes(), "dtype": StorageDtype()} if self.shaped else {}
        self.arguments |= self.given
        # Of the descriptor, in the order of `planned`; positions put what has no default before the dtype.
        self.fields = ("shape", "dtype", *attributes, *self.optional)
        self.descriptor_type = self._descriptor_type()
        self.plan_type = self._plan_type()
        # Outputs that are laid out as the problem's array.
        alike = [key for key, a in outputs.items() if isinstance(a, Like) and not (a.compute or a.dtype)]
        self.alike = frozenset([] if self.shaped or shape_of else alike)
        self.planned = self._planned()

    @property
    def differentiable(self) -> bool:
        """Whether there is a gradient of it."""
        return self.vjp is not None or self.pullback is not None

    def __repr__(self) -> str:
        return f"Operation({self.name!r})"

    def _typed(self, kind: str) -> tuple[str, dict[str, Any]]:
        """The name of a type of the operation's, and where it says that it comes from."""
        return "".join(part.capitalize() for part in self.name.split("_")) + kind, {
            "__module__": f"{self.reference.__module__.rpartition('.')[0]}.operation"
        }

    def _descriptor_type(self) -> type[OperationDescriptor]:
        name, where = self._typed("Descriptor")
        if self.sizes:
            where["shape"] = property(lambda problem: tuple([getattr(problem, key) for key in self.sizes]))
        fields: list[Any] = [(key, int) for key in self.sizes[:1]] or [("shape", tuple[int, ...])]
        fields += [(key, int) for key, a in self.attributes.items() if a.required]
        fields += [(key, int) for key in self.sizes[1:]]
        fields.append(("dtype", str, field(default="int64")) if self.integral else ("dtype", str))
        fields += [
            (key, type(a.default), field(default=a.default)) for key, a in self.attributes.items() if not a.required
        ]
        fields += [(key, bool, field(default=False)) for key in self.optional]
        arrays = ", ".join([*self.inputs, *self.outputs])
        where |= {
            "__doc__": f"A problem of {self.name}, whose arrays are {arrays}. shape, dtype: of {self.problem}.",
            "declared": self,
        }
        made = make_dataclass(name, fields, bases=(OperationDescriptor,), namespace=where, frozen=True, slots=True)
        made.__module__ = where["__module__"]
        return made

    def described(self, make: Callable[..., Any], shape: Any, *fields: Any) -> Any:
        """A descriptor, from the problem's shape and what follows it in `fields`."""
        named = dict(zip(self.fields[1:], fields, strict=True))
        return make(**named, **(dict(zip(self.sizes, shape, strict=True)) if self.sizes else {"shape": shape}))

    def _plan_type(self) -> type[Plan]:
        name, where = self._typed("Plan")
        arrays = ", ".join(f"{key}={key}" for key in [*self.inputs, *self.outputs])
        doc = f"A kernel for {self.name}: `plan.run({arrays})`."
        return type(name, (Plan,), where | {"__slots__": (), "__doc__": doc, "descriptor_type": self.descriptor_type})

    def _planned(self) -> Callable[..., Planned]:
        """(device, *fields of the descriptor, plain) -> the plan, made once."""

        @functools.lru_cache(maxsize=4096)
        def select(device: str, generation: int, *fields: Any) -> Planned:
            make: Callable[..., OperationDescriptor] = self.descriptor_type
            plan = self.plan_type.select(self.described(make, *fields), device)
            operands = plan.descriptor.operands()
            arrays = {w: [(o.name, o.shape, o.dtype) for o in operands if o.output is w] for w in (False, True)}
            return Planned(plan, tuple(arrays[False]), tuple(arrays[True]))

        def cached(device: str, *fields: Any) -> Planned:
            return select(device, registry.generation(), *fields)

        def guarded(device: str, *fields: Any) -> Planned:
            with default_environment():  # the cache compares numbers: with subnormals flushed they would equal zero
                return select(device, registry.generation(), *fields)

        found = guarded if any(a.kind == "float" for a in self.given.values()) else cached
        varying = [(i, key) for i, (key, a) in enumerate(self.attributes.items(), 2) if a.per_call]
        if not varying:
            return found

        def of_call(device: str, *fields: Any) -> Planned:
            alike = list(fields)
            for i, _ in varying:
                alike[i] = 0
            planned = found(device, *alike)
            made: Any = planned.plan.descriptor
            descriptor = replace(made, **{key: fields[i] for i, key in varying})
            return planned._replace(plan=planned.plan.of_call(descriptor))

        return of_call

    def has_parts(self, settings: Mapping[str, Any]) -> bool:
        """Whether rows, or elements, are computed alone: no output is a sum over them, nor a share of their number.

        settings: the attributes, and which optional outputs are asked for.
        """
        reduction = self.reduction(settings)
        if any(isinstance(a, Loss) for a in self.inputs.values()) and reduction not in ("none", "sum"):
            return False
        if any(isinstance(a, (Sized, Total)) for a in (*self.inputs.values(), *self.outputs.values())):
            return False
        return not any(
            (isinstance(a, AlongAxis) and settings.get(key, not a.optional))
            or (isinstance(a, Loss) and reduction != "none")
            for key, a in self.outputs.items()
        )

    def complete(self, values: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All attributes, from those that are given and the inputs that the others are measured from."""
        if len(self.given) == len(self.attributes):
            return values
        name, given = self.name, iter(values)
        return tuple(
            [next(given) if measure is None else measure(name, inputs.get(of)) for measure, of in self._measures]
        )

    def reduction(self, settings: Mapping[str, Any]) -> str:
        """What becomes of losses."""
        if "reduction" not in self.attributes:
            return "none"
        return str(settings.get("reduction", self.attributes["reduction"].default))

    def gradients(self, vjp: Operation) -> dict[str, str]:
        """The outputs of the vjp, by the inputs whose gradients they are."""
        if len(vjp.outputs) == 1:
            (only,) = vjp.outputs
            if isinstance(wrt := vjp.attributes.get("wrt"), Choice):
                return dict.fromkeys(wrt.accepted, only)
            if len(self.inputs) == 1:
                return dict.fromkeys(self.inputs, only)
        named = [(key, name) for key in self.inputs for name in (f"d{key}", f"d_{key}")]
        found = {key: name for key, name in named if name in vjp.outputs}
        return found | {key: found[of] for key, of in self._same.items()}

    # --- what follows for one problem --------------------------------------------------------------------------------
    def operands(self, descriptor: Any) -> tuple[Operand, ...]:
        """The arrays of a validated descriptor: inputs, then outputs."""
        shape, compute = descriptor.shape, compute_dtype(descriptor.dtype)
        settings = {key: getattr(descriptor, key) for key in self.attributes}
        axis = settings.get("axis", -1)

        def dtype(a: Array) -> str:
            return str(settings.get(a.dtype, a.dtype)) if a.dtype else compute if a.compute else descriptor.dtype

        return tuple(
            [
                Operand(key, a.shape(shape, axis, settings), dtype(a), key in self.outputs, a.over)
                for key, a in [*self.inputs.items(), *self.outputs.items()]
                if not a.optional or getattr(descriptor, self.present[key]) not in (False, None)
            ]
        )

    def work_dtype(self, dtype: str) -> str:
        """The name of the type that a dtype is computed in."""
        return "int64" if self.integral else compute_dtype(dtype)

    def guarantee(self, dtype: str) -> PrecisionGuarantee:
        """What every kernel promises: the bits of the reference, and the bound."""

        def evaluate(**given: Any) -> Any:
            return self.bound(dtype, **given)

        return PrecisionGuarantee(
            math_precision="exact integers" if self.integral else compute_dtype(dtype),
            accumulator="exact integers in fixed point",
            deterministic=True,
            bit_stable_on_same_hardware=True,
            batch_invariant=True,
            order_invariant=not self.ordered,
            bit_stable_across_hardware=True,
            error_bound=ErrorBound(self.formula, evaluate),
        )
