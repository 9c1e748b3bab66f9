"""Short trainings of tiny models: what the tests of this folder train, and what of it must not depend on the clock."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.conversion.transfer import transferred
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, Recipe, Scale
from nas.training import checkpoint
from nas.training.objective import Objective
from nas.training.outcome import Outcome, RungRecord
from search_spaces.bases import BASES
from search_spaces.notation import parse

SCALE = replace(
    SCALES["smoke"], seq_len=16, vocab_size=300, tokens=16 * 4 * 16, batch=4, micro_batch=4, validation_tokens=128
)  # 16 steps of 64 tokens


def candidate(name: str = "SM+LN+G", scale: Scale = SCALE, base: str = "tiny", **recipe: Any) -> Candidate:
    return Candidate(architecture=parse(name, BASES[base]).architecture, recipe=Recipe(scale=scale, **recipe))


def parent_of(made: Candidate) -> tuple[Decoder, dict[str, Tensor]]:
    """An untrained parent, and the weights that a candidate starts from."""
    plain = replace(made, architecture=parse("SM+LN+G", BASES["tiny"]).architecture, recipe=Recipe(scale=SCALE))
    parent = build(plain.trained, torch.Generator().manual_seed(7)).requires_grad_(False)
    return parent, transferred(parent.architecture, deployed_weights(parent), made.initial_architecture)


def before_every_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Objective], object]) -> None:
    original = Objective.backward

    def backward(self, inputs, targets, **rest):
        act(self)
        return original(self, inputs, targets, **rest)

    monkeypatch.setattr(Objective, "backward", backward)


def timeless(events: Iterable[RungRecord | Outcome]) -> list[RungRecord | Outcome]:
    return [replace(event, seconds=0.0) for event in events]


def assert_resumes(
    run: Callable[..., Iterable[RungRecord | Outcome]], folder: Path, *, stopped_after: int
) -> list[RungRecord | Outcome]:
    """Returns the events of a whole `run`, after one in another folder that was stopped and went on to the same end."""
    whole = timeless(run(folder=folder / "whole"))
    stop = chain([False] * (stopped_after - 1), repeat(True))
    list(run(folder=folder / "stopped", stop=lambda: next(stop)))
    assert checkpoint.load_latest(folder / "stopped").step == stopped_after
    assert timeless(run(folder=folder / "stopped")) == whole
    ends = [checkpoint.load_latest(folder / name).weights for name in ("whole", "stopped")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    return whole
