"""Placements of a real model that are recovered on a mixture of text, then judged next to the model's own file.

Each model is trained, folded, evaluated and asked by the commands that a user runs: `nas.train`, `nas.export`,
`nas.evaluate` and `nas.private`. A finished training, export or answer is not repeated, and a stopped training
continues. `nas.evaluate` runs each time, but takes finished parts from its .jsonl file.
"""

import csv
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from costmodel.deployment.deploy import Deployment, Projection
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from costmodel.report.tables import table
from experiments.private_answers import answer_table, private_answers
from nas.conversion.parent import read_parent_architecture
from nas.conversion.pretrained import CHECKSUMS_FILE
from nas.evaluate.table import Row
from nas.report.draw import draw_panels, save_figure
from nas.report.front_figures import LinePanel, PanelFigure, Series
from nas.storage import RUNS, locked, replace_file, write_csv
from nas.train import CONFIG_FILE
from search_spaces.budget.priced_space import price_architecture
from search_spaces.lower import Workload

COLUMNS = ("model", "placement", "training_tokens", "seed", "sent_bytes_share", "latency_share", *Row._fields)
Judged = Mapping[str, str]  # a row of the table as the .csv file has it, by COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model to recover.

    Attributes:
        placement: Its layers, as `nas.train` takes them.
        tokens, seed: Training tokens and seed.
    """

    placement: str
    tokens: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: File of the model, in the current folder.
        mixture: Folder that `experiments run mixture` has written.
        train, evaluate: Flags of `nas.train` and `nas.evaluate` for all models.
        protocol, network, prompt_len, projection: What costs are of: one token after a prompt, with the logits of all
            tokens or of the last one.
        models: Models to recover, by name.
        answer, answer_protocols: Flags of `nas.private`, such as --prompt, for the file and all models, and protocols
            under which they answer.
    """

    parent: str
    mixture: str
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    protocol: str
    network: str
    prompt_len: int
    models: dict[str, Model]
    projection: Projection = "all"
    answer: tuple[str, ...]
    answer_protocols: tuple[str, ...]


def run(name: str, settings: Settings, console: Console) -> None:
    """Recover, judge and ask the models that are not there yet, and print, write and plot the results.

    A UserError is raised without the parent's file or the mixture, for an unknown protocol or network, if a command
    fails, if a model was trained with other settings, or if another process runs the experiment.
    """
    require_files(name, settings.parent, *(f"{settings.mixture}/{part}" for part in ("recovery", "unseen", "tasks")))
    pricer = load_pricer(settings.protocol, settings.network)
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        judged = [row for model in settings.models for row in _judged(model, settings, folder, pricer, console)]
        write_csv(folder / f"{name}.csv", COLUMNS, ([row[column] for column in COLUMNS] for row in judged))
        written = save_figure(folder / name, draw_panels(figure(judged, Path(settings.parent).stem)))
        asked = {"file": (settings.parent,)} | {name: (str(folder / f"{name}-private"),) for name in settings.models}
        console.print(result_table(judged))
        console.print(f"figures: {folder / name}.csv, {written[0]}", soft_wrap=True, highlight=False)
        answers = private_answers(asked, settings.answer_protocols, settings.answer, folder, console)
    console.print(answer_table(answers))


def require_files(experiment: str, parent: str, *folders: str) -> None:
    """Raise UserError unless the parent's file and the folders of the mixture are there."""
    places = dict.fromkeys(folders, "`python -m experiments run mixture` writes it")
    for needed, where in {parent: "docs/llama.md and docs/gemma.md say where it is", **places}.items():
        if not Path(needed).exists():
            raise UserError(f"experiment {experiment} needs {needed} in this folder; {where}.")


def require_same(arguments: Sequence[str], made_with: Path, *made: Path) -> None:
    """Raise UserError if something of `made` exists but was made with other arguments; else write these to a file."""
    told = made_with.exists() and json.loads(made_with.read_text(encoding="utf-8"))
    if told != [*arguments] and (there := [str(path) for path in made if path.exists()]):
        raise UserError(f"{there[0]} must have been made with the experiment's settings, but was not; delete it.")
    replace_file(made_with, json.dumps(arguments))


def _judged(name: str, settings: Settings, folder: Path, pricer: Pricer, console: Console) -> list[Judged]:
    """Train, fold and evaluate a model, as far as that is not done, and return its rows."""
    model, trained, exported = settings.models[name], folder / name, folder / f"{name}-private"
    mixture, made_with = Path(settings.mixture), folder / f"{name}.json"
    source = ("--parent", settings.parent, "--scale", "parent", "--data", str(mixture / "recovery"))
    size = ("--tokens", str(model.tokens), "--seed", str(model.seed))
    wanted = (model.placement, *source, *size, *settings.train)
    require_same(wanted, made_with, trained, exported)
    if not (exported / CHECKSUMS_FILE).exists():  # written last
        anew, begun = (*wanted, "--output-dir", str(trained)), (trained / CONFIG_FILE).exists()
        call("nas.train", *(("--resume", str(trained)) if begun else anew), console=console)
        shutil.rmtree(exported, ignore_errors=True)
        call("nas.export", str(trained), "--fold", "--output-dir", str(exported), console=console)
    output = folder / "evaluation.md"
    unseen, tasks = sorted(str(path) for path in (mixture / "unseen").iterdir()), str(mixture / "tasks")
    asked = ("--versus", settings.parent, "--text", *unseen, "--tasks", tasks, *settings.evaluate)
    call("nas.evaluate", str(exported), *asked, "--output", str(output), console=console)
    workload = Workload(prompt_len=settings.prompt_len, deployment=Deployment(projection=settings.projection))
    ours, theirs = (
        price_architecture(read_parent_architecture(each), pricer, workload, "folded").price
        for each in (str(exported), settings.parent)
    )
    facts = {
        "model": name,
        "placement": model.placement,
        "training_tokens": str(model.tokens),
        "seed": str(model.seed),
        "sent_bytes_share": f"{ours.sent_bytes / theirs.sent_bytes:.4f}",
        "latency_share": f"{ours.latency_s / theirs.latency_s:.4f}",
    }
    with output.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [facts | row | ({"name": Path(row["name"]).name} if row["kind"] == "text" else {}) for row in rows]


def call(module: str, *args: str, console: Console) -> None:
    """Run a command, whose output is shown. Raises UserError if it fails."""
    command = ["-m", module, *args]
    console.print(f"python {shlex.join(command)}", soft_wrap=True, highlight=False, markup=False)
    if code := subprocess.run([sys.executable, *command]).returncode:
        raise UserError(f"{module} must end without an error, but its exit status is {code}; see above.")


def result_table(judged: Sequence[Judged]) -> Table:
    """Return a table of what each model loses: a row for each text and task, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in judged))
    by_row: dict[tuple[str, str], dict[str, str]] = {}
    for row in judged:
        change, is_text = float(row["change"]), row["kind"] == "text"
        words = f"{change:+.0f}" if row["kind"] == "writing" else f"{100 * change:+.1f} {'%' if is_text else 'points'}"
        by_row.setdefault((row["kind"], row["name"]), {})[row["model"]] = words
    rows = [(f"{kind}: {name}", *(cells.get(model, "") for model in models)) for (kind, name), cells in by_row.items()]
    return table(("change against the file",), tuple(models), rows)


def figure(judged: Sequence[Judged], title: str) -> PanelFigure:
    """Return a figure of the changes of perplexity and of accuracy against the shares of bytes and of seconds.

    Of several tasks, only the mean is shown.
    """
    axes = {"sent_bytes_share": "bytes, % of the file's", "latency_share": "predicted seconds, % of the file's"}
    tasks = "mean" if any(row["kind"] == "mean" for row in judged) else "task"
    changes = {"text": "change of perplexity, %", tasks: "change of accuracy, points"}

    def series(kind: str, axis: str) -> Iterator[Series]:
        for name in dict.fromkeys(row["name"] for row in judged if row["kind"] == kind):
            points = [(100.0, 0.0)]
            points += [
                (100 * float(row[axis]), 100 * float(row["change"]))
                for row in judged
                if (row["kind"], row["name"]) == (kind, name)
            ]
            x, y = zip(*sorted(points), strict=True)
            yield Series("mean of the tasks" if kind == "mean" else name, x, y)

    panels = (
        LinePanel("", label, words, tuple(series(kind, axis)))
        for kind, words in changes.items()
        for axis, label in axes.items()
    )
    return PanelFigure(f"{title}, recovered, next to its file", tuple(panels), columns=2)
