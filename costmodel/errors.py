"""The package's exceptions that a command reports in one line, with their exit codes.

OSError and MemoryError (exit code 1), ArgumentError (2) and Ctrl-C (130) are reported this way too; others are bugs.
"""


class UserError(ValueError):
    """Bad input: a line that states the subject, rule, value and remedy. Nothing was written. Exit code 2."""


class UnpricedOpError(UserError):
    """A protocol has no formula for an op, or for one of its forms."""


class InfeasibleError(UserError):
    """A model, or every member of a space, exceeds the budget; the line names it or the cheapest one. Exit code 3."""


class StoppedError(RuntimeError):
    """A command started and cannot go on (disk full, no completed trial, engine crash). Exit code 1."""


class OutOfRangeError(UserError):
    """Numbers in a run leave an engine's fixed-point range; the line states the op, the numbers and the limits.

    with_fewer_bits: whether fewer fraction bits could bring the numbers into range.
    """

    def __init__(self, line: str, *, with_fewer_bits: bool = False) -> None:
        super().__init__(line)
        self.with_fewer_bits = with_fewer_bits
