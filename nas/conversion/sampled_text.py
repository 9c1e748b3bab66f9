"""Text sampled from the parent itself, as a corpus: `--data parent`, for a checkpoint that comes without its text.

Source: Liu et al. 2023, LLM-QAT, arXiv 2305.17888, for data-free distillation on text that the model generates.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from costmodel.config.files import decode
from costmodel.errors import UserError
from nas.conversion.pretrained import Pretrained
from nas.corpus.documents import Batch, Document, DocumentSource, Split, Stream, fingerprint
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import given_encoder
from nas.model.decoder import Decoder
from nas.model.self_attention import Past
from nas.model.weights import load_deployed

NAME = "parent"
BATCH = 32  # sequences that are sampled together, from one seed
LONGEST = 256  # tokens of a document
VALIDATION_SHARE = 1 / 8
MOST_VALIDATION = 65_536  # tokens
FORMAT = 1  # of the text; part of the fingerprint
GREEDY_TOKENS = 3  # after the first, which is drawn uniformly; Liu et al. use 3 to 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledText:
    """Settings after `parent:` in `--data`, such as `parent:temperature=0.8,tokens=200000`.

    Attributes:
        temperature: divides the logits before a token is drawn.
        tokens: number of training tokens; by default as many as a training takes.
        seed: seed of the text, which is the same for every seed of a search.

    Raises UserError for a temperature outside 0.1 to 10, fewer than 1024 tokens or a negative seed.
    """

    temperature: float = 1.0
    tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.1 <= self.temperature <= 10 or not (self.tokens is None or self.tokens >= 1024) or self.seed < 0:
            raise UserError(
                "text of the parent needs a temperature from 0.1 to 10, at least 1024 tokens and no negative seed, but "
                f"got {self}."
            )


def sampled_source(
    data: str, parent: Pretrained | None, digest: str, tokens: int, device: str = "cpu"
) -> DocumentSource | None:
    """Return the text that a model generates as a source of documents; None if `--data` asks for another source.

    tokens: number of training tokens if `data` does not set it. digest: `Parent.digest`, part of the fingerprint.
    device: where to sample. Raises UserError for unknown or invalid settings, or without a parent that has a tokenizer.
    """
    if data.partition(":")[0] != NAME:
        return None
    settings = _settings(data)
    if parent is None or parent.tokenizer is None:
        raise UserError(f"--data {data} is text that the parent generates, but there is none; name a --parent.")
    tokens = settings.tokens or tokens
    counts: dict[Split, int] = {"validation": min(MOST_VALIDATION, int(tokens * VALIDATION_SHARE)), "train": tokens}
    content = [NAME, FORMAT, digest, settings.temperature, settings.seed, tokens]
    batches = partial(_batches, parent, settings, device=device)
    return DocumentSource(
        name=data,
        fingerprint=fingerprint(content),
        streams=tuple(Stream(split=split, batches=partial(batches, split, count)) for split, count in counts.items()),
    )


def _settings(data: str) -> SampledText:
    said = data.partition(":")[2]
    pairs = [pair.partition("=") for pair in said.split(",")] if said else []
    types = {"temperature": float, "tokens": int, "seed": int}
    try:
        values = {name: types[name](value) for name, _, value in pairs}
    except (KeyError, ValueError):
        raise UserError(
            f"--data {data} must be `parent`, or say {', '.join(types)} as in parent:temperature=0.8,tokens=200000."
        ) from None
    return decode(SampledText, values, f"--data {data}")


def _batches(
    parent: Pretrained, settings: SampledText, split: Split, tokens: int, position: Any, *, device: str
) -> Generator[Batch, None, None]:
    """Yield batches of documents, each from its own seed, until there are `tokens`.

    position: [tokens, batches] that were made before; None for a new stream.
    """
    assert parent.tokenizer is not None
    model = Decoder(parent.architecture)
    load_deployed(model, parent.weights)
    model = model.requires_grad_(False).eval().to(device)
    encoder = given_encoder(parent.tokenizer, parent.architecture.vocab_size, None)
    length = min(LONGEST, parent.architecture.context)
    made, number = position or [0, 0]
    while made < tokens:
        drawn = sampled(
            model,
            batch=BATCH,
            length=length,
            vocab_size=encoder.vocab_size,
            begin=None if encoder.begin is None else encoder.begin.id,
            temperature=settings.temperature,
            generator=torch.Generator().manual_seed(int(fingerprint([settings.seed, split, number])[:15], 16)),
        )
        # each cut where the model ended it
        kept = [row[: row.index(encoder.end)] if encoder.end in row else row for row in drawn.tolist()]
        with tokenizing("the tokenizer of the parent"):
            texts = [encoder.tokenizer.decode(row) for row in kept]
        made, number = made + sum(len(row) + 1 for row in kept), number + 1
        documents = [Document(split, text, f"{split}-{number}-{at}") for at, text in enumerate(texts) if text]
        yield Batch(documents, [made, number], min(1.0, made / tokens))


@torch.no_grad()
def sampled(
    model: Decoder,
    *,
    batch: int,
    length: int,
    vocab_size: int,
    temperature: float,
    generator: torch.Generator,
    begin: int | None = None,
) -> Tensor:
    """Sample sequences from a model without any prompt: batch x length token ids.

    The first token is uniform over the first `vocab_size` entries, the next GREEDY_TOKENS are the most likely ones, and
    all others are drawn at the temperature. begin: the token that begins every text, which is not returned.

    Source: Liu et al. 2023, arXiv 2305.17888, section 3.1. Raises UserError as `Decoder.step` does.
    """
    tokens = torch.randint(vocab_size, (batch,), generator=generator)
    made, past, device = [tokens], Past(), model.embed.weight.device
    if begin is not None:
        model.step(torch.full_like(tokens, begin).to(device), past)
    for position in range(length - 1):
        logits = model.step(made[-1].to(device), past)[:, :vocab_size].float().cpu()
        if position < GREEDY_TOKENS:
            made.append(logits.argmax(dim=-1))
        else:
            shares = (logits / temperature).softmax(dim=-1)
            made.append(torch.multinomial(shares, 1, generator=generator)[:, 0])
    return torch.stack(made, dim=1)
