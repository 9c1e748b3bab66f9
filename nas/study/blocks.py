"""The block scores of a run, computed or read from the cache, and saved with the run."""

from collections.abc import Callable

from rich.console import Console

from costmodel.config.files import MOST_YAML, read_text
from nas.report.progress import share_progress
from nas.storage import replace_file
from nas.study.resolve import ResolvedStudy, device_of
from nas.training.distillation.library import block_scores, settings_of
from nas.training.distillation.sub_layers import BlockScores, from_csv, to_csv

BLOCKS_FILE = "blocks.csv"
READERS = ("trellis",)  # searchers that use block scores


def study_blocks(
    study: ResolvedStudy, console: Console, on_share: Callable[[float], None] = lambda share: None
) -> BlockScores | None:
    """Return the block scores that the searcher uses; None without a parent, or if it uses none.

    If candidates start from sub-layers that were trained on their own, these are scored, and saved. Raises UserError if
    the saved scores of the run are damaged.
    """
    config, parent, recipe = study.config, study.parent, study.meta.recipe
    if parent is None or config.searcher not in READERS:
        return None
    path = study.folder / BLOCKS_FILE
    if path.exists():
        return from_csv(read_text(path, MOST_YAML), str(path))
    settings, keep = settings_of(recipe), bool(recipe.distillation and recipe.distillation.blockwise_tokens)
    with share_progress(console, "scoring the blocks of the parent") as on_progress:

        def both(share: float) -> None:
            on_progress(share)
            on_share(share)

        scores = block_scores(
            parent,
            study.feasible.space.layers,
            study.corpus,
            settings,
            seq_len=config.seq_len,
            first_depth=config.kept_layers or 0,
            device=device_of(config),
            keep=keep,
            on_progress=both,
        )
    replace_file(path, to_csv(scores))
    return scores
