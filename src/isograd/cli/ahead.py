"""Kernels compiled in processes beside this one: they are kept on disk, where every process finds them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import NamedTuple

from isograd.cli.check import Runner
from isograd.cli.devices import DEVICES
from isograd.cli.suites import SUITES, cases
from isograd.core import registry
from isograd.errors import UnsupportedError
from isograd.runtime import parallel


class Problem(NamedTuple):
    """What kernels are registered for."""

    operation: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.operation} {self.dtype}"


def problems(entries: Iterable[registry.Entry]) -> list[Problem]:
    """The problems of registered kernels, each once, in their order."""
    return list(dict.fromkeys(Problem(e.operation, e.dtype, e.device) for e in entries))


def compute(problem: Problem) -> None:
    """Compute the cases of a problem, and their changes, with every kernel: all that verify computes."""
    suite = SUITES[problem.operation]
    given = cases(problem.operation, problem.dtype)
    given += [change.case for case in given for make in suite.changes.values() for change in make(case)]
    for entry in registry.kernels():
        if Problem(entry.operation, entry.dtype, entry.device) != problem:
            continue
        run = Runner(suite, entry, DEVICES[problem.device])
        for threads in (1, 2):  # one thread alone may take another kernel
            parallel.set_num_threads(threads)
            for case in given:
                with contextlib.suppress(UnsupportedError):
                    run(case)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a process at once and without a word
    logging.getLogger("isograd").setLevel(logging.ERROR)  # that kernels are compiled is said by the command


class Pool:
    """Processes that compute problems, and end with the block whatever they are at."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._others = multiprocessing.active_children()
        self._executor: ProcessPoolExecutor | None = None

    @property
    def started(self) -> bool:
        """Whether the processes have something to do."""
        return self._executor is not None

    def start(self, given: Iterable[Problem]) -> dict[Future[None], Problem]:
        """Begin with the problems, in their order, and wait for none."""
        self._executor = ProcessPoolExecutor(self._processes, multiprocessing.get_context("spawn"), _begin)
        return {self._executor.submit(compute, problem): problem for problem in given}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            for child in multiprocessing.active_children():
                if child not in self._others:
                    child.terminate()
            self._executor.shutdown(cancel_futures=True)


def outcomes(started: dict[Future[None], Problem]) -> Iterator[tuple[Problem, str]]:
    """Each problem as soon as it is done, and what went wrong with it, if anything."""
    for future in as_completed(started):
        error = future.exception()
        yield started[future], "" if error is None else f"{type(error).__name__}: {error}"
