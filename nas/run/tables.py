"""The tables of a run: `trials.csv`, `pareto.csv` and the architectures of the front."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise

from costmodel.cost import Costs
from nas.corpus.ngrams import NgramBaseline
from nas.run import ledger
from nas.run.ledger import Record, Table
from nas.run.members import TrainedMember, difference_error, holds_on_first_alone, in_noise
from nas.run.run import Run
from search_spaces.architecture import dump_architecture


def write_tables(run: Run) -> None:
    """Write the tables of a run and the architectures of its front, and replace old ones."""
    ledger.write_table(run.folder / "trials.csv", trial_table(run))
    ledger.write_table(run.folder / "pareto.csv", front_table(run))
    architectures = run.folder / "architectures"
    shutil.rmtree(architectures, ignore_errors=True)
    architectures.mkdir()
    for member in run.front:
        text = dump_architecture(ledger.architecture_of(member.first, run.base))
        (architectures / f"{member.arch_id}.yaml").write_text(text, encoding="utf-8")


def trial_table(run: Run) -> Table:
    """Return a row for every trial that ended: its record, the errors of its candidate, and n-gram baselines.

    `seed_error`, `document_error` and both combined, `standard_error`, are of the candidate's mean loss, in nats.
    `perplexity_low` and `perplexity_high` are the perplexities two standard errors below and above that loss.
    `knows_less_than_trigram` is whether the row's own `val_loss` is above the trigram baseline's.
    """
    by_candidate = {member.candidate_id: member for member in run.members}
    losses = [record.val_loss if record.status == "completed" else None for record in run.finished]
    seeds = _seed_columns([by_candidate.get(record.candidate_id) for record in run.finished])
    also = _also_columns(run, run.finished)
    return ledger.table(run.finished, {**also, **seeds, **_ngram_columns(losses, run.ngrams)})


def front_table(run: Run) -> Table:
    """Return a row for every member of the front, cheapest first, with the columns of `trial_table` and more.

    Fields of the record are those of the `TrainedMember`, and `knows_less_than_trigram` is about its mean loss.
    `within_noise`: whether the member was compared with its cheaper neighbour and is not better. `nats_below_neighbour`
    is the neighbour's mean loss minus the member's, and `neighbour_error` the standard error of that difference.
    `second_...` and `holds_on_first_alone` are about the second corpus.
    """
    front, neighbours = run.front, list(pairwise(run.front))
    below = [cheaper.val_loss - costlier.val_loss for cheaper, costlier in neighbours]
    return ledger.table(
        front,
        {
            **_also_columns(run, front),
            **_seed_columns(front),
            "within_noise": in_noise(front),
            "nats_below_neighbour": [None, *below][: len(front)],
            "neighbour_error": [None, *(difference_error(*both) for both in neighbours)][: len(front)],
            **_ngram_columns([member.val_loss for member in front], run.ngrams),
            **_second_columns(run),
        },
    )


def _also_columns(run: Run, records: Sequence[Record]) -> Mapping[str, Sequence[object]]:
    """Costs under the other protocols of a run, such as `sigma_latency_s`."""
    return {
        f"{protocol}_{cost.name}": [getattr(record.also[protocol], cost.name) for record in records]
        for protocol in run.config.protocols[1:]
        for cost in fields(Costs)
    }


def _second_columns(run: Run) -> Mapping[str, Sequence[object]]:
    if (second := run.meta.second) is None:
        return {}
    floors = second.ngrams.perplexities
    return {
        "second_perplexity": [member.second_perplexity for member in run.front],
        "second_error": [member.second_error for member in run.front],
        "holds_on_first_alone": [holds_on_first_alone(member, run.front) for member in run.front],
        **{f"second_floor_{name.replace('-', '')}": [floors[name]] * len(run.front) for name in floors},
    }


def _seed_columns(trained: Sequence[TrainedMember | None]) -> Mapping[str, Sequence[object]]:
    names = {"num_seeds": "num_seeds", "num_diverged_seeds": "num_diverged", "mean_val_loss": "val_loss"}
    names |= {name: name for name in ("seed_error", "document_error", "standard_error")}
    bounds = [member and member.perplexity_bounds for member in trained]
    return {
        **{column: [member and getattr(member, name) for member in trained] for column, name in names.items()},
        "perplexity_low": [pair and pair[0] for pair in bounds],
        "perplexity_high": [pair and pair[1] for pair in bounds],
    }


def _ngram_columns(losses: Sequence[float | None], ngrams: NgramBaseline | None) -> Mapping[str, Sequence[object]]:
    """Columns of the n-gram baselines. losses: nats of completed trials; None for other rows."""
    if ngrams is None:
        return {}
    floors = ngrams.perplexities
    return {
        "floor_tokens": [ngrams.tokens] * len(losses),
        **{f"floor_{name.replace('-', '')}": [floors[name]] * len(losses) for name in floors},
        "knows_less_than_trigram": [None if loss is None else ngrams.above_trigram(loss) for loss in losses],
    }
