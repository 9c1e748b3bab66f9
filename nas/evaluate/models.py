"""The two models that are compared, and the tokenizer that they must share."""

from collections.abc import Iterable
from typing import NamedTuple

from costmodel.errors import UserError
from nas.corpus.tokenizer import Encoder, given_encoder
from nas.model.decoder import Decoder
from nas.study.parent import find_parent

PROBE_CHARACTERS = 4096  # of a text; where tokenizers cut otherwise, they do so soon


class Judged(NamedTuple):
    """A model to be evaluated, with its tokenizer. digest: hash of architecture, weights and tokenizer."""

    name: str
    digest: str
    decoder: Decoder
    encoder: Encoder


def find_judged(name: str) -> Judged:
    """Load a model by name. Raises UserError as `find_parent` does, or if its tokenizer is not complete."""
    found = find_parent(name)
    assert found.model.tokenizer is not None
    encoder = given_encoder(found.model.tokenizer, found.model.architecture.vocab_size, None)
    return Judged(found.name, found.digest, found.decoder(), encoder)


def shared_encoder(parent: Judged, model: Judged, probes: Iterable[str]) -> Encoder:
    """Return the parent's encoder. Raises UserError, with the reason, if the model's encodes `probes` differently."""
    theirs, ours = parent.encoder, model.encoder
    why = ""
    sizes = [each.decoder.architecture.vocab_size for each in (model, parent)]
    differing = sorted(theirs.tokenizer.get_vocab().items() ^ ours.tokenizer.get_vocab().items())
    begins = [each.begin.token if each.begin else None for each in (ours, theirs)]
    if sizes[0] != sizes[1]:
        why = f"their vocabularies have {sizes[0]:,} and {sizes[1]:,} entries"
    elif differing:
        token = differing[0][0]
        ids = [each.tokenizer.token_to_id(token) for each in (ours, theirs)]
        why = f"token {token!r} is {ids[0]} in one and {ids[1]} in the other"
    elif begins[0] != begins[1]:
        why = f"one begins a text with {begins[0]!r} and the other with {begins[1]!r}"
    for probe in probes if not why else ():
        if theirs.encode_prompt(probe[:PROBE_CHARACTERS]) != ours.encode_prompt(probe[:PROBE_CHARACTERS]):
            why = f"they cut {probe[:40]!r} otherwise"
            break
    if why:
        raise UserError(
            f"{model.name} must have the tokenizer of {parent.name}, since they are compared token by token, but {why}."
        )
    return theirs
