"""Every error the library raises on purpose. Each class is also a standard one, so that `except ValueError` works."""


class IsogradError(Exception):
    """Base of all errors of the library."""


class InvalidProblemError(IsogradError, ValueError):
    """Shapes, axes, dtypes, strides or overlaps that no kernel could serve."""


class UnsupportedError(IsogradError, NotImplementedError):
    """A meaningful problem for which no kernel is registered here."""


class BufferTooSmallError(IsogradError, ValueError):
    """An output array with fewer elements than the result."""


class WorkspaceTooSmallError(IsogradError, ValueError):
    """A workspace with fewer bytes than `Plan.workspace_size`."""


class MisalignedOperandError(IsogradError, ValueError):
    """An array whose address or strides are not multiples of its element size, or a misaligned workspace."""


class IndexOutOfRangeError(IsogradError, IndexError):
    """An index outside the axis it indexes."""


class RecordingError(IsogradError, RuntimeError):
    """An encoder used out of turn, a result read before its recording was submitted, or an argument freed since."""


class TraceFileError(IsogradError, OSError):
    """A trace that cannot be written, or a file that is none."""


class StepError(IsogradError, RuntimeError):
    """A step of a distributed run that cannot be finished, such as one without a whole backward pass."""


class DeviceMismatchError(IsogradError, ValueError):
    """Arguments on different devices, or on another device than the plan's."""


class NonFiniteGradientError(IsogradError, RuntimeError):
    """Gradients with a norm that is infinite or NaN, where the caller asked for an error."""


class MissingGradientError(IsogradError, KeyError):
    """A variable that `Tape.backward` returned no gradient for, because it is no leaf that was there."""

    __str__ = Exception.__str__  # KeyError's shows the text as a literal
