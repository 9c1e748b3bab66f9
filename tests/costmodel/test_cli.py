from typing import Literal

import pytest

from costmodel import cli
from costmodel.cost import InfeasibleError


def greet(name: str, num_times: int = 1, style: Literal["loud", "quiet"] = "quiet") -> int | None:
    """Say hello.

    Args:
        name: whom to greet.
        num_times: how often.
    """
    print(name, num_times, style)
    return None


def code_of(command, *args):
    with pytest.raises(SystemExit) as exit_info:
        cli.run(command, prog="greet", args=args)
    return exit_info.value.code


def raising(error: BaseException):
    def command() -> None:
        """Raise."""
        raise error

    return command


def test_flags_come_from_the_signature_and_take_hyphens_or_underscores(capsys):
    assert code_of(greet, "Ada", "--num-times", "2") == 0
    assert code_of(greet, "Ada", "--num_times=2", "--style=loud") == 0
    assert capsys.readouterr().out == "Ada 2 quiet\nAda 2 loud\n"


def test_values_keep_their_underscores_and_hyphens(capsys):
    assert code_of(greet, "a_b-c") == 0
    assert capsys.readouterr().out == "a_b-c 1 quiet\n"


def test_help_comes_from_the_docstring_and_spells_hyphens(capsys):
    assert code_of({"greet": greet}, "greet", "--help") == 0
    text = capsys.readouterr().out
    assert "Say hello." in text
    assert "--num-times" in text
    assert "how often." in text
    assert "--print_config" in text


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("`x` must be 1,\n  but got 2."), 2, "error: `x` must be 1, but got 2.\n"),
        (InfeasibleError("nothing fits."), 3, "error: nothing fits.\n"),
        (cli.StoppedError("the engine crashed."), 1, "error: the engine crashed.\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_exit_codes(capsys, error, code, line):
    assert code_of(raising(error)) == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()), prog="greet", args=[])


def test_a_command_may_return_its_exit_code():
    def five() -> int:
        """Return 5."""
        return 5

    assert code_of(five) == 5


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["Ada", "--num-times", "x"], "error: --num-times must be int. Got value: x\n"),
        (["Ada", "--style", "x"], "error: --style must be one of ['loud', 'quiet']. Got value: x\n"),
        (["Ada", "--colour", "x"], "error: unrecognized arguments: --colour x\n"),
    ],
)
def test_usage_errors_are_one_line(capsys, args, line):
    assert code_of(greet, *args) == 2
    assert capsys.readouterr() == ("", line)
