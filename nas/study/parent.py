"""Which trained model the candidates of a study start from."""

from dataclasses import replace
from pathlib import Path

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, NO_PARENT, Parent, kept_parent, load_parent, require_fit
from nas.corpus.corpus import Corpus
from nas.recipe.distillation import parent_architecture
from nas.recipe.recipe import SCALES, Scale, trained_architecture
from nas.run.config import StudyConfig
from nas.run.folder import PARENT_FOLDER, Meta, ParentResult
from nas.training.batches import validate
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import name_of
from search_spaces.pricing import price_architecture


def study_parent(config: StudyConfig, base: Architecture) -> Parent | None:
    """The parent that a new study asks for, or None to train from scratch. base: of its space.

    Unless one is named, the builtin one at scale `proxy`, as far as it fits. Raises UserError if the one named is not
    whole or does not fit.
    """
    if config.parent == NO_PARENT or (config.parent is None and config.scale != "proxy"):
        return None
    parent = load_parent(config.parent or BUILTIN)
    try:
        require_fit(parent, trained_architecture(base, replace(SCALES[config.scale], seq_len=config.seq_len)))
    except UserError:
        if config.parent is None:
            return None
        raise
    return parent


def run_parent(folder: Path, meta: Meta) -> Parent | None:
    """The parent of a run's candidates. Raises UserError if what the run keeps of it is damaged."""
    route = meta.recipe.route
    if route is None or meta.parent is None:
        return None
    return kept_parent(folder / PARENT_FOLDER, meta.parent.name, route.parent)


def parent_result(
    parent: Parent, corpus: Corpus, scale: Scale, feasible: FeasibleSpace, device: str = "cpu"
) -> ParentResult:
    """The parent validated on the tokens that validate its candidates, and priced at the size of the space."""
    priced = feasible.priced
    architecture = parent_architecture(parent.route, priced.space.base)
    cost = price_architecture(architecture, priced.pricer, priced.workload, priced.accounting)
    validation = validate(parent.decoder().to(device), corpus, scale)
    return ParentResult(
        name=parent.name,
        notation=name_of(architecture),
        val_loss=validation.loss,
        latency_s=cost.price.latency_s,
        documents=validation.documents,
    )
