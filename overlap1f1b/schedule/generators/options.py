"""What a schedule is: its options, and the generator that makes a program from them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.values import check_size


@dataclass(frozen=True)
class Schedule(ABC):
    """A schedule. The fields of its class are its options: whole numbers, if the class does not check them by itself.

    Options that several schedules have:

    - ``chunks``: stages a rank, v.
    - ``extra_warmup``: additional forwards before the first backward, which cost one more activation each.
    - ``group_size``: microbatches that pass one chunk before a rank turns to the next one, G: P ≤ G ≤ M, and M mod G is
      0 or at least P; by default M is divided into ⌊M/P⌋ groups that are as equal as possible.

    Attributes:
        fixed_chunks: Stages a rank of a schedule without the option.

    Raises:
        ValueError: An option is out of range.
    """

    fixed_chunks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_size(name, value, 0 if name == "extra_warmup" else 1)

    @classmethod
    def takes(cls, option: str) -> bool:
        """Return whether the schedule has an option."""
        return option in (field.name for field in fields(cls))

    @abstractmethod
    def program(self, microbatches: int, ranks: int) -> Program:
        """Return the program for numbers that have been checked; ValueError if the schedule is impossible for them."""
