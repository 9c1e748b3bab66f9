"""The papers' recipes on each of their corpora, for `--scale paper`."""

import math
from dataclasses import replace

from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe, ScaleName, from_parent

# Source: arXiv 2410.13060 and its training code, which do not state the betas.
CODEPARROT = Recipe(
    scale=SCALES["paper"],
    data="codeparrot",
    schedule="linear",
    final_rate_share=0.0,
    temperature_init=1e-2,  # arXiv 2501.03489
)

# Source: arXiv 2501.03489 and the Languini Kitchen that it uses (arXiv 2309.11197); the shortest of its three runs.
LANGUINI = Recipe(
    scale=replace(
        SCALES["paper"],
        vocab_size=16_384,
        seq_len=512,
        tokens=18_265 * 128 * 512,
        batch=128,
        learning_rate=6e-4,
        warmup_share=200 / 18_265,
    ),
    data="languini",
    schedule="cosine",
    final_rate_share=0.01,
    weight_decay=0.0,
    clip_norm=math.inf,  # gradients are not clipped
    temperature_init=1e-1,
)

PAPER_RECIPES = {recipe.data: recipe for recipe in (CODEPARROT, LANGUINI)}

# The papers' weights, 1e-5 and 5e-5, are for penalties summed over the rows of a batch, as in their code.
PAPER_PENALTIES = {
    "codeparrot": EntropyRegularisation(weight=1e-5 * 128 * 128),
    "languini": EntropyRegularisation(weight=5e-5 * 128 * 512),
}


def recipe_at(
    name: ScaleName,
    data: str,
    *,
    entropy_regularised: bool,
    distillation: DistillationSchedule | None = None,
    seq_len: int | None = None,
    tokens: int | None = None,
) -> Recipe:
    """Return the recipe of a scale on some data, with a distillation schedule if there is a parent.

    None keeps the recipe's own sequence length or tokens. Raises UserError for a number out of range.
    """
    recipe = recipe_for(name, data, entropy_regularised=entropy_regularised)
    recipe = recipe if distillation is None else from_parent(recipe, distillation)
    scale = recipe.scale
    seq_len, tokens = scale.seq_len if seq_len is None else seq_len, scale.tokens if tokens is None else tokens
    return replace(recipe, scale=replace(scale, seq_len=seq_len, tokens=tokens))


def recipe_for(scale: ScaleName, data: str, *, entropy_regularised: bool) -> Recipe:
    """Return the recipe of a scale on some data; for scale `paper` the papers', on their corpora and copies of them."""
    corpus = data.partition(":")[0] if scale == "paper" else ""
    recipe = PAPER_RECIPES.get(corpus, Recipe(scale=SCALES[scale], optimizer="muon" if scale == "proxy" else "adamw"))
    penalty = PAPER_PENALTIES.get(corpus, EntropyRegularisation()) if entropy_regularised else None
    return replace(recipe, data=data, entropy=penalty)
