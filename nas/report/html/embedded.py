"""The data that a page's scripts draw, as JSON inside it: points with their prices, and what training was like."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from nas.report.front_figures import drawn_ngrams
from nas.report.html.grid import Grid
from nas.report.html.points import Point, perplexity_words
from nas.run.front import front
from nas.run.ledger import Record
from nas.run.pareto import hypervolume
from nas.run.run import Run

MOST_STEPS = 80  # of a curve: more cannot be told apart on a screen


def embedded(run: Run, points: Sequence[Point], grid: Grid) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(_data(run, points, grid), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _data(run: Run, points: Sequence[Point], grid: Grid) -> dict[str, Any]:
    """The scripts' data; prices are looked up in `settings`, those of kinds of op in `columns`, by their place."""
    ngrams = drawn_ngrams(run.ngrams, run.members).perplexities
    columns: dict[tuple[float, ...] | None, int] = {}  # networks share bytes and rounds
    return {
        "points": [_point(point) for point in points],
        "settings": [
            setting._asdict()
            | {"parts": [[columns.setdefault(part, len(columns)) for part in point] for point in setting.parts]}
            for setting in grid.settings
        ],
        "columns": list(columns),
        "pick": max(0, len(run.front) - 1),
        "ngrams": [{"name": name, "perplexity": value} for name, value in ngrams.items()],
        "curves": list(_learning_curves(run)),
        "entropies": list(_entropies(run)),
        "hypervolumes": list(_hypervolumes(run)),
        "seq_len": run.seq_len,
    }


def _point(point: Point) -> dict[str, Any]:
    member = point.member
    low, high = (member.perplexity_bounds or (None, None)) if member else (None, None)
    least, most = (member.latency_s_range or (None, None)) if member else (None, None)
    return {
        "name": point.name,
        "role": point.role,
        "number": point.number,
        "perplexity": point.perplexity,
        "low": low,
        "high": high,
        "said": perplexity_words(point),
        "range": None if least is None else [least, most],
        "runs_as": member.deployed if member else None,
    }


def _learning_curves(run: Run) -> Iterator[dict[str, Any]]:
    """Losses of each front member's first seed, nats per token: of training, in means of equal steps, and at rungs."""
    for number, member in enumerate(run.front, 1):
        rungs = (record for record in run.records if record.trial_id == member.trial_id)
        losses = {
            "training": _means(_training_losses(_folder(run, member.first) / "metrics.csv")),
            "validation": sorted({rung.tokens: rung.val_loss for rung in rungs if rung.val_loss is not None}.items()),
        }
        for series, points in losses.items():
            for tokens, loss in points:
                yield {"number": number, "series": series, "tokens": tokens, "loss": loss}


def _entropies(run: Run) -> Iterator[dict[str, Any]]:
    """Entropies of heads in the last step of each front member's first seed, nats, where its folder has them."""
    for number, member in enumerate(run.front, 1):
        for layer, heads in enumerate(_last_entropies(_folder(run, member.first) / "diagnostics.jsonl")):
            for head, entropy in enumerate(heads):
                if entropy is not None:
                    yield {"number": number, "layer": layer, "head": head, "entropy": entropy}


def _hypervolumes(run: Run) -> Iterator[dict[str, Any]]:
    """The front's, s*nat, and the tokens of all trials together, after every trial that ended, in the order of the
    ledger; more seeds move means, so it may fall.
    """
    spent: dict[str, int] = {}
    yield {"tokens": 0, "hypervolume": 0.0}
    for count, record in enumerate(run.records, 1):
        spent[record.trial_id] = max(spent.get(record.trial_id, 0), record.tokens)
        if record.event == "finished":
            points = [member.point for member in front(run.records[:count], run.budget)]
            yield {"tokens": sum(spent.values()), "hypervolume": hypervolume(points, run.meta.reference)}


def _folder(run: Run, trial: Record) -> Path:
    return run.folder / "trials" / trial.trial_id


def _training_losses(path: Path) -> Iterator[tuple[int, float]]:
    """Tokens and training loss of each step on disk."""
    for row in csv.DictReader(_lines(path)):
        try:
            tokens, loss = int(row["tokens"]), float(row["train_loss"])
        except (KeyError, TypeError, ValueError):  # a torn line ends it
            return
        if math.isfinite(loss):
            yield tokens, loss


def _last_entropies(path: Path) -> list[list[float | None]]:
    """Layers x heads, as in `Diagnosis`."""
    try:
        entropies: list[list[float | None]] = json.loads(_lines(path)[-1])["head_entropies"]
    except (IndexError, KeyError, TypeError, ValueError):  # none, or a torn line
        return []
    return entropies


def _lines(path: Path) -> list[str]:
    """None of a trial whose folder is elsewhere."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _means(steps: Iterator[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over as many consecutive steps each, at most MOST_STEPS of them, at the last tokens of each."""
    known = list(steps)
    size = -(-len(known) // MOST_STEPS) or 1
    groups = [known[start : start + size] for start in range(0, len(known), size)]
    return [(group[-1][0], round(fmean(loss for _, loss in group), 4)) for group in groups]
