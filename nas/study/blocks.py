"""The block scores of a run: made before its first trial, kept with it."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nas.blocks.halves import BlockScores, read, written
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.run.config import StudyConfig
from nas.storage import replace_file
from search_spaces.budget.feasible import FeasibleSpace

BLOCKS_FILE = "blocks.csv"
READERS = ("trellis",)  # searchers that read them


def study_blocks(
    config: StudyConfig, feasible: FeasibleSpace, parent: Parent | None, corpus: Corpus, folder: Path, console: Console
) -> BlockScores | None:
    """The scores that the searcher of a run reads; None without a parent, or where it reads none.

    Raises UserError if the run's own are damaged.
    """
    if parent is None or config.searcher not in READERS:
        return None
    path = folder / BLOCKS_FILE
    if path.exists():
        return read(path.read_text(encoding="utf-8"), str(path))
    from nas.blocks.library import block_scores

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("scoring the blocks of the parent", total=1.0)
        scores = block_scores(
            parent, feasible.space.layers, corpus, on_progress=lambda share: bar.update(task, completed=share)
        )
    replace_file(path, written(scores))
    return scores
