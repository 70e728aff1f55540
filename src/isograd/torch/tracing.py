"""Digests of everything that a step computes, in a file: `isograd diff` finds the first place where two runs part."""

import os
import platform
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import isograd
from isograd import trace_file
from isograd.errors import InvalidProblemError, TraceFileError
from isograd.runtime.blocks import BlockEnd
from isograd.torch import digests
from isograd.torch.module_calls import Call, ModuleCalls, not_compiled, unwrapped


class Trace:
    """What `trace` returns; see there. A context manager for one block. records: how many were written."""

    def __init__(
        self, path: str | os.PathLike[str], model: Module | None = None, optimizer: Optimizer | None = None
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidProblemError(f"trace: path is {path!r}; expected the path of a file")
        if model is not None and not isinstance(model, Module):
            raise InvalidProblemError(f"trace: model is a {type(model).__name__}; expected a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InvalidProblemError(
                f"trace: optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
            )
        rank, _ = _rank()
        self.path = Path(str(path).replace("{rank}", str(rank)))
        self.records = 0
        self._optimizer = optimizer
        self._file: BinaryIO | None = None
        self._lock = threading.RLock()  # a signal handler may call a module while it is held
        self._handles: list[Any] = []
        self._parameters: dict[Tensor, str] = {}
        self._stepped = False
        self._last: tuple[weakref.ref[Tensor], int, digests.Leaf] | None = None
        self._calls = ModuleCalls(model, entered=self._entered, left=self._left, found=self._found)

    # --- the block ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self._file is not None:
            raise InvalidProblemError("trace: the block has begun before; expected a new trace for every block")
        try:
            self._file = self.path.open("wb", buffering=0)  # a line is in the file once it is written
        except OSError as error:
            raise TraceFileError(f"trace: path is '{self.path}', which cannot be written ({error.strerror})") from error
        self._file.write(trace_file.line({trace_file.FORMAT: trace_file.VERSION, **_header()}))
        before, after = not_compiled(self._before_step), not_compiled(self._after_step)
        self._handles.append(register_optimizer_step_pre_hook(before))
        self._handles.append(register_optimizer_step_post_hook(after))
        self._calls.install()
        return self

    def _end(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if self._file is None or self._file.closed:
            return
        self._calls.remove()
        for handle in self._handles:
            handle.remove()
        if kind is None and not self._stepped:
            self._write_gradients("end")
            self._write_parameters("end")
        end = {"records": self.records, "compiled": self._calls.compiled, "error": kind and kind.__name__}
        with self._lock:
            self._file.write(trace_file.line({"end": end}))
            self._file.close()

    __exit__ = BlockEnd(_end)

    # --- records -----------------------------------------------------------------------------------------------------
    def _write(self, kind: str, name: str, part: str, leaf: digests.Leaf, call: int = 0) -> None:
        found = {"kind": kind, "name": name, "part": part + leaf.path, "call": call, "value": leaf.value}
        found |= {"sha256": leaf.sha256} if leaf.sha256 else {"unseen": leaf.unseen}
        with self._lock:
            if self._file is not None and not self._file.closed:
                self._file.write(trace_file.line(found))
                self.records += 1

    def _write_all(self, kind: str, name: str, part: str, value: Any, call: int = 0) -> None:
        for leaf in digests.leaves(value):
            self._write(kind, name, part, leaf, call)

    def _found(self, root: Module, prefix: str) -> None:
        """A model: its parameters and buffers before the step, and hooks on gradients."""
        for path, parameter in root.named_parameters():
            if parameter not in self._parameters:
                name = self._parameters[parameter] = prefix + unwrapped(path, root)
                self._write_all("start", name, "parameter", parameter)
                if parameter.requires_grad:
                    self._watch_gradient(parameter, "gradient", name, "gradient")
        for path, buffer in root.named_buffers():
            self._write_all("start", prefix + unwrapped(path, root), "buffer", buffer)

    # --- modules -----------------------------------------------------------------------------------------------------
    def _entered(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for part, value in (*((f"input[{i}]", a) for i, a in enumerate(args)), *_named("input", kwargs)):
            self._write_all(_kind(call), call.name, part, value, call.number)
            self._watch_gradients(call, part, value)

    def _left(self, call: Call, output: Any) -> None:
        self._write_all(_kind(call), call.name, "output", output, call.number)
        self._watch_gradients(call, "output", output)

    def _watch_gradients(self, call: Call, part: str, value: Any) -> None:
        for path, found in digests.walk(value):
            if isinstance(found, Tensor) and found.requires_grad and found not in self._parameters:
                self._watch_gradient(found, "backward", call.name, f"gradient of {part}{path}", call.number)

    def _watch_gradient(self, tensor: Tensor, kind: str, name: str, part: str, number: int = 0) -> None:
        def hook(gradient: Tensor) -> None:
            # The hooks of one tensor follow each other and see the same gradient. Autograd copies one that it would
            # keep as it is, if somebody else had it.
            if self._last is None or self._last[0]() is not gradient or self._last[1] != gradient._version:
                self._last = weakref.ref(gradient), gradient._version, digests.tensor(gradient)
            self._write(kind, name, part, self._last[2], number)

        self._handles.append(tensor.register_hook(not_compiled(hook)))  # type: ignore[no-untyped-call]

    # --- parameters --------------------------------------------------------------------------------------------------
    def _write_gradients(self, kind: str) -> None:
        for parameter, name in self._parameters.items():
            if parameter.grad is not None:
                self._write_all(kind, name, "gradient", parameter.grad)

    def _write_parameters(self, kind: str) -> None:
        for parameter, name in self._parameters.items():
            self._write_all(kind, name, "parameter", parameter)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer is optimizer:
            for name, parameter in self._optimized(optimizer):
                if parameter.grad is not None:
                    self._write_all("step", name, "gradient", parameter.grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer is optimizer:
            self._stepped = True
            for name, parameter in self._optimized(optimizer):
                self._write_all("parameter", name, "parameter", parameter)
                for part, value in _named("state", optimizer.state.get(parameter, {})):
                    self._write_all("parameter", name, part, value)

    def _optimized(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield self._parameters.get(parameter, f"{type(optimizer).__name__}.{g}.{i}"), parameter


def _kind(call: Call) -> str:
    return "recompute" if call.recompute else "forward"


def _named(part: str, values: Any) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield f"{part}[{key!r}]", value


# --- the header ------------------------------------------------------------------------------------------------------
def _rank() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _header() -> dict[str, Any]:
    """What a run's bits may depend on beside its program and data."""
    rank, ranks = _rank()
    random = {"cpu": digests.tensor(torch.get_rng_state()).sha256}
    found: dict[str, Any] = {
        "isograd": isograd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "rank": rank,
        "ranks": ranks,
        "settings": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "default_dtype": str(torch.get_default_dtype()),
        },
        "random": random,
    }
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        random["cuda"] = digests.tensor(torch.cuda.get_rng_state(index)).sha256
        found |= {
            "device": torch.cuda.get_device_name(index),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
        cudnn = torch.backends.cudnn
        found["settings"] |= {"cudnn.benchmark": cudnn.benchmark, "cudnn.deterministic": cudnn.deterministic}
    return found


def trace(path: str | os.PathLike[str], model: Module | None = None, optimizer: Optimizer | None = None) -> Trace:
    """A context manager that writes a digest of everything that a step computes into a file.

        with igt.trace("a.trace", model=model, optimizer=optimizer):
            step()

        $ isograd diff a.trace b.trace     # the first place where two runs part

    path: of the file, which is overwritten; "{rank}" in it stands for the rank of torch.distributed, since every rank
    writes a file of its own. model: whose modules, gradients and parameters are recorded; without one, every module
    that is called outside of known ones counts as a model. optimizer: whose steps are recorded; without one, all.

    A record is a SHA-256 over dtype, shape and bytes, of, in this order: every parameter and buffer before the step;
    the inputs and outputs of every call of a module; in backward the gradients of those tensors, each with all that
    flows into it, and the gradient that each pass has for every parameter; the gradients that an optimizer is given,
    then the parameters and its state after the step. Where no optimizer steps in the block, gradients and parameters
    are recorded at its end. Of a DTensor the local part is digested, with its placements. What a checkpoint
    recomputes in backward is marked. The file begins with versions, devices, settings and the states of torch's
    generators.

    Every digest waits for the device and copies a tensor to the host: a step takes many times as long, and no bit of it
    changes. Lines are written as they come, so that the file of a run that was stopped can be read.

    Modules inside of code that torch.compile has compiled are not seen: the calls of the compiled module itself are,
    and the gradients of its parameters; the file says which modules were compiled. Nothing is seen of what is done in a
    CUDA graph's replay. InvalidProblemError for arguments of other types; TraceFileError if the file cannot be written.
    """
    return Trace(path, model, optimizer)
