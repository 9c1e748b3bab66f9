"""Log-likelihoods of continuations of contexts, tokenised as in lm-evaluation-harness.

Context and continuation are tokenised together. If the context alone has n tokens, the continuation is what follows the
first n. Spaces at the end of a context go to the continuation. A context begins with the token that begins a text, if
the tokenizer adds one. A context that several continuations share is run once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nas.corpus.tokenizer import Encoder
from nas.model.decoder import Decoder
from nas.model.self_attention import Past

KEPT_NUMBERS = 1 << 27  # keys and values that are held at a time: 512 MiB
TOKENS_AT_A_TIME = 1024  # of a batch, unless one sequence has more
ROWS_AT_A_TIME = 256  # of logits, each as long as the vocabulary


class Request(NamedTuple):
    """Token ids of a context, at least one, and of its continuation. is_cut: whether the context lost its beginning."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    is_cut: bool


class Likelihood(NamedTuple):
    """The likelihood of a continuation.

    log_likelihood: sum over its tokens, nats. is_greedy: whether each token was the most likely one.
    """

    log_likelihood: float
    is_greedy: bool


def request_of(encoder: Encoder, context: str, continuation: str, most_tokens: int) -> Request | None:
    """Return the tokens of context and continuation; None if the continuation alone is too long or adds no token.

    most_tokens: the model's context. If context and continuation are too long together, the context loses its
    beginning, but still begins with the token that begins a text, if the tokenizer adds one. An empty context is
    replaced by that token or, without one, by the token that ends a document. Raises UserError as
    `Encoder.encode_prompt`.
    """
    kept = context.rstrip()
    before = encoder.encode_prompt(kept) or [encoder.end]
    whole = encoder.encode_prompt(context + continuation)
    after = whole[len(before) if kept or encoder.begin else 0 :]
    if not after or len(after) > most_tokens:
        return None
    left = most_tokens + 1 - len(after)  # the last token is only predicted
    is_cut = len(before) > left
    before = before[-left:]
    if is_cut and encoder.begin is not None:
        before[0] = encoder.begin.id
    return Request(tuple(before), tuple(after), is_cut)


@torch.no_grad()
def likelihoods(
    model: Decoder, requests: Sequence[Request], on_done: Callable[[int], None] = lambda done: None
) -> list[Likelihood]:
    """Return the likelihood of each request's continuation. on_done: called with the number of requests done so far."""
    found: dict[int, Likelihood] = {}
    for stem, branches in _batches(model, requests):
        for indices, features in _features(model, stem, branches):
            targets = [torch.tensor(requests[index].continuation) for index in indices]
            sizes = [len(target) for target in targets]
            rows = torch.cat([part[-size:] for part, size in zip(features, sizes, strict=True)])
            scores, are_likely = [], []
            parts = (torch.split(part, ROWS_AT_A_TIME) for part in (rows, torch.cat(targets)))
            for some, wanted in zip(*parts, strict=True):
                logits = model.logits_of(some).float()
                scores.append(-functional.cross_entropy(logits, wanted, reduction="none").double())
                are_likely.append(logits.argmax(dim=-1) == wanted)
            by_request = zip(*(torch.split(torch.cat(part), sizes) for part in (scores, are_likely)), strict=True)
            for index, (score, likely) in zip(indices, by_request, strict=True):
                found[index] = Likelihood(float(score.sum()), bool(likely.all()))
        on_done(len(found))
    return [found[index] for index in range(len(requests))]


class Branch(NamedTuple):
    """Tokens that continue a sequence of a batch. request: index of the request. row: of the sequence in the batch."""

    request: int
    row: int
    tokens: tuple[int, ...]


def _batches(model: Decoder, requests: Sequence[Request]) -> Iterator[tuple[Tensor, list[Branch]]]:
    """Yield sequences of equal lengths, batch x T, with the branches that continue them."""
    by_context: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        by_context[request.context].append(index)
    # whether several requests share a sequence, its tokens -> indices of these requests, and what follows
    stems: defaultdict[tuple[bool, tuple[int, ...]], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for context, indices in by_context.items():
        shares = len(indices) > 1
        for index in indices:
            seen = requests[index].continuation[:-1]
            stems[shares, context if shares else context + seen].append((index, seen if shares else ()))
    alike: defaultdict[tuple[int, bool], list[tuple[int, ...]]] = defaultdict(list)
    for shares, stem in stems:
        alike[len(stem), shares].append(stem)
    per_token = 2 * model.architecture.d_model * model.architecture.num_layers
    for (length, shares), rows in sorted(alike.items(), reverse=True):  # the slowest first
        most_branches = max(len(stems[shares, stem]) for stem in rows)
        most_kept = KEPT_NUMBERS // (length * per_token * most_branches)
        size = max(1, min(most_kept, TOKENS_AT_A_TIME // length))
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            yield (
                torch.tensor(some),
                [Branch(index, row, seen) for row, stem in enumerate(some) for index, seen in stems[shares, stem]],
            )


def _features(model: Decoder, stem: Tensor, branches: list[Branch]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield indices of requests, and the input of the vocabulary projection at their last tokens, each T x d_model."""
    past = Past()
    if not any(branch.tokens for branch in branches):
        whole = model.features(stem, with_entropies=False)[0]
        yield [branch.request for branch in branches], [whole[branch.row] for branch in branches]
        return
    whole = model.continued(stem, past)
    ordered = sorted(branches, key=lambda branch: -len(branch.tokens))
    while ordered:
        longest = len(ordered[0].tokens)
        size = max(1, TOKENS_AT_A_TIME // 2 // max(1, longest))
        some, ordered = ordered[:size], ordered[size:]
        rows = torch.tensor([branch.row for branch in some])
        last = whole[rows, -1:]
        if longest:
            padded = torch.tensor([branch.tokens + (0,) * (longest - len(branch.tokens)) for branch in some])
            last = torch.cat((last, model.continued(padded, past.of_rows(rows))), dim=1)
        yield (
            [branch.request for branch in some],
            [row[: 1 + len(branch.tokens)] for row, branch in zip(last, some, strict=True)],
        )
