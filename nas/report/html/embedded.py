"""What the scripts of a page draw, as JSON inside it."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from nas.report.front_figures import drawn_ngrams
from nas.report.html.answer import answer_of
from nas.report.html.curves import entropies, hypervolumes, learning_curves
from nas.report.html.grid import Grid, Setting
from nas.report.html.points import Point, perplexity_words
from nas.run.run import Run


def embedded(run: Run, points: Sequence[Point], grid: Grid) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(_data(run, points, grid), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _data(run: Run, points: Sequence[Point], grid: Grid) -> dict[str, Any]:
    """What the scripts draw; prices are looked up in `settings`, those of kinds of op in `columns`, by their place."""
    ngrams = drawn_ngrams(run.ngrams, run.members)
    columns: dict[tuple[float, ...] | None, int] = {}  # networks share bytes and rounds
    answer = answer_of(run)
    return {
        "points": [_point(point) for point in points],
        "settings": [_setting(setting, columns) for setting in grid.settings],
        "columns": list(columns),
        "pick": answer.place if answer else 0,
        "ngrams": [
            {"name": name, "perplexity": value} for name, value in zip(ngrams.names, ngrams.perplexity, strict=True)
        ],
        "curves": [one._asdict() for one in learning_curves(run)],
        "entropies": [one._asdict() for one in entropies(run)],
        "hypervolumes": [one._asdict() for one in hypervolumes(run)],
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


def _setting(setting: Setting, columns: dict[tuple[float, ...] | None, int]) -> dict[str, Any]:
    parts = [[columns.setdefault(column, len(columns)) for column in point] for point in setting.parts]
    return setting._asdict() | {"parts": parts}
