"""Records of what an operator does on a device, with kernels that are Python functions on the CPU's memory."""

import contextlib
import ctypes
import itertools
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from steps import at_step, interrupt  # noqa: E402

from isograd.runtime import blocks, launches  # noqa: E402
from isograd.torch import replay  # noqa: E402

modes = torch.utils._python_dispatch


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Records ask for the current device and its stream; the tensors here have no device number.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def floats(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def triple(stream: int, source: int, target: int, count: int) -> None:
    """A kernel."""
    assert stream == 7
    floats(target, count)[:] = floats(source, count) * np.float32(3)


def launch(source: Any, target: Any, count: int | None = None) -> None:
    arguments = [source.data_ptr(), target.data_ptr(), target.numel() if count is None else count]
    watcher = launches.watcher()
    if watcher is not None:
        watcher.launched(triple, [source, target], arguments)
    triple(7, *arguments)


class Problem:
    """An implementation that is called, recorded and replayed on fresh tensors."""

    def __init__(self, run: Any, *tensors: Any) -> None:
        extents = tuple([replay._extent(t.shape, t.stride(), t.element_size()) for t in tensors])
        self.calls, self.met = 0, replay._Met(extents)

        def counted(*args: Any) -> Any:
            self.calls += 1
            return run(*args)

        self.run = counted
        self.first = self(*tensors)

    def __call__(self, *tensors: Any) -> Any:
        addresses = [t.data_ptr() for t in tensors]
        layout = self.met.layout(addresses)
        if layout not in self.met.records:
            return replay._recorded(self.run, tensors, list(tensors), self.met, layout)
        record = self.met.records[layout]
        return self.run(*tensors) if record is None else record(list(tensors), addresses)


CONSTANT = torch.tensor([10.0, 20.0, 30.0, 40.0])


def alone(x: Any) -> Any:
    out = torch.empty_like(x)
    launch(x, out)
    return out


def scratch(x: Any) -> Any:
    first, out = torch.empty(4), torch.empty(4)
    launch(x, first)
    del first
    second = torch.empty(4)  # perhaps where the first was
    launch(x, second)
    launch(second, out)
    return out


def views(x: Any) -> Any:
    out = torch.zeros(2, 4)
    launch(x[2:], out[1, 1:3])
    out[0].copy_(x)
    return out.t()


def constants(x: Any) -> Any:
    out = torch.empty(4)
    launch(CONSTANT, out)
    return out.add_(x)


def operators(x: Any) -> tuple[Any, Any]:
    square = torch.mm(x.view(2, 2), x.view(2, 2).t())
    out = torch.full((2, 2), 0.5)
    torch.mm(square, square, out=out)
    launch(out, square)
    values, _ = torch.sort(x, stable=True)
    return square, values


def several(x: Any) -> tuple[Any, Any, Any]:
    pair = torch.empty(2, 4)
    launch(x, pair[0])
    launch(pair[0], pair[1])
    return pair[0], pair[1], torch.empty(0, 3)


def converted(x: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():  # under which `to` is a single operator, perhaps a view
        wide, same = x.to(torch.float64), x.to(torch.float32)
        out = wide.mul_(2).to(torch.float32)
    launch(same, out)
    return out.reshape(2, 2).t().reshape(-1)


@pytest.mark.parametrize("run", [alone, scratch, views, constants, operators, several, converted])
def test_a_record_does_what_the_call_does(run: Any) -> None:
    problem = Problem(run, torch.arange(4.0))
    for seed in range(4):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        got, expected = problem(x), run(x)
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for a, b in pairs:
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
    assert problem.calls == 2


def test_a_result_in_memory_of_the_caller_is_that_tensor() -> None:
    def run(x: Any, out: Any) -> tuple[Any, Any]:
        launch(x, out)
        return out, out.sum()

    whole = torch.arange(4.0)
    problem = Problem(run, whole, whole.view(4))
    for start in range(3):
        x = torch.arange(4.0) + start
        out, expected = x.view(4), x * 3
        got, total = problem(x, out)
        assert got is out
        assert torch.equal(x, expected)
        assert total == expected.sum()
    assert problem.calls == 2


def test_results_of_replays_are_apart() -> None:
    problem = Problem(alone, torch.arange(4.0))
    problem(torch.ones(4))
    a, b = problem(torch.ones(4)), problem(torch.zeros(4))
    assert torch.equal(a, torch.full((4,), 3.0))
    assert torch.equal(b, torch.zeros(4))


def test_memory_is_released_where_it_is_read_for_the_last_time() -> None:
    problem = Problem(scratch, torch.arange(4.0))
    alive: list[int] = []
    problem(torch.ones(4))
    record = problem.met.records[None]
    assert record is not None
    tensors: list[Any] = [torch.ones(4)]
    addresses = [tensors[0].data_ptr()]
    for step in record._steps:
        step(tensors, addresses, 7)
        alive.append(sum(t is not None for t in tensors[1:]))
    assert max(alive) == 2  # of three allocations


def test_memory_that_nobody_reads_is_not_made() -> None:
    def run(x: Any) -> Any:
        out = torch.empty_like(x)
        torch.empty(1000)  # as Triton does for a launch
        launch(x, out)
        return out

    problem = Problem(run, torch.arange(4.0))
    problem(torch.ones(4))
    record = problem.met.records[None]
    assert record is not None
    tensors: list[Any] = [torch.ones(4)]
    assert torch.equal(record(tensors, [tensors[0].data_ptr()]), torch.full((4,), 3.0))
    assert sum(t is not None for t in tensors) == 2


def listed(x: Any) -> Any:
    return [x * 2]


def reads(x: Any) -> Any:
    return x * 2 if x[0].item() > 0 else x * 3


def random(x: Any) -> Any:
    return x + torch.rand(4)


def dropped(x: Any) -> Any:
    return torch.nn.functional.dropout(x, 0.5)


def part(x: Any) -> Any:
    return x[1:]


def constant(x: Any) -> Any:
    return CONSTANT


def described(x: Any) -> Any:
    out = torch.empty(4)
    launches.watcher() and launches.watcher().launched(triple, [x, out], [object(), out.data_ptr()])
    return out.copy_(x)


class Foreign:
    """A kernel of somebody else."""


def unseen(x: Any) -> Any:
    # Memory of a call's own that no operator of torch makes.
    made = torch.frombuffer(bytearray(16), dtype=torch.float32)
    with torch._C._DisableTorchDispatch():
        made = made.clone().fill_(float(x[1]))
    out = torch.empty(4)
    launch(made, out)
    return out


def foreign(x: Any) -> Any:
    launches.running(Foreign())
    return x * 2


def resized(x: Any) -> Any:
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    return out


def found(x: Any) -> Any:
    out = torch.empty(len(x.nonzero()))
    return out.fill_(1)


def turned(x: Any) -> Any:
    out = torch.empty(1, 4)
    launch(x, out.t_())
    return out


NUMBERS = itertools.count()


def counted(x: Any) -> Any:
    return x + next(NUMBERS)


def counted_by_a_kernel(x: Any) -> Any:
    out = torch.zeros(4)
    launch(x, out, next(NUMBERS) % 4)
    return out


@pytest.mark.parametrize(
    "run",
    [
        *(reads, random, dropped, part, constant, described, foreign, unseen, resized, turned),
        *(counted, counted_by_a_kernel, listed, found),
    ],
)
def test_what_cannot_be_repeated_is_not_recorded(run: Any) -> None:
    problem = Problem(run, torch.arange(4.0))
    for seed in range(3):
        x = torch.full((4,), float(seed))
        got = problem(x)
        assert run in (random, dropped, counted, counted_by_a_kernel, listed) or torch.equal(got, run(x))
    assert problem.met.records == {None: None}
    assert problem.calls == 4


def test_a_call_that_differs_once_is_recorded_again() -> None:
    numbers = iter((1, 0, 0, 0, 0))

    def run(x: Any) -> Any:
        return x + next(numbers)

    problem = Problem(run, torch.arange(4.0))
    for seed in range(5):
        x = torch.full((4,), float(seed))
        assert torch.equal(problem(x), x)
    assert problem.calls == 3


def both(x: Any, y: Any) -> Any:
    out = torch.empty(4)
    launch(x, out)
    return out.add_(y)


def test_tensors_that_lie_in_one_another_have_a_record_of_their_own() -> None:
    whole = torch.arange(8.0)
    problem = Problem(both, whole[:4], whole[:4])
    assert None not in problem.met.first
    for x, y in ((whole[:4], whole[:4]), (whole[:4], whole[4:]), (whole[:4], whole[2:6]), (whole[2:6], whole[:4])):
        for _ in range(3):
            assert torch.equal(problem(x, y), x * 3 + y)
            assert torch.equal(problem(x.clone(), y.clone()), x * 3 + y)
    assert problem.calls == 8  # twice each: the same, apart, and two distances


def test_an_error_leaves_nothing_behind() -> None:
    def failing(x: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Problem(failing, torch.arange(4.0))
    assert launches.watcher() is None
    assert torch._C._len_torch_dispatch_stack() == 0


def nothing_is_left() -> bool:
    return (
        launches.watcher() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not modes.is_in_torch_dispatch_mode()
        and not modes.is_in_any_mode_without_ignore_compile_internals()
    )


def test_an_interrupt_at_any_step_leaves_nothing_behind() -> None:
    number, more = 0, True
    while more:
        number += 1
        files = (replay.__file__, launches.__file__, blocks.__file__)
        with contextlib.suppress(KeyboardInterrupt):
            more = at_step(number, lambda: Problem(alone, torch.arange(4.0)), interrupt, *files)
        assert nothing_is_left(), number
    assert number > 100


def test_a_record_does_not_load_the_compiler() -> None:
    # torch puts a function before that of a mode which does.
    assert replay._Recorder.__torch_dispatch__.__code__.co_filename == replay.__file__


def test_threads_that_record_at_once_leave_nothing_behind() -> None:
    entered, left = threading.Event(), threading.Event()

    def first(x: Any) -> Any:
        entered.wait(10)
        return alone(x)

    def second(x: Any) -> Any:
        entered.set()
        left.wait(10)
        return alone(x)

    thread = threading.Thread(target=Problem, args=(second, torch.arange(4.0)))
    other = threading.Thread(target=Problem, args=(first, torch.arange(4.0)))
    other.start()
    thread.start()
    other.join()
    left.set()
    thread.join()
    assert nothing_is_left()


def test_layouts_of_a_problem_are_limited() -> None:
    whole = torch.arange(8.0 * replay._LAYOUTS)
    problem = Problem(both, whole[:4], whole[4:8])
    problem.met.extents = (whole.numel() * 4,) * 2  # as if every tensor lay in the other
    for _ in range(3):
        for i in range(2 * replay._LAYOUTS):
            x, y = whole[:4], whole[4 * i :][:4]
            assert torch.equal(problem(x, y), x * 3 + y)
            assert len(problem.met.first) + len(problem.met.records) <= replay._LAYOUTS
    assert len(problem.met.records) == replay._LAYOUTS - 1  # and what was found without layouts


class OnAGpu:
    """What is asked of a tensor to find its records."""

    is_cuda, shape, dtype = True, (4,), torch.float32

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return 512

    def element_size(self) -> int:
        return 4


def test_autocast_is_off_in_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "Tensor", OnAGpu)
    seen = []
    call = replay.replayed(lambda x: seen.append(torch.is_autocast_enabled("cuda")))
    torch.set_autocast_enabled("cuda", True)
    try:
        call(OnAGpu())
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [False]
