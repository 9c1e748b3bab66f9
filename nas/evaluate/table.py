"""Results of an evaluation with their intervals, as Markdown and as rows of a CSV file.

Intervals are from the 2.5th to the 97.5th percentile over samples, drawn with replacement, of documents of a text (of
windows, if there are few documents), items of a task, or continuations. Samples are the same for both models, so the
interval of a difference is a paired one. For the mean over tasks, each task is sampled separately.

Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapters 8 and 13.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nas.evaluate.tasks import METRICS, Task
from nas.evaluate.texts import LONGEST_CYCLE, TAIL, collapses, first_difference

SAMPLES = 2000  # bootstrap samples
LEAST = 64  # tokens of a document or window whose change of perplexity is not due to a few tokens
Numbers: TypeAlias = NDArray[np.float64]
Answers: TypeAlias = Sequence[tuple[float, bool, int]]  # log-likelihood, greediness and tokens of each choice


class Row(NamedTuple):
    """A result, as a row of a CSV file. A field that does not apply is None, an empty cell.

    kind: text, task, mean (over the tasks) or writing. size: number of tokens, items or continuations. of_parent,
    of_model: perplexity of a text, accuracy on a task from 0 to 1, or number of continuations that collapse. change: of
    perplexity, as a share of the parent's; otherwise of_model - of_parent. change_low, change_high: the ends of its
    95 % interval. kl_nats: KL(parent || model) in nats per token. agreement: top-1 agreement, or the share of items
    with the same choice. worst_change: largest change of the perplexity of a document or window of at least LEAST
    tokens.
    """

    kind: str
    name: str
    size: int
    of_parent: float
    of_model: float
    change: float
    change_low: float | None
    change_high: float | None
    kl_nats: float | None
    agreement: float | None
    worst_change: float | None = None


class Sums(NamedTuple):
    """Sums of each column over all units (such as items), and over bootstrap samples of them, one in each row."""

    whole: Numbers
    samples: Numbers


def sums_of(units: ArrayLike, seed: str = "") -> Sums:
    """Return the sums of an array, units x columns, over all units and over bootstrap samples of them.

    seed: decides the samples, so that those of tasks with equally many items differ.
    """
    rows = np.asarray(units, dtype=np.float64)
    generator = np.random.default_rng(list(seed.encode()))
    counts = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=SAMPLES)
    return Sums(rows.sum(axis=0), counts @ rows)


def interval(values: Numbers) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentiles of values, one per bootstrap sample; NaN counts as infinite."""
    low, high = np.percentile(np.nan_to_num(values, nan=np.inf), [2.5, 97.5], method="nearest")
    return float(low), float(high)


def shown(form: str, of: Callable[[Numbers], Numbers], sums: Sums) -> str:
    """Return a number as text, with its interval unless both ends are equal.

    form: format of the number, such as {:.1%}. of: function that computes the number from the sums of each column.
    """
    low, high = interval(of(sums.samples.T))
    value = form.format(float(of(sums.whole)))
    return value if low == high else f"{value} ({form.format(low)} to {form.format(high)})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*columns: str) -> list[str]:
    return [_row(*columns), f"|{'---|' * len(columns)}"]


def task_columns(task: Task, parent: Sequence[Answers | None], model: Sequence[Answers | None]) -> Numbers:
    """Return an array of items x 5, without items that were left out.

    The columns are 1, the chance of a random choice to be right (0 in a greedy task), whether the parent is right,
    whether the model is right, and whether their choices differ. parent, model: answers to each item; None for an item
    that was left out. A model chooses the first of the answers with the highest value of the task's metric; in a greedy
    task it chooses the only answer, or none if it would not write that one.
    """
    rows = []
    for item, *both in zip(task.items, parent, model, strict=True):
        chosen: list[int | None] = []
        for answers in both:
            if answers is not None and task.is_greedy:
                chosen.append(0 if answers[0][1] else None)
            elif answers is not None:
                divided = [
                    score / METRICS[task.metric].divisor(text, num_tokens)
                    for (_, text), (score, _, num_tokens) in zip(item.choices, answers, strict=True)
                ]
                chosen.append(divided.index(max(divided)))
        if len(chosen) == len(both):
            chance = 0.0 if task.is_greedy else 1 / len(item.choices)
            rows.append((1, chance, *(choice == item.label for choice in chosen), chosen[0] != chosen[1]))
    return np.array(rows, dtype=np.float64)


def task_lines(columns: Mapping[Task, Numbers]) -> list[str]:
    """Return the lines of the table of tasks; several tasks get a row of means. columns: results of `task_columns`."""

    def retention(part: Numbers) -> Numbers:
        with np.errstate(divide="ignore", invalid="ignore"):
            kept: Numbers = (part[3] - part[1]) / (part[2] - part[1])
            return kept

    lines = _head("task", "items", "chance", "parent", "model", "difference, points", "retention", "choose differently")
    for task, sums in _with_mean(columns):
        name = "mean over tasks" if task is None else f"{task.name}, {METRICS[task.metric].words}"
        num_items = "" if task is None else f"{sums.whole[0]:,.0f}"
        parents_low = interval((sums.samples[:, 2] - sums.samples[:, 1]) / sums.samples[:, 0])[0]
        cells = [
            name,
            num_items,
            f"{sums.whole[1] / sums.whole[0]:.1%}",
            shown("{:.1%}", lambda part: part[2] / part[0], sums),
            shown("{:.1%}", lambda part: part[3] / part[0], sums),
            shown("{:+.1f}", lambda part: 100 * _difference(part), sums),
            shown("{:.0%}", retention, sums) if parents_low > 0 else "the parent guesses",
            shown("{:.1%}", lambda part: part[4] / part[0], sums),
        ]
        lines.append(_row(*cells))
    return lines


def task_rows(columns: Mapping[Task, Numbers]) -> Iterator[Row]:
    """Yield the row of each task, and of their mean if there are several. columns: results of `task_columns`."""
    num_items = sum(map(len, columns.values()))
    for task, sums in _with_mean(columns):
        kind, name, size = ("mean", "tasks", num_items) if task is None else ("task", task.name, len(columns[task]))
        _, _, parent, model, differing = sums.whole / sums.whole[0]
        change, ends = _difference(sums.whole), interval(_difference(sums.samples.T))
        yield Row(kind, name, size, parent, model, float(change), *ends, None, 1 - differing)


def _with_mean(columns: Mapping[Task, Numbers]) -> list[tuple[Task | None, Sums]]:
    """Return the sums of each task and, if there are several, of the mean over tasks, for None."""
    by_task = {task: sums_of(rows, seed=task.name) for task, rows in columns.items()}
    shares = [Sums(sums.whole / sums.whole[0], sums.samples / sums.samples[:, :1]) for sums in by_task.values()]
    mean = Sums(*(np.mean(parts, axis=0) for parts in zip(*shares, strict=True)))
    return [*by_task.items(), *([(None, mean)] if len(by_task) > 1 else [])]


def _difference(columns: Numbers) -> Numbers:
    """Return the difference of accuracies, from sums of the columns of `task_columns`."""
    return np.asarray((columns[3] - columns[2]) / columns[0])


def _change(columns: Numbers) -> Numbers:
    """Return the change of perplexity as a share of the parent's, from sums of the fields of `Compared`."""
    return np.asarray(np.expm1((columns[2] - columns[1]) / columns[0]))


def _worst_change(units: Sequence[Sequence[float]]) -> float | None:
    """Return the largest change of a unit's perplexity; None if none has LEAST tokens. units: fields of `Compared`."""
    return max((float(_change(np.asarray(unit))) for unit in units if unit[0] >= LEAST), default=None)


def text_lines(units: Mapping[str, Sequence[Sequence[float]]], kinds: Mapping[str, str]) -> list[str]:
    """Return the lines of the table of texts.

    units: by text, the fields of `Compared` for each unit. kinds: by text, what its units are, in words.
    """
    perplexities = ("perplexity, parent", "model", "change")
    compared = *perplexities, "KL(parent \\|\\| model), nats", "top-1 agreement"
    lines = _head("text", "tokens", "resampled", *compared, "largest change of one")
    for name, rows in units.items():
        sums = sums_of(rows)
        worst = _worst_change(rows)
        cells = [
            name,
            f"{sums.whole[0]:,.0f}",
            f"{len(rows)} {kinds[name]}",
            shown("{:.2f}", lambda part: np.exp(part[1] / part[0]), sums),
            shown("{:.2f}", lambda part: np.exp(part[2] / part[0]), sums),
            shown("{:+.1%}", _change, sums),
            shown("{:.4f}", lambda part: part[3] / part[0], sums),
            shown("{:.1%}", lambda part: part[4] / part[0], sums),
            "" if worst is None else f"{worst:+.0%}",
        ]
        lines.append(_row(*cells))
    return lines


def text_rows(units: Mapping[str, Sequence[Sequence[float]]]) -> Iterator[Row]:
    """Yield the row of each text. units: by text, the fields of `Compared` for each unit."""
    for name, rows in units.items():
        sums = sums_of(rows)
        num_tokens, parent, model, divergence, agreements = sums.whole
        change = float(_change(sums.whole))
        low, high = interval(_change(sums.samples.T)) if len(rows) > 1 else (None, None)
        perplexities = np.exp(parent / num_tokens), np.exp(model / num_tokens)
        parts = divergence / num_tokens, agreements / num_tokens
        yield Row("text", name, int(num_tokens), *perplexities, change, low, high, *parts, _worst_change(rows))


def writing_row(parent: Sequence[Sequence[int]], model: Sequence[Sequence[int]]) -> Row:
    """Return the row with the numbers of continuations that collapse."""
    sums = sums_of([[collapses(tokens) for tokens in pair] for pair in zip(parent, model, strict=True)])
    theirs, ours = map(int, sums.whole)
    ends = interval(sums.samples[:, 1] - sums.samples[:, 0])
    return Row("writing", "collapsed continuations", len(model), theirs, ours, ours - theirs, *ends, None, None)


def writing_lines(parent: Sequence[Sequence[int]], model: Sequence[Sequence[int]], num_new: int) -> list[str]:
    """Return lines that compare the models' greedy continuations of the same prompts, at most `num_new` tokens each."""
    places = [first_difference(ours, theirs) for ours, theirs in zip(model, parent, strict=True)]
    num_equal = places.count(None)
    median = statistics.median(math.inf if place is None else place for place in places)
    where = "most are equal to their end" if math.isinf(median) else f"at token {median:g} in the median"
    row = writing_row(parent, model)
    return [
        f"Of {row.size} greedy continuations of at most {num_new} tokens, {row.of_model} of the model and "
        f"{row.of_parent} of the parent collapse into repetition ({row.change:+}, 95 % interval {row.change_low:+g} to "
        f"{row.change_high:+g}): each of the last {TAIL} tokens equals the one p before it, for some p up to "
        f"{LONGEST_CYCLE}. The two first differ {where}; {num_equal} do not differ."
    ]
