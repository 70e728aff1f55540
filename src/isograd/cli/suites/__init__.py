"""What `isograd verify` computes: for every operation its plan, its definition, its oracle and a fixed set of inputs.

A family has its suites in the file of its name; verify finds the kernels in the registry.
"""

from isograd.cli.suites import attention, cross_entropy, gather, operations, products
from isograd.core.cases import Case, Suite
from isograd.runtime.fenv import default_environment

SUITES: dict[str, Suite] = {
    **gather.SUITES,
    **cross_entropy.SUITES,
    **operations.SUITES,
    **attention.SUITES,
    **products.SUITES,
}


def cases(operation: str, dtype: str) -> list[Case]:
    """The inputs of an operation in a dtype."""
    with default_environment():
        return list(SUITES[operation].cases(dtype))
