"""The flag for indices out of range: what works without a GPU, and without torch."""

import pytest

import isograd
from isograd.core import faults


def test_nothing_to_find_without_a_gpu(run_python) -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        import isograd
        isograd.check()
        with isograd.debug():
            isograd.check()
        isograd.debug()
        isograd.check()
        print("torch" in sys.modules and sys.modules["torch"] is not None)
    """
    assert run_python(code) == "False"


def test_debug_is_a_switch_and_a_context() -> None:
    assert faults._debugging is False
    with isograd.debug():
        assert faults._debugging
        with isograd.debug(False):
            assert not faults._debugging
        assert faults._debugging
    assert not faults._debugging
    isograd.debug()
    assert faults._debugging
    isograd.debug(False)
    assert not faults._debugging


def test_a_first_use_inside_a_capture_is_refused(monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(isograd.RecordingError, match="cuda:63 is inside a CUDA graph's capture; call it once before"):
        faults.flag(torch.device("cuda", 63))


def test_devices_have_flags_of_their_own(monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(faults, "_flags", {})
    meta, cpu = faults.flag(torch.device("meta", 0)), faults.flag(torch.device("cpu"))
    assert meta.device.type == "meta"
    assert faults.flag(torch.device("meta", 0)) is meta
    assert cpu is not meta


def test_a_flag_of_inference_mode_is_cleared_out_of_it(monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(faults, "_flags", {})
    with torch.inference_mode():
        flag = faults.flag(torch.device("cpu"))
    assert flag.zero_().tolist() == [0, 0, 0, 0]


def test_codes_are_numbers_of_operation_and_argument() -> None:
    first = faults.code("some_operation", "targets", negative=False)
    assert first > 0
    assert faults.code("some_operation", "targets", negative=False) == first
    assert faults.code("some_operation", "indices", negative=False) != first
    assert faults.code("some_operation", "targets") != first


def test_check_names_what_the_flag_holds_and_clears_it() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    flag = faults.flag(torch.device("cpu"))
    assert flag is faults.flag(torch.device("cpu"))
    for negative, accepted in ((True, "-7 to 6"), (False, "0 to 6")):
        number = faults.code("cross_entropy", "targets", negative)
        flag.copy_(torch.tensor([number, 12, 300, 7]))
        with pytest.raises(
            isograd.IndexOutOfRangeError,
            match=f"cross_entropy: targets has 300 at flat position 12; accepted: {accepted}",
        ):
            isograd.check()
        isograd.check()
        flag.copy_(torch.tensor([number, 12, 300, 7]))
        faults.after_launch(torch.device("cpu"))
        with isograd.debug(), pytest.raises(IndexError):
            faults.after_launch(torch.device("cpu"))
