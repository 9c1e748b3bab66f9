"""Text sampled from the parent itself, as a corpus: `--data parent`, for a checkpoint that comes without its text.

Source: Liu et al. 2023, LLM-QAT, arXiv 2305.17888, for data-free distillation on text that the model generates.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from costmodel.config.files import decode
from costmodel.errors import UserError
from nas.conversion.pretrained import Pretrained
from nas.corpus.documents import Batch, Document, DocumentSource, Split, Stream, fingerprint
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import Encoder, given_encoder
from nas.model.decoder import Decoder
from nas.model.sampling import sampled
from nas.model.weights import load_deployed

NAME = "parent"
BATCH = 32  # sequences that are sampled together, from one seed
LONGEST = 256  # tokens of a document
VALIDATION_SHARE = 1 / 8
MOST_VALIDATION = 65_536  # tokens
FORMAT = 1  # of the text; part of the fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledText:
    """Settings after `parent:` in `--data`, such as `parent:temperature=0.8,tokens=200000`.

    Attributes:
        temperature: divides the logits before a token is drawn.
        tokens: number of training tokens; by default as many as a training takes.
        seed: seed of the text, which is the same for every seed of a search.
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

    tokens: number of training tokens if `data` does not set it. digest: the parent's. device: where to sample.

    Raises UserError for unknown settings, or without a parent that has a tokenizer.
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
    """Yield batches of documents, each from its own seed, until there are `tokens`. position: [tokens, batches]."""
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
        with tokenizing("the tokenizer of the parent"):
            texts = [_text(row, encoder) for row in drawn.tolist()]
        made, number = made + sum(count for _, count in texts), number + 1
        names = (f"{split}-{number}-{place}" for place in range(BATCH))
        documents = [Document(split, text, name) for name, (text, _) in zip(names, texts, strict=True) if text]
        yield Batch(documents, [made, number], min(1.0, made / tokens))


def _text(row: list[int], encoder: Encoder) -> tuple[str, int]:
    """Return a document, cut where the model ended it, and its number of tokens."""
    kept = row[: row.index(encoder.end)] if encoder.end in row else row
    return encoder.tokenizer.decode(kept), len(kept) + 1
