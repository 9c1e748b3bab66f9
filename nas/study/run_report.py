"""A run's folder to its page: reads what the run has written and hands it to `nas.report.html`."""

from pathlib import Path

from costmodel.config.cli import flags_of
from costmodel.errors import UserError
from nas.report.html.page import page
from nas.report.html.run import Run
from nas.results import ledger
from nas.storage import replace_file
from nas.study.config import StudyConfig
from nas.study.run_folder import Meta, read_config, read_ledger, read_meta, run_pricer

REPORT_FILE = "report.html"


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes the page of a run, into its folder unless another file is given, and returns its path.

    Raises UserError if the run cannot be read or priced, or the page not be written.
    """
    path = output or folder / REPORT_FILE
    if path.is_dir():
        raise UserError(f"--output {path} must be a file that we can write, but is a folder.")
    text = page(run_of(folder))
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"--output {path} must be a file that we can write: {error.strerror}.") from None
    return path


def run_of(folder: Path) -> Run:
    """What a page says of a run, from its folder. Raises UserError if a file of it is damaged."""
    config, meta, records = read_config(folder), read_meta(folder), read_ledger(folder)
    return Run(
        folder=folder,
        records=records,
        budget=config.budget,
        base=meta.base,
        pricer=run_pricer(folder, config),
        workload=config.workload,
        accounting=config.accounting,
        weights=config.weights,
        cost_model_id=meta.cost_model_id,
        reference=meta.reference,
        num_trials=config.num_trials,
        num_members=meta.num_members,
        num_feasible=meta.num_feasible,
        space=config.space,
        flags=tuple(flags_of(config)),
        provenance=tuple(_provenance(config, meta, records)),
        parent=meta.parent,
        ngrams=meta.ngrams,
    )


def _provenance(config: StudyConfig, meta: Meta, records: tuple[ledger.Record, ...]) -> list[tuple[str, str]]:
    return [
        ("begun", meta.created),
        ("corpus fingerprint", f"{config.data}: {meta.corpus}"),
        ("tokenizer, split", f"{meta.tokenizer}, {meta.split}"),
        ("parent", "none" if meta.parent is None else f"{meta.parent.name}, {meta.parent.notation}"),
        ("cost model", meta.cost_model_id),
        ("seed", str(config.seed)),
        ("records", str(len(records))),
        *meta.versions.items(),
        *meta.hardware.items(),
    ]
