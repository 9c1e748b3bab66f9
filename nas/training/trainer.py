"""Training of one candidate: a generator of rung records that ends with an outcome. Independent of studies and Ray.

On the CPU with one thread, results depend only on candidate, corpus, seed, initial weights and teacher, even if the
training is killed and resumed.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from costmodel.config.files import decode
from nas.corpus.corpus import Corpus
from nas.model.cross_entropy import losses_of_chunk
from nas.model.norms import freeze_due
from nas.model.weights import load_deployed, load_stored, stored_weights
from nas.recipe.candidate import Candidate, candidate_id
from nas.training import checkpoint, divergence
from nas.training.batches import Prefetched, check, train_batch, train_indices, validate, validation_batches
from nas.training.checkpoint import Checkpoint, TrainingProgress
from nas.training.device import compiled, kind_of, layer_function
from nas.training.distillation.foldable import keep_foldable
from nas.training.distillation.parts import Gates
from nas.training.distillation.teacher import Lesson, Teacher
from nas.training.divergence import LAG, Readings, turning_points
from nas.training.memory import raise_out_of_memory
from nas.training.metrics import Diagnosis, MetricsLog, StepMetrics, diagnose, is_due
from nas.training.objective import Objective, summarise
from nas.training.optimizer import learning_rate, load_state_tensors, state_tensors
from nas.training.outcome import Outcome, RungRecord
from nas.training.step_graph import OptimizerStep, StepGraph

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 30.0  # between checkpoints, and so the most work that a kill loses,
CHECKPOINT_SHARE = 0.03  # or longer, so that checkpoints take at most this share of the time


def train(
    candidate: Candidate,
    corpus: Corpus,
    *,
    seed: int,
    folder: Path | None = None,
    device: str = "cpu",
    initial: Mapping[str, Tensor] | None = None,
    teacher: Teacher | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Generator[RungRecord | Outcome, None, None]:
    """Train to the end; yield a record at every rung (validation), then the outcome. Close the generator to stop early.

    Args:
        folder: for metrics, TensorBoard log and checkpoints; None to write nothing. A run in the folder is resumed; the
            run's earlier records, and its outcome if it has ended, are yielded again first.
        initial: deployed weights of `candidate.initial_architecture` to start from; missing weights are random.
        teacher: the parent, needed if a distillation schedule gives the parent's predictions or hidden states a weight.
        stop: called after every step; if it is true, the run is saved (if there is a folder) and the generator ends.
        on_progress: called before every step, with the share of the steps taken so far.

    Raises UserError if corpus and recipe, or `initial`, do not fit, or the folder has another run; OSError if the
    folder cannot be written; TooLargeError if memory is too small.
    """
    with raise_out_of_memory(candidate, device):
        run = TrainingRun(
            candidate, corpus, seed=seed, folder=folder, device=device, initial=initial or {}, teacher=teacher
        )
        del initial  # these weights were copied into the model
        yield from run.progress.rungs
        log = MetricsLog(folder, last_step=run.progress.step) if folder and not run.progress.outcome else None
        saved_s, interval_s = run.progress.seconds, CHECKPOINT_INTERVAL_S
        with closing(log) if log else nullcontext(), closing(run):
            while run.progress.outcome is None:
                on_progress(run.begun / run.scale.num_steps)
                judged = run.step()
                record = run.validate_if_due()
                stopping, due = stop(), run.progress.seconds - saved_s >= interval_s
                if stopping or (log and due):
                    judged += run.settle()
                if log:
                    for metrics in judged:
                        is_rung = record is not None and record.steps == metrics.step
                        log.add(replace(metrics, val_loss=record.val_loss if record and is_rung else None))
                    if judged and run.diagnosis:
                        log.add_diagnosis(run.diagnosis)
                    if record or run.progress.outcome or due or stopping:
                        since_s = time.perf_counter()
                        log.flush()
                        run.save()
                        saved_s = run.progress.seconds
                        interval_s = max(CHECKPOINT_INTERVAL_S, (time.perf_counter() - since_s) / CHECKPOINT_SHARE)
                if record:
                    yield record
                if stopping:
                    break
        if run.progress.outcome:
            yield run.progress.outcome


class TrainingRun:
    """A training run, step by step. Arguments are as for `train`, which calls the methods.

    A step is judged when the host has read its loss and gradient norm and checks them for divergence. On a GPU this is
    up to `divergence.LAG` steps later.
    """

    def __init__(
        self,
        candidate: Candidate,
        corpus: Corpus,
        *,
        seed: int,
        folder: Path | None,
        device: str,
        initial: Mapping[str, Tensor],
        teacher: Teacher | None = None,
    ) -> None:
        check(candidate, corpus)
        self.recipe, self.scale = candidate.recipe, candidate.recipe.scale
        self.corpus, self.seed, self.folder, self.device, self.teacher = corpus, seed, folder, device, teacher
        self.identity = {"candidate": candidate_id(candidate), "corpus": corpus.fingerprint, "seed": seed}
        self.objective = Objective(candidate, torch.Generator().manual_seed(seed))
        load_deployed(self.objective.model, initial)
        self.objective.to(device)
        distillation, model = candidate.recipe.distillation, self.objective.model
        model.layer_function = layer_function(self.recipe, device)
        self.objective.loss_function = compiled(losses_of_chunk, self.recipe, device)
        self._step = OptimizerStep(self.objective, self.recipe, device, self.lessons)
        self._graph = StepGraph(self._step.take, self._step.undo, self.recipe, device)
        as_tensor = model.layer_function is not nn.Module.__call__ or self._graph.is_wanted
        self._gates: Gates | None = None
        if distillation is not None:
            self._gates = Gates(model, candidate.trained, distillation, as_tensor=as_tensor)
        self.progress = TrainingProgress()
        self.diagnosis: Diagnosis | None = None  # of the last step, if it was diagnosed
        self._prefetched: Prefetched[tuple[Tensor, Tensor]] | None = None
        if torch.device(device).type == "cuda":
            torch.set_float32_matmul_precision("high" if self.recipe.precision == "tf32" else "highest")
            self._prefetched = Prefetched(self._host_batch)
        if folder and (saved := checkpoint.load_latest(folder, self.identity)):
            self._restore(saved)
        self._turning_points = turning_points(self.recipe, model)
        self._step.readings = self._new_readings(LAG[torch.device(device).type])
        self._since_s = time.perf_counter()

    def step(self) -> list[StepMetrics]:
        """Take one optimizer step; return the metrics of the steps judged during the call: on a CPU, of this step.

        A diverged step and those after it change no weight; the outcome is set when the diverged step is judged.
        """
        step, (inputs, targets) = self.begun + 1, self.batch()
        is_judged_now = step in self._turning_points or is_due(step, self.scale)
        rate = learning_rate(self.recipe, self.begun)
        entropy = self.recipe.entropy
        penalty_weight = 0.0 if entropy is None else entropy.weight_at(self.begun, self.scale.num_steps)
        self._step.begin(rate=rate, penalty_weight=penalty_weight, settled=step >= self._settled)
        if not is_judged_now and (values := self._graph.take(inputs, targets)) is not None:
            self._step.readings.send(values)
            judged = self.settle()
        else:
            self._graph.make_room()
            values, norm = self._step.differentiate(inputs, targets)
            self._step.readings.send(values)
            judged = self.settle(inputs, everything=is_judged_now)
            if self.progress.outcome is None and self.begun == step:
                self._step.move(norm)
            self._step.clear()
        if self.progress.outcome is None and self.begun == step:
            model, num_steps = self.objective.model, self.scale.num_steps
            freeze_due(model, self.recipe.freezing, step=step, num_steps=num_steps)
            if self._gates is not None and self._gates.move(step=step, num_steps=num_steps):
                self._graph.drop()
            keep_foldable(model, self.recipe.foldable, step=step, num_steps=num_steps)
        return judged

    def settle(self, inputs: Tensor | None = None, *, everything: bool = True) -> list[StepMetrics]:
        """Judge all queued steps or, without `everything`, all but the newest (`Readings.lag`); return their metrics.

        inputs: batch of the last step if its gradients still exist, else None. A diverged step whose gradients are gone
        is repeated without lag, which gives the same numbers, since no weight has changed.
        """
        judged: list[StepMetrics] = []
        for loss, penalty, norm, halted in self._step.readings.take(everything=everything):
            if halted and (inputs is None or self._step.readings):
                self._step.readings = self._new_readings(lag=0)
                self._graph.drop(for_good=True)
                self.objective.zero_grad(set_to_none=True)
                if self._gates is not None:
                    self._gates.move(step=self.progress.step, num_steps=self.scale.num_steps)
                return judged + self.step()
            judged.append(self.judge(inputs, loss, penalty, norm))
        return judged

    def judge(self, inputs: Tensor | None, loss: float, penalty: float, gradient_norm: float) -> StepMetrics:
        """Judge the next step: count it, set the outcome if it diverged, return its metrics. inputs: as in `settle`."""
        rate = learning_rate(self.recipe, self.progress.step)
        losses, initial_loss = self.progress.losses, self.progress.initial_loss
        if math.isfinite(loss):
            losses = (*losses, loss)[-divergence.WINDOW :]
            initial_loss = max(loss, self.corpus.unigram_loss) if initial_loss is None else initial_loss
        self.progress = replace(self.progress, step=self.progress.step + 1, losses=losses, initial_loss=initial_loss)
        self._tick()
        batches, progress = () if inputs is None else torch.split(inputs, self.scale.micro_batch), self.progress
        problem = divergence.nonfinite_step(self.objective, batches, loss, gradient_norm)
        initial = math.inf if progress.initial_loss is None else progress.initial_loss
        if not problem and progress.step >= self._settled and divergence.above_start(progress.losses, initial):
            where = divergence.steepest_module(self.objective.model)
            problem = "training loss above its initial value at step {step}, steepest in {layer}", where
        self.diagnosis = None
        if self.folder is not None and inputs is not None and (problem or is_due(self.progress.step, self.scale)):
            self.diagnosis = diagnose(self.objective, inputs[: self.scale.micro_batch], step=self.progress.step)
        if problem:
            self._end_diverged(*problem)
        return StepMetrics(
            step=self.progress.step,
            tokens=self._tokens,
            learning_rate=rate,
            train_loss=loss,
            penalty=penalty,
            gradient_norm=gradient_norm,
            seconds=self.progress.seconds,
        )

    def validate_if_due(self) -> RungRecord | None:
        """Validate and return the record if a rung ends at this step; else return None.

        The outcome is set after the last rung, and by a divergence, for which None is returned.
        """
        scale, steps = self.scale, self.scale.rung_steps
        if self.progress.outcome or self.begun not in steps:
            return None
        is_last = self.progress.step == steps[-1]
        tokens = scale.validation_tokens if is_last else scale.rung_validation_tokens
        loss, head_means, documents = validate(self.objective.model, self.corpus, scale, tokens)
        self._tick()
        if not (math.isfinite(loss) and torch.cat(head_means).isfinite().all()):
            batches = (inputs.to(self.device) for inputs, _ in validation_batches(self.corpus, scale))
            where = divergence.first_nonfinite_activation(self.objective.model, batches)
            self._end_diverged("non-finite validation loss at step {step}, first in {layer}", where)
            return None
        if loss > divergence.MAX_LOSS:
            self._end_diverged("validation loss too large for a perplexity at step {step}, in {layer}", "logits")
            return None
        progress = self.progress
        record = RungRecord(
            rung=steps.index(progress.step),
            share=progress.step / scale.num_steps,
            steps=progress.step,
            tokens=self._tokens,
            val_loss=loss,
            perplexity=math.exp(loss),
            entropy=summarise(head_means, scale.seq_len),
            seconds=progress.seconds,
            documents=documents if is_last else (),
        )
        self.progress = replace(progress, rungs=(*progress.rungs, record))
        if is_last:
            names = ("steps", "tokens", "seconds", "val_loss", "perplexity", "entropy", "documents")
            outcome = Outcome(status="completed", **{name: getattr(record, name) for name in names})
            self.progress = replace(self.progress, outcome=outcome)
        return record

    def save(self) -> None:
        """Write a checkpoint into the run's folder; after the end, without optimizer states. Raises OSError."""
        assert self.folder is not None
        weights = {name: value.cpu() for name, value in stored_weights(self.objective.model).items()}
        state = self.objective.state_dict()
        thresholds = {f"value.{name}": state[name].cpu() for name in state if not name.startswith("model.")}
        self._tick()
        progress, optimizers = self.progress, self._step.optimizers
        written = Checkpoint(
            step=progress.step,
            identity=self.identity,
            progress=asdict(progress),
            weights=weights,
            optimizer=None if progress.outcome else state_tensors(self.objective, optimizers) | thresholds,
            device=kind_of(self.device, self.recipe.precision),
        )
        checkpoint.save(self.folder, written)

    def _restore(self, saved: Checkpoint) -> None:
        self.progress = decode(TrainingProgress, saved.progress, "the progress of a checkpoint")
        if saved.optimizer is None:  # an ended run does not need its weights
            return
        if saved.device not in (None, kind := kind_of(self.device, self.recipe.precision)):
            _log.warning(
                f"the checkpoint was written on {saved.device} and training continues on {kind}; from here on, its "
                f"numbers differ by more than rounding from those of a training on one device"
            )
        if self._gates is not None:
            self._gates.move(step=saved.step, num_steps=self.scale.num_steps)
        load_stored(self.objective.model, saved.weights)
        moments = {name: value for name, value in saved.optimizer.items() if not name.startswith("value.")}
        thresholds = {name.removeprefix("value."): saved.optimizer[name] for name in saved.optimizer.keys() - moments}
        self.objective.load_state_dict(thresholds, strict=False)  # the model's values are loaded already
        load_state_tensors(self.objective, self._step.optimizers, moments)

    def close(self) -> None:
        """Stop preparing batches, and free the memory of a graph."""
        self._graph.drop(for_good=True)
        if self._prefetched:
            self._prefetched.close()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next step, on the device."""
        inputs, targets = (self._prefetched or self._host_batch)(self.begun)
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def lessons(self, inputs: Tensor, num_parts: int) -> Iterator[Lesson] | None:
        """Return the parent's lesson for each of `num_parts` parts of the next step's batch; None without a teacher."""
        if self.teacher is None:
            return None
        scale, step = self.scale, self.begun
        predictions, hidden_states = self.objective.prediction_weight > 0, self.objective.hidden_state_weight > 0
        indices = train_indices(self.corpus, step=step, batch=scale.batch, seq_len=scale.seq_len, seed=self.seed)
        return self.teacher.lessons(indices, inputs, num_parts, predictions=predictions, hidden_states=hidden_states)

    def _host_batch(self, step: int) -> tuple[Tensor, Tensor]:
        batch, seq_len = self.scale.batch, self.scale.seq_len
        inputs, targets = train_batch(self.corpus, step=step, batch=batch, seq_len=seq_len, seed=self.seed)
        return (inputs.pin_memory(), targets.pin_memory()) if self._prefetched else (inputs, targets)

    def _end_diverged(self, reason: str, layer: str) -> None:
        """Set the outcome. reason: a format string with step and layer."""
        outcome = Outcome(
            status="diverged",
            steps=self.progress.step,
            tokens=self._tokens,
            seconds=self.progress.seconds,
            reason=reason.format(step=self.progress.step, layer=layer),
            layer=layer,
        )
        self.progress = replace(self.progress, outcome=outcome)

    def _new_readings(self, lag: int) -> Readings:
        losses, initial_loss = self.progress.losses, self.progress.initial_loss
        readings = Readings(lag, self.device, losses, initial_loss, self.corpus.unigram_loss)
        for optimizer in self._step.optimizers:
            vars(optimizer)["found_inf"] = readings.halted if lag else None
        return readings

    @property
    def begun(self) -> int:
        """Number of steps taken, including those whose numbers are not read yet."""
        return self.progress.step + len(self._step.readings)

    @property
    def _settled(self) -> int:
        """First step at which losses above the start are divergence: WINDOW after warm-up, or half of distillation."""
        settled = self.scale.warmup_steps if self.recipe.distillation is None else self.scale.num_steps // 2
        return settled + divergence.WINDOW

    @property
    def _tokens(self) -> int:
        return self.progress.step * self.scale.batch * self.scale.seq_len

    def _tick(self) -> None:
        now_s = time.perf_counter()
        self.progress = replace(self.progress, seconds=self.progress.seconds + now_s - self._since_s)
        self._since_s = now_s
