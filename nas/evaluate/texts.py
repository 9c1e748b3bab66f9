"""A model next to its parent on text: losses, divergence, agreement by document or window, and greedy continuations."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.corpus.documents import Document, fingerprint
from nas.corpus.tokenizer import Encoder
from nas.evaluate.likelihood import TOKENS_AT_A_TIME
from nas.model.decoder import Decoder, log_probabilities
from nas.model.self_attention import Past

LONGEST = 512  # tokens of a window
FEW = 10  # documents; the intervals of a text with fewer are over its windows
TAIL = 32  # tokens at the end of a continuation that must repeat earlier ones for a collapse
LONGEST_CYCLE = 16  # tokens of the longest repeated piece, such as a line or a word


class Text(NamedTuple):
    """A text as windows of tokens; the first token of each is not predicted.

    units: number of each window's unit. kind: what units are: documents or, if there are fewer than FEW, windows.
    """

    name: str
    windows: tuple[tuple[int, ...], ...]
    units: tuple[int, ...]
    kind: Literal["documents", "windows"]

    @property
    def num_tokens(self) -> int:
        return sum(len(window) - 1 for window in self.windows)

    @property
    def digest(self) -> str:
        return fingerprint([self.windows, self.units])


def windows_of(name: str, documents: Sequence[Document], encoder: Encoder, context: int, most_tokens: int) -> Text:
    """Return a text of about `most_tokens` predicted tokens, as windows of its documents.

    Documents are in a random order, always the same. The first windows of all of them are taken first, then the second
    ones, and so on. context: the models'; a window predicts at most this many tokens, and at most LONGEST. Raises
    UserError if no document has a token to predict, and as `Encoder.encode_prompt`.
    """
    length, windows = min(LONGEST, context), list[tuple[int, int, tuple[int, ...]]]()
    order = np.random.default_rng(0).permutation(len(documents))  # of many documents some are read, of any part
    for place, document in enumerate(order[:most_tokens]):
        ids = encoder.encode_prompt(documents[document].text)
        for number, start in enumerate(range(0, len(ids) - 1, length)):
            window = ids[start : start + length + 1]
            begin = window[0] if encoder.begin is None else encoder.begin.id
            windows.append((number, place, (begin, *window[1:])))
    kept, left = list[tuple[int, int, tuple[int, ...]]](), most_tokens
    for each in sorted(windows):
        if left > 0:
            kept.append(each)
            left -= len(each[2]) - 1
    if not kept:
        raise UserError(f"--text {name} must have text of at least two tokens, but has none.")
    places, made = tuple(place for _, place, _ in kept), tuple(tokens for *_, tokens in kept)
    if len({*places}) < FEW:
        return Text(name, made, tuple(range(len(kept))), "windows")
    return Text(name, made, places, "documents")


class Compared(NamedTuple):
    """Sums over the predicted tokens of a document or window; losses and divergence in nats.

    divergence: KL(parent || model). agreements: number of tokens at which both models have the same most likely token.
    """

    num_tokens: int
    parent_loss: float
    model_loss: float
    divergence: float
    agreements: int


@torch.no_grad()
def compared(
    model: Decoder, parent: Decoder, text: Text, on_done: Callable[[int], None] = lambda done: None
) -> list[Compared]:
    """Return the comparison for each unit of a text, in order. on_done: called with how many windows are done."""
    sums: dict[int, Any] = {}
    order, done = sorted(range(len(text.windows)), key=lambda index: -len(text.windows[index])), 0
    while order:
        length = len(text.windows[order[0]])
        alike = [index for index in order[: max(1, TOKENS_AT_A_TIME // length)] if len(text.windows[index]) == length]
        order = order[len(alike) :]
        measured = _measured(model, parent, torch.tensor([text.windows[index] for index in alike]))
        for index, row in zip(alike, measured.numpy(), strict=True):
            unit = text.units[index]
            sums[unit] = sums.get(unit, 0.0) + row
        on_done(done := done + len(alike))
    return [
        Compared(int(row[0]), float(row[1]), float(row[2]), float(row[3]), int(row[4]))
        for _, row in sorted(sums.items())
    ]


def _measured(model: Decoder, parent: Decoder, tokens: Tensor) -> Tensor:
    """Return the numbers of `Compared` for each window. tokens: windows x (T + 1)."""
    targets, parts = tokens[:, 1:].flatten(), []
    for rows, (mine, wanted) in log_probabilities(model, parent, tokens=tokens[:, :-1]):
        losses = [-each.gather(1, targets[rows, None])[:, 0].double() for each in (wanted, mine)]
        divergence = (wanted.exp() * (wanted - mine)).sum(dim=-1).double()
        agrees = (mine.argmax(dim=-1) == wanted.argmax(dim=-1)).double()
        parts.append(torch.stack([torch.ones_like(divergence), *losses, divergence, agrees], dim=1))
    return torch.cat(parts).view(len(tokens), -1, len(Compared._fields)).sum(dim=1)


def prompts(texts: Sequence[Text], num_prompts: int, length: int) -> list[tuple[int, ...]]:
    """Return at most `num_prompts` prompts, from each text in turn: the first `length` tokens of its longer windows."""
    long = [[window[:length] for window in text.windows if len(window) > length] for text in texts]
    by_turns = [
        windows[turn] for turn in range(max(map(len, long), default=0)) for windows in long if turn < len(windows)
    ]
    return by_turns[:num_prompts]


@torch.no_grad()
def written(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    ends: Collection[int],
    on_done: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt: `num_new` tokens, or those before the first token in `ends`.

    prompts: token ids, all of one length. on_done: called after each step with the number of tokens made per prompt.
    """
    tokens = torch.tensor(prompts)
    past = Past()
    for number in range(num_new):
        features = model.continued(tokens[:, past.get_seq_length() :], past)
        tokens = torch.cat((tokens, model.logits_of(features[:, -1:]).argmax(dim=-1)), dim=1)
        on_done(number + 1)
    made = tokens[:, len(prompts[0]) :].tolist()
    return [row[: next((place for place, token in enumerate(row) if token in ends), len(row))] for row in made]


def collapses(tokens: Sequence[int]) -> bool:
    """Whether a continuation ends in repetition.

    It does if, for some p from 1 to LONGEST_CYCLE, each of its last TAIL tokens equals the one p places earlier.
    """
    return any(
        len(tokens) >= TAIL + cycle and tokens[-TAIL:] == tokens[-TAIL - cycle : -cycle]
        for cycle in range(1, LONGEST_CYCLE + 1)
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the position, from 1 on, of the first token in which two continuations differ; None if they are equal."""
    if ours == theirs:
        return None
    same = (a == b for a, b in zip(ours, theirs, strict=False))
    return 1 + next((place for place, is_same in enumerate(same) if not is_same), min(len(ours), len(theirs)))
