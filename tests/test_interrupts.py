"""Interrupts, signal handlers and threads at the worst moment: programs of their own, since they may die.

Each runs for some seconds; in the exhaustive choice for two minutes.
"""

import ctypes.util
import os
import sys

import pytest
from choices import exhaustive
from programs import durations, program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks of POSIX")


@durations
def test_interrupts_at_random_moments(run_python, seconds):
    code = f"""
    import ctypes
    UPWARD = 0x800 if os.uname().machine == "x86_64" else 1 << 22
    libm = ctypes.CDLL({ctypes.util.find_library("m")!r})
    armed = False

    def handler(number, frame):
        if armed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    x = rng.standard_normal((4000, 1000)).astype(np.float32)
    out = np.empty_like(x)
    expected = ig.softmax(x, out=out).copy()
    libm.fesetround(UPWARD)
    mode = fenv.current() & fenv.SETTINGS
    interrupted = late = lost = 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(20, exit=True)  # a call takes milliseconds
        kept = random.random() < 0.3
        target = out if kept else None
        delay = random.choice((3e-4, 2e-2))
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + random.random() * delay, random.choice((0, 1e-4)))
            ig.softmax(x, out=target)  # without `out` the result is freed with the exception
        except KeyboardInterrupt:
            armed = False
            interrupted += 1
            if kept:
                before = out.copy()
                time.sleep(0.005)
                late += not np.array_equal(before, out)
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        if fenv.current() & fenv.SETTINGS != mode:
            lost += 1
            libm.fesetround(UPWARD)
    print(interrupted > 10 * SECONDS, late, lost, np.array_equal(ig.softmax(x), expected))
    """
    assert program(run_python, code, seconds) == "True 0 0 True"


@durations
def test_handlers_that_call_the_library(run_python, seconds):
    code = """
    x = rng.standard_normal((400, 1000)).astype(np.float32)
    expected = ig.softmax(x)
    calls = wrong = 0

    def handler(number, frame):
        global calls, wrong
        calls += 1
        wrong += not np.array_equal(ig.softmax(x), expected)
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + random.random() * 2e-3)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(20, exit=True)
        wrong += not np.array_equal(ig.softmax(x), expected)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(calls > 10 * SECONDS, wrong)
    """
    assert program(run_python, code, seconds) == "True 0"


def test_interrupts_at_every_step(run_python):
    # At the beginning of every Python function and after every call into C: where the interpreter looks for signals.
    code = """
    UPWARD = 0x5F80 if os.uname().machine == "x86_64" else 1 << 22
    usual, main = fenv.current(), threading.get_ident()
    one, y = np.ones((2, 3), np.float32), np.empty((2, 3), np.float32)
    running = set()

    def environment():
        with fenv.default_environment():
            pass

    def chunk(start, stop):
        if threading.get_ident() != main:
            running.add(start)
        time.sleep(0.002)
        running.discard(start)

    def record():
        with ig.Encoder():
            ig.softmax(one, out=y)

    def completes(function, step):
        seen = 0

        def profile(frame, event, argument):
            nonlocal seen
            seen += event in ("call", "c_return")
            if seen == step:
                sys.setprofile(None)
                raise KeyboardInterrupt

        try:
            sys.setprofile(profile)
            function()
        except KeyboardInterrupt:
            return False
        finally:
            sys.setprofile(None)
        return True

    tried = []
    for function in (
        environment, lambda: parallel.for_ranges(chunk, 1, 1), lambda: parallel.for_ranges(chunk, 6, 1), record,
    ):
        function()
        step, done = 0, False
        while not done:
            step += 1
            fenv.leave(UPWARD)
            done = completes(function, step)
            after, busy = fenv.current() & fenv.SETTINGS, set(running)
            fenv.leave(usual)
            assert after == UPWARD & fenv.SETTINGS, (function, step)
            assert not busy, (function, step, busy)
            assert type(ig.softmax(one)) is np.ndarray, (function, step)
        tried.append(step > 2)
    print(*tried)
    """
    assert program(run_python, code, 0) == "True True True True"


SMALL_STACKS = """
def calls():
    for dtype in DTYPES:
        x = rng.standard_normal((400, 500)).astype(dtype)
        for axis in (1, 0):
            ig.log_softmax_backward(x, ig.log_softmax(x, axis), axis)
        ig.cross_entropy(x, np.zeros(400, int), label_smoothing=0.1, return_gradient=True)
        if MANY:
            ig.top_k(x, 8), ig.moe_router(x, 8), ig.sparsemax(x), ig.gumbel_softmax(x, seed=1)
            ig.embedding_backward(x, rng.integers(0, 50, 400), 50)
            q = rng.standard_normal((2, 4, 300, 64)).astype(dtype)
            o, l = ig.attention(q, q, q, return_lse=True)
            ig.attention_backward(q, q, q, q, o, l)

threading.stack_size(KIB << 10)
calls()
print(threading.stack_size() >> 10)
threading.stack_size(max(KIB, 256) << 10)  # Python's own code needs some
thread = threading.Thread(target=calls)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("kib", "dtypes", "many"),
    [
        (32, ("float32",), False),
        (32, ("float64",), False),
        *[exhaustive(kib, ("float32", "float64"), True) for kib in (32, 64, 128, 512, 1024)],
    ],
)
def test_small_stacks(run_python, kib, dtypes, many):
    code = SMALL_STACKS.replace("MANY", str(many)).replace("KIB", str(kib)).replace("DTYPES", str(dtypes))
    assert program(run_python, code, 0) == str(kib)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_no_new_thread_can_be_had(run_python):
    # A pool of one thread is busy with another call while a second call is made.
    code = """
    import resource
    release, pooled, written = threading.Event(), threading.Event(), []

    def in_pool():
        return threading.current_thread().name.startswith("isograd")

    def busy(start, stop):
        if in_pool():
            pooled.set()
            release.wait(20)
        else:
            pooled.wait(20)

    first = threading.Thread(target=parallel.for_ranges, args=(busy, 2, 1))
    first.start()
    assert pooled.wait(20)
    parallel.stacks.STACK = 1 << 40
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, limit[1]))

    def slow(start, stop):
        if start == 0:
            release.set()
        time.sleep(0.4 if in_pool() else 0.05)
        written.append(start)

    parallel.for_ranges(slow, 5, 1)
    now = sorted(written)
    time.sleep(0.6)
    first.join()
    print(now, len(written), threading.stack_size(), parallel._pool)
    """
    assert program(run_python, code, 0) == "[0, 1, 2, 3, 4] 5 0 {1}"


@pytest.mark.thorough
def test_a_small_stack_without_a_thread_to_go_to(run_python):
    code = """
    parallel.stacks.STACK = 1 << 50
    threading.stack_size(256 << 10)
    x = np.ones((2, 3), np.float32)
    ig.set_num_threads(1)
    found = []

    def call():
        try:
            found.append(ig.softmax(x))
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    print(*found)
    """
    assert "can't start new thread" in program(run_python, code, 0)


def test_a_call_in_a_new_thread_is_over_when_it_was_interrupted(run_python):
    # The process waits in the end for those that are not.
    code = """
    from isograd.runtime import stacks
    step, done = 0, False
    while not done:
        step, seen, ran = step + 1, 0, []

        def profile(frame, event, argument):
            global seen
            seen += event in ("call", "c_return") and frame.f_code.co_filename == stacks.__file__
            if seen == step:
                seen += 1
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(profile)
        try:
            stacks.call(ran.append, 1)
        except KeyboardInterrupt:
            pass
        sys.setprofile(None)
        done = seen < step
        end = time.monotonic() + 20
        while stacks._unfinished and time.monotonic() < end:
            time.sleep(0.001)
        assert not stacks._unfinished, step
        assert threading.stack_size() == 0, step
    print(step > 5)
    """
    assert program(run_python, code, 0) == "True"


def test_an_interrupted_compilation_leaves_no_lock(run_python, tmp_path):
    code = """
    from isograd.runtime.numba_compile import kernel
    from numba.core.compiler_lock import global_compiler_lock

    def handler(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    interrupted = 0
    for delay in (0.001, 0.01, 0.05):
        made = kernel(lambda x: x + delay)
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            made(1.0)
        except KeyboardInterrupt:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    free = []
    thread = threading.Thread(target=lambda: free.append(global_compiler_lock._lock.acquire(timeout=60)))
    thread.start()
    thread.join()
    print(interrupted > 0, free)
    """
    assert program(run_python, code, 0, NUMBA_CACHE_DIR=str(tmp_path)) == "True [True]"


def test_a_recording_whose_end_was_interrupted_is_discarded(run_python):
    code = """
    x = np.ones((2, 2), np.float32)
    ended = ig.Encoder()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is ig.Encoder._leave.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        with ended:
            promised = ig.softmax(x)
            sys.setprofile(profile)
    except KeyboardInterrupt:
        pass
    print(type(ig.softmax(x)).__name__, ended.state)
    import contextlib
    with contextlib.ExitStack() as stack:
        encoder = stack.enter_context(ig.Encoder())
        promised = ig.softmax(x)
    print(encoder.state, float(promised[0, 0]))
    """
    assert program(run_python, code, 0).split() == ["ndarray", "discarded", "submitted", "0.5"]


def test_blocks_whose_end_was_interrupted_have_ended(run_python):
    # At every Python call between the block's last line and the first one behind it.
    code = """
    import contextlib
    from isograd.core import faults, registry

    def state():
        return faults._debugging, registry._preferred, len(faults._called.namings)

    def stack(block):
        with contextlib.ExitStack() as blocks:
            blocks.enter_context(block)
            raise_at()

    def plain(block):
        with block:
            raise_at()

    def raise_at():
        seen = 0

        def profile(frame, event, argument):
            nonlocal seen
            seen += event == "call"
            if seen == step:
                sys.setprofile(None)
                raise KeyboardInterrupt

        inside.append(state())
        sys.setprofile(profile)

    before = state()
    tracebacks = []
    for make in (ig.debug, lambda: ig.prefer("triton"), lambda: faults.named("called")):
        for step in range(1, 20):
            inside = []
            try:
                plain(make())
            except KeyboardInterrupt as error:
                tracebacks.append(error)  # whose frames end no block
            sys.setprofile(None)
            assert inside != [before], step
            assert state() == before, (step, state())
        step = 100
        stack(make())
        sys.setprofile(None)
        assert state() == before
    print("restored")
    """
    assert program(run_python, code, 0) == "restored"
