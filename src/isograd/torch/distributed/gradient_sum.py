"""The mean gradient of the units of all ranks, with bits that do not depend on the ranks (rule 17)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isograd.errors import InvalidProblemError, IsogradError, StepError, UnsupportedError
from isograd.torch.distributed import sharded
from isograd.torch.distributed.agreement import agree, checked_group
from isograd.torch.distributed.buckets import Slot, packed
from isograd.torch.distributed.report import GradientReport
from isograd.torch.distributed.settings import Exponents, Setting, checked, resolved
from isograd.torch.distributed.units import Passes

_NAME = "GradientSum"
_TAKEN = "_isograd_gradient_sum"  # marks parameters that have one, and the gradients that it left
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class GradientSum:
    """The mean gradient over units of work, with the same bits however they are spread over ranks and passes.

        total = igt.distributed.GradientSum(model)
        for step in steps:
            for batch in batches_of_this_rank(step):
                loss(model(batch)).backward()     # one unit
            total.finish()                        # p.grad: the mean over the units of all ranks
            optimizer.step()
            optimizer.zero_grad()

    A *unit* is one backward pass. With g_u the gradient of a parameter in unit u of N, and a quantum of 2^q:

        S = sum over u of rint(g_u * 2^-q), an exact integer;    p.grad = RN(RN(S) / RN(N)) * 2^q, rounded to p.dtype

    off by at most 2^(q - 1) + 2.1 * 2^-24 |mean| (float64: 2^-53) and half an ulp of a 16-bit type from the exact mean
    of the g_u. Integers have no order: neither ranks, units, buckets, nor what is sent when leave a trace. What a unit
    is must not depend on the ranks either: a batch of fixed content, its loss divided by constants, computed by kernels
    that return the same bits on every run. Several backward passes are several units; they are not added up in floats.

    model: a module whose trainable parameters are float16, bfloat16, float32 or float64 on one device: plain, in
    DistributedDataParallel, or with `fully_shard` (FSDP2) over one mesh of one dimension, whose ranks exchange
    gradients in FSDP2's `reduce_dtype`. Made after these, on every rank. Every backward pass moves the gradients into
    int64 totals, 8 bytes a parameter (an FSDP2 rank holds its part), and leaves None in `p.grad`. A parameter without
    a gradient in a unit adds zero there, and one without any gets a gradient of zeros. DDP's own reduction is off, and
    `no_sync()` and FSDP2's `set_requires_gradient_sync` have no effect; buffers of a DDP model are copied from the
    first rank in `finish`.

    group: the ranks to add over, by default all of `torch.distributed` where that is initialized, else none. With
    FSDP2 the ranks of the mesh are added in any case; a group then has the ranks that hold the same part.

    units: how many units this rank has in a step, if known. In the last one buckets are sent as soon as the pass has
    completed them, while it goes on, and the last bucket by `finish`. The attribute may be set before each step. If
    every rank announces one unit here, gradients themselves are sent instead of totals, where those of all ranks take
    no more than 8 bytes a parameter (up to 4 ranks in 16 bits, 2 in float32); the attribute stays 1, or 0 in a step
    without a unit. It never changes a bit.

    quantum, range: exponents of two, for all parameters or by name: a mapping of names, or patterns as in `fnmatch`, to
    exponents (the first match counts). By default the quantum is 2^-48, and the range, of which N times the largest
    |g_u| must stay below, 2^62 times the quantum. If a gradient is not finite or leaves its range, every gradient of
    the step is NaN on all ranks: see `finish`.

    bucket_bytes: the size of what is sent at once.

    Raises InvalidProblemError on all ranks if their parameters or settings differ, and for gradients that are there
    already; UnsupportedError for other models and devices.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Any = None,
        *,
        units: int | None = None,
        quantum: Exponents | None = None,
        range: Exponents | None = None,  # noqa: A002
        bucket_bytes: int = 1 << 26,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidProblemError(f"{_NAME}: model is a {type(model).__name__}; expected a torch.nn.Module")
        group = checked_group(_NAME, group)
        ddp, plain = _unwrapped(model)
        self._ddp = ddp
        self._modules = sharded.fsdp_modules(plain)
        if group is None and ddp is not None:
            group = ddp.process_group
        if group is None and not self._modules and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._group = group
        self._named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
        first = next(iter(self._named.values()), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._mesh: Any = getattr(first, "device_mesh", None) if self._modules else None
        self._mesh_group = None if self._mesh is None or self._mesh.ndim != 1 else self._mesh.get_group()
        self._shards = 1 if self._mesh_group is None else dist.get_world_size(self._mesh_group)
        self._groups = [g for g in (self._mesh_group, self._group) if g is not None]
        self._bucket_bytes = bucket_bytes
        self._handles: list[Any] = []
        self._passes = Passes(self._ended)
        self._unread: tuple[Any, Tensor, GradientReport] | None = None
        # The state of a step.
        self._peaks: Tensor
        self._problem: str | None = None
        self._single = False  # whether every rank has one unit in a step
        self._pending: Tensor | None = None  # what FSDP2 has just sent, of parameters whose hooks come next
        self._streams: set[int] = set()
        self._counted = self._ahead = self._taken = 0
        self._set_up(_NAME, lambda: self._checked(units, quantum, range))
        for slot in self._slot.values():
            setattr(slot.parameter, _TAKEN, True)
            hook = partial(self._take, slot.name)
            handle = slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        self._let_ddp_reduce(False)

    # --- construction ------------------------------------------------------------------------------------------------
    def _set_up(self, name: str, check: Callable[[], list[Setting]]) -> None:
        """Agree with the other ranks on parameters and on the settings of `check`; then lay out the totals.

        An error of `check` is raised on the other ranks as well, which would wait for this one.
        """
        failed: IsogradError | None = None
        settings = list[Setting]()
        try:
            settings = check()
        except IsogradError as error:
            failed = error
        parameters = [(n, tuple(p.shape), str(p.dtype), p.stride()) for n, p in self._named.items()]
        described = {"parameters": parameters, "settings": (settings, self._bucket_bytes)}
        announced = -1 if failed or self._units is None else self._units
        everyone = agree(name, self._groups, self._device, failed, described, announced)
        self._settings = dict(zip(self._named, settings, strict=True))
        slots = [Slot(n, p, _local(p), self._settings[n], i) for i, (n, p) in enumerate(self._named.items())]
        self._slot = {slot.name: slot for slot in slots}
        self._single = self._group is not None and self._shards == 1 and set(everyone) == {1}
        self._buckets = packed(slots, self._bucket_bytes, self._group, self._single)
        if self._shards > 1:
            for module in sharded.reducing(self._modules):
                sharded.exchange_by(module, self._exchanged)
        for module in self._modules:
            sharded.reduce_always(module)
        wide = [p.dtype is torch.float64 for p in self._named.values()]
        self._wide = torch.tensor(wide, dtype=torch.bool, device=self._device)
        limits = [2.0**setting.range for setting in settings]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=self._device)
        self._begin()

    def _checked(self, units: int | None, quantum: Exponents | None, limit: Exponents | None) -> list[Setting]:
        """Raise for what cannot be summed."""
        if not isinstance(self._bucket_bytes, int) or self._bucket_bytes < 1:
            raise InvalidProblemError(f"{_NAME}: bucket_bytes is {self._bucket_bytes!r}; expected a positive integer")
        if not self._named:
            raise InvalidProblemError(f"{_NAME}: model has no parameters that require gradients")
        self.units = units
        for option in ("static_graph", "mixed_precision"):
            if getattr(self._ddp, option, None):
                raise UnsupportedError(f"{_NAME}: model is DistributedDataParallel({option}=...); accepted: without")
        for name, p in self._named.items():
            what = f"{_NAME}: parameter {name!r}"
            if p.dtype not in _DTYPES:
                accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                raise UnsupportedError(f"{what} has dtype {p.dtype}; accepted: {accepted}")
            if p.device != self._device or p.device.type not in ("cpu", "cuda"):
                raise UnsupportedError(f"{what} is on {p.device}; accepted: the CPU or one GPU for all parameters")
            if getattr(p, "device_mesh", None) != self._mesh or (self._mesh is not None and self._mesh_group is None):
                raise UnsupportedError(
                    f"{what} is not sharded like the others; accepted: models without sharded parameters, and those "
                    "whose parameters `fully_shard` has sharded over one mesh of one dimension"
                )
            if p.grad is not None:
                raise InvalidProblemError(f"{what} has a gradient already; call zero_grad() first")
            if hasattr(p, _TAKEN):
                raise InvalidProblemError(f"{what} belongs to another {_NAME}; call its remove() first")
        return resolved(_NAME, list(self._named), quantum, limit)

    def _let_ddp_reduce(self, enable: bool) -> None:
        """Switch DDP's own collectives, which expect the same passes on every rank, as `no_sync` does."""
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._ddp.require_forward_param_sync = enable

    @property
    def units(self) -> int | None:
        """How many units this rank has in a step; None if that is not known. Nothing overlaps then."""
        return self._units

    @units.setter
    def units(self, units: int | None) -> None:
        if units is not None and (not isinstance(units, int) or isinstance(units, bool) or units < 0):
            raise InvalidProblemError(f"{_NAME}: units is {units!r}; expected a number of backward passes, or None")
        if self._single and units not in (0, 1):
            raise InvalidProblemError(
                f"{_NAME}: units is {units}, and every rank has announced one unit in a step to the constructor; "
                "accepted: 0 and 1, or anything after a constructor with units=None"
            )
        self._units = units

    # --- in a backward pass ------------------------------------------------------------------------------------------
    def _take(self, name: str, parameter: Tensor) -> None:
        """Move a gradient that is complete into the total."""
        slot, gradient = self._slot[name], parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        self._passes.enter()
        with torch.no_grad():
            if (problem := self._refusal(slot, gradient)) is not None:
                self._problem = self._problem or problem
            elif self._shards > 1:
                self._take_exchanged(slot, parameter)
            else:
                slot.add(_local(gradient), self._peaks)
        self._send_ahead(slot)

    def _refusal(self, slot: Slot, gradient: Tensor) -> str | None:
        if getattr(gradient, _TAKEN, False):
            return (
                f"the gradient of {slot.name!r} of the step before was still there in a backward pass; call "
                "zero_grad(set_to_none=True) after each step"
            )
        if slot.bucket.sent or (self._group is not None and self._units is not None and self._counted >= self._units):
            return (
                f"a gradient of {slot.name!r} came when all should have been sent: this rank announced {self._units} "
                f"units and was in unit {self._counted + 1}"
            )
        if slot.bucket.parts is not None and slot.seen:
            return (
                f"a second gradient of {slot.name!r} came in the only unit, as with reentrant checkpoints; make the "
                f"{_NAME} with units=None"
            )
        if gradient.layout is not torch.strided:
            return f"the gradient of {slot.name!r} is sparse; accepted: dense gradients"
        if gradient.dtype not in _DTYPES or (gradient.dtype is torch.float64) != (slot.bucket.dtype is torch.float64):
            return f"the gradient of {slot.name!r} has dtype {gradient.dtype}, the parameter {slot.bucket.dtype}"
        if slot.bucket.parts is not None and gradient.dtype is not slot.bucket.dtype:
            return (
                f"the gradient of {slot.name!r} has dtype {gradient.dtype}, the parameter {slot.bucket.dtype}; "
                f"accepted with one unit on every rank: the parameter's; make the {_NAME} with units=None"
            )
        return None

    def _exchanged(self, gradients: Tensor) -> None:
        self._pending, self._taken = gradients, 0

    def _take_exchanged(self, slot: Slot, parameter: Any) -> None:
        """Take all ranks' gradients of a parameter's part from what FSDP2 has just sent; its own result is none."""
        if self._pending is None or self._taken + slot.size > self._pending.shape[1]:
            self._problem = f"FSDP2 has not reduced {slot.name!r} by {_NAME}; leave set_custom_reduce_scatter alone"
            return
        if (self._pending.dtype is torch.float64) != (slot.bucket.dtype is torch.float64):
            self._problem = f"FSDP2 reduces in {self._pending.dtype} what belongs to {slot.name!r}"
            return
        slot.add_parts(self._pending[:, self._taken : self._taken + slot.size], self._peaks)
        self._taken += sharded.padded_size(parameter, self._shards)

    def _send_ahead(self, slot: Slot) -> None:
        """In the last unit, send what is complete; in one order on all ranks."""
        if self._units is None or self._counted != self._units - 1 or self._group is None:
            return
        slot.bucket.missing.discard(slot)
        if self._device.type == "cuda":
            # What other streams have added is complete only when the pass is.
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._streams.add(stream)
            if len(self._streams) > 1:
                return
        while self._ahead < len(self._buckets) - 1 and not self._buckets[self._ahead].missing:
            self._buckets[self._ahead].send()
            self._ahead += 1

    def _ended(self) -> None:
        self._counted += 1

    # --- a step ------------------------------------------------------------------------------------------------------
    def finish(self) -> GradientReport:
        """Add over the ranks, and leave the mean over the units of all ranks in every `p.grad`.

        A collective call: every rank of the group calls it once a step, also one that had no unit. Ranks may have
        different numbers of units (FSDP2 itself wants as many forward and backward passes on every rank).

        Returns a report. Whether gradients fit their ranges is known on the device: on a GPU the call does not wait for
        that, and the gradients are NaN on all ranks if they did not. Reading the report waits; a RuntimeWarning tells
        as well, on the CPU at once, on a GPU in a later `finish`, when the answer has arrived.

        Raises StepError if the step cannot be finished, and begins another: no rank had a unit; an exception ended a
        backward pass; more units than announced; gradients of the step before still in `p.grad`; sparse gradients. All
        ranks raise on the CPU; on GPUs the rank at fault raises, and the others' gradients are NaN, as their reports
        explain.
        """
        problem = self._problem
        if self._passes.broken:
            problem = "an exception ended a backward pass; call reset() on every rank to go on after one"
        if not self._groups and problem is None and self._counted == 0:
            problem = "there was no backward pass since the last step"
        if not self._groups and problem is not None:
            self._begin()
            raise StepError(f"{_NAME}.finish: {problem}")
        with torch.no_grad():
            for bucket in self._buckets[self._ahead : -1]:
                bucket.send()
            header, exceeded = self._added_up(problem)
            self._copy_buffers()
            # While the last, often the largest, is under way, the means of the others are taken, which need the header.
            self._buckets[-1].send()
            report = GradientReport(header, exceeded, list(self._named))
            if self._counted == 0 and problem is None and report.problem is None and report.units == 0:
                problem = "no rank had a backward pass since the last step"
            if problem is None and self._device.type == "cpu" and report.problem is not None:
                problem = report.problem
            if problem is not None:
                self._begin()
                raise StepError(f"{_NAME}.finish: {problem}")
            for bucket in self._buckets:
                bucket.wait()
                for slot, gradient in bucket.gradients(header):
                    self._leave(slot.parameter, gradient)
        self._begin()
        self._tell(report)
        return report

    def _added_up(self, problem: str | None) -> tuple[Tensor, Tensor]:
        """((units of all ranks, whether gradients are NaN, ranks with a problem), which peaks exceed)."""
        header = torch.empty(3, dtype=torch.int64, device=self._device)
        for i, value in enumerate((self._counted, 0, int(problem is not None))):
            header[i].fill_(value)  # without the wait of a copy from the host
        peaks = self._peaks
        for group in self._groups:
            dist.all_reduce(header, group=group)
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        narrow = peaks.to(torch.int32).view(torch.float32).to(torch.float64)
        magnitudes = torch.where(self._wide, peaks.view(torch.float64), narrow)
        exceeded = ~(magnitudes * header[0].to(torch.float64) < self._limits)
        header[1] = exceeded.any() | (header[2] != 0)
        return header, exceeded

    def _leave(self, parameter: Any, gradient: Tensor) -> None:
        if not parameter.requires_grad:
            return
        if self._mesh_group is not None:
            from torch.distributed.tensor import DTensor

            gradient = DTensor.from_local(
                gradient, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        setattr(gradient, _TAKEN, True)
        parameter.grad = gradient

    def _copy_buffers(self) -> None:
        """What DDP does with the buffers of a model in a forward pass that is followed by its reduction."""
        if self._ddp is not None and self._ddp.broadcast_buffers and self._group is not None:
            for buffer in self._ddp.module.buffers():
                dist.broadcast(buffer, group=self._group, group_src=0)

    def _tell(self, report: GradientReport) -> None:
        """Warn of gradients that are NaN: now, or on a GPU in a later step, when the answer has arrived."""
        if self._device.type == "cpu":
            if not report.fits:
                warnings.warn(f"{_NAME}: {report}", RuntimeWarning, stacklevel=3)
            return
        before = self._unread
        flag = torch.empty(1, dtype=torch.int64, pin_memory=True)
        flag.copy_(report._header[1:2], non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self._device))
        self._unread = arrived, flag, report
        if before is not None and before[0].query() and int(before[1]):
            warnings.warn(f"{_NAME}: in an earlier step {before[2]}", RuntimeWarning, stacklevel=3)

    def _begin(self) -> None:
        """Nothing added yet."""
        self._passes.forget()
        self._counted = self._ahead = self._taken = 0
        self._problem = self._pending = None
        self._streams = set()
        # New ones: a report may still look at those before.
        self._peaks = torch.zeros(len(self._named), dtype=torch.int64, device=self._device)
        for bucket in self._buckets:
            bucket.clear()

    def reset(self) -> None:
        """Forget the units of a step that is not finished, as after an exception in a backward pass.

        Every rank must do so; a rank that cannot know of the exception on another calls `finish`, and so does the one
        with the exception: then all raise StepError. Gradients in `p.grad` are dropped.
        """
        self._begin()
        for parameter in self._named.values():
            parameter.grad = None

    def remove(self) -> None:
        """Take the sum off the model, whose gradients are torch's again. The step must be finished."""
        self._idle("remove")
        for handle in self._handles:
            handle.remove()
        for parameter in self._named.values():
            if hasattr(parameter, _TAKEN):
                delattr(parameter, _TAKEN)
        for module in self._modules:
            sharded.restore(module)
        self._let_ddp_reduce(True)

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def _idle(self, method: str) -> None:
        if self._counted or self._passes.broken or self._problem is not None:
            raise StepError(
                f"{_NAME}.{method}: {self._counted} units of a step are added up; call finish() or reset() first"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on with the same bits, with any number of ranks: quanta and ranges.

        Raises StepError between the first unit of a step and its `finish`: totals are not part of it.
        """
        self._idle("state_dict")
        return {
            "quantum": {name: setting.quantum for name, setting in self._settings.items()},
            "range": {name: setting.range for name, setting in self._settings.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take quanta and ranges from a run that may have had another number of ranks.

        A collective call. Raises InvalidProblemError for a state of other parameters, and on all ranks where states
        differ; StepError between the first unit of a step and its `finish`.
        """
        name = f"{_NAME}.load_state_dict"
        self._idle("load_state_dict")

        def check() -> list[Setting]:
            if not isinstance(state, Mapping) or not {"quantum", "range"} <= set(state):
                raise InvalidProblemError(f"{name}: state is no result of state_dict()")
            if apart := sorted(set(state["quantum"]) ^ set(self._named)):
                shown = ", ".join(apart[:8])
                raise InvalidProblemError(f"{name}: state and model differ in the parameters {shown}")
            pairs = [(state["quantum"][n], state["range"][n]) for n in self._named]
            return [checked(name, n, *pair) for n, pair in zip(self._named, pairs, strict=True)]

        self._set_up(name, check)


def _unwrapped(model: Any) -> tuple[Any, nn.Module]:
    """(the DDP wrapper or None, the module inside it and inside `torch.compile`)."""
    ddp = None
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            ddp = model
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            return ddp, model


def _local(tensor: Any) -> Tensor:
    """A tensor, or this rank's part of it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    return local.detach()
