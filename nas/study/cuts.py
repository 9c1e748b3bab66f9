"""Cuts: members of the space that are judged by a nested training before any is trained by itself.

The searcher chooses them as it chooses looks, a few at a time; each takes about a second. They are kept with the run.
"""

import csv
import io
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from costmodel.errors import UserError
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.recipe.recipe import Recipe
from nas.run.config import StudyConfig, study_candidate
from nas.searchers.early import after_cuts
from nas.searchers.strategy import Room, SearchProblem, Strategy, searcher_of
from nas.storage import replace_file
from nas.study.blocks import READERS, progress
from nas.study.nested import can_nest, nested_training
from nas.study.parent import teacher_of
from nas.training.batches import validate
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member, name_of, parse

CUTS_FILE = "cuts.csv"
COLUMNS = ("notation", "nats_over_parent")
NUM_CUTS = 192
AT_A_TIME = 8  # chosen; fewer know more, more take less of the searcher's time
NESTED_SHARE = 2.0  # of a candidate's tokens, by default


def nested_tokens(config: StudyConfig, parent: Parent | None, recipe: Recipe) -> int:
    """Tokens of the nested training of a study; 0 for none. Raises UserError where they are asked for in vain."""
    reasons = {
        "a parent, but candidates start from scratch": parent is None,
        f"searcher {' or '.join(READERS)}, but it is {config.searcher}": config.searcher not in READERS,
        "that no layer stays the parent's, but some do": config.kept_layers is not None,
        "a parent of live norms, softmax and FFNs without a gate": parent is not None
        and not can_nest(parent.model.architecture),
    }
    lacking = next((reason for reason, holds in reasons.items() if holds), None)
    if config.nested_tokens is None:
        fits = lacking is None and config.scale == "proxy" and config.knowledge != "shipped"
        return round(NESTED_SHARE * recipe.scale.tokens) if fits else 0
    if config.nested_tokens and lacking:
        raise UserError(f"--nested-tokens needs {lacking}; leave it out.")
    return config.nested_tokens


def study_cuts(
    problem: SearchProblem,
    config: StudyConfig,
    parent: Parent,
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    console: Console,
) -> dict[Member, float]:
    """Nats over the parent of the members that the searcher asks to look at, those that the run has kept first."""
    path, feasible = folder / CUTS_FILE, problem.feasible
    cuts = read_cuts(path, feasible) if path.exists() else {}
    if len(cuts) >= NUM_CUTS:
        return cuts
    assert config.nested_tokens
    strategy = searcher_of(config.searcher)(problem)
    teacher = teacher_of(parent, corpus, recipe, "cpu")
    with progress(console, "training all placements at once") as on_progress:
        nested = nested_training(
            parent,
            feasible.space.layers,
            corpus,
            recipe,
            teacher,
            tokens=config.nested_tokens,
            log=console.print,
            on_progress=on_progress,
        )
    parents = validate(parent.decoder(), corpus, recipe.scale, recipe.scale.rung_validation_tokens).loss
    num_threads = torch.get_num_threads()  # of each cut, as a thread of ours is one that torch has not set up
    at_a_time = max(1, len(os.sched_getaffinity(0)) // num_threads)
    with (
        progress(console, "judging placements") as on_progress,
        ThreadPoolExecutor(at_a_time, initializer=torch.set_num_threads, initargs=(num_threads,)) as threads,
    ):
        while len(cuts) < NUM_CUTS and (members := _chosen(strategy, problem, cuts, config.seed)):
            losses = threads.map(nested.loss, [study_candidate(recipe, member).trained for member in members])
            cuts |= {member: loss - parents for member, loss in zip(members, losses, strict=True)}
            _write(path, cuts)
            on_progress(len(cuts) / NUM_CUTS)
    return cuts


def read_cuts(path: Path, feasible: FeasibleSpace) -> dict[Member, float]:
    """The cuts of a run. Raises UserError if the file is damaged."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(row["notation"], float(row["nats_over_parent"])) for row in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} must have the columns {', '.join(COLUMNS)}, but: {error}; remove it.") from None
    return {parse(notation, feasible.space.base): over for notation, over in rows}


def _chosen(strategy: Strategy, problem: SearchProblem, cuts: Mapping[Member, float], seed: int) -> list[Member]:
    """The next members, by what is expected of those before; none where the space has no more."""
    assert problem.parent_loss is not None
    trained = after_cuts(cuts, [], problem.parent_loss)
    rng, room = np.random.default_rng([seed, NUM_CUTS, len(cuts)]), Room(looks=NUM_CUTS, ends=1, per_end=NUM_CUTS)
    requests = strategy.requests(AT_A_TIME, rng, cuts.keys(), trained, room)
    return [request.member for request in requests if request.is_look]


def _write(path: Path, cuts: Mapping[Member, float]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for member, over in cuts.items():
        writer.writerow((name_of(member.architecture, entropy_regularised=member.entropy_regularised), repr(over)))
    replace_file(path, text.getvalue())
