"""What a command tells its user in one line, and what it exits with; any other exception is a bug of ours."""


class UserError(ValueError):
    """Bad input: subject, rule, value and remedy in one line. Nothing was written; exit code 2."""


class UnpricedOpError(UserError):
    """An op, or a form of one, that a protocol has no formula for."""


class InfeasibleError(UserError):
    """No member of a space fits the budget; the line names the cheapest. Exit code 3."""


class StoppedError(RuntimeError):
    """A command that started and cannot go on (disk full, no completed trial, engine crash). Exit code 1."""
