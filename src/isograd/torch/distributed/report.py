"""What a step of a sum of gradients was: its units, and whether they fit the range."""

from collections.abc import Sequence

from torch import Tensor


class GradientReport:
    """What `GradientSum.finish` returns. Reading it waits for the device; not reading it waits for nothing.

    units: the backward passes of all ranks. fits: whether every gradient is a number; if not, all are NaN on all
    ranks. exceeded: the parameters whose gradients were NaN, infinite, or too large for their range. problem: why the
    ranks could not be added up, or None.
    """

    def __init__(self, header: Tensor, exceeded: Tensor, names: Sequence[str]) -> None:
        self._header, self._exceeded, self._names = header, exceeded, names

    def _word(self, index: int) -> int:
        return int(self._header[index])

    @property
    def units(self) -> int:
        """The backward passes of all ranks in this step."""
        return self._word(0)

    @property
    def fits(self) -> bool:
        """Whether the gradients are the sums, and not NaN."""
        return self._word(1) == 0

    @property
    def problem(self) -> str | None:
        """Why the ranks could not be added up."""
        return f"{self._word(2)} of the ranks could not finish the step, and say why" if self._word(2) else None

    @property
    def exceeded(self) -> tuple[str, ...]:
        """The parameters whose gradients did not fit."""
        found = self._exceeded.tolist()
        return tuple([name for name, out in zip(self._names, found, strict=True) if out])

    def __str__(self) -> str:
        if self.fits:
            return f"the mean gradient of {self.units} units"
        if (problem := self.problem) is not None:
            return f"every gradient is NaN: {problem}"
        names = self.exceeded
        shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (
            f"every gradient is NaN: in {self.units} units, gradients of {shown} were not finite or too large for "
            "their range"
        )

    def __repr__(self) -> str:
        return f"GradientReport({self})"
