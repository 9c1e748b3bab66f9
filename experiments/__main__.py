"""`python -m experiments list | run NAME`: runs the benchmarks behind the numbers in the documentation."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from costmodel.config import cli
from costmodel.config.files import decode, load_mapping
from costmodel.errors import UserError
from costmodel.report.tables import console as table_console
from experiments import front, gpu, mixture, private_answers, recovery
from experiments.searchers import benchmark, table
from nas.recipe.recipe import ScaleName
from nas.training.device import Device

CONFIGS = Path(__file__).parent / "configs"

# kind in an experiment's YAML -> module; the YAML is decoded to its `Settings`, which its `run` takes with the
# experiment's name and a console
KINDS: dict[str, ModuleType] = {
    "engines": private_answers,
    "front": front,
    "gpu": gpu,
    "mixture": mixture,
    "recovery": recovery,
    "search-benchmark": benchmark,
    "table": table,
}


@cache
def definitions() -> dict[str, Path]:
    """Return the YAML file of every experiment, by its name: the files below CONFIGS that state a kind."""
    return {path.stem: path for path in sorted(CONFIGS.rglob("*.yaml")) if "kind" in load_mapping(path)}


def list_experiments() -> None:
    """Print the name of each experiment, and the first sentence of its YAML."""
    for name, path in definitions().items():
        sentence = re.findall(r"\A# (.*?[.?!])$", path.read_text(), re.DOTALL | re.MULTILINE)[0]
        print(name, sentence.replace("\n# ", " "), sep=": ")


def settings_of(name: str, **changes: Any) -> Any:
    """Return the settings of an experiment. changes: values in place of the YAML's. Raises UserError for bad ones."""
    data = load_mapping(definitions()[name]) | changes
    return decode(KINDS[data.pop("kind")].Settings, data, f"experiment {name}")


def run(
    name: str,
    scale: ScaleName | None = None,
    device: Device | None = None,
    output_dir: str | None = None,
    parent: str | None = None,
    parts: str | None = None,
) -> None:
    """Run an experiment, or resume it if it was stopped (`gpu` and `search-benchmark` begin anew).

    Args:
        name: one of `python -m experiments list`.
        scale: size, length and speed of the trainings; by default the experiment's own.
        device: where to train; by default a GPU if there is one.
        output_dir: folder of what is written, by default runs/experiments/NAME.
        parent: trained model to start from, such as a GGUF file.
        parts: the parts to run, separated by commas, such as step,sharing; by default all.
    """
    names = list(definitions())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise UserError(f"experiment must be one of {', '.join(names)}, but got {name!r}{meant}")
    some = None if parts is None else parts.split(",")
    flags = {"scale": scale, "device": device, "output_dir": output_dir, "parent": parent, "parts": some}
    changes = {flag: value for flag, value in flags.items() if value is not None}
    kind = KINDS[load_mapping(definitions()[name])["kind"]]
    taken = [field.name for field in fields(kind.Settings)]
    for flag in changes.keys() - taken:
        able = ", ".join(f"--{other}" for other in flags if other in taken) or "none"
        flag, able = flag.replace("_", "-"), able.replace("_", "-")
        raise UserError(f"experiment {name} does not take --{flag}; flags that it takes: {able}.")
    kind.run(name, settings_of(name, **changes), table_console())


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    cli.run({"list": list_experiments, "run": run}, prog="python -m experiments", args=args)


if __name__ == "__main__":
    main()
