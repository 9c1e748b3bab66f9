"""The book-keeping of a run: proposals become trials, events become ledger records, results go back to the schedule.

Knows neither Ray nor torch. A resumed run replays its ledger: what it says was proposed stands, trials that finished
go to the schedule at once, and only the others are handed out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate, candidate_id, trial_id
from nas.recipe.recipe import Recipe
from nas.run import ledger
from nas.run.config import StudyConfig, study_candidate
from nas.run.folder import PARENT_FOLDER
from nas.run.front import is_feasible
from nas.run.ledger import Event, LedgerIndex, Record, Status
from nas.study.finalists import Key, Result
from nas.study.prices import CandidatePrices, price_fields, prices_of
from nas.study.schedule import LAG, Proposal, TrialSchedule
from nas.training.outcome import Outcome, RungRecord, VerifiedForm
from search_spaces.architecture import Architecture, arch_id
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.deployed import deployed
from search_spaces.notation import placement

Device = Literal["cpu", "cuda"]

MAX_LOSSES = 3  # workers that a trial may lose between two rungs, to nodes taken away or memory that runs out


class RunHaltedError(RuntimeError):
    """The machine, not a candidate, keeps the run from going on; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """Everything a worker needs to train one candidate; plain data.

    deployed: what the candidate deploys to by rule, or None where candidates are priced as written.
    prices: of that. is_look: it pauses at the first rung.
    folder: where its checkpoints and metrics go. parent: folder of the parent, or None. second: the second corpus.
    timeout_s: most seconds it may take in one go, or None.
    """

    proposal: Proposal
    trial_id: str
    candidate: Candidate
    deployed: Architecture | None
    prices: CandidatePrices
    seed: int
    corpus: Corpus
    folder: Path
    device: Device
    is_look: bool = False
    parent: Path | None = None
    second: Corpus | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEvent:
    """An event that a worker reports. `halted` is a failure of the machine, not of the candidate: the run must stop.

    elsewhere: of a failure, whether another node may do better.
    measured: what training reported by then; None if nothing.
    verified: what the weights of a completed trial fold to; None where nothing is folded.
    second: losses by document of a completed trial on the second corpus.
    """

    event: Event | None
    status: Status
    reason: str | None = None
    halted: bool = False
    elsewhere: bool = False
    measured: RungRecord | Outcome | None = None
    verified: VerifiedForm | None = None
    second: tuple[tuple[float, float], ...] = ()

    @property
    def rung(self) -> int | None:
        return self.measured.rung if isinstance(self.measured, RungRecord) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSetting:
    """The setting that all trials of a run share. `folder` is the run's."""

    config: StudyConfig
    recipe: Recipe
    folder: Path
    corpus: Corpus
    device: Device
    versions: Mapping[str, str]
    second: Corpus | None = None


class Trials:
    """Hands out trials and keeps the ledger; one instance per process that runs a study.

    on_end: takes the record of every trial that ended. halted: why the run cannot go on, or None.
    running: handed out, and not ended yet.
    """

    def __init__(
        self,
        schedule: TrialSchedule,
        feasible: FeasibleSpace,
        setting: TrialSetting,
        records: Iterable[Record] = (),
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.schedule = schedule
        self.feasible = feasible
        self.setting = setting
        self.running: dict[Key, TrialSpec] = {}
        self.halted: str | None = None
        self._index = LedgerIndex(records)
        self._on_end = on_end
        self._again: list[TrialSpec] = []
        self._losses: Counter[Key] = Counter()
        self._num_failed = 0
        self._num_logged = 0

    @property
    def records(self) -> list[Record]:
        return self._index.records

    @property
    def path(self) -> Path:
        return self.setting.folder / ledger.FILE_NAME

    @property
    def finished(self) -> bool:
        """Whether every trial there will ever be has been handed out, and none must be again."""
        return self.schedule.finished and not self._again

    def next_spec(self) -> TrialSpec | None:
        """The next trial to run, or None if there is none now; trials the ledger holds go to the schedule instead."""
        if self._again:
            return self._handed_out(self._again.pop(0))
        while (proposal := self.schedule.ask()) is not None:
            self._log_proposals()
            record = self._index.end_of((proposal.index, self._seed(proposal)), is_look=proposal.is_look)
            if record is None or self._is_retried(record):
                return self._handed_out(self._spec(proposal))
            if not self.schedule.results:
                self._check_same(proposal, record)
            self.schedule.tell(self._result(record))
        return None

    def started(self, spec: TrialSpec) -> None:
        self._write(self._record(spec, TrialEvent(event="started", status="running")))

    def happened(self, spec: TrialSpec, event: TrialEvent, *, again: bool = False) -> None:
        """Records a rung or an end. Nothing is recorded once the run is halted.

        An end goes to the schedule, unless the trial is to run once more, from its beginning (`again`).
        """
        if event.halted:
            self.halted = self.halted or event.reason
        if self.halted or self._is_known(spec, event):
            return
        self._losses.pop(spec.proposal.key, None)
        record = self._record(spec, event)
        if not self._write(record) or event.event != "finished":
            return
        self.running.pop(spec.proposal.key, None)
        if again:
            self._again.append(self._spec(spec.proposal))
            return
        self.schedule.tell(self._result(record))
        self._on_end(record)
        self._count_failure(record)

    def lost(self, spec: TrialSpec, reason: str) -> None:
        """A worker died without a word: the trial goes on from its checkpoint, or has failed if it was one too many."""
        if spec.proposal.key not in self.running or self.halted:
            return
        self._losses[spec.proposal.key] += 1
        if self._losses[spec.proposal.key] <= MAX_LOSSES:
            del self.running[spec.proposal.key]
            self._again.append(spec)
            return
        reason = f"{reason}, {MAX_LOSSES + 1} times"
        self.happened(spec, TrialEvent(event="finished", status="failed", reason=reason))

    def _handed_out(self, spec: TrialSpec) -> TrialSpec:
        self.running[spec.proposal.key] = spec
        return spec

    def _log_proposals(self) -> None:
        """Writes what the schedule has proposed and the ledger does not hold, before any of it is started."""
        proposals = self.schedule.proposals[self._num_logged :]
        self._num_logged = len(self.schedule.proposals)
        event = TrialEvent(event="proposed", status="proposed")
        new = [
            self._record(self._spec(proposal), event)
            for proposal in proposals
            if proposal.role != "replicate" and (proposal.index, proposal.is_look) not in self._index.proposed
        ]
        if new:
            self._write(*new)

    def _count_failure(self, record: Record) -> None:
        most = self.setting.config.max_failures
        self._num_failed += record.status == "failed"
        if most is not None and record.status == "failed" and self._num_failed >= most:
            trials = "1 trial" if most == 1 else f"{most} trials"
            self.halted = f"{trials} failed (--max-failures), the last, {record.trial_id}: {record.reason}"

    def _spec(self, proposal: Proposal) -> TrialSpec:
        candidate = study_candidate(self.setting.recipe, proposal.member)
        seed = self._seed(proposal)
        name = trial_id(candidate, seed=seed, attempt=self._index.num_ends[proposal.index, seed])
        folds = self.setting.config.accounting == "deployed"
        return TrialSpec(
            proposal=proposal,
            trial_id=name,
            candidate=candidate,
            deployed=deployed(proposal.member.architecture) if folds else None,
            prices=prices_of(proposal.member.architecture, self.feasible),
            seed=seed,
            corpus=self.setting.corpus,
            device=self.setting.device,
            folder=self.setting.folder / "trials" / name,
            is_look=proposal.is_look,
            parent=None if self.setting.recipe.route is None else self.setting.folder / PARENT_FOLDER,
            second=self.setting.second,
            timeout_s=self.setting.config.trial_timeout_s,
        )

    def _seed(self, proposal: Proposal) -> int:
        return self.setting.config.seed + proposal.replicate

    def _is_retried(self, record: Record) -> bool:
        """A failure says nothing about a candidate: it is tried again, unless later proposals depend on it already."""
        return record.status == "failed" and self._index.last_generation < record.generation + LAG

    def _is_known(self, spec: TrialSpec, event: TrialEvent) -> bool:
        """Whether the ledger holds this rung already: a resumed trial reports its rungs again."""
        return event.event == "rung" and event.rung in self._index.rungs.get(spec.trial_id, {})

    def _result(self, record: Record) -> Result:
        log_perplexity = record.val_loss if record.status == "completed" else None
        return Result(
            index=record.index,
            status=record.status,
            latency_s=record.latency_s,
            log_perplexity=log_perplexity,
            rung_losses=self._index.rung_losses(record.trial_id) if record.status in ("completed", "paused") else (),
            replicate=record.seed - self.setting.config.seed,
            feasible=is_feasible(record, self.setting.config.budget),
        )

    def _check_same(self, proposal: Proposal, record: Record) -> None:
        """Raises UserError if a member and the run's recipe make another candidate than they did; one shows it."""
        proposed = candidate_id(study_candidate(self.setting.recipe, proposal.member))
        if proposed != record.candidate_id:
            raise UserError(
                f"trial {proposal.index} of {self.path} must be candidate {proposed} under this configuration, but "
                f"the ledger holds {record.candidate_id}; the run was made by another version or on other data."
            )

    def _write(self, *records: Record) -> bool:
        """Appends records and says whether the disk took them; if not, the run is halted."""
        try:
            ledger.append(self.path, *records)
        except OSError as error:
            self.halted = f"cannot write {self.path}: {error.strerror}"
            return False
        for record in records:
            self._index.add(record)
        return True

    def _record(self, spec: TrialSpec, event: TrialEvent) -> Record:
        assert event.event is not None
        member, setting, measured, verified = spec.proposal.member, self.setting, event.measured, event.verified
        prices, run_as = spec.prices, spec.deployed
        if verified is not None:
            prices, run_as = prices_of(verified.architecture, self.feasible), verified.architecture
        return Record(
            event=event.event,
            trial_id=spec.trial_id,
            candidate_id=candidate_id(spec.candidate),
            arch_id=arch_id(member.architecture),
            notation=spec.candidate.name,
            placement=placement(member.architecture),
            entropy_regularised=member.entropy_regularised,
            index=spec.proposal.index,
            generation=spec.proposal.generation,
            role=spec.proposal.role,
            is_look=spec.is_look,
            expected_loss=spec.proposal.expected,
            status=event.status,
            reason=event.reason,
            scale=spec.candidate.recipe.scale.name,
            width=spec.candidate.trained.d_model,
            rung=event.rung,
            steps=measured.steps if measured else 0,
            tokens=measured.tokens if measured else 0,
            corpus=setting.corpus.fingerprint,
            tokenizer=setting.corpus.tokenizer,
            split=setting.corpus.split,
            val_loss=measured.val_loss if measured else None,
            perplexity=measured.perplexity if measured else None,
            documents=_rounded(measured.documents) if measured else (),
            second_documents=_rounded(event.second),
            **price_fields(prices, spec.prices if run_as else None, self.feasible),
            flags=measured.entropy.flags if measured and measured.entropy else (),
            seed=spec.seed,
            seconds=measured.seconds if measured else 0.0,
            versions=dict(setting.versions),
            deployed_id=arch_id(run_as) if run_as else None,
            deployed=placement(run_as) if run_as else None,
            left_unfolded=verified.left if verified else (),
            fold_logits_error=_finite(verified.logits_error) if verified else None,
            fold_fixed_point_error=_finite(verified.fixed_point_error) if verified else None,
            trained_fixed_point_error=_finite(verified.trained_fixed_point_error) if verified else None,
            fold_holds=verified.holds if verified else None,
            fold_top1_agreement=_finite(verified.top1_agreement) if verified else None,
        )


def over_timeout(timeout_s: float) -> str:
    """Why a trial has failed that took too long."""
    return f"over --trial-timeout {format_seconds(timeout_s)}"


def _rounded(documents: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Rounds to what a table of them is read for, which keeps the ledger short."""
    return tuple((round(share, 6), round(loss, 6)) for share, loss in documents)


def _finite(value: float) -> float | None:
    """None for what overflowed."""
    return value if math.isfinite(value) else None
