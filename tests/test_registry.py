"""A third party serves an operation: choice by priority and by name, reasons for a refusal, and back out again."""

import sys
import threading

import numpy as np
import pytest
from softmax_kernel import sku

import isograd as ig
from isograd.core import registry

DESCRIPTOR = ig.SoftmaxDescriptor((4, 6), "float32")


class Constant(ig.Kernel):
    """Writes a number: easy to tell from a softmax."""

    backend = "test"

    def __init__(self, name="constant", value=42.0, reason=None, workspace=0):
        self.name, self.value, self.reason, self.size = name, value, reason, workspace
        self.seen = []

    def reject(self, descriptor):
        return self.reason

    def sku(self, descriptor):
        return sku(descriptor, self.backend, "abacus")

    def workspace_size(self, descriptor):
        return self.size

    def launch(self, descriptor, arguments, workspace, stream):
        self.seen.append((descriptor, workspace, stream))
        arguments[descriptor.operands()[-1].name][...] = self.value


@pytest.fixture
def register():
    """register_kernel whose entries are taken out after the test."""
    added = []

    def add(kernel, operation="softmax", device="cpu", dtype="float32", priority=10):
        ig.register_kernel(operation, device, dtype, kernel, priority=priority)
        added.append((operation, device, dtype, kernel.name))
        return kernel

    before = ig.kernels()
    yield add
    for entry in dict.fromkeys(added):
        if any((*e[:3], e.kernel.name) == entry for e in ig.kernels()):
            ig.unregister_kernel(*entry)
    assert ig.kernels() == before


def ones(dtype=np.float32):
    return np.ones((4, 6), dtype)


def test_every_operation_and_dtype_has_a_kernel_of_the_library():
    served = {(e.operation, e.device, e.dtype) for e in ig.kernels()}
    for operation in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            assert (operation, "cpu", dtype) in served
    assert all(e.priority == 0 for e in ig.kernels())


def test_higher_priority_serves_plans_and_the_functional_api(register):
    own = ig.softmax(ones())  # a plan is cached before the registry changes
    kernel = register(Constant())
    plan = ig.SoftmaxPlan.select(DESCRIPTOR)
    assert plan.kernel is kernel
    assert (plan.sku.backend, plan.sku.arch) == ("test", "abacus")
    np.testing.assert_array_equal(ig.softmax(ones()), 42.0)
    out = ones()
    ig.softmax(ones(), out=out)
    np.testing.assert_array_equal(out, 42.0)
    # Nothing else is touched: another dtype, another operation.
    np.testing.assert_array_equal(ig.softmax(ones(np.float64)), ig.softmax(ones()[:1].astype(np.float64)).repeat(4, 0))
    assert ig.LogSoftmaxPlan.select(ig.LogSoftmaxDescriptor((4, 6), "float32")).sku.backend == "numba"

    ig.unregister_kernel("softmax", "cpu", "float32", "constant")
    np.testing.assert_array_equal(ig.softmax(ones()), own)
    assert len(kernel.seen) == 2


def test_arguments_are_checked_before_a_third_partys_kernel_sees_them(register):
    kernel = register(Constant())
    base = np.ones((5, 6), np.float32)
    with pytest.raises(ig.InvalidProblemError, match="in part"):
        ig.softmax(base[1:], out=base[:-1])
    assert kernel.seen == []


def test_lower_priority_is_taken_by_name_only(register):
    kernel = register(Constant(), priority=-1)
    assert ig.SoftmaxPlan.select(DESCRIPTOR).sku.backend == "numba"
    plan = ig.SoftmaxPlan.select(DESCRIPTOR, preference="constant")
    assert plan.kernel is kernel
    out = ones()
    plan.run(x=ones(), y=out)
    np.testing.assert_array_equal(out, 42.0)


def test_the_librarys_kernel_is_taken_by_name_below_a_higher_priority(register):
    register(Constant())
    plan = ig.SoftmaxPlan.select(DESCRIPTOR, preference="numba")
    out = np.zeros((4, 6), np.float32)
    plan.run(x=ones(), y=out)
    np.testing.assert_allclose(out, 1 / 6, rtol=2**-22)


def test_order_of_priorities(register):
    low, high, middle = Constant("low"), Constant("high"), Constant("middle")
    for kernel, priority in ((low, 1), (high, 3), (middle, 2)):
        register(kernel, priority=priority)
    names = [e.kernel.name for e in ig.kernels() if e[:3] == ("softmax", "cpu", "float32")]
    assert names == ["high", "middle", "low", "numba"]
    ig.unregister_kernel("softmax", "cpu", "float32", "high")
    assert ig.SoftmaxPlan.select(DESCRIPTOR).kernel is middle


def test_a_kernel_that_rejects_leaves_the_problem_to_the_next(register):
    kernel = register(Constant(reason="only powers of two"))
    assert ig.SoftmaxPlan.select(DESCRIPTOR).sku.backend == "numba"
    with pytest.raises(ig.UnsupportedError, match=r"softmax: .*constant: only powers of two"):
        ig.SoftmaxPlan.select(DESCRIPTOR, preference="constant")
    np.testing.assert_allclose(ig.softmax(ones()), 1 / 6, rtol=2**-22)
    assert kernel.seen == []


def test_every_rejection_is_named(register):
    register(Constant("first", reason="too wide"), operation="softmax", device="abacus")
    register(Constant("second", reason="too deep"), operation="softmax", device="abacus")
    with pytest.raises(ig.UnsupportedError, match="first: too wide") as caught:
        ig.SoftmaxPlan.select(DESCRIPTOR, device="abacus")
    assert "second: too deep" in str(caught.value)
    # A device that some kernel serves is named to those who ask for another.
    with pytest.raises(ig.UnsupportedError, match="'slide rule'") as caught:
        ig.SoftmaxPlan.select(DESCRIPTOR, device="slide rule")
    assert "'abacus'" in str(caught.value)
    assert "'cpu'" in str(caught.value)


def test_the_same_name_replaces(register):
    register(Constant(value=1.0))
    register(Constant(value=2.0))
    np.testing.assert_array_equal(ig.softmax(ones()), 2.0)
    assert [e.kernel.name for e in ig.kernels()].count("constant") == 1


def test_workspace_and_stream_reach_the_kernel(register):
    kernel = register(Constant(workspace=192), device="cpu")
    plan = ig.SoftmaxPlan.select(DESCRIPTOR)
    assert plan.workspace_size == 192
    x, y = ones(), ones()
    raw = np.zeros(512, np.uint8)
    start = -raw.ctypes.data % 64
    with pytest.raises(ig.WorkspaceTooSmallError, match=r"softmax: workspace has 191 bytes; the plan needs 192"):
        plan.run(x=x, y=y, workspace=raw[start : start + 191])
    with pytest.raises(ig.MisalignedOperandError, match="workspace"):
        plan.run(x=x, y=y, workspace=raw[start + 32 : start + 32 + 192])
    np.testing.assert_array_equal(y, 1.0)
    assert kernel.seen == []
    workspace = raw[start : start + 192].view(np.float32)
    plan.run(x=x, y=y, workspace=workspace)
    plan.run(x=x, y=y)
    assert [w is workspace for _, w, _ in kernel.seen] == [True, False]
    assert kernel.seen[1][1] is None
    np.testing.assert_array_equal(y, 42.0)


def test_wrong_registrations():
    before, number = ig.kernels(), registry.generation()
    with pytest.raises(ig.InvalidProblemError, match=r"register_kernel: kernel is str; expected an isograd\.Kernel"):
        ig.register_kernel("softmax", "cpu", "float32", "numba")
    with pytest.raises(ig.InvalidProblemError, match=r"expected an isograd\.Kernel"):
        ig.register_kernel("softmax", "cpu", "float32", Constant)
    with pytest.raises(ig.IsogradError, match="register_kernel: dtype is 'int8'; accepted: float16"):
        ig.register_kernel("softmax", "cpu", "int8", Constant())
    with pytest.raises(
        ig.InvalidProblemError, match="no kernel 'constant' is registered for softmax on cpu in float32"
    ):
        ig.unregister_kernel("softmax", "cpu", "float32", "constant")
    assert ig.kernels() == before
    assert registry.generation() == number


def test_an_abstract_kernel_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        ig.Kernel()


def test_plans_are_found_while_other_threads_register(register):
    # Readers take no lock: at no time may they see a registry that lacks an entry.
    kernel, stop, problems = Constant("other"), threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                ig.SoftmaxPlan.select(DESCRIPTOR)
            except ig.IsogradError as error:
                problems.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(300):
            register(kernel, operation="softmax", dtype="float64", priority=1)
            ig.unregister_kernel("softmax", "cpu", "float64", "other")
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for reader in readers:
            reader.join()
    assert problems == []


@pytest.mark.parametrize("priority", [float("nan"), 1.5, "high", None])
def test_a_priority_that_is_no_integer_is_refused(priority):
    before = ig.kernels()
    kernel = ig.kernels()[0].kernel
    with pytest.raises(ig.InvalidProblemError, match="priority"):
        ig.register_kernel("softmax", "cpu", "float64", kernel, priority=priority)
    assert ig.kernels() == before


def test_a_kernel_without_a_name_is_refused():
    class Nameless(ig.Kernel):
        def sku(self, descriptor):
            raise AssertionError

        def launch(self, descriptor, arguments, workspace, stream):
            raise AssertionError

    with pytest.raises(ig.InvalidProblemError, match="Nameless has no name"):
        ig.register_kernel("softmax", "cpu", "float64", Nameless())


@pytest.fixture
def preferred():
    yield ig.prefer
    ig.prefer()


def test_preferred_kernels_come_first_in_every_api(register, preferred):
    x = np.zeros((4, 6), np.float32)
    usual = ig.softmax(x)
    register(Constant("low", 1.0), priority=-1)
    register(Constant("lower", 2.0), priority=-2)
    register(Constant("picky", 3.0, "it takes nothing"), priority=-3)
    assert np.array_equal(ig.softmax(x), usual)
    assert preferred("picky", "lower", "low") == ()
    assert np.all(ig.softmax(x) == 2)
    assert ig.SoftmaxPlan.select(DESCRIPTOR).kernel.name == "lower"
    assert ig.SoftmaxPlan.select(DESCRIPTOR, preference="low").kernel.name == "low"
    names = [e.kernel.name for e in registry.kernels() if e[:3] == ("softmax", "cpu", "float32")]
    assert names == ["picky", "lower", "low", "numba"]
    assert preferred("low") == ("picky", "lower", "low")
    assert np.all(ig.softmax(x) == 1)
    assert preferred() == ("low",)
    assert np.array_equal(ig.softmax(x), usual)


def test_preferred_for_a_block(register, preferred):
    x = np.zeros((4, 6), np.float32)
    usual = ig.softmax(x)
    for name, value in (("low", 1.0), ("lower", 2.0)):
        register(Constant(name, value), priority=-1)
    with preferred("low") as before:
        assert before == ()
        assert np.all(ig.softmax(x) == 1)
        with pytest.raises(ig.UnsupportedError), preferred("lower"):
            ig.softmax(x.astype(np.int32))
        assert np.all(ig.softmax(x) == 1)
        preferred("lower")  # also what was preferred inside ends with the block
    assert np.array_equal(ig.softmax(x), usual)
    with preferred("low"):
        with preferred("lower"):
            ig.unregister_kernel("softmax", "cpu", "float32", "low")
        assert np.array_equal(ig.softmax(x), usual)  # a name that is gone meanwhile comes back without effect
    assert preferred() == ()


def test_preferring_what_there_is_not():
    with pytest.raises(ig.InvalidProblemError, match=r"prefer: names has 'hoper'; accepted: .*hopper"):
        ig.prefer("hoper")
    with pytest.raises(ig.InvalidProblemError, match="names has \\['hopper'\\]"):
        ig.prefer(["hopper"])


def test_what_is_no_kernel_is_refused():
    def register(operation="softmax", device="cpu", dtype="float32", priority=0, **attributes):
        kernel = Constant("refused")
        for name, value in attributes.items():
            setattr(kernel, name, value)
        ig.register_kernel(operation, device, dtype, kernel, priority=priority)

    before = ig.kernels()
    for given, words in (
        ({"operation": ""}, "operation is ''"),
        ({"operation": None}, "operation is None"),
        ({"operation": ("softmax",)}, r"operation is \('softmax',\)"),
        ({"device": "cuda:0"}, "device is 'cuda:0'"),
        ({"device": 0}, "device is 0"),
        ({"dtype": np.dtype("float32")}, "dtype is"),
        ({"dtype": ["float32"]}, "dtype is"),
        ({"priority": True}, "priority is True"),
        ({"name": " "}, "has no name"),
        ({"backend": None}, "has no name or backend"),
        ({"launch": None}, "launch of Constant is None; expected a method"),
        ({"reject": "no"}, "reject of Constant is 'no'; expected a method"),
    ):
        with pytest.raises(ig.InvalidProblemError, match=f"register_kernel: .*{words}"):
            register(**given)
    assert ig.kernels() == before


@pytest.mark.parametrize("attributes", [{"sku": lambda d: "me"}, {"workspace_size": lambda d: None}, {"size": -1}])
def test_a_kernel_that_does_not_describe_itself(register, attributes):
    kernel = Constant()
    for name, value in attributes.items():
        setattr(kernel, name, value)
    register(kernel)
    with pytest.raises(ig.InvalidProblemError, match=r"kernel constant returns .*; expected a KernelSku"):
        ig.SoftmaxPlan.select(DESCRIPTOR)


def test_a_block_that_comes_again_finds_its_plans():
    before = registry.generation()
    seen = []
    for _ in range(2):
        with ig.prefer("numba"):
            seen.append(registry.generation())
        assert registry.generation() == before
    assert seen[0] == seen[1] != before
