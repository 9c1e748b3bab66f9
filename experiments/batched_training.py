"""Training of several candidates of one size at once, as one batched program.

Every member is a run of `nas.training` and ends as it would alone: the same batches, clipping, AdamW, schedule, rungs
and rules of divergence. Only losses, gradients and updates are computed together. A member that ends leaves: the others
go on without it, so that nothing it computed can reach them.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional

from costmodel.errors import UserError
from experiments.stacked_decoder import Joint, Joints, StackedDecoder
from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import Recipe, layers_kept_foldable
from nas.training.batches import Validation, validation_batches
from nas.training.optimizer import adamw_over, decays
from nas.training.outcome import Outcome, RungRecord
from nas.training.trainer import TrainingRun
from search_spaces.architecture import Architecture

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
THRESHOLDS = "penalty.thresholds"


def train_population(
    candidates: Sequence[Candidate], corpus: Corpus, *, seed: int, device: str = "cpu"
) -> Generator[tuple[int, RungRecord | Outcome], None, None]:
    """Trains all to full fidelity; yields the place of a candidate with each of its rungs and its outcome.

    Seconds in the records are those of the whole group since its start.

    Raises UserError if a candidate cannot be trained this way or beside the others, or does not fit the corpus.
    """
    check(candidates)
    runs = [
        TrainingRun(candidate, corpus, seed=seed, folder=None, device=device, initial={}) for candidate in candidates
    ]
    population = Population(runs)
    while population.runs:
        before = population.runs
        population.step()
        records = population.validate_if_due()
        for run in before:
            if run in records:
                yield runs.index(run), records[run]
            if run.progress.outcome:
                yield runs.index(run), run.progress.outcome


def check(candidates: Sequence[Candidate]) -> None:
    """Raises UserError, naming the candidate, unless all can be trained as one program."""
    if not candidates:
        raise UserError("a population needs at least one candidate, but got none.")
    first = candidates[0]
    penalised = next((one.recipe.entropy for one in candidates if one.recipe.entropy), None)
    for candidate in candidates:
        for name, value, wanted in _requirements(candidate):
            if value != wanted:
                raise UserError(
                    f"a population trains only {name}={wanted!r}, but {candidate.name} has {value!r}; train it alone."
                )
        if _shape(candidate.trained) != _shape(first.trained) or _shared(candidate.recipe) != _shared(first.recipe):
            raise UserError(
                f"members of a population must agree in dimensions and recipe, entropy regularisation or not aside, "
                f"but {first.name} and {candidate.name} do not; train them apart."
            )
        if candidate.recipe.entropy not in (None, penalised):
            raise UserError(
                f"members of a population must agree in the settings of entropy regularisation, "
                f"but {candidate.name} has {candidate.recipe.entropy}, not {penalised}; train them apart."
            )


def _requirements(candidate: Candidate) -> list[tuple[str, Any, Any]]:
    """What is asked, what the candidate has, and what a population can train."""
    architecture, recipe = candidate.trained, candidate.recipe
    layers = architecture.layers
    has_piecewise = architecture.gelu == "piecewise" and any(layer.ffn == "gelu" for layer in layers)
    has_piecewise |= any(layer.ffn == "gelu-piecewise" for layer in layers)
    norms = {architecture.final_norm, *(norm for layer in layers for norm in (layer.norm1, layer.norm2))}
    return [
        ("block", architecture.block, "gpt2"),
        ("softmax", architecture.softmax, "exact"),
        ("norm", _other(norms, "layernorm", "none"), "layernorm"),
        ("attention", _other({layer.attention for layer in layers}, "softmax", "softmax-temperature"), "softmax"),
        ("folded", architecture.folded, False),
        ("piecewise GELU", has_piecewise, False),
        ("normalisation", recipe.normalisation and recipe.normalisation.kind, None),
        ("foldable", recipe.foldable if layers_kept_foldable(architecture) else None, None),
        ("slopes", recipe.slopes, "layer"),
        ("optimizer", recipe.optimizer, "adamw"),
        ("route", recipe.route, None),
        ("precision", recipe.precision, "float32"),
    ]


def _other(found: Collection[str], *trained: str) -> str:
    """A choice that is not among those that can be trained; the first of those if there is none."""
    return min(set(found).difference(trained), default=trained[0])


def _shape(architecture: Architecture) -> tuple[int, dict[str, Any]]:
    """What is left of an architecture without its placement."""
    names = ("num_heads", "d_model", "d_ff", "vocab_size", "context", "bias", "tied_embeddings", "gelu")
    return architecture.num_layers, {name: getattr(architecture, name) for name in names}


def _shared(recipe: Recipe) -> Recipe:
    return replace(recipe, entropy=None, temperature_init=1.0)


class Population:
    """Runs whose parameters, gradients and optimizer states are slices of common tensors, between two steps."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        self.runs = sorted(runs, key=lambda run: run.recipe.entropy is None)  # those with entropies first
        self._join()

    def step(self) -> None:
        """One optimizer step of every member; one that diverges ends, unmoved, and leaves."""
        inputs, targets = self.runs[0].batch()
        losses, penalties = self._backward(inputs, targets)
        norms = self._gradient_norms()
        table = torch.stack((losses, penalties, norms.double()), dim=1).tolist()
        metrics = [run.judge(inputs, *row) for run, row in zip(self.runs, table, strict=True)]
        kept = [place for place, run in enumerate(self.runs) if run.progress.outcome is None]
        self.leave([run for run in self.runs if run.progress.outcome])
        if self.runs:
            self._update(metrics[0].learning_rate, norms[kept])

    def validate_if_due(self) -> dict[TrainingRun, RungRecord]:
        """The records of a rung that ends with this step; members that complete with it leave."""
        if not self.runs or self.runs[0].progress.step not in self.runs[0].scale.rung_steps:
            return {}
        found = zip(self.runs, self._validate(), strict=True)
        records = {run: record for run, one in found if (record := run.end_rung(one))}
        self.leave([run for run in self.runs if run.progress.outcome])
        return records

    @torch.no_grad()
    def _validate(self) -> list[Validation]:
        """Validates every member as `batches.validate` does."""
        members, first = len(self.runs), self.runs[0]
        losses = torch.zeros(members, dtype=torch.float64, device=first.device)
        entropies = torch.zeros((), dtype=torch.float64, device=first.device)
        count = 0
        for inputs, targets in validation_batches(first.corpus, first.scale):
            logits, rows = self._model(inputs.to(first.device), num_with_entropies=members)
            assert rows is not None
            losses += len(inputs) * _cross_entropies(logits, targets.to(first.device)).double()
            entropies = entropies + rows.double().mean(dim=-1).sum(dim=2)  # members x layers x heads
            count += len(inputs)
        pairs = zip((losses / count).tolist(), (entropies / count).cpu(), strict=True)
        return [Validation(loss, tuple(head_means)) for loss, head_means in pairs]

    def leave(self, leaving: Sequence[TrainingRun]) -> None:
        """Takes runs out; their parameters stay as they are, in memory of their own."""
        if not leaving:
            return
        self._hand_back()
        for run in leaving:
            run.close()
            for parameter in run.objective.parameters():
                parameter.data, parameter.grad = parameter.data.clone(), None
        self.runs = [run for run in self.runs if run not in leaving]
        if self.runs:
            self._join()

    def _join(self) -> None:
        objectives = [run.objective for run in self.runs]
        joints = Joints(objectives)
        self._model = StackedDecoder([one.model.architecture for one in objectives], joints, "model.")
        self._thresholds = joints.join(THRESHOLDS)
        self._num_penalised = 0 if self._thresholds is None else len(self._thresholds)
        self._joints = joints.all
        self._optimizer = adamw_over(
            [(joint.value, decays(joint.name, joint.parts[0])) for joint in self._joints], self.runs[0].recipe
        )
        states = {part: state for run in self.runs for part, state in run.optimizers[0].state.items()}
        for joint in self._joints:
            if joint.parts[0] in states:
                self._optimizer.state[joint.value] = _joint_state([states[part] for part in joint.parts])
        places = [joint.rows.places for joint in self._joints]
        self._owners = torch.tensor([place for one in places for place in one], device=joints.device)

    def _hand_back(self) -> None:
        """Every run's own optimizer gets its share of the state."""
        for joint in self._joints:
            state = self._optimizer.state[joint.value]
            for share, (place, part) in enumerate(zip(joint.rows.places, joint.parts, strict=True)):
                if state:
                    self.runs[place].optimizers[0].state[part] = _own_state(state, share)

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up the gradients of a batch; cross-entropies and penalties of the members, as `Objective.backward`."""
        scale, first = self.runs[0].scale, self.runs[0].objective.penalty
        num_parts = scale.batch // scale.micro_batch
        penalty_share = 1.0 if first is not None and first.adds_up else 1 / num_parts
        total = torch.zeros(2, len(self.runs), dtype=torch.float64, device=inputs.device)
        for part in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
            losses, penalties = self._losses(*part)
            scaled = torch.stack((losses / num_parts, penalties * penalty_share))
            torch.autograd.backward((scaled[0] + self.runs[0].penalty_weight * scaled[1]).sum())
            total += scaled.detach()
        return total[0], total[1]

    def _losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and penalty of every member; a member without regulariser has penalty 0."""
        logits, entropies = self._model(inputs, num_with_entropies=self._num_penalised)
        losses = _cross_entropies(logits, targets)
        penalty = self.runs[0].objective.penalty
        if penalty is None or self._thresholds is None or entropies is None:
            return losses, torch.zeros_like(losses)

        def penalty_of(thresholds: Tensor, rows: Tensor) -> Any:
            return functional_call(penalty, {"thresholds": thresholds}, (tuple(rows),))

        found: Tensor = vmap(penalty_of)(self._thresholds, entropies)
        return losses, functional.pad(found, (0, len(losses) - self._num_penalised))

    def _gradient_norms(self) -> Tensor:
        """Length of the whole gradient of every member."""
        lengths = torch.cat(
            [torch.linalg.vector_norm(_gradient(joint).view(len(joint.parts), -1), dim=1) for joint in self._joints]
        )
        return lengths.new_zeros(len(self.runs)).index_add(0, self._owners, lengths.square()).sqrt()

    def _update(self, rate: float, norms: Tensor) -> None:
        """Clips, moves the weights and empties the gradients."""
        factors = (self.runs[0].recipe.clip_norm / (norms + CLIP_EPS)).clamp(max=1.0)
        gradients = [_gradient(joint) for joint in self._joints]
        for joint, gradient in zip(self._joints, gradients, strict=True):
            gradient.mul_(joint.rows.of(factors).view(-1, *(1,) * (gradient.ndim - 1)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        torch._foreach_zero_(gradients)


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every member, nats per token. logits: members x batch x T x vocab; targets: batch x T."""
    members = len(logits)
    wanted = targets.flatten().repeat(members)
    return functional.cross_entropy(logits.flatten(0, 2), wanted, reduction="none").view(members, -1).mean(dim=1)


def _gradient(joint: Joint) -> Tensor:
    assert joint.value.grad is not None
    return joint.value.grad


def _joint_state(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """AdamW's state of members at the same step; `step` is one number for all."""
    return {
        moment: states[0][moment].clone() if moment == "step" else torch.stack([state[moment] for state in states])
        for moment in MOMENTS
    }


def _own_state(state: dict[str, Tensor], share: int) -> dict[str, Tensor]:
    return {moment: (state[moment] if moment == "step" else state[moment][share]).clone() for moment in MOMENTS}
