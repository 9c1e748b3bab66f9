"""Loads a model by its name on the command line, and the model of a checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent, load_parent, parent_of, read_parent_architecture
from nas.conversion.pretrained import Pretrained, read_tokenizer
from nas.conversion.score_bounds import bounding_tokens, half_range, set_bounds, unheld
from nas.conversion.verified_fold import LOG_SUMS
from nas.corpus.corpus import Corpus, known_corpus
from nas.corpus.documents import OWN_RULE
from nas.corpus.held_out import trained_on
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights, load_stored
from nas.recipe.candidate import Candidate
from nas.storage import RUNS, newest
from nas.training import checkpoint
from nas.training.checkpoint import Checkpoint
from nas.training.distillation.parts import Gates
from nas.training.manifest import TRAINING_FILE, is_training, read_training, training_tokenizer
from nas.training.objective import Objective
from search_spaces.architecture import Architecture

UNREAD = "unread"  # digest of a parent whose weights are not read


def find_parent(name: str, begin_of_text: str = OWN_RULE) -> Parent:
    """Load a parent. name: as for `load_parent`, or the folder of a training of `nas.train`, or `latest` for the last.

    begin_of_text: as for --begin-of-text. Raises UserError if the model cannot be read, has no tokenizer or a tokenizer
    without this token, if a training has no whole checkpoint, or as `deployable`.
    """
    folder = _training(name)
    found = load_parent(name) if folder is None else parent_of(str(folder), _trained(folder))
    return found if begin_of_text == OWN_RULE else parent_of(found.name, found.model, begin_of_text)


def find_parent_settings(name: str) -> Parent:
    """Return a parent from its settings alone, without weights and tokenizer, and with the digest UNREAD.

    The builtin parent is loaded as by `find_parent`, with the same errors. So is a training, since its architecture
    depends on its weights. For others, a UserError is raised if the settings cannot be read.
    """
    if name == BUILTIN or _training(name) is not None:
        return find_parent(name)
    return Parent(name, Pretrained(read_parent_architecture(name), {}, None), UNREAD)


def _training(name: str) -> Path | None:
    folder = newest(TRAINING_FILE) if name == "latest" else Path(name)
    if folder is None:
        raise UserError(f"there is no training under {RUNS}/ yet; start one with python -m nas.train ARCH.")
    return folder if is_training(folder) else None


def _trained(folder: Path) -> Pretrained:
    training = read_training(folder)
    candidate, corpus = training.candidate, known_corpus(training.corpus)
    architecture, weights, _ = deployable(candidate, checkpoint.load_latest_of(folder, candidate), corpus)
    windows = None if corpus is None else trained_on(Path(corpus.folder))
    return Pretrained(architecture, weights, read_tokenizer(training_tokenizer(folder, training.corpus)), windows)


def deployable(
    candidate: Candidate, trained: Checkpoint, corpus: Corpus | None
) -> tuple[Architecture, dict[str, Tensor], tuple[str, ...]]:
    """Return architecture and weights of a checkpoint's unfolded model, and remarks on attention out of range.

    Scores on `bounding_tokens` of the corpus set the bounds that attention `bounded` subtracts in place of each row's
    maximum, and `power8` before it takes eighth powers. Where `bounded` leaves fixed-point range on them, the returned
    architecture has an exact softmax; `power8` stays. The third result has a sentence for each layer that leaves the
    range. Weights are by `<node>.<suffix>` of the op graph, with a copy of a tied output table.

    Raises UserError if the model still contains components of its parent, or has such attention and there is no corpus.
    """
    model = trained_model(candidate, trained)
    layers, farthest = list(model.architecture.layers), dict[int, float]()
    if not LOG_SUMS.keys().isdisjoint(layer.attention for layer in layers):
        if corpus is None:
            raise UserError(
                f"{candidate.name} must have its training text in the cache, on which the bounds of its attention are "
                f"set, but the text is not there; --resume of its training or search prepares it again."
            )
        tokens = bounding_tokens(corpus, candidate.trained.vocab_size, candidate.recipe.scale.seq_len)
        farthest = set_bounds(model, tokens)
    exact, powers = (unheld(farthest, layers, form) for form in LOG_SUMS)
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


def trained_model(candidate: Candidate, trained: Checkpoint) -> Decoder:
    """Return the model of a checkpoint. Raises UserError if the model still contains components of its parent."""
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
