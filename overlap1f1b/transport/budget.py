"""Multiprocessors of a GPU that transfers may occupy. The module does not load torch."""

from dataclasses import dataclass

from overlap1f1b.schedule.values import check_size, checked

DEFAULT_CTAS = 8
"""Thread blocks of a transfer on NCCL, each on one multiprocessor."""
LEAST_CTAS = 16
"""Smallest budget of thread blocks: what rows and sums leave of it is enough for counts and neighbours."""


@checked
@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Multiprocessors of a GPU for transfers and for compute.

    A third of the thread blocks is for rows, a sixth for each of the two sums of gradients, one for counts, and one for
    each direction between two neighbours. So all kernels that wait for a peer fit beside each other, and leave compute
    the rest. Sums of tied parameters run alone, at the end of a step, and have no limit.

    Args:
        ctas: Thread blocks, each on a multiprocessor, that all transfers of an engine on NCCL may occupy together.
        carveout: Whether torch's products leave multiprocessors alone in which rows may travel, two for each of their
            blocks: else a grouped product takes up to 1.7 times as long beside them.

    Raises:
        ValueError: Fewer than :data:`LEAST_CTAS`, or values of another kind.
    """

    ctas: int = 3 * DEFAULT_CTAS
    carveout: bool = True

    def __post_init__(self) -> None:
        check_size("ctas", self.ctas, LEAST_CTAS)

    @property
    def rows(self) -> int:
        """Thread blocks of rows."""
        return self.ctas // 3

    @property
    def sums(self) -> int:
        """Thread blocks of each sum of gradients."""
        return self.ctas // 6

    def check(self, device: object, multiprocessors: int) -> None:
        """Raise ``ValueError`` if a device has fewer multiprocessors."""
        if self.ctas > multiprocessors:
            raise ValueError(
                f"ctas={self.ctas} on {device}; allowed: {LEAST_CTAS} to its {multiprocessors} multiprocessors"
            )
