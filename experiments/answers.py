"""Private answers of several models, each in its own process, saved as `nas.private` writes them and not run again.

Each is reported on one line: agreement with plaintext, bytes and their prediction, seconds and memory.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from experiments.bars import table
from nas.storage import replace_file

COLUMNS = ("model", "protocol", "as in the clear", "bytes sent", "predicted", "seconds", "predicted", "memory")


def private_answers(
    models: Mapping[str, Sequence[str]], protocols: Sequence[str], asked: Sequence[str], folder: Path, console: Console
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the documents of `nas.private --format json` by model and protocol; completed ones are saved.

    `models` maps a name for files to the arguments that select the model; `asked` are further arguments of all. A
    UserError is raised, in one line, if one fails.
    """
    answers, digest = {}, sha256(json.dumps(asked).encode()).hexdigest()[:8]
    for name, model in models.items():
        for protocol in protocols:
            path = folder / f"private-{name}-{protocol}-{digest}.json"
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


def answer_table(answers: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    """Tabulate the answers; memory is the most of any party."""
    rows = []
    for (name, protocol), document in answers.items():
        measured, predicted = document["total"]["measured"], document["total"]["predicted"]
        same = sum(bool(token["top1_agrees"]) for token in document["tokens"])
        seconds = (costs["latency_s"] for costs in (measured, predicted))
        peaks = [peak for peak in measured["peak_bytes"] if peak is not None]
        rows.append(
            (
                name,
                protocol,
                f"{same} of {len(document['tokens'])}",
                f"{measured['sent_bytes']:,}",
                "equal" if measured["sent_bytes"] == predicted["sent_bytes"] else f"{predicted['sent_bytes']:,}",
                *("?" if value is None else format_seconds(value) for value in seconds),
                format_bytes(max(peaks)) if peaks else "?",
            )
        )
    return table(COLUMNS, rows, title="answered privately, the parties on this machine")
