"""Trains a table: every architecture of a space, by the same training as in a search, with several seeds.

Architectures are trained in the order of their space, all with one seed before any with the next.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from costmodel.errors import UserError
from experiments.trainings import DATA, Plan, train_all
from nas.conversion.parent import BUILTIN, load_parent
from nas.corpus.corpus import prepare
from nas.recipe.recipe import SCALES, ScaleName
from nas.storage import RUNS, locked, replace_file
from nas.study.open_trials import BLOCKS_FILE
from nas.training.distillation.library import block_scores
from nas.training.distillation.sub_layers import to_csv
from search_spaces.notation import placement
from search_spaces.space import SearchSpace, load_space, members

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """A part of the table. space: a file in `experiments/configs`.

    parent: `builtin`, a folder of `experiments/data`, or a path with a slash. committed, blocks: files of
    `experiments/data` with the outcomes of trainings, and the block scores of the parent.
    """

    space: str
    parent: str
    seeds: tuple[int, ...]
    committed: str
    blocks: str

    @property
    def parent_name(self) -> str:
        """The name of the parent, as `load_parent` takes it."""
        return self.parent if self.parent == BUILTIN or "/" in self.parent else str(DATA / self.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML. parts: the parts of the table, by name. data: training text, as for `nas.train`."""

    scale: ScaleName
    parts: dict[str, TablePart]
    data: str = "stdlib"


def run(name: str, settings: Settings, console: Console) -> None:
    """Train all that is not in the table yet, and score the blocks of parents; an interrupted run resumes.

    A UserError is raised if another process runs the experiment, or a parent has not been made yet.
    """
    for part_name, part in settings.parts.items():
        if "/" in part.parent and not Path(part.parent).is_dir():
            made = f"make it by the commands that {name}.yaml begins with"
            raise UserError(f"parent {part.parent!r} of part {part_name!r} must be a folder, but is not there; {made}.")
        folder = RUNS / "experiments" / name / settings.scale / part_name
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            definition = table_space(part).definition
            plan = Plan(
                name=part_name,
                scale=settings.scale,
                base=definition.base,
                dimensions=definition.dimensions,
                rows=table_rows(part),
                seeds=part.seeds,
                parent=part.parent_name,
                data=settings.data,
                committed=part.committed,
            )
            ended = train_all(plan, folder, console)
            if not (DATA / part.blocks).exists():
                parent, scale = load_parent(part.parent_name), SCALES[settings.scale]
                tokenizer, windows = parent.model.tokenizer, parent.model.windows
                corpus = prepare(settings.data, scale.vocab_size or 0, tokenizer=tokenizer, of_parent=windows)
                scores = block_scores(parent, table_space(part).layers, corpus, seq_len=scale.seq_len)
                replace_file(folder / BLOCKS_FILE, to_csv(scores))
                console.print(f"scores of the parent's blocks: {folder / BLOCKS_FILE}", soft_wrap=True)
        perplexities = sorted(training.perplexity for training in ended.values() if training.perplexity is not None)
        reach = f", perplexities from {perplexities[0]:.2f} to {perplexities[-1]:.2f}" if perplexities else ""
        console.print(
            f"part {part_name}: {len({job.row for job in ended})} architectures, seeds "
            f"{', '.join(map(str, part.seeds))}, {len(ended) - len(perplexities)} diverged{reach}"
        )


def table_space(part: TablePart) -> SearchSpace:
    """Return the space of a part."""
    return load_space(str(CONFIGS / part.space))


def table_rows(part: TablePart) -> tuple[str, ...]:
    """Return the names of the members of a part's space, in order; regularised ones are EReg(...)."""
    space = table_space(part)
    placements = space.definition.members or [placement(member.architecture) for member in members(space)]
    names = [f"EReg({name})" if regularised else name for name in placements for regularised in space.recipes]
    return tuple(dict.fromkeys(names))
