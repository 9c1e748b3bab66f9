"""What a run asks of its ledger again and again, each answered without reading through it."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from nas.results.ledger import Record

TrialKey: TypeAlias = tuple[int, int]  # index of a candidate, seed


class LedgerIndex:
    """The records of a ledger, in order, and what is known of each trial.

    finished: the last end of every trial, by key. num_ends: how many there were, of all attempts.
    rungs: of a trial, by number, as they were first reported. proposed: the indexes that were.
    last_generation: of any record; -1 if there is none.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self.finished: dict[TrialKey, Record] = {}
        self.num_ends: Counter[TrialKey] = Counter()
        self.rungs: dict[str, dict[int | None, Record]] = {}
        self.proposed: set[int] = set()
        self.last_generation = -1
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.last_generation = max(self.last_generation, record.generation)
        key = record.index, record.seed
        if record.event == "finished":
            self.finished[key] = record
            self.num_ends[key] += 1
        elif record.event == "rung":
            self.rungs.setdefault(record.trial_id, {}).setdefault(record.rung, record)
        elif record.event == "proposed":
            self.proposed.add(record.index)

    def rung_losses(self, trial_id: str) -> tuple[float, ...]:
        """Nats per token, in the order in which rungs were reached."""
        losses = (one.val_loss for one in self.rungs.get(trial_id, {}).values())
        return tuple(loss for loss in losses if loss is not None)
