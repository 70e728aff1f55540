"""Forks at the worst moment: while another thread computes, compiles or holds a lock."""

import os

import pytest
from programs import program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks of POSIX")


def test_forks_while_another_thread_compiles(run_python):
    # The thread holds the compiler's locks, as it does for seconds where a kernel is compiled.
    code = """
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock
    x = np.ones((2, 3), np.float32)

    def compile():
        with global_compiler_lock, ffi.lib._lock:
            holding.set()
            time.sleep(0.5)

    for _ in range(2):
        holding = threading.Event()
        thread = threading.Thread(target=compile)
        thread.start()
        holding.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            ig.softmax(x)
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        thread.join()
    with global_compiler_lock:  # the forking thread's own stays its own
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            ig.log_softmax(x)
            os._exit(0)
    print(os.waitpid(pid, 0)[1])
    """
    assert program(run_python, code, 0).split() == ["0", "0", "0"]


def test_an_interrupted_fork_leaves_no_lock(run_python):
    code = """
    from isograd.runtime import numba_compile as compiling

    def free():
        owners = []
        for owner in compiling._locks:
            lock = owner._lock
            thread = threading.Thread(
                target=lambda: owners.append(lock.acquire(timeout=5) and not lock.release())  # noqa: B023
            )
            thread.start()
            thread.join()
        return owners

    def forked():  # what the hooks around a fork do: an exception of one does not stop the others
        for hook in (compiling._hold, compiling._release, compiling._release):
            try:
                hook()
            except KeyboardInterrupt:
                pass

    step, done = 0, False
    while not done:
        step, seen = step + 1, 0

        def profile(frame, event, argument):
            global seen
            seen += event in ("call", "c_return") and frame.f_code.co_filename == compiling.__file__
            if seen == step:
                seen += 1
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(profile)
        forked()
        sys.setprofile(None)
        done = seen < step
        assert free() == [True, True], step
        assert not compiling._held, step
    print(step > 5)
    """
    assert program(run_python, code, 0) == "True"


@pytest.mark.thorough
def test_a_child_forked_in_the_midst_of_its_own_call(run_python):
    code = """
    inside, children = threading.Event(), []

    def chunk(start, stop):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            time.sleep(0.3)
        elif inside.wait(10) and not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(20)

    try:
        parallel.for_ranges(chunk, 8, 1)
    except ig.IsogradError as error:
        os._exit("forked" not in str(error))
    if not children[0]:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """
    assert program(run_python, code, 0) == "0"


@pytest.mark.exhaustive
def test_forks_while_kernels_are_compiled(run_python, tmp_path):
    code = """
    faulthandler.dump_traceback_later(600, exit=True)
    x = rng.standard_normal((8, 100)).astype(np.float32)
    thread = threading.Thread(target=lambda: [ig.softmax(x.astype(t)) for t in (np.float64, np.float16)])
    thread.start()
    time.sleep(1.5)
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        ig.softmax(x)
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
    thread.join()
    """
    assert program(run_python, code, 0, timeout=700, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
