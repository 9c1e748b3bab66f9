"""Converts documents to token ids, by a tokenizer that comes with a model or corpus or is trained here."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from costmodel.config.files import MOST_JSON, read_bytes, read_json, read_text
from costmodel.errors import UserError
from nas.corpus.documents import NO_TOKEN, OWN_RULE, DocumentSource, GivenTokenizer, texts
from nas.corpus.foreign_tokenizer import MOST_CHARACTERS, read_foreign_tokenizer, tokenizing
from nas.storage import replace_file

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # where transformers looks for the token after a document
GENERATION_FILE = "generation_config.json"  # where transformers looks for the tokens that end a text
END_OF_TEXT = "<|endoftext|>"  # after every document, as in GPT-2
TOKENIZER_BYTES = 100_000_000  # of training text for the tokenizer: merges settle long before
PIECE_CHARACTERS = 1 << 20  # longer documents are encoded in pieces of whole lines, which bounds memory
KEPT_FILES = (  # what a tokenizer may come with beside TOKENIZER_FILE
    TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    GENERATION_FILE, "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginOfText:
    """The token with which each text and each sequence of a corpus begins."""

    token: str
    id: int

    def set_in(self, sequences: NDArray[Any]) -> None:
        """Put this token in place of the first token of each sequence. sequences: rows x tokens, changed in place."""
        sequences[:, 0] = self.id


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Converts texts to token ids.

    name: includes a digest of the tokenizer. vocab_size: the tokenizer's largest id + 1, or the model's vocab_size if
        that is less. begin: the token that the tokenizer adds before a text, if any; stored documents are without it.
        end: id of the token that ends a document. ends: ids of tokens that end an answer: `end` and others, such as the
        end of a turn. after: ids that are stored after every document that is not cut. seq_len: length of the sequences
        into which each document is cut; None if documents are not cut. A sequence is stored with the token after it,
        as seq_len + 1 ids, and the rest of the document is dropped.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    begin: BeginOfText | None
    end: int
    ends: frozenset[int]
    after: tuple[int, ...]
    seq_len: int | None

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return id_type(self.vocab_size)

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Return the ids to store for each document: its tokens and `after`, or its sequences one after the other.

        A text with too few tokens gets no ids. Raises UserError for a token beyond the vocabulary or a failed encoding.
        """
        pieces = [_pieces(text) for text in documents]
        with tokenizing(f"the tokenizer {self.name}"):
            encodings = iter(
                self.tokenizer.encode_batch([piece for parts in pieces for piece in parts], add_special_tokens=False)
            )
        return [self._cut([token for _ in document for token in next(encodings).ids]) for document in pieces]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt, after the id of `begin` if there is one. Raises UserError as `encode`."""
        with tokenizing(f"the tokenizer {self.name}"):
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        self._require_known(ids)
        return [*([self.begin.id] if self.begin else []), *ids]

    def _require_known(self, ids: Sequence[int]) -> None:
        if ids and (largest := max(ids)) >= self.vocab_size:
            raise UserError(
                f"text must be in the {self.vocab_size} tokens of the model, but has "
                f"{self.tokenizer.id_to_token(largest)!r}, of id {largest} in {self.name}; take that out."
            )

    def _cut(self, ids: list[int]) -> NDArray[np.unsignedinteger[Any]]:
        self._require_known(ids)
        if self.seq_len is None:
            return np.asarray([*ids, *self.after] if ids else [], dtype=self.dtype)
        starts = np.arange(max(0, len(ids) - 1) // self.seq_len) * self.seq_len
        return np.asarray(ids, dtype=self.dtype)[starts[:, None] + np.arange(self.seq_len + 1)].reshape(-1)


def given_encoder(given: GivenTokenizer, vocab_size: int | None, seq_len: int | None) -> Encoder:
    """Return the encoder of a tokenizer.

    vocab_size: the model's, or None for the tokenizer's. Ids of added tokens may lie beyond it, as in Gemma 3, but then
        no text may have these tokens. seq_len: as in `Encoder`. Raises UserError if the tokenizer is damaged, has other
        ids beyond `vocab_size`, lacks the token that ends a document, or begins a text with more than one token.
    """
    tokenizer = read_foreign_tokenizer(given.json, f"the tokenizer of {given.name}")
    tokenizer.no_truncation()  # saved if a call with `max_length` came before save_pretrained
    tokenizer.no_padding()
    size = num_ids(tokenizer)
    if vocab_size is not None and num_ids(tokenizer, added=False) > vocab_size:
        raise UserError(
            f"the tokenizer of {given.name} has {tokenizer.get_vocab_size()} entries, but the model's vocabulary, for "
            f"ids up to {size - 1}, only {vocab_size}; use the right tokenizer, or an architecture with a larger one."
        )
    if (end := tokenizer.token_to_id(given.end_of_text)) is None:
        raise UserError(f"the tokenizer of {given.name} must have the token {given.end_of_text}, but has not.")
    with tokenizing(f"the tokenizer of {given.name}"):
        before, after = _around(tokenizer)
    if len(before) > 1:
        raise UserError(
            f"the tokenizer of {given.name} begins a text with {len(before)} tokens, but sequences begin with one at "
            f"most; name it by --begin-of-text, or none."
        )
    return Encoder(
        name=f"{given.name}-{size}-{hashlib.sha256(given.json.encode()).hexdigest()[:8]}",
        tokenizer=tokenizer,
        vocab_size=size if vocab_size is None else min(size, vocab_size),
        begin=BeginOfText(token=str(tokenizer.id_to_token(before[0])), id=before[0]) if before else None,
        end=end,
        ends=frozenset((end, *end_ids(json.loads(dict(given.files).get(GENERATION_FILE, b"{}"))))),
        after=after or (end,),
        seq_len=seq_len,
    )


def end_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the ids of tokens that end a generation, from settings of transformers; these may name several or none."""
    named = settings.get("eos_token_id")
    return [id_ for id_ in (named if isinstance(named, list) else [named]) if id_ is not None]


def num_ids(tokenizer: Tokenizer, *, added: bool = True) -> int:
    """Return a tokenizer's largest id + 1, which may exceed its number of tokens. added: whether added tokens count."""
    return max(tokenizer.get_vocab(with_added_tokens=added).values(), default=-1) + 1


def _around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's post-processor adds before and after a text."""
    for text in ("a", *tokenizer.get_vocab()):
        if ids := tokenizer.encode(text, add_special_tokens=False).ids:
            whole = tokenizer.encode(text).ids
            first = next(place for place in range(len(whole)) if whole[place : place + len(ids)] == ids)
            return tuple(whole[:first]), tuple(whole[first + len(ids) :])
    return (), ()


def with_begin_of_text(given: GivenTokenizer, rule: str) -> GivenTokenizer:
    """Return the tokenizer with another rule for what begins a text. Raises UserError for a token that it lacks.

    rule: OWN_RULE keeps the tokenizer's own, NO_TOKEN begins with no token, and anything else is the token to add.
    """
    if rule == OWN_RULE:
        return given
    what = f"the tokenizer of {given.name or 'the model'}"
    tokenizer = read_foreign_tokenizer(given.json, what)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    token = tokenizer.token_to_id(rule)
    if rule != NO_TOKEN and token is None:
        raise UserError(
            f"--begin-of-text must be {OWN_RULE}, {NO_TOKEN} or a token of {given.name or 'the tokenizer'}, but got "
            f"{rule!r}."
        )
    with tokenizing(what):
        before, after = _around(tokenizer)
    wanted = () if rule == NO_TOKEN or token is None else (token,)
    if wanted == before:
        return given
    tokenizer.post_processor = template(tokenizer, wanted, after)
    own = {"tokenizer_class": "PreTrainedTokenizerFast"}  # others replace the post-processor by their own
    own |= {} if rule == NO_TOKEN else {"bos_token": rule}
    settings = {**json.loads(dict(given.files).get(TOKENIZER_CONFIG_FILE, b"{}")), **own}
    files = {**dict(given.files), TOKENIZER_CONFIG_FILE: json.dumps(settings, indent=1).encode()}
    return replace(given, json=tokenizer.to_str(), files=tuple(files.items()))


def template(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> processors.TemplateProcessing:
    """Return the post-processor that adds these ids before and after a text."""
    tokens = {id_: tokenizer.id_to_token(id_) for id_ in (*before, *after)}
    single = [*(tokens[id_] for id_ in before), "$A", *(tokens[id_] for id_ in after)]
    return processors.TemplateProcessing(single=single, special_tokens=[(token, id_) for id_, token in tokens.items()])


def begin_line(begin: BeginOfText | None, rule: str) -> str:
    """Return words that say with which token sequences begin. rule: as in `with_begin_of_text`."""
    token = f"{begin.token!r}, which is not predicted" if begin else "no token of its own"
    return (
        f"each sequence begins with {token}: the rule of {'its tokenizer' if rule == OWN_RULE else '--begin-of-text'}"
    )


def trained_encoder(text: str, seq_len: int | None) -> Encoder:
    """Return the encoder of a tokenizer that was trained here. text: result of `train_tokenizer`."""
    return given_encoder(GivenTokenizer(name="bpe", json=text, end_of_text=END_OF_TEXT), None, seq_len)


def write_tokenizer(folder: Path, json_text: str, end_of_text: str, files: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write a tokenizer for `kept_tokenizer`. An `eos_token` that its other `files` name replaces `end_of_text`."""
    settings = {"eos_token": end_of_text}
    for name, content in files:
        if name == TOKENIZER_CONFIG_FILE:
            settings |= {key: value for key, value in json.loads(content).items() if value or key != "eos_token"}
        else:
            (folder / name).write_bytes(content)
    replace_file(folder / TOKENIZER_CONFIG_FILE, json.dumps(settings) + "\n")
    replace_file(folder / TOKENIZER_FILE, json_text)


def kept_tokenizer(folder: Path, name: str) -> GivenTokenizer:
    """Read the tokenizer in a folder, and name it `name`. Raises UserError if a file cannot be read or is damaged.

    A document ends with the `eos_token` of tokenizer_config.json, or with END_OF_TEXT if there is no such file.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    end: Any = END_OF_TEXT
    if path.is_file():
        rule = f"must name the `eos_token` of {TOKENIZER_FILE} beside it"
        data = read_json(path, rule)
        eos = data.get("eos_token") if isinstance(data, dict) else None
        end = eos.get("content") if isinstance(eos, dict) else eos  # in some models of transformers it is a mapping
        if not isinstance(end, str):
            raise UserError(f"{path} {rule}; restore it.")
    require_settings(folder / GENERATION_FILE)
    files = tuple((name, read_bytes(folder / name, MOST_JSON)) for name in KEPT_FILES if (folder / name).is_file())
    content = read_text(folder / TOKENIZER_FILE, MOST_JSON)
    return GivenTokenizer(name=name, json=content, end_of_text=end, files=files)


def require_settings(path: Path) -> None:
    """Raise UserError if a file is there, but is no JSON mapping."""
    rule = "must be a mapping of settings"
    if path.is_file() and not isinstance(read_json(path, rule), dict):
        raise UserError(f"{path} {rule}; restore it.")


def train_tokenizer(source: DocumentSource, vocab_size: int) -> str:
    """Train byte-level BPE on about the first TOKENIZER_BYTES of the train split; return the text of a tokenizer.json.

    vocab_size: the most tokens; short text yields fewer. Source: Radford et al. 2019, GPT-2, section 2.2.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=MOST_CHARACTERS,  # longer ones would be refused
    )
    tokenizer.train_from_iterator(_first_bytes(texts(source, "train"), TOKENIZER_BYTES), trainer)
    return str(tokenizer.to_str())


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return uint16 if it can hold the token ids of a vocabulary, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _first_bytes(documents: Iterable[str], num_bytes: int) -> Iterator[str]:
    for document in documents:
        if num_bytes <= 0:
            return
        num_bytes -= len(document.encode("utf-8", "surrogatepass"))
        yield document


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARACTERS and (end := text.find("\n", start + PIECE_CHARACTERS) + 1):
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
