"""Optimizers in torch's spelling whose steps have the same bits on CPUs and GPUs (rule 18 of `docs/arithmetic.md`).

    optimizer = igt.optim.AdamW(model.parameters(), lr=3e-4)
    loss.backward()
    igt.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

They are `torch.optim.Optimizer`s: parameter groups, hooks, learning-rate schedulers, `state_dict`s that torch's own
optimizers load and the other way round, DTensor parameters (FSDP2). States are float32, also for parameters of 16 bits,
and float64 for float64. One kernel goes through all parameters of a group. On a GPU a step never waits and may be
captured in a CUDA graph after a first one; `lr` may be a tensor there. `foreach`, `fused` and `capturable` are taken
for compatibility and choose nothing: there is one implementation.

A schedule's rate is a Python float. Of torch's schedulers ConstantLR, LinearLR, StepLR, MultiStepLR, ExponentialLR,
PolynomialLR with power 1, CyclicLR's triangles and OneCycleLR with anneal_strategy="linear" take no more than IEEE
operations, and have the same bits everywhere. Those with a cosine or another power call the C library, whose last bit
differs between systems: `cosine_schedule` is a cosine of fixed operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from isograd.errors import DeviceMismatchError, InvalidProblemError
from isograd.optimizers.chunks import chunks
from isograd.optimizers.numbers import (
    ADAM,
    COUPLED,
    DECOUPLED,
    LION,
    NO_DECAY,
    Rates,
    Update,
    numbers,
    rates,
)
from isograd.optimizers.numbers import (
    SGD as SGD_RULE,
)
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.torch import many_tensors as many
from isograd.torch.tensors import NAMES, refuse, work_dtype

__all__ = ["SGD", "AdamW", "Lion", "cosine_schedule"]

_MASTER = "master"  # what the state calls the float32 copy of a parameter


class _Problem(NamedTuple):
    """What one launch serves: the update, and where parameters, gradients and copies are and what type they have."""

    update: Update
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    copied: bool


class _Row(NamedTuple):
    """A parameter; what is updated, gradient, two states and copy; its count of steps; the momentum, if it begins."""

    p: Tensor
    tensors: list[Any]
    step: Tensor | None
    begun: Tensor | None


class _Optimizer(torch.optim.Optimizer):
    """What the optimizers share."""

    _rule: ClassVar[int]
    _decay: ClassVar[int] = DECOUPLED

    def __init__(self, params: Any, defaults: dict[str, Any], **refused: Any) -> None:
        self._name = f"optim.{type(self).__name__}"
        refuse(self._name, False, **refused)
        self._tables: dict[Any, tuple[bytes, Tensor]] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._name, self._tables = f"optim.{type(self).__name__}", {}
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    # --- options -----------------------------------------------------------------------------------------------------
    def _number(self, argument: str, value: Any) -> float:
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_cpu:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidProblemError(f"{self._name}: {argument} is {value!r}; expected a number of at least 0")
        return float(value)

    def _checked(self, group: Mapping[str, Any]) -> None:
        """Raise what is wrong with a group's options."""
        if not (isinstance(group["lr"], Tensor) and group["lr"].is_cuda and group["lr"].numel() == 1):
            self._number("lr", group["lr"])
        self._number("weight_decay", group["weight_decay"])
        if "betas" in group:
            betas = group["betas"]
            if not isinstance(betas, (tuple, list)) or len(betas) != 2:
                raise InvalidProblemError(f"{self._name}: betas is {betas!r}; expected two numbers")
            if max([self._number("betas", beta) for beta in betas]) >= 1:
                raise InvalidProblemError(f"{self._name}: betas is {betas!r}; expected numbers below 1")
        if group.get("amsgrad") or group.get("differentiable"):
            refuse(self._name, False, amsgrad=group.get("amsgrad"), differentiable=group["differentiable"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch."""
        if isinstance(param_group, dict):
            self._checked({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _update(self, group: Mapping[str, Any]) -> Update:
        """What a step of a group does."""
        decay = self._decay if self._decay == DECOUPLED or group["weight_decay"] != 0 else NO_DECAY
        return Update(self._rule, decay, maximize=bool(group["maximize"]))

    # --- a step ------------------------------------------------------------------------------------------------------
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @many.uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have gradients; `closure` computes the loss anew and is called first.

        Raises, before anything is written, UnsupportedError for gradients that are sparse or of another dtype, and
        InvalidProblemError or DeviceMismatchError for ones that do not match their parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with default_environment():
            found = []
            for group in self.param_groups:
                self._checked(group)
                found.append((group, self._problems(group)))
            for place, (group, problems) in enumerate(found):
                for number, (problem, rows) in enumerate(problems.items()):
                    self._run(group, problem, rows, (place, number))
        return loss

    def _problems(self, group: Mapping[str, Any]) -> dict[_Problem, list[_Row]]:
        """The parameters of a group that have gradients, by launches."""
        update, master_weights = self._update(group), group["master_weights"]
        states, rows = update.states, {}  # type: ignore[var-annotated]
        for i, p in enumerate(group["params"]):
            grad = p.grad
            if grad is None:
                continue
            plain = many.is_plain(p) and many.is_plain(grad) and p.dtype is grad.dtype and p.device == grad.device
            weights, g = (p, grad) if plain else (many.local(self._name, f"params[{i}]", p), self._gradient(p, i))
            state = self._state(p, weights, update, master_weights)
            begun = None if all(name in state for name in states) else self._zeros(p)
            tensors = [weights, g, *[many.local(self._name, name, state.get(name, begun)) for name in states]]
            master = state.get(_MASTER)
            if master is not None:
                tensors += [None] * (4 - len(tensors))
                tensors.append(weights)
                tensors[0] = many.local(self._name, _MASTER, master)
            key = begun is not None, weights.device, tensors[0].dtype, g.dtype, weights.dtype
            rows.setdefault(key, []).append(_Row(p, tensors, state.get("step"), begun))
        return {
            _Problem(update._replace(first=first), device, (target, g, w), target is not w): found
            for (first, device, target, g, w), found in rows.items()
        }

    def _gradient(self, p: Tensor, i: int) -> Tensor:
        name, given = f"the gradient of params[{i}]", p.grad
        assert given is not None
        grad = many.local(self._name, name, given)
        if given.device != p.device:
            raise DeviceMismatchError(f"{self._name}: {name} is on {given.device}; expected {p.device}")
        if grad.dtype not in (p.dtype, work_dtype(p.dtype)):
            raise InvalidProblemError(
                f"{self._name}: {name} has dtype {grad.dtype}; expected {p.dtype} of the parameter"
            )
        if many.placements(given) != many.placements(p):
            raise InvalidProblemError(
                f"{self._name}: {name} has placements {many.placements(given)}; expected {many.placements(p)}"
            )
        return grad

    def _zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p, dtype=work_dtype(p.dtype), memory_format=torch.preserve_format, requires_grad=False)

    def _state(self, p: Tensor, weights: Tensor, update: Update, master_weights: bool) -> dict[str, Any]:
        """A parameter's state, made where it is missing; SGD's momentum is made by its first step."""
        state: dict[str, Any] = self.state[p]
        if update.rule == ADAM and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weights.device)
        for name in update.states:
            if state.get(name) is None:
                state.pop(name, None)
                if update.rule != SGD_RULE:
                    state[name] = self._zeros(p)
        if master_weights and p.dtype is not work_dtype(p.dtype) and _MASTER not in state:
            state[_MASTER] = p.detach().to(work_dtype(p.dtype), memory_format=torch.preserve_format)
        return state

    def _run(self, group: Mapping[str, Any], problem: _Problem, rows: list[_Row], place: Any) -> None:
        update = problem.update
        if steps := [row.step for row in rows if row.step is not None]:
            torch._foreach_add_(steps, 1)
        back: list[tuple[Tensor, Tensor]] = []
        for i, row in enumerate(rows):
            tensors, moved = many.alike(row.tensors)
            if moved:
                back += [(t, copy) for t, copy in moved if t is not row.tensors[1]]
                rows[i] = row._replace(tensors=tensors)
            if row.begun is not None:
                self.state[row.p][update.states[0]] = row.begun
        of = rates(update, group)
        run = self._on_cpu if problem.device.type == "cpu" else self._on_gpu
        run(group["lr"], problem, of, rows, place)
        for tensor, copy in back:
            tensor.copy_(copy)
        torch.autograd.graph.increment_version([row.p for row in rows])

    def _on_cpu(self, lr: Any, problem: _Problem, of: Rates, rows: list[_Row], place: Any) -> None:
        from isograd.optimizers import numba_updates

        update, rate = problem.update, self._number("lr", lr)
        like_p, like_g, like_copy = (many.KERNEL_TYPES[dtype] for dtype in problem.dtypes)
        zero = np.float64(0) if problem.dtypes[0] is torch.float64 else np.float32(0)
        counts = [0 if row.step is None else int(row.step.item()) for row in rows]
        made = {count: numbers(update, of, rate, count, zero.dtype) for count in set(counts)}
        values = np.stack([made[count] for count in counts])
        table = many.table_of([(row.tensors, row.step) for row in rows])
        where = chunks(many.counts_of(table), numba_updates.LENGTH)
        parallel.for_ranges(
            numba_updates.update_chunks, len(where), parallel.grain(len(where), numba_updates.LENGTH), like_p, like_g,
            like_copy, zero, table.ctypes.data, values.ctypes.data, where.ctypes.data, update.rule, update.decay,
            update.momentum, update.first, update.nesterov, update.maximize, problem.copied,
        )  # fmt: skip

    def _on_gpu(self, lr: Any, problem: _Problem, of: Rates, rows: list[_Row], place: Any) -> None:
        from isograd.optimizers import triton_updates

        table = many.table_of([(row.tensors, row.step) for row in rows])
        length = triton_updates.chunk_length(int(many.counts_of(table).sum()))
        p_type, g_type, copy_type = (NAMES[dtype] for dtype in problem.dtypes)
        types = p_type, g_type, copy_type
        rate = lr.to(problem.device) if isinstance(lr, Tensor) and lr.is_cuda else self._number("lr", lr)
        on_device = self._uploaded(table, problem.device, place)
        values = triton_updates.numbers_of(problem.update, of, rate, on_device, p_type)
        for aligned, counts in many.by_alignment(table):
            where = many.places(counts, length, problem.device)
            triton_updates.launch_updates(
                problem.update, on_device, where, values, length, types, problem.copied, aligned
            )

    def _uploaded(self, table: Any, device: torch.device, place: Any) -> Tensor:
        """A table on a GPU, kept while the addresses stay the same."""
        content = table.tobytes()
        known = self._tables.get(place)
        if known is None or known[0] != content:
            known = content, many.upload(table, device)
            if not many.capturing(device):
                self._tables[place] = known
        many.keep_for_graph(known[1])
        return known[1]

    # --- states ------------------------------------------------------------------------------------------------------
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch, but that states keep the digits that a parameter of 16 bits has no room for."""
        given: dict[str, Any] = {}

        def remember(_: Any, last: dict[str, Any]) -> None:
            given.update(last)

        def restore(_: Any) -> None:
            old = [i for group in given["param_groups"] for i in group["params"]]
            new = [p for group in self.param_groups for p in group["params"]]
            for i, p in zip(old, new, strict=True):
                for name, value in given["state"].get(i, {}).items():
                    if name == "step":
                        value = torch.as_tensor(value, dtype=torch.float32)
                        self.state[p][name] = value.to(many.local(self._name, "params", p).device).clone()
                    elif isinstance(value, Tensor) and value.is_floating_point():
                        self.state[p][name] = value.to(dtype=work_dtype(p.dtype), device=p.device)

        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()


class AdamW(_Optimizer):
    """AdamW (Loshchilov and Hutter, 2019), as `torch.optim.AdamW`.

    master_weights: keep a float32 copy of parameters of 16 bits, to which the steps are added. It is the parameter:
    what is written into the narrow one from elsewhere is lost with the next step.
    """

    _rule = ADAM

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": fused, "decoupled_weight_decay": True, "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _checked(self, group: Mapping[str, Any]) -> None:
        super()._checked(group)
        self._number("eps", group["eps"])


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`. master_weights: as of `AdamW`."""

    _rule, _decay = SGD_RULE, COUPLED

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused,
            "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _checked(self, group: Mapping[str, Any]) -> None:
        super()._checked(group)
        momentum, dampening = (self._number(name, group[name]) for name in ("momentum", "dampening"))
        if group["nesterov"] and (momentum == 0 or dampening != 0):
            raise InvalidProblemError(
                f"{self._name}: nesterov is True with momentum {momentum} and dampening {dampening}; it needs a "
                "momentum and no dampening"
            )

    def _update(self, group: Mapping[str, Any]) -> Update:
        return super()._update(group)._replace(momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]))


class Lion(_Optimizer):
    """Lion (Chen et al., 2023), "Symbolic Discovery of Optimization Algorithms", with decoupled weight decay.

    master_weights: as of `AdamW`.
    """

    _rule = LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
            "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults)


# --- a schedule ------------------------------------------------------------------------------------------------------
_TERMS = tuple(
    [(-1.0 if k % 2 else 1.0) / math.factorial(2 * k) for k in range(12)]
)  # of the cosine's series, each rounded once


def _cosine(x: float) -> float:
    """The cosine of pi * x for 0 <= x <= 1, by the series up to a right angle; at most 2**-51 off."""
    if x > 0.5:
        return -_cosine(1.0 - x)
    square = (math.pi * x) * (math.pi * x)
    result: float = _TERMS[-1]
    for term in reversed(_TERMS[:-1]):
        result = result * square + term
    return result


class _Cosine:
    """What `cosine_schedule` returns; an object, so that a scheduler's state has it."""

    def __init__(self, steps: int, warmup: int, final: float) -> None:
        self.steps, self.warmup, self.final = steps, warmup, final

    def __call__(self, step: int) -> float:
        with default_environment():
            done = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
            if done < 0:
                return (step + 1) / self.warmup
            return self.final + (1.0 - self.final) * (0.5 * (1.0 + _cosine(done)))


def cosine_schedule(steps: int, warmup: int = 0, final: float = 0.0) -> Callable[[int], float]:
    """The factor of `torch.optim.lr_scheduler.LambdaLR`: a linear warm-up, then half a cosine down to `final`.

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, igt.optim.cosine_schedule(10_000, warmup=500))

    steps: in all, of which `warmup` rise to 1. From IEEE operations in binary64 alone, so with the same bits on every
    machine. InvalidProblemError unless 0 <= warmup < steps and 0 <= final <= 1.
    """
    if not isinstance(steps, int) or not isinstance(warmup, int) or not 0 <= warmup < steps:
        raise InvalidProblemError(
            f"cosine_schedule: steps is {steps!r} and warmup {warmup!r}; expected integers with 0 <= warmup < steps"
        )
    if isinstance(final, bool) or not isinstance(final, (int, float)) or not 0 <= final <= 1:
        raise InvalidProblemError(f"cosine_schedule: final is {final!r}; expected a number from 0 to 1")
    return _Cosine(steps, warmup, float(final))
