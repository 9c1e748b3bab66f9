"""The package's exceptions that a command reports in one line, with their exit codes.

OSError and MemoryError (exit code 1), ArgumentError (2) and Ctrl-C (130) are reported this way too; others are bugs.
"""


class UserError(ValueError):
    """Bad input, in one line: subject, rule, value and, unless it is plain, remedy.

    Raised before anything is written where that can be known. Exit code 2.
    """


class UnpricedOpError(UserError):
    """A protocol has no formula for an op, one of its forms or public weights; or a testbed lacks a unit of work."""


class InfeasibleError(UserError):
    """A model, or every member of a space, exceeds the budget; the line names it or the cheapest one. Exit code 3."""


class StoppedError(RuntimeError):
    """A command started and cannot go on (disk full, no completed trial, engine crash). Exit code 1."""


class OutOfRangeError(UserError):
    """Numbers in a run leave an engine's fixed-point range, or too many results are expected to be wrong.

    The line states the op, and its numbers with the limits, or how many results of a sequence would be wrong.

    with_fewer_bits: whether fewer fraction bits could bring the numbers into range.
    """

    def __init__(self, line: str, *, with_fewer_bits: bool = False) -> None:
        super().__init__(line)
        self.with_fewer_bits = with_fewer_bits
