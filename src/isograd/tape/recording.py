"""The tape: what was computed, in order, and the walk back through it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError, MissingGradientError
from isograd.numerics.reference import narrow
from isograd.numerics.storage import require_array
from isograd.runtime.fenv import default_environment
from isograd.tape import rules
from isograd.tape.variable import Variable

Array = NDArray[Any]


class Operation(NamedTuple):
    """A recorded operation: where each gradient goes, and the function that computes it. Leaves have none."""

    parents: tuple[int, ...]
    gradients: tuple[rules.Gradient, ...]


class Checkpoint(NamedTuple):
    """A recorded call whose inside is computed again when its gradient is due."""

    parents: tuple[int, ...]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # an _Input for a variable, or the argument itself
    output: int
    digest: int


class _Input(NamedTuple):
    position: int  # in the frame around the checkpoint
    value: Array


class Frame:
    """The operations of a tape or of the inside of one checkpoint.

    A variable of an enclosing frame that is used here is imported: it becomes a leaf, and `outer` tells its index in
    the frame around this one.
    """

    def __init__(self, parent: Frame | None):
        self.parent = parent
        self.nodes: list[Operation | Checkpoint] = []
        self.outer: dict[int, int] = {}
        self._imported: dict[int, int] = {}

    def append(self, node: Operation | Checkpoint) -> int:
        """Record a node; its index is returned."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def index_of(self, frame: Frame, index: int) -> int | None:
        """The index here of a variable of this or an enclosing frame; None for one of another frame."""
        if frame is self:
            return index
        if self.parent is None or (origin := self.parent.index_of(frame, index)) is None:
            return None
        return self.import_from_parent(origin)

    def import_from_parent(self, origin: int) -> int:
        """The index here of a node of the frame around this one."""
        if origin not in self._imported:
            self._imported[origin] = self.append(Operation((), ()))
            self.outer[self._imported[origin]] = origin
        return self._imported[origin]


class _Gradients:
    """The gradients that have been collected for the nodes of a frame."""

    def __init__(self, frame: Frame, around: _Gradients | None):
        self._frame, self._around = frame, around
        self.of: dict[int, Array] = {}

    def add(self, index: int, gradient: Array) -> None:
        if self._around is not None and index in self._frame.outer:
            # Straight to where it belongs: a checkpoint changes no order of addition, and so no bit.
            self._around.add(self._frame.outer[index], gradient)
        elif index in self.of:
            self.of[index] = rules.accumulated(self.of[index], gradient)
        else:
            self.of[index] = gradient


def _digest(value: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data) if value.size else 0


class Gradients(dict[Variable, Array]):
    """The gradients of leaves; `get` returns None for any other variable, `[]` raises MissingGradientError."""

    def __init__(self, tape: Tape):
        super().__init__()
        self._tape = tape

    def __missing__(self, key: Any) -> NoReturn:
        if not isinstance(key, Variable):
            raise MissingGradientError(f"backward: a key is a {type(key).__name__}; expected a leaf of the tape")
        if key.tape is not self._tape:
            reason = "it belongs to another tape than the one that was walked through"
        elif key._frame is self._tape._root and key._index in self._tape._leaves:
            reason = "backward was called before the leaf was made"
        else:
            reason = "it was computed by an operation, and backward returns the gradients of leaves"
        raise MissingGradientError(f"backward: no gradient for a variable of {key.dtype} {key.shape}: {reason}")


class Tape:
    """Records operations on arrays and computes gradients backwards through them.

        tape = Tape()
        w = tape.leaf(array)
        loss = ((x @ w - target) * (x @ w - target)).mean()
        gradient = tape.backward(loss)[w]

    A value that is used several times gets the sum of its gradients, added one by one in descending order of use: the
    last operation that used it comes first and, within one operation, the operands from left to right. Each addition is
    rounded to the dtype. A tape may be walked through any number of times. It belongs to one thread.
    """

    def __init__(self) -> None:
        self._root = Frame(None)
        self._current = self._root
        self._leaves: dict[int, weakref.ref[Variable]] = {}

    def leaf(self, array: Array) -> Variable:
        """A variable that `backward` returns the gradient of.

        The array (NumPy; float16, bfloat16, float32, float64; any shape and strides) is copied, so it may be changed
        afterwards. Raises InvalidProblemError for anything that is no array and inside a checkpoint, UnsupportedError
        for another dtype.
        """
        array = require_array("leaf", "array", array)
        if self._current is not self._root:
            raise InvalidProblemError("leaf: called inside a checkpoint; make leaves outside and pass them to it")
        with default_environment():
            value = narrow(array, array.dtype)
        variable = Variable(self, self._root, self._root.append(Operation((), ())), value)
        self._leaves[variable._index] = weakref.ref(variable)
        return variable

    def _index_of(self, operation: str, x: Variable) -> int:
        if x._frame is self._current:
            return x._index
        index = self._current.index_of(x._frame, x._index)
        if index is None:
            raise InvalidProblemError(
                f"{operation}: an operand was computed inside a checkpoint that has ended; return it from its function"
            )
        return index

    def _record(self, value: Array, parents: tuple[int | None, ...], gradients: tuple[rules.Gradient, ...]) -> Variable:
        # Constants need no gradient; what only their gradient functions hold on to is freed here.
        pairs = [(p, f) for p, f in zip(parents, gradients, strict=True) if p is not None]
        node = Operation(tuple([p for p, _ in pairs]), tuple([f for _, f in pairs]))
        return Variable(self, self._current, self._current.append(node), value)

    def checkpoint(self, function: Callable[..., Variable], *arguments: Any) -> Variable:
        """Call function(*arguments) as one operation that keeps its arguments and nothing computed inside.

        `backward` calls the function again, so it must compute the same each time; a result with other bits or one made
        from other variables raises InvalidProblemError. Variables of this tape may be arguments or be used inside
        without being passed; both get their gradients. Other arguments are handed on. The function returns one
        variable. Gradients have the same bits as without the checkpoint. Arrays that are passed are copied, as
        constants are elsewhere; one that the function captures must not change before `backward`.
        """
        around = self._current
        passed = tuple(
            _Input(self._index_of("checkpoint", x), x.value)
            if isinstance(x, Variable)
            else x.copy()
            if isinstance(x, np.ndarray)
            else x
            for x in arguments
        )
        frame, out = self._run(around, function, passed)
        if out._frame is not frame:
            # The function returned a variable from outside as it is.
            self._index_of("checkpoint", out)
            return out
        if out._index in frame.outer:
            origin = frame.outer[out._index]
            pairs = zip(arguments, passed, strict=True)
            same: Variable = next(x for x, p in pairs if isinstance(p, _Input) and p.position == origin)
            return same
        node = Checkpoint(tuple(frame.outer.values()), function, passed, out._index, _digest(out.value))
        return Variable(self, around, around.append(node), out.value)

    def _run(self, around: Frame, function: Callable[..., Any], passed: tuple[Any, ...]) -> tuple[Frame, Variable]:
        """Call a checkpointed function inside a frame of its own."""
        before, frame = self._current, Frame(around)
        self._current = frame
        try:
            out: Any = function(
                *(
                    Variable(self, frame, frame.import_from_parent(p.position), p.value) if isinstance(p, _Input) else p
                    for p in passed
                )
            )
        finally:
            self._current = before
        if not isinstance(out, Variable) or out.tape is not self:
            raise InvalidProblemError(
                f"checkpoint: the function returned a {type(out).__name__}; expected one variable of this tape"
            )
        return frame, out

    def backward(self, out: Variable, upstream: Array | None = None) -> Gradients:
        """The gradient of `out` for every leaf of the tape that is still referenced, zeros where `out` ignores it.

        `upstream` is the gradient of what follows, with the shape and dtype of `out`; it may be left out where `out`
        has one element, and is 1 then. Gradients have the shape and dtype of their leaf. The result is a dict that
        raises MissingGradientError, which is a KeyError too, for a variable that is none of these leaves.

        Raises InvalidProblemError for an `out` of another tape, an `upstream` that does not match, and inside a
        checkpoint.
        """
        if not isinstance(out, Variable) or out.tape is not self:
            raise InvalidProblemError("backward: out is no variable of this tape")
        if self._current is not self._root or out._frame is not self._root:
            raise InvalidProblemError("backward: called inside a checkpoint, or for a variable from inside one")
        gradients = _Gradients(self._root, None)
        with default_environment(), np.errstate(all="ignore"):
            gradients.add(out._index, self._upstream(out, upstream))
            self._walk(self._root, gradients, out._index)
        result = Gradients(self)
        for index, reference in self._leaves.items():
            leaf = reference()
            if leaf is not None:
                g = gradients.of.get(index)
                result[leaf] = np.zeros(leaf.shape, leaf.dtype) if g is None else np.array(g, order="C")
        return result

    def _upstream(self, out: Variable, upstream: Array | None) -> Array:
        if upstream is None:
            if out.size != 1:
                raise InvalidProblemError(
                    f"backward: out has shape {out.shape}; expected one element, or an upstream gradient of that shape"
                )
            return np.ones(out.shape, out.dtype)
        upstream = require_array("backward", "upstream", upstream)
        if upstream.shape != out.shape or upstream.dtype != out.dtype:
            raise InvalidProblemError(
                f"backward: upstream is {upstream.dtype} {upstream.shape}; expected dtype and shape of out, "
                f"{out.dtype} {out.shape}"
            )
        return narrow(upstream, out.dtype)

    def _walk(self, frame: Frame, gradients: _Gradients, last: int) -> None:
        """Hand gradients on from the node `last` backwards."""
        for index in range(last, -1, -1):
            node = frame.nodes[index]
            if index not in gradients.of or not node.parents:
                continue
            g = gradients.of.pop(index)
            if isinstance(node, Checkpoint):
                self._walk_inside(frame, node, gradients, g)
                continue
            for parent, gradient in zip(node.parents, node.gradients, strict=True):
                gradients.add(parent, gradient(g))

    def _walk_inside(self, frame: Frame, node: Checkpoint, gradients: _Gradients, upstream: Array) -> None:
        inside, out = self._run(frame, node.function, node.arguments)
        same = out._frame is inside and out._index == node.output and tuple(inside.outer.values()) == node.parents
        if not same or _digest(out.value) != node.digest:
            raise InvalidProblemError(
                "checkpoint: the function computed something else when it was called again; it must depend on its "
                "arguments and on variables of the tape alone"
            )
        collected = _Gradients(inside, gradients)
        collected.add(out._index, upstream)
        self._walk(inside, collected, out._index)
