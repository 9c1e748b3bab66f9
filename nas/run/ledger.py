"""The ledger of a run: `trials.jsonl`, to which one JSON record per line is appended for each event of a trial.

Records are flushed to disk before the run continues, so a killed run loses at most the records that it was writing. An
incomplete last line is dropped, with a warning, when the ledger is opened again.
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from costmodel.config.files import decode, plain_json, read_bytes
from costmodel.cost import Costs, Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from nas.corpus.ngrams import require_losses
from nas.provenance import SCHEMA_VERSION as SCHEMA_VERSION
from nas.storage import write_csv
from search_spaces.architecture import Architecture
from search_spaces.deployed import deployed
from search_spaces.notation import parse, parse_deployed

FILE_NAME = "trials.jsonl"
MOST_LEDGER = 1_000_000_000  # bytes; a record has 2 kB
NAMES = ("trial_id", "candidate_id", "arch_id", "deployed_id")  # fields that name files and folders
NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{,99}")
MOST = 1e18
LIMITS = {  # least and largest value
    **dict.fromkeys(("index", "rung", "steps", "tokens", "width", "seconds", "rounds", "key_bytes"), (0.0, MOST)),
    **dict.fromkeys(("predicted_latency_s", "predicted_sent_bytes", "predicted_key_bytes"), (0.0, MOST)),
    **dict.fromkeys(("latency_s", "sent_bytes"), (0.0, MOST)),
    **dict.fromkeys(("generation", "expected_loss", "parent_divergence"), (-MOST, MOST)),
    **dict.fromkeys(("parent_agreement", "fold_top1_agreement"), (0.0, 1.0)),
    **dict.fromkeys(("fold_logits_error", "fold_fixed_point_error", "trained_fixed_point_error"), (0.0, 1e308)),
    "perplexity": (0.0, 1e308),
}
NO_COLUMNS = ("versions", "documents", "second_documents", "also", "predicted_also")  # not columns of a table

Event = Literal["proposed", "started", "rung", "finished"]
Status = Literal["proposed", "running", "completed", "paused", "diverged", "failed"]
Role = Literal["candidate", "baseline", "replicate"]
TrialKey: TypeAlias = tuple[int, int]  # index of a candidate, seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One event of one trial. None means unknown; a non-finite number is never written.

    Attributes:
        event: `proposed` for training, `started` whenever a worker takes the trial up, `rung` and `finished` when the
            worker reports them. Replicates have no `proposed` record, since they follow from results.
        notation: name from the papers, or layer codes. placement: layer codes, which with the run's base define the
            architecture.
        index: number of the candidate or baseline in order of proposal. generation: number of its generation.
        is_proxy: whether it is a low-fidelity evaluation, which is `paused` at the first rung until it is promoted.
        expected_loss: final loss that the searcher predicted, nats, or None.
        role: a `baseline` is trained for comparison only and may exceed the budget; a `replicate` is the candidate of
            the same index with another seed. reason: why the trial did not complete.
        rung: index of the last rung, in a `rung` record and at the end of a `paused` trial.
        seconds: wall time of the training so far, in all its processes. flags: warnings on attention entropy
            (`nas.training.outcome.EntropySummary.flags`).
        val_loss: nats per token of the named tokenizer and split; perplexity = exp(val_loss).
        documents: of a completed trial, weight in the mean loss and nats per token of each validation document in
            `meta.json`. second_documents: the same on the second corpus.
        deployed_id, deployed: id and layer codes of the folded form: the predicted form, or after completion the
            verified form. Both are None in a run with unfolded costs.
        latency_s, sent_bytes, key_bytes, rounds: cost per token of the folded form, or in a run with unfolded costs of
            the unfolded form: seconds, bytes that all parties send, and bytes of keys that a dealer sends each party
            before inference (None for protocols without keys). latency_s_range: smallest and largest seconds consistent
            with the data of the cost model. also: costs under the run's other protocols.
        predicted_latency_s, predicted_sent_bytes, predicted_key_bytes, predicted_also: cost of the predicted form.
        parent_divergence, parent_agreement: mean KL(parent || model) in nats per token, and share of positions with the
            same most likely token, on validation text, of a completed trial from a parent.
        left_unfolded, fold_*, trained_fixed_point_error: see `nas.training.outcome.VerifiedForm`.
    """

    schema_version: int = SCHEMA_VERSION
    event: Event
    trial_id: str
    candidate_id: str
    arch_id: str
    notation: str
    placement: str
    entropy_regularised: bool
    index: int
    generation: int
    role: Role
    status: Status
    reason: str | None = None
    scale: str
    width: int
    is_proxy: bool = False
    expected_loss: float | None = None
    rung: int | None = None
    steps: int = 0
    tokens: int = 0
    corpus: str
    tokenizer: str
    split: str
    val_loss: float | None = None
    perplexity: float | None = None
    documents: tuple[tuple[float, float], ...] = ()
    second_documents: tuple[tuple[float, float], ...] = ()
    protocol: str
    network: str | None
    cost_model_id: str
    rounds: float | None
    sent_bytes: float
    key_bytes: float | None = None
    latency_s: float
    latency_s_range: tuple[float, float] | None
    also: dict[str, Costs] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    seed: int
    seconds: float = 0.0
    versions: dict[str, str]
    deployed_id: str | None = None
    deployed: str | None = None
    predicted_latency_s: float | None = None
    predicted_sent_bytes: float | None = None
    predicted_key_bytes: float | None = None
    predicted_also: dict[str, Costs] = field(default_factory=dict)
    parent_divergence: float | None = None
    parent_agreement: float | None = None
    left_unfolded: tuple[str, ...] = ()
    fold_logits_error: float | None = None
    fold_fixed_point_error: float | None = None
    trained_fixed_point_error: float | None = None
    fold_top1_agreement: float | None = None
    fold_holds: bool | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise UserError(
                    f"`{name}` of trial {self.trial_id} must be finite and from {least:g} to {most:g}, but got "
                    f"{value!r:.80}."
                )
        require_losses(f"trial {self.trial_id}", self.val_loss)
        if self.event == "finished" and self.status == "completed" and self.val_loss is None:
            raise UserError(f"`val_loss` of trial {self.trial_id} must be a number once it has completed.")


def architecture_of(record: Record, base: Architecture) -> Architecture:
    """Return the unfolded architecture of a trial. base: the dimensions of the run's space, from its meta.json."""
    return parse(record.placement, base).architecture


def deployed_of(record: Record, base: Architecture) -> Architecture:
    """Return the folded form of a trial, or in a run with unfolded costs, its unfolded form."""
    if record.deployed is None:
        return architecture_of(record, base)
    form = parse_deployed(record.deployed, base)
    if form.layer_positions == base.layer_positions:
        return form
    places = deployed(architecture_of(record, base)).layer_positions  # layers with nothing left were dropped
    return replace(form, layer_positions=places if len(places) == form.num_layers else ())


def price_columns(pricer: Pricer, price: Price) -> dict[str, Any]:
    """Return the fields of a `Record` that have a cost and its protocol, network and cost model, by name."""
    names = ("rounds", "sent_bytes", "key_bytes", "latency_s")
    known = {"protocol": pricer.protocol, "network": pricer.network, "cost_model_id": pricer.cost_model_id}
    return known | {name: getattr(price, name) for name in names}


def append(path: Path, *records: Record) -> None:
    """Append records to a ledger and wait until they are on disk. Raises OSError if that fails; none is then added."""
    lines = (json.dumps(asdict(record), allow_nan=False, separators=(",", ":")) + "\n" for record in records)
    data = "".join(lines).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)  # removes what may not be on disk
        raise
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[Record, ...]:
    """Return every record of a ledger, none if there is no file. An incomplete last line is dropped with a warning.

    Raises UserError if the file cannot be read or, naming the line, if one is damaged or of another schema.
    """
    if not os.path.lexists(path):
        return ()
    records: list[Record] = []
    lines = read_bytes(path, MOST_LEDGER).split(b"\n")
    torn = lines.pop()  # the text after the last newline: empty unless a write was cut off
    for number, line in enumerate(lines, 1):
        data = plain_json(line, f"{path}, line {number} must be a JSON record")
        records.append(record := decode(Record, data, f"{path}, line {number}"))
        for name in NAMES:
            if (text := getattr(record, name)) is not None and not NAME.fullmatch(text):
                raise UserError(f"`{name}` of {path}, line {number} must be letters and digits, but got {text!r:.80}.")
    if torn:
        # stacklevel 1 attributes it to this line, so that it is shown once
        warnings.warn(f"{path}: dropped a torn last line of {len(torn)} bytes.", stacklevel=1)
    return tuple(records)


def recover(path: Path) -> tuple[Record, ...]:
    """Read an existing ledger as `read` does, and delete an incomplete last line, so that records can be appended."""
    records = read(path)
    data = read_bytes(path, MOST_LEDGER)
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
    return records


def finished(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the last `finished` record of every trial (index and seed), sorted by seed and then by index."""
    last = {(record.seed, record.index): record for record in records if record.event == "finished"}
    return tuple(last[key] for key in sorted(last))


def completed(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records of `finished` whose status is `completed`: trials with a whole final training."""
    return tuple(record for record in finished(records) if record.status == "completed")


class Table(NamedTuple):
    """Names of columns, and rows with a value for each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def table(records: Sequence[Record], more: Mapping[str, Sequence[object]] | None = None) -> Table:
    """Return a row per record, without the fields in NO_COLUMNS. more: further columns, with one value per record."""
    derived = more or {}
    columns = [column.name for column in fields(Record) if column.name not in NO_COLUMNS]
    rows = zip(records, *derived.values(), strict=True)
    return Table(
        columns=(*columns, *derived),
        rows=tuple((*(getattr(record, name) for name in columns), *added) for record, *added in rows),
    )


def write_table(path: Path, written: Table) -> None:
    """Write a table as CSV; the values of a tuple are separated by spaces."""
    rows = ([" ".join(map(str, value)) if isinstance(value, tuple) else value for value in row] for row in written.rows)
    write_csv(path, written.columns, rows)
