"""Private answers of models, each by a process of `nas.private`, whose JSON is saved, so that it need not run again.

`experiments run engines` compares engines by the answers of a parent and of a cheaper model. The cheaper model is not
trained: it costs what a trained one does, but its text means nothing.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from costmodel.report.tables import table
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.corpus.documents import fingerprint
from nas.corpus.local_files import digest
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.storage import RUNS, replace_file, write_csv
from search_spaces.notation import parse

COLUMNS = (
    "protocol", "as in the clear", "error", "bytes sent", "predicted", "messages", "seconds", "predicted",
    "memory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: A model by a name that `nas.private` and `load_parent` take.
        placement: Layers of the cheaper model.
        protocols: Protocols with an engine, under each of which both models answer.
        prompt, new_tokens: The text to continue, and most tokens to generate.
        output_dir: Folder of the results; None for `runs/experiments/` and the experiment's name.
    """

    parent: str
    placement: str
    protocols: tuple[str, ...]
    prompt: str
    new_tokens: int
    output_dir: str | None = None


def run(name: str, settings: Settings, console: Console) -> None:
    """Let both models answer under every protocol, unless the folder has the answer; print and write a table."""
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
    path, records = folder / f"{name}.csv", answer_records(answers)
    write_csv(path, list(records[0]), (record.values() for record in records))
    console.print(f"figures: {path}", soft_wrap=True, highlight=False)


def private_answers(
    models: Mapping[str, Sequence[str]], protocols: Sequence[str], asked: Sequence[str], folder: Path, console: Console
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the JSON data of `nas.private --format json` by model and protocol, which is saved in `folder`.

    models: for each model, by a name for files, the arguments of `nas.private` that select it. asked: further arguments
    for all models. A UserError is raised, in one line, if a process fails.
    """
    answers = {}
    for name, model in models.items():
        made_with = fingerprint([*model, *asked, *filter(None, map(_content, model))])[:8]
        for protocol in protocols:
            path = folder / f"private-{name}-{protocol}-{made_with}.json"
            if not path.exists():
                command = ["-m", "nas.private", *model, "--protocol", protocol, *asked, "--format", "json"]
                console.print(f"python {shlex.join(command)}", soft_wrap=True, highlight=False, markup=False)
                done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
                if done.returncode:
                    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
                    raise UserError(f"nas.private {name} must answer under {protocol}, but: {last}")
                replace_file(path, done.stdout)
            answers[name, protocol] = json.loads(path.read_text(encoding="utf-8"))
    return answers


def _content(argument: str) -> str | None:
    """Return a digest of the file or folder that an argument names, or None if it names none.

    Without checksums, the digest of a folder is that of the names, sizes and times of its files.
    """
    path = Path(argument)
    if path.is_dir() and not (path / CHECKSUMS_FILE).exists():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return fingerprint([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    path = path / CHECKSUMS_FILE if path.is_dir() else path
    return digest(path) if path.is_file() else None


def answer_records(answers: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each answer, in SI units. peak_bytes: peak memory of the largest process; None if unknown."""
    records = []
    for (name, protocol), document in answers.items():
        measured, predicted = document["total"]["measured"], document["total"]["predicted"]
        records.append(
            {
                "model": name,
                "protocol": protocol,
                "tokens": len(document["tokens"]),
                "as_in_the_clear": sum(bool(token["top1_agrees"]) for token in document["tokens"]),
                "largest_logit_error": document["agreement"]["largest_logit_error"],
                "sent_bytes": measured["sent_bytes"],
                "predicted_bytes": predicted["sent_bytes"],
                "messages": measured["messages"],
                "seconds": measured["latency_s"],
                "predicted_s": predicted["latency_s"],
                "peak_bytes": max((peak for peak in measured["peak_bytes"] if peak is not None), default=None),
            }
        )
    return records


def answer_table(answers: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """Return a table with a row for each answer. answers: result of `private_answers`."""
    rows = [
        (
            row["model"],
            row["protocol"],
            f"{row['as_in_the_clear']} of {row['tokens']}",
            f"{row['largest_logit_error']:.2g}",
            f"{row['sent_bytes']:,}",
            "equal" if row["sent_bytes"] == row["predicted_bytes"] else f"{row['predicted_bytes']:,}",
            f"{row['messages']:,}",
            *("?" if row[key] is None else format_seconds(row[key]) for key in ("seconds", "predicted_s")),
            "?" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
        )
        for row in answer_records(answers)
    ]
    return table(("model",), COLUMNS, rows, title="answered privately, the parties on this machine")
