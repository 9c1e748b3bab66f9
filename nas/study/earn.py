"""What the weights of a trained candidate earn: the form they really fold to, checked against the trained model."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.conversion.earned import fold_as_far_as
from nas.conversion.fold import folded_placement
from nas.corpus.corpus import Corpus
from nas.model.weights import deployed_weights, load_stored
from nas.recipe.candidate import Candidate, candidate_id
from nas.training import checkpoint
from nas.training.batches import validation_batches
from nas.training.checkpoint import Checkpoint
from nas.training.objective import Objective
from nas.training.outcome import EarnedForm

CHECKED_POSITIONS = 4_096  # of the validation split


def earned_form(candidate: Candidate, corpus: Corpus, folder: Path) -> EarnedForm:
    """Folds the last checkpoint of a completed trial as far as its logits stay what they are.

    Raises UserError if there is no whole checkpoint.
    """
    found = checkpoint.load_latest(folder, {"candidate": candidate_id(candidate)})
    if found is None:
        raise UserError(f"{folder} must have a whole checkpoint to fold, but has none; train the candidate again.")
    scale = candidate.recipe.scale
    inputs = np.concatenate([batch.numpy() for batch, _ in validation_batches(corpus, scale)])
    tokens = inputs[: max(1, CHECKED_POSITIONS // scale.seq_len)]
    earned = fold_as_far_as(candidate.trained, trained_weights(candidate, found), tokens)
    check = earned.check
    return EarnedForm(
        architecture=folded_placement(candidate.architecture, earned.folded.architecture),
        left=earned.folded.left,
        logits_error=check.float_error,
        fixed_point_error=check.fixed_error,
        trained_fixed_point_error=check.trained_fixed_error,
        top1_agreement=check.agreement,
        holds=check.passes,
    )


def trained_weights(candidate: Candidate, found: Checkpoint) -> dict[str, Tensor]:
    """The weights of a checkpoint by node of the op graph, a tied output table written out."""
    model = Objective(candidate, torch.Generator()).model
    load_stored(model, found.weights)
    return {name: value.contiguous().clone() for name, value in deployed_weights(model).items()}
