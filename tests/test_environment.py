"""What surrounds a call leaves no trace: rounding modes, threads, forks, interrupts."""

import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import os
import sys
import textwrap
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from choices import thorough
from modes import MODES, SETTINGS, X86, environment, settings

import isograd as ig
from isograd.runtime import fenv, parallel

USUAL, OTHERS = (ml_dtypes.bfloat16, np.float32), (np.float16, np.float64)
each_width = pytest.mark.parametrize("dtypes", [USUAL, thorough(OTHERS)], ids=["usual", "others"])


# --- the floating-point environment ---------------------------------------------------------------------------------
@functools.cache
def calls(*dtypes):
    """Functions that compute something everywhere near the limits, in the caller's thread and in several."""
    rng = np.random.default_rng(60)
    made = []
    for dtype in dtypes:
        for shape, axis in (((20, 300), 1), ((300, 20), 0), ((400, 300), 1), ((300, 1500), 0)):
            x = (rng.standard_normal(shape) * 25 - 20).astype(dtype)
            x[:2] = x[:2] * np.array(1e-3, dtype)
            dy = (rng.standard_normal(shape) * 1e-3).astype(dtype)
            dy[::3] = (rng.standard_normal(dy[::3].shape) * 2.0**-140).astype(dtype)
            for kind in ("softmax", "log_softmax"):
                y = getattr(ig, kind)(x, axis)
                made.append((getattr(ig, kind), (x, axis)))
                made.append((getattr(ig, f"{kind}_backward"), (dy, y, axis)))
    return made


def digest(*dtypes):
    total = hashlib.sha256()
    for function, arguments in calls(*(dtypes or USUAL)):
        total.update(function(*arguments).tobytes())
    return total.hexdigest()


@pytest.fixture
def two_threads(restore_threads):
    ig.set_num_threads(2)  # drops the pool: its threads start again, under the environment of the next call


@pytest.mark.usefixtures("two_threads")
@each_width
@pytest.mark.parametrize("mode", MODES)
def test_results_and_environment_survive_each_other(mode, dtypes):
    expected = digest(*dtypes)
    ig.set_num_threads(2)
    with environment(mode):
        inside = settings()
        assert inside == MODES[mode] & SETTINGS
        small = np.float32(2.0**-126)
        if mode == "flush":
            assert small * np.float32(0.5) == 0  # the mode really is in force
        result = digest(*dtypes)
        assert settings() == inside
        with pytest.raises(ig.InvalidProblemError):
            ig.softmax(np.zeros((2, 2)), 5)
        assert settings() == inside
    assert result == expected


@pytest.mark.parametrize("mode", MODES)
def test_without_the_guard_the_environment_would_leak_in(mode, monkeypatch):
    expected = digest(np.float32)
    enter, leave = fenv.enter, fenv.leave
    monkeypatch.setattr(fenv, "enter", lambda: 0)
    monkeypatch.setattr(fenv, "leave", lambda previous: None)
    monkeypatch.setattr(fenv._DefaultEnvironment, "__enter__", lambda block: 0)
    monkeypatch.setattr(fenv._DefaultEnvironment, "__exit__", lambda block, *error: None)
    previous = enter()
    leave(MODES[mode])
    try:
        unguarded = digest(np.float32)
    finally:
        leave(previous)
    assert unguarded != expected


@contextlib.contextmanager
def set_by_others(mode):
    """Set a mode without the tested module: fesetround of the C library, or torch.set_flush_denormal."""
    if mode == "flush":
        torch = pytest.importorskip("torch")
        torch.set_flush_denormal(True)
        yield
        torch.set_flush_denormal(False)
        return
    x86, arm = {"up": (0x800, 1 << 22), "down": (0x400, 2 << 22), "toward zero": (0xC00, 3 << 22)}[mode]
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    assert libm.fesetround(x86 if X86 else arm) == 0
    yield
    libm.fesetround(0)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", MODES)
def test_modes_that_others_set(mode):
    expected = digest()
    ig.set_num_threads(2)
    with set_by_others(mode):
        inside = settings()
        result = digest()
        assert settings() == inside == MODES[mode] & SETTINGS
    assert result == expected


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", ["up", "flush"])
def test_threads_that_inherit_a_mode(mode):
    expected = digest()
    ig.set_num_threads(2)
    results = []

    def work():
        inherited = settings()
        results.append((inherited, digest(), settings()))

    with environment(mode):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert results == [(MODES[mode] & SETTINGS, expected, MODES[mode] & SETTINGS)]
    # And the pool's threads, which were started under that mode, serve callers of the default mode.
    assert digest() == expected


def test_default_environment_context():
    usual = settings()
    with environment("down"):
        with fenv.default_environment():
            assert settings() == usual
        assert settings() == MODES["down"] & SETTINGS
    assert settings() == usual


# --- threads --------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("two_threads")
def test_sixteen_threads_at_once():
    expected = digest()
    barrier, wrong = threading.Barrier(16), []

    def work(number):
        order = calls(*USUAL)[number:] + calls(*USUAL)[:number]
        barrier.wait()
        for _ in range(2):
            for function, arguments in order:
                out = np.empty_like(arguments[0])
                function(*arguments, out=out)
                if out.tobytes() != function(*arguments).tobytes():
                    wrong.append(function)
            if digest() != expected:
                wrong.append("digest")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for _ in range(5):  # the pool is replaced while calls are under way
        ig.set_num_threads(3)
        ig.set_num_threads(2)
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def unset_threads(restore_threads, monkeypatch):
    """A function that forgets the number of threads, as in a new process without torch, and sets variables."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def forget(**variables):
        monkeypatch.setattr(parallel, "_threads", None)
        monkeypatch.setattr(parallel, "_configured", False)
        parallel._without_torch.cache_clear()
        for name in ("ISOGRAD_NUM_THREADS", "OMP_NUM_THREADS"):
            if variables.get(name) is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, variables[name])

    yield forget
    parallel._without_torch.cache_clear()


def test_number_of_threads(unset_threads, monkeypatch):
    monkeypatch.setattr(parallel, "_usable_cores", lambda: 11)
    for text, number in (("3", 3), ("1", 1), ("007", 7)):
        unset_threads(ISOGRAD_NUM_THREADS=text, OMP_NUM_THREADS="5")
        assert ig.get_num_threads() == number
    for text in ("0", "-1", "two", "1.5", " 2", "²"):
        unset_threads(ISOGRAD_NUM_THREADS=text)
        for _ in range(2):
            with pytest.raises(
                ig.InvalidProblemError, match=r"ISOGRAD_NUM_THREADS: got .*; expected a positive integer"
            ):
                ig.get_num_threads()
    for text, number in (("5", 5), (" 4 , 2", 4), ("0", 11), ("many", 11), ("", 11), (None, 11)):
        for unset in ("", None):
            unset_threads(ISOGRAD_NUM_THREADS=unset, OMP_NUM_THREADS=text)
            assert ig.get_num_threads() == number
    ig.set_num_threads(4)
    assert ig.get_num_threads() == 4
    for wrong in (0, -2, 1.0, True, "2", None):
        with pytest.raises(
            ig.InvalidProblemError, match=r"set_num_threads: threads is .*; expected a positive integer"
        ):
            ig.set_num_threads(wrong)
    assert ig.get_num_threads() == 4


def test_number_of_threads_follows_torch(unset_threads, monkeypatch):
    unset_threads(OMP_NUM_THREADS="5")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert ig.get_num_threads() == 5  # torch is being imported
    numbers = iter((3, 1))
    monkeypatch.setattr(sys.modules["torch"], "get_num_threads", lambda: next(numbers), raising=False)
    assert [ig.get_num_threads(), ig.get_num_threads()] == [3, 1]  # as in a worker of a data loader
    ig.set_num_threads(2)
    assert ig.get_num_threads() == 2
    unset_threads(ISOGRAD_NUM_THREADS="6")
    assert ig.get_num_threads() == 6


def test_number_of_usable_cores(tmp_path):
    def granted(membership, **files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return parallel._control_groups(tmp_path, membership)

    assert granted("0::/pod/box\n") == []
    assert granted("0::/pod/box\n", pod__cpu_DOT_max="max 100000\n") == []
    assert granted("0::/pod/box\n", pod__cpu_DOT_max="350000 100000\n", cpu_DOT_max="800000 100000\n") == [4, 8]
    assert granted("0::/pod/box\n", pod__box__cpu_DOT_max="50000 100000\n") == [1, 4, 8]
    quota, period = "cpu__a__cpu_DOT_cfs_quota_us", "cpu__a__cpu_DOT_cfs_period_us"
    lines = "4:memory:/a\n3:cpu,cpuacct:/a\n1:name=systemd:/a\n"
    assert granted(lines, **{quota: "-1\n", period: "100000\n"}) == []
    assert granted(lines, **{quota: "250000\n"}) == [3]
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= parallel._usable_cores() <= affinity


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_helper_thread_reaches_the_caller():
    done = []

    def work(start, stop):
        done.append(start)
        if start == 3:
            raise RuntimeError("chunk 3")

    with pytest.raises(RuntimeError, match="chunk 3"):
        parallel.for_ranges(work, 1000, 1)
    assert len(done) < 1000  # the remaining chunks are not begun
    done.clear()
    parallel.for_ranges(lambda start, stop: done.extend(range(start, stop)), 1000, 7)
    assert sorted(done) == list(range(1000))


# --- processes ------------------------------------------------------------------------------------------------------
PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
import isograd as ig
ig.set_num_threads(2)
x = np.random.default_rng(0).standard_normal((2000, 500)).astype(np.float32)
y = ig.softmax(x)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_children(run_python):
    # The first child is forked while the library is idle, the second in the midst of another thread's calls.
    code = """
    def child():
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                same = ig.softmax(x).tobytes() == y.tobytes() and ig.softmax(x.T, 0).T.tobytes() == y.tobytes()
                ig.set_num_threads(3)
                same = same and ig.softmax(x).tobytes() == y.tobytes()
            finally:
                os._exit(0 if same else 1)
        return os.waitpid(pid, 0)[1]

    print(child())
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            ig.softmax(x)
    threads = [threading.Thread(target=busy) for _ in range(3)]
    [t.start() for t in threads]
    print(sum(child() for _ in range(5)))
    stop.set()
    [t.join() for t in threads]
    print(ig.softmax(x).tobytes() == y.tobytes())
    """
    assert run_python(PRELUDE + textwrap.dedent(code)).split() == ["0", "0", "True"]


@pytest.mark.thorough
def test_keyboard_interrupt_during_a_long_call(run_python):
    code = """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background jobs of a shell ignore
    big = np.broadcast_to(x[:, :, None], (2000, 500, 30))
    out = np.empty(big.shape, np.float32)
    ig.log_softmax(big, 1, out=out)  # loads the kernel
    begin = time.perf_counter()
    ig.log_softmax(big, 1, out=out)
    duration = time.perf_counter() - begin
    right = out.copy()
    caught = partial = 0
    for attempt in range(8):
        out.fill(7)
        timer = threading.Timer(duration * 0.1 * (attempt + 1), lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            ig.log_softmax(big, 1, out=out)
            time.sleep(duration * 2)
        except KeyboardInterrupt:
            caught += 1
            after = out.copy()
            partial += bool((after == 7).any())
            time.sleep(duration * 0.2)
            assert after.tobytes() == out.tobytes(), "a helper still writes"
        timer.join()
    ig.log_softmax(big, 1, out=out)
    print(caught, partial > 0, out.tobytes() == right.tobytes(), ig.softmax(x).tobytes() == y.tobytes())
    """
    assert run_python(PRELUDE + textwrap.dedent(code)).split() == ["8", "True", "True", "True"]


@pytest.mark.thorough
def test_keyboard_interrupt_while_a_helper_finishes(run_python):
    code = """
    from isograd.runtime import parallel
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started, finished = threading.Event(), []

    def chunk(start, stop):
        if threading.current_thread() is threading.main_thread():
            started.wait(10)
            return
        started.set()
        time.sleep(0.1)  # the main thread waits by now
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        finished.append(start)

    try:
        parallel.for_ranges(chunk, 2, 1)
        print("not interrupted")
    except KeyboardInterrupt:
        print(len(finished))
    """
    assert run_python(PRELUDE + textwrap.dedent(code)) == "1"


def test_calls_while_the_interpreter_shuts_down(run_python):
    code = """
    import atexit
    atexit.register(lambda: print(ig.softmax(x).tobytes() == y.tobytes()))
    """
    assert run_python(PRELUDE + textwrap.dedent(code)) == "True"
