"""What a model writes: greedy continuations of prompts, and which of them collapse into repetition."""

from collections.abc import Callable, Collection, Sequence

import torch

from nas.model.decoder import Decoder
from nas.model.self_attention import Past

TAIL = 32  # tokens at the end of a continuation that repeat
LONGEST_CYCLE = 16  # tokens; shorter ones, such as a line or a word, repeat more often


def collapses(tokens: Sequence[int]) -> bool:
    """Whether a continuation ends in repetition: its last TAIL tokens equal those a few places earlier.

    A few is 1 to LONGEST_CYCLE, so the last TAIL tokens repeat what is before them at least twice.
    """
    return any(
        len(tokens) >= TAIL + cycle and tokens[-TAIL:] == tokens[-TAIL - cycle : -cycle]
        for cycle in range(1, LONGEST_CYCLE + 1)
    )


@torch.no_grad()
def written(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    ends: Collection[int],
    on_done: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Return greedy continuations of prompts of one length, each until a token of `ends`, which is left out.

    on_done: called with the number of tokens of each.
    """
    tokens = torch.tensor(prompts)
    past = Past()
    for number in range(num_new):
        features = model.continued(tokens[:, past.get_seq_length() :], past)
        tokens = torch.cat((tokens, model.logits_of(features[:, -1:]).argmax(dim=-1)), dim=1)
        on_done(number + 1)
    made = tokens[:, len(prompts[0]) :].tolist()
    return [row[: next((place for place, token in enumerate(row) if token in ends), len(row))] for row in made]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the position, from 1 on, of the first token in which two continuations differ; None if they are equal."""
    if ours == theirs:
        return None
    same = (a == b for a, b in zip(ours, theirs, strict=False))
    return 1 + next((place for place, is_same in enumerate(same) if not is_same), min(len(ours), len(theirs)))
