"""The bookkeeping of a run: makes trials of suggestions, and ledger records and observations of their results.

It imports neither Ray nor torch. A resumed run reads earlier results from its ledger, and runs only trials without a
result, and failed ones unless later proposals depend on the failure.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from costmodel.config.units import format_seconds
from costmodel.cost import Costs
from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import DocumentLoss
from nas.recipe.candidate import Candidate, candidate_id, trial_id
from nas.recipe.recipe import Recipe
from nas.run import ledger
from nas.run.config import StudyConfig, study_candidate
from nas.run.ledger import Record, Status, TrialKey, deployed_of, price_columns
from nas.run.members import is_feasible
from nas.searchers.strategy import Observation, Suggestion
from nas.study.schedule import LAG, TrialSchedule
from nas.training.outcome import Agreement, Outcome, RungRecord, VerifiedForm
from search_spaces.architecture import Architecture, arch_id
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import price_architecture
from search_spaces.deployed import deployed
from search_spaces.notation import Member, placement

Device = Literal["cpu", "cuda"]

MAX_LOSSES = 3  # workers that a trial may lose between two rungs, because nodes were taken away or memory ran out


class RunHaltedError(RuntimeError):
    """Raised if the machine, and not a candidate, prevents the run from continuing now; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSetting:
    """Plain data that all trials of a run share. folder: the run's folder. second: the second corpus, or None."""

    config: StudyConfig
    recipe: Recipe
    folder: Path
    corpus: Corpus
    device: Device
    versions: Mapping[str, str]
    second: Corpus | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A training as plain data for a worker.

    record: the `proposed` record, with the predicted cost; workers report copies of this record with their results.
    """

    member: Member
    record: Record
    setting: TrialSetting

    @property
    def key(self) -> TrialKey:
        return self.record.index, self.record.seed

    @property
    def candidate(self) -> Candidate:
        return study_candidate(self.setting.recipe, self.member)

    @property
    def folder(self) -> Path:
        """Folder of the trial's checkpoints and metrics."""
        return self.setting.folder / "trials" / self.record.trial_id

    def at_rung(self, rung: RungRecord) -> Record:
        return replace(self._measured(rung), event="rung", status="running", rung=rung.rung)

    def ended(
        self,
        status: Status,
        reason: str | None = None,
        *,
        measured: RungRecord | Outcome | None = None,
        verified: VerifiedForm | None = None,
        second: Sequence[DocumentLoss] = (),
        agreement: Agreement | None = None,
    ) -> Record:
        """Return the `finished` record. Its cost is the predicted one; `Trials.happened` sets the verified cost.

        measured: the last validation or the outcome, if any. verified: the verified folded form, if any. second: losses
        by document of the second corpus, which are left out unless all are finite. agreement: agreement with the
        parent's predictions, if any.
        """
        record = replace(
            self._measured(measured),
            event="finished",
            status=status,
            reason=reason,
            second_documents=_rounded(second) if all(math.isfinite(loss) for _, loss in second) else (),
            parent_divergence=None if agreement is None else _finite(agreement.divergence),
            parent_agreement=None if agreement is None else agreement.top1,
        )
        if verified is None:
            return record
        return replace(
            record,
            deployed_id=arch_id(verified.architecture),
            deployed=placement(verified.architecture),
            left_unfolded=verified.left,
            fold_logits_error=_finite(verified.logits_error),
            fold_fixed_point_error=_finite(verified.fixed_point_error),
            trained_fixed_point_error=_finite(verified.trained_fixed_point_error),
            fold_holds=verified.holds,
            fold_top1_agreement=_finite(verified.top1_agreement),
        )

    def _measured(self, measured: RungRecord | Outcome | None) -> Record:
        if measured is None:
            return self.record
        return replace(
            self.record,
            rung=measured.rung if isinstance(measured, RungRecord) else None,
            steps=measured.steps,
            tokens=measured.tokens,
            val_loss=measured.val_loss,
            perplexity=measured.perplexity,
            documents=_rounded(measured.documents),
            flags=measured.entropy.flags if measured.entropy else (),
            seconds=measured.seconds,
        )


class Trials:
    """Returns trials to run and writes the ledger; a process that runs a study has one instance.

    on_end: called with the record of every trial that ended and is not repeated. halted: why the run cannot continue,
        or None. running: trials that `next_trial` returned and that have not ended, by key. has_time_for: function that
        returns whether a suggestion is trained in this session.
    """

    def __init__(
        self,
        schedule: TrialSchedule,
        feasible: FeasibleSpace,
        setting: TrialSetting,
        records: Iterable[Record] = (),
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.has_time_for: Callable[[Suggestion], bool] = lambda suggestion: True
        self.schedule, self.feasible, self.setting = schedule, feasible, setting
        self.running: dict[TrialKey, Trial] = {}
        self.halted: str | None = None
        self.records = list(records)
        self._on_end = on_end
        self._again: list[Trial] = []
        self._losses: Counter[TrialKey] = Counter()
        self._num_failed, self._num_logged = 0, 0

    @property
    def path(self) -> Path:
        return self.setting.folder / ledger.FILE_NAME

    @property
    def finished(self) -> bool:
        """Whether `next_trial` has returned every trial of the run, and none must be repeated."""
        return self.schedule.finished and not self._again

    @property
    def is_held(self) -> bool:
        """Whether `next_trial` returns no more trials in this session, although some are left."""
        return self.schedule.is_held and not self._again

    def next_trial(self) -> Trial | None:
        """Return the next trial to run, or None if there is none now.

        If a suggestion has a result in the ledger, the schedule receives this result instead of running the trial
        again; but failures on which no later proposal depends are repeated. New suggestions are written to the ledger;
        if that fails, the run is halted.

        Raises UserError if a paused trial has no rung in the ledger, or if a result is of another candidate than this
        configuration proposes, which is checked up to the first result that is not a paused evaluation.
        """
        if self._again:
            return self._handed_out(self._again.pop(0))
        while (suggestion := self.schedule.ask()) is not None:
            proposals = self.schedule.proposals[self._num_logged :]
            self._num_logged += len(proposals)
            known = {(record.index, record.is_proxy) for record in self.records if record.event == "proposed"}
            new = [
                self._trial(proposal).record
                for proposal in proposals
                if proposal.role != "replicate" and (proposal.index, proposal.is_proxy) not in known
            ]
            if new:
                self._write(*new)
            record = self._end_of((suggestion.index, self._seed(suggestion)), is_proxy=suggestion.is_proxy)
            last = max((known.generation for known in self.records), default=-1)
            # a failure says nothing about the candidate, so it is repeated unless later proposals depend on it
            if record is None or (record.status == "failed" and last < record.generation + LAG):
                if self.has_time_for(suggestion):
                    return self._handed_out(self._trial(suggestion))
                self.schedule.skip(suggestion)
                continue
            if not self.schedule.results:
                proposed = candidate_id(study_candidate(self.setting.recipe, suggestion.member))
                if proposed != record.candidate_id:
                    raise UserError(
                        f"trial {suggestion.index} of {self.path} must be candidate {proposed} under this configuration"
                        f", but the ledger holds {record.candidate_id}; the run was of another version or other data."
                    )
            self.schedule.tell(self._observation(suggestion.member, record))
        return None

    def started(self, trial: Trial) -> None:
        self._write(replace(trial.record, event="started", status="running"))

    def happened(self, record: Record, *, again: bool = False) -> None:
        """Write a worker's record of a rung or end to the ledger.

        Nothing is done if the run is halted, the trial is not in `running`, or its rung is in the ledger already. The
        schedule receives the result of a trial that ended, unless `again`, which repeats the trial from the beginning.
        Too many failures (`max_failures`), and a ledger that cannot be written, halt the run.
        """
        key = record.index, record.seed
        trial = self.running.get(key)
        # a resumed trial reports its rungs again
        is_known = record.event == "rung" and record.rung in self._rungs(record.trial_id)
        if self.halted or trial is None or is_known:
            return
        self._losses.pop(key, None)
        if record.deployed != trial.record.deployed and record.deployed is not None:
            folded = deployed_of(record, self.feasible.space.base)
            record = replace(record, **price_fields(folded, self.feasible))
        if not self._write(record) or record.event != "finished":
            return
        del self.running[key]
        if again:
            name = self._next_name(trial.candidate, *key)
            self._again.append(replace(trial, record=replace(trial.record, trial_id=name)))
            return
        self.schedule.tell(self._observation(trial.member, record))
        self._on_end(record)
        most = self.setting.config.max_failures
        self._num_failed += record.status == "failed"
        if most is not None and record.status == "failed" and self._num_failed >= most:
            trials = "1 trial" if most == 1 else f"{most} trials"
            self.halted = f"{trials} failed (--max-failures), the last, {record.trial_id}: {record.reason}"

    def halt(self, reason: str) -> None:
        """Halt the run for this reason, unless it is halted already; trials that have not ended can be resumed."""
        self.halted = self.halted or reason

    def lost(self, trial: Trial, reason: str) -> None:
        """Resume a trial after its worker died, or fail it if more than MAX_LOSSES workers died without a new rung."""
        if trial.key not in self.running or self.halted:
            return
        self._losses[trial.key] += 1
        if self._losses[trial.key] <= MAX_LOSSES:
            del self.running[trial.key]
            self._again.append(trial)
            return
        self.happened(trial.ended("failed", f"{reason}, {MAX_LOSSES + 1} times"))

    def _handed_out(self, trial: Trial) -> Trial:
        self.running[trial.key] = trial
        return trial

    def _trial(self, suggestion: Suggestion) -> Trial:
        member, setting = suggestion.member, self.setting
        candidate = study_candidate(setting.recipe, member)
        run_as = deployed(member.architecture) if setting.config.cost_of == "folded" else None
        prices = price_fields(member.architecture, self.feasible)
        by_rule = ("latency_s", "sent_bytes", "key_bytes", "also") if run_as else ()
        record = Record(
            event="proposed",
            trial_id=self._next_name(candidate, suggestion.index, self._seed(suggestion)),
            candidate_id=candidate_id(candidate),
            arch_id=arch_id(member.architecture),
            notation=candidate.name,
            placement=placement(member.architecture),
            entropy_regularised=member.entropy_regularised,
            index=suggestion.index,
            generation=suggestion.generation,
            role=suggestion.role,
            is_proxy=suggestion.is_proxy,
            expected_loss=suggestion.expected,
            status="proposed",
            scale=candidate.recipe.scale.name,
            width=candidate.trained.d_model,
            corpus=setting.corpus.fingerprint,
            tokenizer=setting.corpus.tokenizer,
            split=setting.corpus.split,
            seed=self._seed(suggestion),
            versions=dict(setting.versions),
            deployed_id=arch_id(run_as) if run_as else None,
            deployed=placement(run_as) if run_as else None,
            **prices,
            **{f"predicted_{name}": prices[name] for name in by_rule},
        )
        return Trial(member=member, record=record, setting=setting)

    def _ends(self, key: TrialKey) -> list[Record]:
        return [record for record in self.records if record.event == "finished" and (record.index, record.seed) == key]

    def _end_of(self, key: TrialKey, *, is_proxy: bool) -> Record | None:
        """Return the last end of a trial, or its low-fidelity evaluation if asked for; None if there is none."""
        ends = self._ends(key)
        paused = [record for record in ends if record.status == "paused"]
        if not ends or (not is_proxy and ends[-1].status == "paused"):
            return None
        return (paused or ends)[-1] if is_proxy else ends[-1]

    def _rungs(self, name: str) -> dict[int | None, Record]:
        """Return the first record of every rung of a trial, in the order in which rungs were reached."""
        rungs: dict[int | None, Record] = {}
        for record in self.records:
            if record.event == "rung" and record.trial_id == name:
                rungs.setdefault(record.rung, record)
        return rungs

    def _next_name(self, candidate: Candidate, index: int, seed: int) -> str:
        attempt = sum(record.status != "paused" for record in self._ends((index, seed)))
        return trial_id(candidate, seed=seed, attempt=attempt)

    def _seed(self, suggestion: Suggestion) -> int:
        return self.setting.config.seed + suggestion.replicate

    def _observation(self, member: Member, record: Record) -> Observation:
        is_measured = record.status in ("completed", "paused")
        rungs = self._rungs(record.trial_id).values() if is_measured else ()
        losses = tuple(rung.val_loss for rung in rungs if rung.val_loss is not None)
        if record.status == "paused" and not losses:
            raise UserError(f"trial {record.trial_id} of {self.path} must have a rung before it pauses; restore it.")
        return Observation(
            member=member,
            index=record.index,
            replicate=record.seed - self.setting.config.seed,
            status=record.status,
            latency_s=record.latency_s,
            log_perplexity=record.val_loss if record.status == "completed" else None,
            rung_losses=losses,
            feasible=is_feasible(record, self.setting.config.budget),
        )

    def _write(self, *records: Record) -> bool:
        """Append records and return whether that succeeded; if not, halt the run."""
        try:
            ledger.append(self.path, *records)
        except OSError as error:
            self.halted = f"cannot write {self.path}: {error.strerror}"
            return False
        self.records += records
        return True


def price_fields(architecture: Architecture, feasible: FeasibleSpace) -> dict[str, Any]:
    """Return the fields of a `Record` with the costs of an architecture under every protocol of a search."""
    every = (constraint.priced for constraint in feasible.every)
    first, *others = (price_architecture(architecture, at.pricer, at.workload, at.cost_of) for at in every)
    names = (constraint.priced.pricer.protocol for constraint in feasible.also)
    also = {name: Costs.of(other.price) for name, other in zip(names, others, strict=True)}
    columns = price_columns(feasible.priced.pricer, first.price)
    return {**columns, "latency_s_range": first.latency_s_range, "also": also}


def over_timeout(timeout_s: float) -> str:
    """Return the `reason` in the record of a trial that failed because it took too long."""
    return f"over --trial-timeout {format_seconds(timeout_s)}"


def _rounded(documents: Sequence[DocumentLoss]) -> tuple[tuple[float, float], ...]:
    """Round to six decimals, which is precise enough and keeps the ledger short."""
    return tuple((round(share, 6), round(loss, 6)) for share, loss in documents)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
