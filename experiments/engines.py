"""Compares the engines: private answers of a parent and of a cheaper model under several protocols, in one run.

The cheaper model is not trained: it costs what a trained one does, but its text is of no worth.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from experiments.answers import answer_records, answer_table, private_answers
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import write_pretrained
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.storage import RUNS
from search_spaces.notation import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: Model that `nas.private` takes.
        placement: Layers of the cheaper model.
        protocols: Protocols with an engine.
        prompt, new_tokens: The text to continue, by so many tokens at most.
        output_dir: None for `runs/experiments/` and the experiment's name.
    """

    parent: str
    placement: str
    protocols: tuple[str, ...]
    prompt: str
    new_tokens: int
    output_dir: str | None = None


def run(name: str, settings: Settings, console: Console) -> None:
    """Print a table, and write its numbers; answers that the folder has are not run again."""
    folder = Path(settings.output_dir) if settings.output_dir else RUNS / "experiments" / name
    source = load_parent(settings.parent).model
    architecture = parse(settings.placement, source.architecture).architecture
    torch.manual_seed(0)
    weights = {key: value.clone() for key, value in deployed_weights(Decoder(architecture)).items()}
    write_pretrained(source._replace(architecture=architecture, weights=weights, windows=None), folder / "member")
    models = {"parent": (settings.parent,), "member": (str(folder / "member"),)}
    asked = ("--prompt", settings.prompt, "--new-tokens", str(settings.new_tokens))
    answers = private_answers(models, settings.protocols, asked, folder, console)
    console.print(answer_table(answers))
    records = answer_records(answers)
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    console.print(f"figures: {file.name}", soft_wrap=True, highlight=False)
