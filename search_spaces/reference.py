"""What a command line calls an architecture: a YAML file, a Python factory, or the papers' notation."""

import importlib
from pathlib import Path

from search_spaces.architecture import Architecture, load_architecture
from search_spaces.notation import Named, parse


def is_notation(text: str) -> bool:
    """Whether the text is read as notation, on the dimensions of a base, and not as a file or factory."""
    return not _is_file(text) and ":" not in text


def resolve(text: str, base: Architecture) -> Named:
    """The architecture of an existing .yaml path; else, with a colon, of `module:factory`; else of a notation.

    base: dimensions that a notation is placed on; a file and a factory bring their own.

    Raises ValueError if the text is none of these, or what it names is not an architecture.
    """
    if _is_file(text):
        return Named(architecture=load_architecture(Path(text)), entropy_regularised=False)
    if ":" in text:
        return Named(architecture=_made(text), entropy_regularised=False)
    if text.endswith(".yaml"):
        raise ValueError(f"architecture file {text!r} does not exist; give the path of a .yaml file or a name.")
    return parse(text, base)


def _is_file(text: str) -> bool:
    return text.endswith(".yaml") and Path(text).exists()


def _made(text: str) -> Architecture:
    rule = f"architecture {text!r} must be module:factory, a callable without arguments that returns an Architecture"
    module_name, _, factory_name = text.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), factory_name)()
    except (Exception, SystemExit) as error:  # whatever foreign code raises is the user's bad input
        raise ValueError(f"{rule}, but it raised {type(error).__name__}: {error}") from None
    if not isinstance(made, Architecture):
        raise ValueError(f"{rule}, but it returned {type(made).__name__}.")
    return made
