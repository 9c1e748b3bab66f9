"""The programs that commands of the documentation name: run in this process, or parsed by their own parsers."""

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from jsonargparse import capture_parser

from costmodel.config.cli import DEBUG
from costmodel.engine.registry import INSTALL_CRYPTEN
from experiments.__main__ import definitions
from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {name: value.partition(":")[0].removesuffix(".__main__") for name, value in PROJECT["scripts"].items()}


def module_and_args(words: Sequence[str]) -> tuple[str, list[str]]:
    """`python -m MODULE ARGS`, or a program of the package."""
    if words[:2] == ["python", "-m"]:
        return words[2], list(words[3:])
    return MODULES[words[0]], list(words[1:])


def main_of(module: str) -> Callable[[list[str]], Any]:
    assert module in MODULES.values(), f"no command is called {module}"
    path = {value.partition(":")[0].removesuffix(".__main__"): value for value in PROJECT["scripts"].values()}[module]
    name, _, function = path.partition(":")
    main: Callable[[list[str]], Any] = getattr(import_module(name), function)
    return main


def run(module: str, args: Sequence[str]) -> Any:
    """What a command exits with."""
    try:
        return main_of(module)(list(args))
    except SystemExit as end:
        return end.code


def parser_of(module: str) -> Any:
    """The parser that a command makes for itself. A bug that `--debug` shows is how it is stopped at that."""
    return capture_parser(main_of(module), [DEBUG])


def parse(words: Sequence[str]) -> None:
    """Raises what the parser of a command raises for its words; an error if nothing here knows the program."""
    program, *rest = words
    if program == "make":
        recipes = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(rest) <= set(recipes)
    elif program == "pip":
        extras = re.fullmatch(r"install -e \.\[([\w,]+)\]", " ".join(rest))
        known = set(PROJECT["optional-dependencies"])
        assert set(extras[1].split(",")) <= known if extras else INSTALL_CRYPTEN.endswith(shlex.join(words))
    elif program == "pytest":
        assert (ROOT / rest[0]).exists()
    else:
        module, args = module_and_args(words)
        parsed = parser_of(module).parse_args(args)
        if module == "experiments" and "run" in parsed:
            assert parsed.run.name in definitions(), shlex.join(words)


def flags_of(module: str) -> set[str]:
    """Every flag that a command or one of its subcommands takes."""
    parsers, flags = [parser_of(module)], set[str]()
    while parsers:
        for action in parsers.pop()._actions:
            flags |= {option.replace("_", "-") for option in action.option_strings}
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
    return {flag.rstrip("-") for flag in flags}
