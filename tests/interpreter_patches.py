"""What the scripts that run under Triton's interpreter share.

Exact versions of what it gets wrong: 3.6 does not fuse `tl.fma`, 3.8 makes constants of tensors, 3.9 truncates to
bfloat16 and makes integers of some masks. Quicker versions of what it takes most of its time for. The report of suites.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from isograd.numerics import reference as ref

MASKED = ("create_masked_load", "create_masked_store")
ORIGINAL = {name: getattr(InterpreterBuilder, name) for name in ("create_fma", "cast_impl", "create_fp_to_fp", *MASKED)}


def report(suites: Mapping[str, Callable[[], Iterable[tuple[str, bool]]]]) -> None:
    """Run the suites that the command names: a line with name, cases and wrong cases each, the wrong ones on stderr."""
    patch_index()
    patch_fma()
    patch_cast()
    patch_masks()
    patch_constants()
    patch_dot()
    patch_speed()
    for name in sys.argv[1:]:
        if name == "--exhaustive":
            continue
        cases = wrong = 0
        for what, right in suites[name]():
            cases += 1
            if not right:
                wrong += 1
                print(f"{name}: {what}", file=sys.stderr)
        print(name, cases, wrong, flush=True)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    return TensorHandle(ref.fma(x.data, y.data, z.data), z.dtype.scalar)


def patch_fma() -> None:
    InterpreterBuilder.create_fma = _create_fma


def _exact_cast(original: Any) -> Any:
    def cast(self: Any, src: Any, dst_type: Any, *rest: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        with np.errstate(all="ignore"):
            if source == tl.float32 and target == tl.bfloat16:
                return TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
            if source == tl.bfloat16 and target == tl.float32:
                return TensorHandle(src.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
            return original(self, src, dst_type, *rest)

    return cast


def patch_cast() -> None:
    InterpreterBuilder.cast_impl = _exact_cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _exact_cast(InterpreterBuilder.create_fp_to_fp)


def patch_index() -> None:
    """3.6 turns a loop bound into an int in a way that NumPy 2.4 no longer allows."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_masks() -> None:
    """3.9 hands on some masks, of a scalar and a block, as integers and then refuses them."""
    for place, name in enumerate(MASKED, 1):
        original = getattr(InterpreterBuilder, name)

        def patched(self: Any, *arguments: Any, original: Any = original, place: int = place, **rest: Any) -> Any:
            mask = arguments[place]
            if isinstance(mask, TensorHandle):  # descriptors bring an array
                mask = TensorHandle(mask.data.astype(bool), mask.dtype)
            return original(self, *arguments[:place], mask, *arguments[place + 1 :], **rest)

        setattr(InterpreterBuilder, name, patched)


def patch_constants() -> None:
    """3.8 wraps the result of a constant and a tensor as a constant, which functions then refuse."""
    for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"):
        original = getattr(tl.constexpr, f"__{name}__")

        def patched(self: Any, other: Any, original: Any = original) -> Any:
            found = original(self, other)
            value = getattr(found, "value", None)
            return value if isinstance(value, tl.tensor) else found

        setattr(tl.constexpr, f"__{name}__", patched)


def patch_dot() -> None:
    """All multiply the bits of bfloat16 as if they were integers, and sum in the order of the machine's BLAS.

    That order may depend on the number of rows, which a GPU's does not: floats are added up one after another.
    """
    original = InterpreterBuilder.create_dot

    def floats(x: Any) -> Any:
        return x.data.view(ml_dtypes.bfloat16) if x.dtype.scalar == tl.bfloat16 else x.data

    def patched(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not d.dtype.scalar.is_floating():
            return original(self, a, b, d, *rest)
        left, right = (floats(x).astype(d.data.dtype) for x in (a, b))
        total = np.zeros_like(d.data)
        with np.errstate(all="ignore"):
            for k in range(left.shape[-1]):
                total += left[..., k, None] * right[..., k, None, :]
            return TensorHandle(total + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = patched


def patch_speed() -> None:
    """Half of the interpreter's time goes where nothing is computed; what it computes stays the same."""
    types = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def type_of(t: Any) -> Any:
        """NumPy's type of a Triton type, of which the original makes a table in every call."""
        name = t.scalar.name
        if name not in known:
            known[name] = types(t)
        return known[name]

    builtins: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """The original looks through all members of the language in every call of a function by another."""
        if package not in builtins:
            builtins[package] = [name for name, x in inspect.getmembers(package) if tl.core.is_builtin(x)]
        names = builtins[package]
        if names and tl.core.is_builtin(getattr(package, names[0])):  # or the calling function has patched all of them
            for name in names:
                interpreter._patch_attr(package, name, getattr(package, name), builder, scope)

    def generic_reduce(self: Any, given: Any) -> list[Any]:
        """In the order of the original, which goes from element to element: the slices of the axis one by one."""
        parts, axis = self.unravel(given, self.axis)
        slices = [np.moveaxis(x.handle.data, axis, 0) for x in parts]
        total = [s[0] for s in slices]
        for i in range(1, len(slices[0])):
            pairs = zip((*total, *(s[i] for s in slices)), parts * 2, strict=True)
            found = self.combine_fn.fn(*(self.to_tensor(a, x.dtype) for a, x in pairs))
            found = found if isinstance(found, tuple) else (found,)
            total = [f.handle.data.reshape(s.shape[1:]).astype(s.dtype) for f, s in zip(found, slices, strict=True)]
        if self.keep_dims:
            everywhere = tuple(range(given[0].handle.data.ndim))
            total = [np.expand_dims(t, everywhere if self.axis is None else axis) for t in total]
        return [self.to_tensor(t, x.dtype) for t, x in zip(total, parts, strict=True)]

    interpreter._get_np_dtype = type_of
    interpreter._patch_builtin = patch_builtin
    interpreter.ReduceOps.generic_reduce = generic_reduce
    _patch_language_once()
    _patch_types()
    _patch_conversions()
    # Every sum and product of integers is computed in 64 bits as well, for an assertion that is off.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_language_once() -> None:
    """The original replaces the language's functions in every call of a function by another, and puts them back."""
    original = interpreter._patch_lang
    modules: dict[int, frozenset[str]] = {}
    replaced: set[frozenset[str]] = set()

    def patch_lang(fn: Any) -> Any:
        names = modules.get(id(fn.__globals__))
        if names is None:
            names = frozenset(m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
            modules[id(fn.__globals__)] = names
        if names not in replaced:
            original(fn)  # for good: these scripts do nothing but interpret
            replaced.add(names)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _patch_types() -> None:
    """The original makes the type of a block, and constants of its shape, anew for every result."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        shape = shape.value if isinstance(shape, tl.constexpr) else shape
        numbers = tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        key = id(element_ty), numbers  # the type of the elements is kept, so no other one gets its number
        if key not in known:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(numbers, self.shape)
            self.of_other_elements, self.of_tensors = {}, {}
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if id(scalar_ty) not in self.of_other_elements:
            self.of_other_elements[id(scalar_ty)] = tl.block_type(scalar_ty, self.shape)
        return self.of_other_elements[id(scalar_ty)]

    def init_tensor(self: Any, handle: Any, of: Any) -> None:
        kept = vars(of).setdefault("of_tensors", {})
        if not kept:
            make_tensor(self, handle, of)
            kept.update(vars(self))
        vars(self).update(kept)
        self.handle = handle

    tl.block_type.__init__, tl.block_type.with_element_ty = init_type, with_element_ty
    tl.block_type.to_ir = lambda self, builder: self
    tl.tensor.__init__ = init_tensor


def _patch_conversions() -> None:
    """Operands that already are of one type and shape need none of the original's rules."""
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    check = TritonSemantic.binary_op_type_checking_impl

    def cast_other(self: Any, given: Any, dst_ty: Any, *rest: Any, **named: Any) -> Any:
        return given if given.dtype is dst_ty.scalar else cast(self, given, dst_ty, *rest, **named)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def check_others(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and not lhs.dtype.is_ptr()
        divides = rest[3:4] == (True,) or named.get("div_or_mod")
        if tensors and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape and not divides:
            return lhs, rhs
        return check(self, lhs, rhs, *rest, **named)

    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = cast_other, broadcast_others
    TritonSemantic.binary_op_type_checking_impl = check_others
