"""A corpus: token arrays of a train and a validation split, prepared once and cached by fingerprint.

Perplexities are comparable only between runs with the same corpus fingerprint. It covers the texts, the split, how much
was prepared, the parent's text that is excluded from validation, how documents are cut into sequences, and the
tokenizer. A tokenizer that is trained here is represented by its settings and the version of `tokenizers`, since
another version may learn other merges from the same text.
"""

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import __version__ as tokenizers_version

from costmodel.config.bugs import default_cache_dir, require_writable_cache
from costmodel.config.files import MOST_JSON, decode, read_json, read_text
from costmodel.errors import UserError
from nas.corpus import token_files
from nas.corpus.documents import VALIDATION_SHARE, DocumentSource, GivenTokenizer, Split
from nas.corpus.held_out import HeldOut, KeptWindows, hold_out
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_BYTES,
    TOKENIZER_FILE,
    BeginOfText,
    Encoder,
    given_encoder,
    id_type,
    train_tokenizer,
    trained_encoder,
    write_tokenizer,
)
from nas.storage import replace_file

T = TypeVar("T")
_log = logging.getLogger(__name__)

FORMAT = 2  # version of the cache entry; part of the fingerprint
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of text
COUNTED_TOKENS = 1 << 24  # tokens counted at a time, which bounds memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A prepared corpus: a train and a validation split in tokens, which `tokens` maps into memory.

    folder: entry of the cache. data: the source as the user named it. fingerprint: hash of everything that the tokens
    depend on. tokenizer: name with a digest. split: name of the split that validates. vocab_size: as in `Encoder`; a
    tokenizer trained on a small corpus has fewer tokens than requested. num_train_tokens: size of the train split, or
    of the prepared part of a large source. unigram_loss: validation loss, nats per token, of a unigram model of the
    train split with one added to every count; the reference loss of the hypervolume. held_out: the validation
    documents. chunk_len: length of the sequences into which each document was cut, each stored with the token after it;
    None if documents follow each other uncut. begin_of_text: the token that replaces the first one of each sequence
    when it is read; None for no such token.
    """

    folder: str
    data: str
    fingerprint: str
    tokenizer: str
    split: str = "validation"
    vocab_size: int
    num_train_tokens: int
    num_validation_tokens: int
    unigram_loss: float
    held_out: HeldOut
    chunk_len: int | None = None
    begin_of_text: BeginOfText | None = None

    def tokens(self, split: Split) -> NDArray[np.unsignedinteger[Any]]:
        """Return the token ids of a split, in order of documents, memory-mapped read-only."""
        return np.memmap(self.file(split), dtype=id_type(self.vocab_size), mode="r", shape=(self.lengths[split],))

    @property
    def lengths(self) -> dict[Split, int]:
        """The number of tokens of each split."""
        return {"train": self.num_train_tokens, "validation": self.num_validation_tokens}

    def file(self, split: Split) -> Path:
        """Return the path of the file with the tokens of a split."""
        return Path(self.folder) / ("train.bin" if split == "train" else self.held_out.file)


def prepare(
    data: str,
    vocab_size: int,
    cache_dir: Path | None = None,
    *,
    seq_len: int | None = None,
    tokens: int = 0,
    tokenizer: GivenTokenizer | None = None,
    of_parent: KeptWindows | None = None,
    source: DocumentSource | None = None,
) -> Corpus:
    """Return the corpus of `data` (see `open_source`) from the cache. What the cache lacks of it is prepared first.

    Args:
        vocab_size: largest size of the vocabulary.
        cache_dir: folder of the cache; None for the user's.
        seq_len: tokens of a training sequence; required for corpora that are cut into sequences, else not used.
        tokens: training tokens of a run. A large source is prepared only as far as needed (see `level_of`).
        tokenizer: the model's tokenizer; None for the corpus's own if it has one that fits, else a trained one.
        of_parent: windows of the parent's training text (`nas.corpus.held_out.to_keep`), None if unknown.
            Documents that repeat many of them are excluded from validation.
        source: the opened source of `data`; None to open it.

    Raises UserError for bad data, vocabulary or tokenizer, a missing `seq_len`, a split without tokens, a validation
    split of nothing but copies of training text, or a user's cache without write access; OSError if writing fails.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"`vocab_size` must be at least {MIN_VOCAB_SIZE} (every byte), but got {vocab_size}.")
    source = source or open_source(data)
    if source.chunked and seq_len is None:
        raise UserError(f"data {data!r} is cut into sequences, so `seq_len` must be given.")
    chunk_len = seq_len if source.chunked else None
    given = tokenizer or source.tokenizer(vocab_size)
    encoder = None if given is None else given_encoder(given, vocab_size, chunk_len)
    key = _key(source, given, encoder, vocab_size, chunk_len, of_parent)
    entry, level = (cache_dir or default_cache_dir()) / key, token_files.level_of(tokens)
    with suppress(UserError):  # a torn entry is handled under the lock
        if corpus := _cached(entry, level):
            return corpus
    if cache_dir is None:
        require_writable_cache()
    with token_files.locked(entry):
        try:
            if corpus := _anew_if_torn(entry, lambda: _cached(entry, level)):  # prepared by another process meanwhile
                return corpus
            encoder = encoder or trained_encoder(_trained_tokenizer(entry, source, vocab_size), chunk_len)
            itemsize = encoder.dtype.itemsize
            progress = _anew_if_torn(entry, lambda: token_files.read_progress(entry, source, itemsize))
            if not (entry / TOKENIZER_FILE).exists():
                write_tokenizer(entry, encoder.tokenizer.to_str(), given.end_of_text if given else END_OF_TEXT)
            progress = progress or token_files.read_progress(entry, source, itemsize)
            progress = token_files.extend(entry, source, encoder, progress, level)
            return _described(entry, source, encoder, level, progress, key, of_parent)
        except OSError as error:
            reason = f"{error.strerror or error}; remove the cause and run it again, it goes on from what it has"
            raise OSError(error.errno, reason, str(entry)) from None
        finally:
            if not (entry / token_files.PROGRESS_FILE).exists():
                shutil.rmtree(entry, ignore_errors=True)


def tokenizer_folder(fingerprint: str) -> Path:
    """Return the folder with the tokenizer of a corpus; it does not exist if the corpus is not in the cache."""
    return _entry(fingerprint)[0]


def known_corpus(fingerprint: str | None) -> Corpus | None:
    """Return the prepared corpus with this fingerprint. Return None for None, or if the cache lacks a part of it."""
    if fingerprint is not None:
        with suppress(UserError):
            return open_corpus(*_entry(fingerprint))
    return None


def _entry(fingerprint: str) -> tuple[Path, int | None]:
    """Return the cache entry of a corpus, existing or not, and the level up to which it is that corpus."""
    cache = default_cache_dir()
    for facts in cache.glob("*/corpus-*.json"):  # entries of sources that were prepared in part
        level = facts.stem.removeprefix("corpus-")
        if _fingerprint(facts.parent.name, level) == fingerprint:
            return facts.parent, int(level)
    return cache / fingerprint, None


def open_corpus(folder: Path, level: int | None = None) -> Corpus:
    """Return the corpus in a cache entry. Raises UserError if it is missing, damaged or incomplete.

    level: training tokens up to which a large source was prepared (`level_of`); None if all of it was.
    """
    path = folder / _facts_file(level)
    try:
        facts = read_json(path)
        corpus = decode(Corpus, {**facts, "folder": str(folder)}, str(path))
        for split, length in corpus.lengths.items():
            least = length * id_type(corpus.vocab_size).itemsize
            if (size := (path := corpus.file(split)).stat().st_size) < least:
                raise UserError(f"{path} must have {least} bytes, but has {size}.")
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} is not a complete corpus: {error}.") from None
    return corpus


def require_chunks(corpus: Corpus, seq_len: int) -> None:
    """Raise UserError if documents were cut into sequences of another length, or a split has at most seq_len tokens."""
    if corpus.chunk_len not in (None, seq_len):
        raise UserError(
            f"data {corpus.data!r} was prepared in sequences of {corpus.chunk_len} tokens, not of {seq_len}; "
            f"prepare it again for these."
        )
    for split, length in corpus.lengths.items():
        if length < seq_len + 1:
            raise UserError(
                f"the {split} split of data {corpus.data!r} must hold more than {seq_len} tokens, but has {length}; "
                f"use more text or shorter sequences."
            )


def _key(
    source: DocumentSource,
    given: GivenTokenizer | None,
    encoder: Encoder | None,
    vocab_size: int,
    chunk_len: int | None,
    of_parent: KeptWindows | None,
) -> str:
    """Return the name of the cache entry, which is the fingerprint of the whole source."""
    settings: list[object] = [FORMAT, source.fingerprint]
    if given is None or encoder is None:
        settings += [vocab_size, VALIDATION_SHARE, TOKENIZER_BYTES, END_OF_TEXT, tokenizers_version]
    else:
        settings += [hashlib.sha256(given.json.encode()).hexdigest(), given.end_of_text]
        settings += ["begins", encoder.begin.token, encoder.begin.id] if encoder.begin else []
        settings += ["ends", *encoder.after] if encoder.after != (encoder.end,) else []
        is_whole = encoder.vocab_size == encoder.tokenizer.get_vocab_size()
        settings += [] if is_whole else ["ids", encoder.vocab_size]
    if chunk_len is not None:
        settings += ["chunks", chunk_len]
    if of_parent is not None:
        settings += ["parent", hashlib.sha256(of_parent.tobytes()).hexdigest()]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _fingerprint(key: str, level: str) -> str:
    return hashlib.sha256(f"{key} {level}".encode()).hexdigest()[:16]


def _facts_file(level: int | None) -> str:
    return "corpus.json" if level is None else f"corpus-{level}.json"


def _cached(entry: Path, level: int) -> Corpus | None:
    """Open the corpus prepared up to the level, or the whole source if it is smaller. Raises UserError if torn."""
    if (entry / _facts_file(level)).exists():
        return open_corpus(entry, level)
    if (entry / _facts_file(None)).exists() and (corpus := open_corpus(entry)).num_train_tokens < level:
        return corpus
    return None


def _anew_if_torn(entry: Path, read: Callable[[], T]) -> T | None:
    """Call `read`; if the entry is torn, remove it with a warning and return None."""
    try:
        return read()
    except UserError as error:
        warnings.warn(f"preparing the corpus anew: {error}", stacklevel=3)
    # facts first, so that no process opens a half-deleted entry; libraries of sub-layers, which are folders, stay
    for path in sorted(entry.glob("[!.]*"), key=lambda path: not path.name.startswith("corpus")):
        if path.is_file():
            path.unlink()
    return None


def _trained_tokenizer(entry: Path, source: DocumentSource, vocab_size: int) -> str:
    path = entry / TOKENIZER_FILE
    if path.exists():
        return read_text(path, MOST_JSON)
    _log.info(f"training a tokenizer of at most {vocab_size:,} tokens on {source.name}")
    text = train_tokenizer(source, vocab_size)
    replace_file(path, text)
    return text


def _described(
    entry: Path,
    source: DocumentSource,
    encoder: Encoder,
    level: int,
    progress: token_files.PreparationProgress,
    key: str,
    of_parent: KeptWindows | None,
) -> Corpus:
    """Hold out validation documents, write the facts of the corpus up to the level, and return the corpus."""
    cut = progress.cuts.get(str(level))
    held_out_file = "held-out.bin" if cut is None else f"held-out-{level}.bin"
    held_out = hold_out(entry, progress.lengths if cut is None else cut, encoder.dtype, of_parent, held_out_file)
    corpus = Corpus(
        folder=str(entry),
        data=source.name,
        fingerprint=key if cut is None else _fingerprint(key, str(level)),
        tokenizer=encoder.name,
        vocab_size=encoder.vocab_size,
        num_train_tokens=progress.lengths["train"] if cut is None else level,
        num_validation_tokens=sum(size for _, size in held_out.documents),
        unigram_loss=0.0,
        held_out=held_out,
        chunk_len=encoder.seq_len,
        begin_of_text=encoder.begin,
    )
    counts, seen = _counts(corpus, "train") + 1, _counts(corpus, "validation")
    corpus = replace(corpus, unigram_loss=float(-(np.log(counts / counts.sum()) * seen).sum() / seen.sum()))
    facts = {name: value for name, value in asdict(corpus).items() if name != "folder"}
    replace_file(entry / _facts_file(None if cut is None else level), json.dumps(facts, indent=1))
    return corpus


def _counts(corpus: Corpus, split: Split) -> NDArray[np.int64]:
    tokens = corpus.tokens(split)
    counts = np.zeros(corpus.vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), COUNTED_TOKENS):
        counts += np.bincount(tokens[start : start + COUNTED_TOKENS], minlength=corpus.vocab_size)
    return counts
