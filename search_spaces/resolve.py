"""Resolves an architecture named on a command line: YAML file, export, checkpoint, factory or notation."""

import importlib
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from costmodel.errors import UserError
from search_spaces.architecture import Architecture, load_architecture
from search_spaces.checkpoints.checkpoint import is_checkpoint, read_checkpoint
from search_spaces.notation import Member, parse

ARCHITECTURE_FILE = "architecture.yaml"  # in the folder of an export, the architecture that is priced


def is_notation(text: str) -> bool:
    """Whether a text is taken as notation: it is no existing .yaml file or export folder, factory or checkpoint."""
    return _file(text) is None and ":" not in text and not is_checkpoint(text)


def is_checkpoint_name(text: str) -> bool:
    """Whether a text is taken as a checkpoint (`is_checkpoint`), and is not a folder with an architecture file."""
    return _file(text) is None and is_checkpoint(text)


def is_factory(text: str) -> bool:
    """Whether a text is taken as `module:factory`: it has a colon, and is no existing .yaml file or checkpoint."""
    return _file(text) is None and ":" in text and not is_checkpoint(text)


def resolve(text: str, base: Architecture) -> Member:
    """Return the member that a text names: a .yaml file, export folder, checkpoint, `module:factory` or notation.

    Only notation uses `base`, for all that it does not state (`parse`), and can ask for entropy regularisation. A
    UserError is raised if the text is none of these, cannot be read, or names a model that is no `Architecture`.
    """
    if (path := _file(text)) is not None:
        made: object = load_architecture(path)
    elif is_checkpoint_name(text):
        made = (checkpoint := read_checkpoint(text)).model
        if not isinstance(made, Architecture):
            raise UserError(f"{checkpoint.unlike} It is only priced, by `python -m costmodel estimate`.")
    elif is_factory(text):
        made = call_factory(text)
    elif text.endswith(".yaml"):
        raise UserError(f"architecture file {text!r} does not exist; give the path of a .yaml file or a name.")
    else:
        return parse(text, base)
    if not isinstance(made, Architecture):
        raise UserError(
            f"architecture {text!r} must return an Architecture, but returned {type(made).__name__}; a torch module is "
            "only priced, by `python -m costmodel estimate`."
        )
    return Member(architecture=made, entropy_regularised=False)


def call_factory(text: str) -> object:
    """Call the factory that `module:factory` names and return its result; what the factory prints goes to stderr.

    A UserError is raised if the factory cannot be imported or called without arguments, or raises an exception.
    """
    module_name, _, factory_name = text.partition(":")
    try:
        with redirect_stdout(sys.stderr):
            return getattr(importlib.import_module(module_name), factory_name)()
    except (Exception, SystemExit) as error:  # any exception of the user's code is bad input
        raise UserError(
            f"architecture {text!r} must be module:factory, a callable without arguments that returns an Architecture "
            f"or a torch module, but it raised {type(error).__name__}: {error}"
        ) from None


def _file(text: str) -> Path | None:
    """Return the .yaml file that a text names, directly or as an export's folder; None also for an overlong name."""
    paths = (text, os.path.join(text, ARCHITECTURE_FILE))
    return next((Path(path) for path in paths if path.endswith(".yaml") and os.path.exists(path)), None)
