"""Processes of one group that run functions together, for tests; every call has a time limit."""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # seconds for a call, the start of the processes and the compilation of kernels included


def _serve(rank: int, size: int, store: str, backend: str, connection: Any) -> None:
    """Run what comes, in the group of all ranks; `groups[n]` has the first n."""
    sys.path.insert(0, str(Path(__file__).parent))
    faulthandler.register(signal.SIGUSR1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    while (task := connection.recv()) is not None:
        module, name, arguments, n = task
        try:
            run = getattr(importlib.import_module(module), name)
            connection.send((True, run(groups[n], **arguments)))
        except Exception as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    os._exit(0)  # without the end of the process group, which waits for other ranks


def _context(backend: str) -> Any:
    """How processes start: as copies of one that has imported what all need, but where they use a GPU."""
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isograd.torch.distributed", "torch.distributed.fsdp"])
    return context


class Ranks:
    """So many processes; `run` calls a function of a module on the first n of them."""

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        context = _context(backend)
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, str(folder / "store"), backend, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, module: str, name: str, n: int, timeout: float = TIMEOUT, **arguments: Any) -> list[Any]:
        """What the function returns on each of n ranks; fails where it raises on one."""
        for ok, found in (results := self.outcomes(module, name, n, timeout, **arguments)):
            assert ok, found[-1]
        return [found for _, found in results]

    def outcomes(
        self, module: str, name: str, n: int, timeout: float = TIMEOUT, **arguments: Any
    ) -> Sequence[tuple[bool, Any]]:
        """(True, result) or (False, (class, message, traceback)) of each rank; ends all where one does not answer."""
        for pipe in self._pipes[:n]:
            pipe.send((module, name, arguments, n))
        results = []
        for rank, pipe in enumerate(self._pipes[:n]):
            if not pipe.poll(timeout):
                for process in self._processes:
                    os.kill(process.pid, signal.SIGUSR1)  # says on stderr where it is
                time.sleep(1)
                self.close()
                raise AssertionError(f"rank {rank} has not answered within {timeout:.0f} s")
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
