"""The page itself: a template filled with what a run has found, its styles, scripts and data inside it.

It asks for nothing from anywhere, and its content security policy holds it to that: no address may be loaded, and only
the scripts of this package, by their digests, may run, whatever text a run brings with it.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from costmodel.config.cli import flags_of
from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from nas.report.html.answer import answer_of, marks_of, rows_beside
from nas.report.html.caveats import caveats
from nas.report.html.embedded import embedded
from nas.report.html.grid import Grid, price_grid
from nas.report.html.placements import layer_map, legend
from nas.report.html.points import Point, perplexity_words, points_of, rows_of
from nas.report.summary import ngram_lines, on_second, sent_text
from nas.run.ledger import Record, architecture_of
from nas.run.run import Run
from nas.storage import replace_file
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import format_budget
from search_spaces.notation import parse, placement

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("vega-6.4.0.min.js", "vega-lite-6.4.3.min.js", "vega-embed-7.3.0.min.js", "charts.js", "page.js")
LICENSES = "LICENSES.txt"
REPORT_FILE = "report.html"

_ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


def page(run: Run) -> str:
    """The page of a run, of one without a completed trial too. Equal runs give equal pages."""
    points = points_of(run) if run.members else ()
    grid = price_grid(run, points) if points else Grid((), ())
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS] if grid.settings else []
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        policy="; ".join(_policy(scripts)),
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        licenses=(ASSETS / LICENSES).read_text(encoding="utf-8") if scripts else "",
        data=embedded(run, points, grid) if scripts else "",
        **_words(run, points, grid),
    )


def write_report(run: Run, output: Path | None = None) -> Path:
    """Writes the page of a run, into its folder unless another file is given, and returns its path.

    Raises UserError if the run cannot be priced, or the page not be written.
    """
    path = output or run.folder / REPORT_FILE
    if path.is_dir():
        raise UserError(f"--output {path} must be a file that we can write, but is a folder.")
    text = page(run)
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"--output {path} must be a file that we can write: {error.strerror}.") from None
    return path


def _policy(scripts: Sequence[str]) -> list[str]:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'"]


def _words(run: Run, points: Sequence[Point], grid: Grid) -> dict[str, Any]:
    """Everything that the template says."""
    totals = grid.settings[0].totals if points else ()
    panels = [_panel(run, point, of_point) for point, of_point in zip(points, totals, strict=True)]
    beside = rows_beside(run, points, grid.settings[0]) if points else []
    return {
        "budget": format_budget(run.budget),
        "setting": _setting_words(run),
        "space": run.config.space,
        "answer": answer_of(run),
        "beside": beside,
        "has_papers": any(row.printed or row.printed_price for row in beside),
        "is_proxy": run.is_proxy,
        "panels": panels,
        "legend": legend(panel["columns"] for panel in panels if panel["point"].role == "front"),
        "marks": marks_of(run),
        "there": [on_second(run, member) for member in run.front],
        "sources": ", ".join(dict.fromkeys(_ARXIV.findall(" ".join(row.source for row in rows_of(run))))),
        "caveats": caveats(run, grid),
        "ngram_lines": ngram_lines(run.ngrams),
        "commands": _commands(run),
        "provenance": _provenance(run),
        "trials": [_trial(record) for record in run.finished],
        "why_nothing": _why_nothing(run),
    }


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Name and value of everything that a repetition depends on, beside the command."""
    meta = run.meta
    return [
        ("begun", meta.created),
        ("corpus fingerprint", f"{run.config.data}: {meta.corpus}"),
        ("tokenizer, split", f"{meta.tokenizer}, {meta.split}"),
        ("parent", "none" if run.parent is None else f"{run.parent.name}, {run.parent.notation}"),
        ("cost model", meta.cost_model_id),
        ("seed", str(run.config.seed)),
        ("records", str(len(run.records))),
        *meta.versions.items(),
        *meta.hardware.items(),
    ]


def _setting_words(run: Run) -> str:
    network = f" on {run.pricer.network}" if run.pricer.network else ""
    tokens = f", {run.workload.new_tokens} new tokens" if run.workload.new_tokens > 1 else ""
    return f"protocol {run.pricer.protocol}{network}, prompt of {run.seq_len} tokens{tokens}"


def _panel(run: Run, point: Point, totals: tuple[float | None, ...]) -> dict[str, Any]:
    """The panel of a point; its layer map is of what was trained."""
    member = point.member
    trained = architecture_of(member.first, run.base) if member else parse(point.name, run.base).architecture
    latency_s, sent_bytes, rounds = totals
    assert latency_s is not None
    assert sent_bytes is not None
    return {
        "title": f"{point.number}  {point.name}" if point.number else point.name,
        "point": point,
        "columns": layer_map(trained, run.config.accounting),
        "runs_as": _runs_as(run, point, trained),
        "price": format_seconds(latency_s),
        "sent": sent_text(member) if member else format_bytes(sent_bytes),
        "rounds": "" if rounds is None else f"{rounds:,.0f}",
        "perplexity": perplexity_words(point),
        "left": member.most_expensive.left_unfolded if member else (),
        "trials": [trial.trial_id for trial in member.trials] if member else [],
    }


def _runs_as(run: Run, point: Point, trained: Architecture) -> str:
    """The placement that is run, where it is not the one that was trained."""
    run_as = placement(point.architecture) if point.member is None else point.member.deployed or ""
    return "" if run_as == placement(trained) else run_as


def _trial(record: Record) -> tuple[str, ...]:
    loss = "" if record.perplexity is None else f"{record.perplexity:.2f}"
    return (
        record.trial_id,
        record.notation,
        record.role,
        record.status,
        format_seconds(record.latency_s),
        loss,
        f"{record.tokens:,}",
        record.reason or "",
    )


def _why_nothing(run: Run) -> list[str]:
    """Why there is no answer; nothing where there is one."""
    if run.front:
        return []
    if run.members:
        cheapest = min(run.members, key=lambda member: member.latency_s)
        return [
            f"None of the {len(run.members)} models that were trained to the end has a place within "
            f"{format_budget(run.budget)} a token.",
            f"The cheapest, {cheapest.notation}, costs {format_seconds(cheapest.latency_s)} and "
            f"{format_bytes(cheapest.sent_bytes)}.",
        ]
    if not run.records:
        return ["No trial was trained to completion: none has been started yet."]
    counts = run.summary
    lines = [
        f"No trial was trained to completion: {counts.paused} paused at a look, {counts.diverged} diverged, "
        f"{counts.failed} failed, {counts.running} unfinished."
    ]
    ended = run.finished
    reasons = dict.fromkeys(f"{record.notation}: {record.status}, {record.reason}" for record in ended if record.reason)
    return [*lines, *list(reasons)[:5]]


def _commands(run: Run) -> list[tuple[str, str]]:
    """Lines for a shell, and what they do: search again, look, export the pick, price it."""
    folder = shlex.quote(_short(run.folder))
    commands = [
        (shlex.join(["python", "-m", "nas.search", *flags_of(run.config)]), "the same search, from the start"),
        (f"python -m nas.status {folder}", "where this run stands, and why trials did not complete"),
        (f"python -m nas.report {folder}", "this page"),
    ]
    if run.front:
        pick = shlex.quote(run.front[-1].arch_id)
        priced = f"python -m costmodel estimate {folder}/architectures/{pick}.yaml {_priced_under(run, folder)}"
        commands += [
            (f"python -m nas.export {folder} --pick {pick} --fold", "the pick, folded, with its weights"),
            (priced, "its costs as written, op by op, and what it deploys to"),
        ]
    return commands


def _priced_under(run: Run, folder: str) -> str:
    """Flags of what the run's prices are of; its own network and testbed are the copies that it keeps."""
    work = run.workload
    flags = {
        "protocol": run.pricer.protocol,
        "network": run.pricer.network and shlex.quote(run.pricer.network),
        **{kept: f"{folder}/{kept}.yaml" for kept in ("network", "testbed") if (run.folder / f"{kept}.yaml").exists()},
        "seq-len": run.seq_len,
        "projection": None if work.deployment.projection == "all" else work.deployment.projection,
        "embedding": None if work.deployment.embedding == "one-hot" else work.deployment.embedding,
        "public-layers": work.deployment.public_layers,
        "client-layers": None if work.deployment.client_layers is None else str(work.deployment.client_layers),
        "new-tokens": None if work.new_tokens == 1 else work.new_tokens,
        "weights": run.config.weights,
        "weight-masks": run.config.weight_masks,
    }
    return " ".join(f"--{name} {value}" for name, value in flags.items() if value)


def _short(folder: Path) -> str:
    """The path from where the command was given, if the run is below; else the run's own name."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
