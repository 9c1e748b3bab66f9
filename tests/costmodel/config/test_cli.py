from typing import Literal

import pytest

from costmodel.config import cli
from costmodel.errors import InfeasibleError, StoppedError


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
        (StoppedError("the engine crashed."), 1, "error: the engine crashed.\n"),
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


def config_errors(capsys, path, *flags) -> str:
    """The one line that `--config path` is refused with, after checking code and stdout."""
    assert code_of(greet, "Ada", *(flags or ("--config", str(path)))) == 2
    out, line = capsys.readouterr()
    assert (out, line.count("\n")) == ("", 1)
    return line


def test_a_config_file_sets_flags_and_flags_override_it(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_times: 3\nstyle: loud\n")
    assert code_of(greet, "Ada", "--config", str(path)) == 0
    assert code_of(greet, "Ada", f"--config={path}", "--num-times=4") == 0
    assert capsys.readouterr().out == "Ada 3 loud\nAda 4 loud\n"


BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n".encode() for level in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (BOMB, "is not valid YAML: aliases are not allowed, line 2."),
        (b"num_times: 1\nnum_times: 2\n", "is not valid YAML: key 'num_times' appears twice, line 2."),
        (b"\xff\xfe\x00", "must be YAML text in UTF-8, but holds binary data."),
        (b"[1, 2]", "must hold a mapping of keys to values, but holds list."),
        (b"config: other.yaml\n", "must not have the key 'config'; give --config once for each file."),
        (b"sub: {config: other.yaml}\n", "must not have the key 'config'; give --config once for each file."),
    ],
)
def test_a_config_that_is_not_plain_yaml_is_refused_by_name(capsys, tmp_path, content, rule):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    for flags in (("--config", str(path)), (f"--config={path}",)):
        assert config_errors(capsys, path, *flags) == f"error: {path} {rule}\n"


def test_a_missing_config_is_named(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    assert config_errors(capsys, path) == f"error: {path} cannot be read: No such file or directory.\n"
    assert "expected" in config_errors(capsys, path, "--config")


def test_a_config_cannot_hide_behind_an_abbreviation(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(BOMB)
    assert "unrecognized arguments: --conf=" in config_errors(capsys, path, f"--conf={path}")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            "num_tmies: 2",
            "error: the file of --config has the unknown key 'num_tmies'; known keys are name, num_times, style.\n",
        ),
        ("num_times: many", "error: --num-times must be int. Got value: many\n"),
        ("num_times: {a: 1}", "error: --num-times must be int. Got value: {'a': 1}\n"),
        ("style: shrill", "error: --style must be one of ['loud', 'quiet']. Got value: shrill\n"),
    ],
)
def test_a_wrong_key_or_type_in_a_config_is_one_line(capsys, tmp_path, content, line):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert config_errors(capsys, path) == line


def test_a_subcommands_config_is_checked_too(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_tmies: 2")
    assert code_of({"greet": greet}, "greet", "Ada", "--config", str(path)) == 2
    assert "unknown key 'num_tmies'; known keys are name, num_times, style." in capsys.readouterr().err
    path.write_bytes(BOMB)
    assert code_of({"greet": greet}, "--config", str(path), "greet", "Ada") == 2
    assert "aliases are not allowed" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "expected"), [([], False), (["--yes"], True), (["--yes=false"], False)])
def test_a_flag_of_type_bool_needs_no_value(args, expected, capsys):
    def command(yes: bool = False) -> None:
        print(yes)

    with pytest.raises(SystemExit):
        cli.run(command, prog="x", args=args)
    assert capsys.readouterr().out == f"{expected}\n"
