"""Short trainings of tiny models: what the tests of this folder train, and what of it must not depend on the clock."""

from collections.abc import Iterable
from dataclasses import replace

from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe, Scale
from nas.training.outcome import Outcome, RungRecord
from search_spaces.bases import BASES
from search_spaces.notation import parse

SCALE = replace(
    SCALES["smoke"], seq_len=16, vocab_size=300, tokens=16 * 4 * 16, batch=4, micro_batch=4, validation_tokens=128
)  # 16 steps of 64 tokens


def candidate(
    name: str = "SM+LN+G", scale: Scale = SCALE, entropy: EntropyRegularisation | None = None, base: str = "tiny"
) -> Candidate:
    return Candidate(architecture=parse(name, BASES[base]).architecture, recipe=Recipe(scale=scale, entropy=entropy))


def timeless(events: Iterable[RungRecord | Outcome]) -> list[RungRecord | Outcome]:
    return [replace(event, seconds=0.0) for event in events]
