"""Verifies the folded form of trained candidates, and compares them on the second corpus and with their parent."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.conversion.fold import at_dimensions
from nas.conversion.parent import Parent
from nas.conversion.score_bounds import bounding_tokens, half_range, set_bounds, unheld
from nas.conversion.verified_fold import LOG_SUMS, check_tokens, fold_as_far_as
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import DocumentLoss
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights, load_stored
from nas.recipe.candidate import Candidate, candidate_id
from nas.training import checkpoint
from nas.training.batches import agreement, validate
from nas.training.checkpoint import Checkpoint
from nas.training.distillation.parts import Gates
from nas.training.objective import Objective
from nas.training.outcome import Agreement, VerifiedForm
from search_spaces.architecture import Architecture


def verified_form(candidate: Candidate, corpus: Corpus, folder: Path, protocol: str) -> VerifiedForm:
    """Fold the last checkpoint of a completed trial as far as its logits stay the same in a protocol's fixed point.

    Raises UserError if there is no whole checkpoint.
    """
    latest, trained = _latest(candidate, folder, "fold"), candidate.trained
    _, tokens = check_tokens(corpus, trained.vocab_size, candidate.recipe.scale.seq_len)
    architecture, weights, left = deployable(candidate, latest, bounding_tokens(corpus, tokens))
    folded, check = fold_as_far_as(architecture, weights, tokens, protocol)
    return VerifiedForm(
        architecture=at_dimensions(folded.architecture, candidate.architecture),
        left=(*left, *folded.left),
        logits_error=check.float_error,
        fixed_point_error=check.fixed_error,
        trained_fixed_point_error=check.trained_fixed_error,
        top1_agreement=check.agreement,
        holds=check.passes,
    )


def deployable(
    candidate: Candidate, trained: Checkpoint, tokens: Tensor
) -> tuple[Architecture, dict[str, Tensor], tuple[str, ...]]:
    """Load the model of a checkpoint, not folded, with attention bounds set on these tokens, sequences x T.

    Returns its architecture, with exact softmax where a bounded one leaves fixed-point range; its weights by node of
    the op graph, a tied output table written out; and these layers, with those whose eighth powers leave it, which have
    no replacement. Raises UserError if it still contains components of its parent.
    """
    model = trained_model(candidate, trained)
    layers = list(model.architecture.layers)
    farthest = set_bounds(model, tokens)
    exact, powers = (
        unheld({depth: apart for depth, apart in farthest.items() if layers[depth].attention == form}, form)
        for form in LOG_SUMS
    )
    for depth in exact:
        layers[depth] = replace(layers[depth], attention="softmax")
    dropped = tuple(f"layers.{depth}.attention.bound." for depth in exact)
    weights = {
        name: value.contiguous().clone()
        for name, value in deployed_weights(model).items()
        if not name.startswith(dropped)
    }
    left = (
        *(f"layers.{depth}.attention: its rows are too far apart for a bounded softmax" for depth in exact),
        *(
            f"layers.{depth}.attention: sums of its rows of eighth powers are up to e^{farthest[depth]:.1f} from "
            f"their middle, and fixed point holds e^{half_range('power8'):g}"
            for depth in powers
        ),
    )
    return replace(model.architecture, layers=tuple(layers)), weights, left


def second_documents(
    candidate: Candidate, second: Corpus, folder: Path, device: str = "cpu"
) -> tuple[DocumentLoss, ...]:
    """Return the losses by document of a completed trial on a second corpus."""
    model = trained_model(candidate, _latest(candidate, folder, "validate"))
    return validate(model.eval().to(device), second, candidate.recipe.scale).documents


def agreement_with_parent(
    candidate: Candidate, parent: Parent, corpus: Corpus, folder: Path, device: str = "cpu"
) -> Agreement:
    """Compare the predictions of a completed trial with its parent's. Raises UserError as `verified_form` does."""
    model = trained_model(candidate, _latest(candidate, folder, "compare"))
    return agreement(model.eval().to(device), parent.decoder().to(device), corpus, candidate.recipe.scale)


def _latest(candidate: Candidate, folder: Path, purpose: str) -> Checkpoint:
    latest = checkpoint.load_latest(folder, {"candidate": candidate_id(candidate)})
    if latest is None:
        raise UserError(f"{folder} must have a whole checkpoint to {purpose}, but has none; train the candidate again.")
    return latest


def trained_model(candidate: Candidate, trained: Checkpoint) -> Decoder:
    """Load the model of a checkpoint. Raises UserError if it still contains components of its parent."""
    model = Objective(candidate, torch.Generator()).model
    if candidate.recipe.distillation is not None:
        gates = Gates(model, candidate.trained, candidate.recipe.distillation)
        gates.move(step=trained.step, num_steps=candidate.recipe.scale.num_steps)
    if model.architecture != candidate.trained:
        raise UserError(
            f"{candidate.name} is still on the way from its parent at step {trained.step} of "
            f"{candidate.recipe.scale.num_steps}; train it to the end."
        )
    load_stored(model, trained.weights)
    return model
