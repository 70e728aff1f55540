"""Optimizers for NumPy arrays, in torch's spelling; the same bits on every machine.

    weights = {"w": w, "b": b}                                  # NumPy arrays, changed in place by step
    optimizer = isograd.optim.AdamW(weights, lr=1e-3)
    ...
    tape = isograd.Tape()
    leaves = {name: tape.leaf(array) for name, array in weights.items()}
    gradients = tape.backward(loss(leaves))
    optimizer.step({name: gradients[leaf] for name, leaf in leaves.items()})

Every step is rule 18 of `docs/arithmetic.md`: a fixed sequence of + - * / and square roots of IEEE 754 in the work type
(float32 for the 16-bit types), one rounding each, written at the class. States have the work type, and a parameter is
rounded to its own dtype once a step. `isograd.torch.optim` has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError
from isograd.numerics.reference import narrow, widen, work_dtype
from isograd.numerics.storage import require_array
from isograd.optimizers import numbers as of_step
from isograd.optimizers import reference
from isograd.optimizers.arrays import Row, apart, update_all
from isograd.optimizers.numbers import Update
from isograd.runtime.fenv import default_environment

Array = NDArray[Any]
Parameters = Mapping[str, Array] | Iterable[Array]

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]


def _named(operation: str, argument: str, arrays: Any) -> dict[str, Array]:
    """Arrays by name; those of a sequence are called "0", "1" and so on."""
    if isinstance(arrays, np.ndarray) or not isinstance(arrays, (Mapping, Iterable)):
        raise InvalidProblemError(
            f"{operation}: {argument} is a {type(arrays).__name__}; expected a mapping or a sequence of NumPy arrays"
        )
    pairs = arrays.items() if isinstance(arrays, Mapping) else ((str(i), x) for i, x in enumerate(arrays))
    return {name: require_array(operation, f"{argument}[{name}]", x) for name, x in pairs}


def _require_same(operation: str, argument: str, given: Any, expected: Any) -> None:
    if list(given) != list(expected) and set(given) != set(expected):
        raise InvalidProblemError(f"{operation}: {argument} has the names {[*given]}; expected {[*expected]}")


class Optimizer:
    """What SGD, Adam and AdamW share; `lr` may be set between steps."""

    def __init__(self, params: Parameters, lr: float, **options: Any):
        self._name = type(self).__name__
        self._params = _named(self._name, "params", params)
        if not self._params:
            raise InvalidProblemError(f"{self._name}: params has no arrays; expected one at least")
        for name, w in self._params.items():
            if not w.flags.writeable:
                raise InvalidProblemError(f"{self._name}: params[{name}] is read-only; expected a writeable array")
        self.lr, self._options = self._checked(lr, options)
        self._steps = 0
        self._apart = apart(self._params)
        kept = self._update(self._options).states
        self._state = {
            name: {key: np.zeros(w.shape, work_dtype(w.dtype)) for key in kept} for name, w in self._params.items()
        }

    def _number(self, argument: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidProblemError(f"{self._name}: {argument} is {value!r}; expected a number of at least 0")
        return float(value)

    def _checked(self, lr: Any, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """The rate and the options as Python floats, or an error."""
        taken = {key: x if isinstance(x, (bool, tuple)) else self._number(key, x) for key, x in options.items()}
        return self._number("lr", lr), taken

    def _update(self, options: dict[str, Any]) -> Update:
        """What a step does."""
        raise NotImplementedError

    def step(self, grads: Parameters) -> None:
        """Update the parameters in place from their gradients, given like the parameters: by name or in order.

        Raises InvalidProblemError, before anything is written, for gradients that do not match.
        """
        given = _named(f"{self._name}.step", "grads", grads)
        _require_same(f"{self._name}.step", "grads", given, self._params)
        for name, w in self._params.items():
            g = given[name]
            if g.shape != w.shape or g.dtype != w.dtype:
                raise InvalidProblemError(
                    f"{self._name}.step: grads[{name}] is {g.dtype} {g.shape}; expected dtype and shape of the "
                    f"parameter, {w.dtype} {w.shape}"
                )
        self.lr = self._number("lr", self.lr)
        with default_environment(), np.errstate(all="ignore"):
            self._steps += 1
            update = self._update(self._options)
            rates = of_step.rates(update, self._options)
            made: dict[Any, Array] = {}
            rows: dict[Any, list[Row]] = {}
            for name, w in self._params.items():
                work, states = work_dtype(w.dtype), [*self._state[name].values()]
                if work not in made:
                    made[work] = of_step.numbers(update, rates, self.lr, self._steps, work)
                if name in self._apart:
                    rows.setdefault(w.dtype, []).append(Row(w, given[name], states))
                    continue
                after, kept = reference.updated(update, widen(w), widen(given[name]), states, made[work])
                w[...] = narrow(after, w.dtype)
                for state, x in zip(states, kept, strict=True):
                    state[...] = x
            for dtype, alike in rows.items():
                update_all(update, made[work_dtype(dtype)], alike)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that a later step depends on but the parameters: plain dicts, numbers and arrays."""
        state = {
            name: {"step": self._steps, **{key: x.copy() for key, x in arrays.items()}}
            for name, arrays in self._state.items()
        }
        return {"state": state, "param_groups": [{"lr": self.lr, **self._options, "params": [*self._params]}]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a copy of what `state_dict` returned; the following steps have the bits that they would have had there.

        Raises InvalidProblemError, before anything is changed, for a state of other parameters or options.
        """
        operation = f"{self._name}.load_state_dict"
        try:
            group, state = dict(state_dict["param_groups"][0]), state_dict["state"]
            names, lr = group.pop("params"), group.pop("lr")
            _require_same(operation, "the group", group, self._options)
            lr, options = self._checked(lr, {k: tuple(x) if isinstance(x, list) else x for k, x in group.items()})
            _require_same(operation, "state", state, self._params)
            steps = {int(state[name]["step"]) for name in names}
            arrays = {name: {key: state[name][key] for key in self._update(options).states} for name in self._params}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidProblemError(f"{operation}: state_dict is none of {self._name} ({error!r})") from None
        if len(steps) != 1:
            raise InvalidProblemError(f"{operation}: parameters have made {sorted(steps)} steps; expected one number")
        for name, w in self._params.items():
            for key, x in arrays[name].items():
                require_array(operation, f"state[{name}][{key}]", x)
                if x.shape != w.shape or x.dtype != work_dtype(w.dtype):
                    raise InvalidProblemError(
                        f"{operation}: state[{name}][{key}] is {x.dtype} {x.shape}; expected "
                        f"{np.dtype(work_dtype(w.dtype))} {w.shape}"
                    )
        self.lr, self._options, self._steps = lr, options, steps.pop()
        self._state = {name: {key: x.copy() for key, x in entries.items()} for name, entries in arrays.items()}


class SGD(Optimizer):
    """Stochastic gradient descent.

    With weight decay g = RN(g + RN(weight_decay * w)). With momentum the first step sets b = g, the later ones
    b = RN(RN(momentum * b) + RN((1 - dampening) * g)), and g = RN(g + RN(momentum * b)) for nesterov, else b. Then
    w = RN(w - RN(lr * g)).
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        super().__init__(
            params, lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )

    def _checked(self, lr: Any, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        rate, taken = super()._checked(lr, options)
        if taken["nesterov"] and (taken["momentum"] == 0 or taken["dampening"] != 0):
            raise InvalidProblemError(
                f"SGD: nesterov is True with momentum {taken['momentum']} and dampening {taken['dampening']}; it needs "
                "a momentum and no dampening"
            )
        return rate, taken

    def _update(self, options: dict[str, Any]) -> Update:
        decay = of_step.COUPLED if options["weight_decay"] != 0 else of_step.NO_DECAY
        momentum = options["momentum"] != 0
        return Update(of_step.SGD, decay, momentum, momentum and self._steps == 1, options["nesterov"])


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight_decay is added to the gradient.

    With weight decay g = RN(g + RN(weight_decay * w)). m = RN(RN(b1 * m) + RN((1 - b1) * g)),
    v = RN(RN(b2 * v) + RN((1 - b2) * RN(g * g))), and with p1, p2 the powers of the betas by squaring in binary64
    w = RN(w - RN(RN(lr * RN(m / (1 - p1))) / RN(sqrt(RN(v / (1 - p2))) + eps))).
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _checked(self, lr: Any, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise InvalidProblemError(f"{self._name}: betas is {betas!r}; expected two numbers")
        pair = tuple([self._number("betas", beta) for beta in betas])
        if max(pair) >= 1:
            raise InvalidProblemError(f"{self._name}: betas is {betas!r}; expected numbers below 1")
        return super()._checked(lr, options | {"betas": pair})

    def _update(self, options: dict[str, Any]) -> Update:
        return Update(of_step.ADAM, of_step.COUPLED if options["weight_decay"] != 0 else of_step.NO_DECAY)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): first w = RN(w * (1 - lr * weight_decay))."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)

    def _update(self, options: dict[str, Any]) -> Update:
        return Update(of_step.ADAM, of_step.DECOUPLED)
