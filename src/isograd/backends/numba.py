"""Kernels on the CPU, compiled by Numba."""

from isograd.core.kernel import Backend


class Numba(Backend):
    """The library's threads; operands are NumPy arrays."""

    name = "numba"
    device = "cpu"

    def architecture(self) -> str:
        """One for all: no kernel asks which processor it is."""
        return "cpu"


BACKEND = Numba()
