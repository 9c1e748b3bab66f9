"""The HTML page of a report: a template filled with the results of a run, with style and figures inside the page.

The page loads nothing and runs no script. Its content security policy forbids both, whatever text a run contains.
"""

import re
import shlex
from pathlib import Path

from markupsafe import Markup

from costmodel.config.cli import flags_of
from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from costmodel.protocols.published import published_rows
from nas.report.draw import draw_front, draw_panels, svg_text
from nas.report.front_figures import cost_figure, front_figure
from nas.report.html.answer import answer_of, caveats, marks_of, rows_beside, rows_of
from nas.report.html.placements import layer_map, legend
from nas.report.summary import ngram_lines
from nas.report.template import rendered
from nas.run.ledger import architecture_of
from nas.run.run import Run
from nas.storage import replace_file
from search_spaces.budget.feasible import format_budget

ASSETS = Path(__file__).with_name("assets")
REPORT_FILE = "report.html"

_ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


def page(run: Run) -> str:
    """Return the HTML page of a run, with or without completed trials. It depends on the run and the working folder."""
    network = f" on {run.pricer.network}" if run.pricer.network else ""
    tokens = f", {run.workload.new_tokens} new tokens" if run.workload.new_tokens > 1 else ""
    maps = [layer_map(architecture_of(member.first, run.base), run.config.cost_of) for member in run.front]
    return rendered(
        ASSETS / "page.html",
        run,
        style=Markup((ASSETS / "style.css").read_text(encoding="utf-8")),
        front=Markup(svg_text(draw_front(front_figure(run, published_rows())))) if run.members else "",
        costs=Markup(svg_text(draw_panels(cost_figure(run)))) if run.members else "",
        setting=f"protocol {run.pricer.protocol}{network}, prompt of {run.seq_len} tokens{tokens}",
        answer=answer_of(run) if run.front else None,
        beside=rows_beside(run) if run.members else [],
        maps=maps,
        legend=legend(maps),
        marks=marks_of(run),
        sources=", ".join(dict.fromkeys(_ARXIV.findall(" ".join(row.source for row in rows_of(run))))),
        caveats=caveats(run),
        ngram_lines=ngram_lines(run.ngrams),
        commands=_commands(run),
        provenance=_provenance(run),
        why_nothing=_why_nothing(run),
    )


def write_report(run: Run, output: Path | None = None) -> Path:
    """Write the report of a run into its folder, or to `output`, and return its path.

    Raises UserError if the run's costs cannot be computed, or the page cannot be written.
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


def _provenance(run: Run) -> list[tuple[str, str]]:
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


def _why_nothing(run: Run) -> list[str]:
    if run.front:
        return []
    if run.members:
        cheapest = min(run.members, key=lambda member: member.latency_s)
        return [
            f"None of the {len(run.members)} models that were trained to the end has a place within "
            f"{format_budget(run.budget)} per token.",
            f"The cheapest, {cheapest.notation}, costs {format_seconds(cheapest.latency_s)} and "
            f"{format_bytes(cheapest.sent_bytes)}.",
        ]
    if not run.records:
        return ["No trial was trained to completion: none has been started yet."]
    counts = run.summary
    ended = [record for record in run.finished if record.reason]
    reasons = dict.fromkeys(f"{record.notation}: {record.status}, {record.reason}" for record in ended)
    return [
        f"No trial was trained to completion: {counts.paused} had only a low-fidelity evaluation, "
        f"{counts.diverged} diverged, {counts.failed} failed, {counts.running} unfinished.",
        *list(reasons)[:5],
    ]


def _commands(run: Run) -> list[tuple[str, str]]:
    here = Path.cwd()
    folder = shlex.quote(str(run.folder.relative_to(here) if run.folder.is_relative_to(here) else run.folder))
    commands = [
        (shlex.join(["python", "-m", "nas.search", *flags_of(run.config)]), "the same search, from the start"),
        (f"python -m nas.status {folder}", "where this run stands, and why trials did not complete"),
    ]
    if run.front:
        other = f"python -m nas.plot {folder} --protocol semi2k --network wan"
        export = f"python -m nas.export {folder} --pick {shlex.quote(run.front[-1].arch_id)} --fold"
        commands.append((other, "the front under another protocol, network or prompt"))
        commands.append((export, "the pick, folded, with its weights"))
    return commands
