"""Converts documents to token ids, with a corpus's own tokenizer or a byte-level BPE trained on it."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from costmodel.config.user_files import MOST_JSON, read_json, read_text
from costmodel.errors import UserError
from nas.corpus.documents import DocumentSource, GivenTokenizer, texts
from nas.corpus.foreign_tokenizer import read_foreign_tokenizer, tokenizing
from nas.storage import replace_file

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # where transformers looks for the token after a document
END_OF_TEXT = "<|endoftext|>"  # after every document, as in GPT-2
TOKENIZER_BYTES = 100_000_000  # of training text for the tokenizer: merges settle long before
PIECE_CHARACTERS = 1 << 20  # longer documents are encoded in pieces of whole lines, which bounds memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Converts texts to token ids.

    name: includes a digest of the tokenizer. end: id after every document. seq_len: None, or the length of the
        sequences into which each document is cut without its tail; each has its next token, seq_len + 1 ids in all, and
        no end.
    """

    name: str
    tokenizer: Tokenizer
    end: int
    seq_len: int | None

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return id_type(self.vocab_size)

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Return the token ids of each document."""
        pieces = [_pieces(text) for text in documents]
        with tokenizing(f"the tokenizer {self.name}"):
            encodings = iter(
                self.tokenizer.encode_batch([piece for parts in pieces for piece in parts], add_special_tokens=False)
            )
        return [self._cut([token for _ in document for token in next(encodings).ids]) for document in pieces]

    def _cut(self, ids: list[int]) -> NDArray[np.unsignedinteger[Any]]:
        if self.seq_len is None:
            return np.asarray([*ids, self.end] if ids else [], dtype=self.dtype)
        starts = np.arange(max(0, len(ids) - 1) // self.seq_len) * self.seq_len
        return np.asarray(ids, dtype=self.dtype)[starts[:, None] + np.arange(self.seq_len + 1)].reshape(-1)


def given_encoder(given: GivenTokenizer, vocab_size: int | None, seq_len: int | None) -> Encoder:
    """Build an encoder. Raises UserError if the tokenizer is damaged, too large or lacks the end of text."""
    tokenizer = read_foreign_tokenizer(given.json, f"the tokenizer of {given.name}")
    tokenizer.no_truncation()  # saved if a call with `max_length` came before save_pretrained
    tokenizer.no_padding()
    size = tokenizer.get_vocab_size()
    if vocab_size is not None and size > vocab_size:
        raise UserError(
            f"the tokenizer of {given.name} has {size} entries, but the model's vocabulary only {vocab_size}; use the "
            f"right tokenizer, or an architecture with a larger vocabulary."
        )
    if (end := tokenizer.token_to_id(given.end_of_text)) is None:
        raise UserError(f"the tokenizer of {given.name} must have the token {given.end_of_text}, but has not.")
    name = f"{given.name}-{size}-{hashlib.sha256(given.json.encode()).hexdigest()[:8]}"
    return Encoder(name=name, tokenizer=tokenizer, end=end, seq_len=seq_len)


def trained_encoder(text: str, seq_len: int | None) -> Encoder:
    """Build an encoder from the JSON of `train_tokenizer`."""
    return given_encoder(GivenTokenizer(name="bpe", json=text, end_of_text=END_OF_TEXT), None, seq_len)


def write_tokenizer(folder: Path, json_text: str, end_of_text: str) -> None:
    """Write a tokenizer for `kept_tokenizer`, its entries last. Raises OSError."""
    replace_file(folder / TOKENIZER_CONFIG_FILE, json.dumps({"eos_token": end_of_text}) + "\n")
    replace_file(folder / TOKENIZER_FILE, json_text)


def kept_tokenizer(folder: Path, name: str) -> GivenTokenizer:
    """Read the tokenizer in a folder; without a configuration, its end of text is END_OF_TEXT.

    Raises UserError if a file cannot be read or the configuration is damaged.
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
    return GivenTokenizer(name=name, json=read_text(folder / TOKENIZER_FILE, MOST_JSON), end_of_text=end)


def train_tokenizer(source: DocumentSource, vocab_size: int) -> str:
    """Train byte-level BPE on the train split and return its JSON. Source: Radford et al. 2019, GPT-2, section 2.2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(texts(source, "train"), TOKENIZER_BYTES), trainer)
    return str(tokenizer.to_str())


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smaller of two types that can hold the ids of a vocabulary."""
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
