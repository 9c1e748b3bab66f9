"""A corpus: token arrays of a train and a validation split, prepared once and cached by fingerprint.

Perplexities are comparable only between runs with the same corpus fingerprint: it covers the texts, the split, the
tokenizer's settings and the version of `tokenizers`, which may learn other merges from the same text.
"""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

from costmodel.schema import decode
from nas.sources import VALIDATION_SHARE, Source, Split, open_source

FORMAT = 1  # of the cache entry; part of the fingerprint
END_OF_TEXT = "<|endoftext|>"  # follows every document, as in GPT-2
MIN_VOCAB_SIZE = 257  # 256 bytes and the end of text
TOKENIZER_BYTES = 100_000_000  # of training text that the tokenizer learns from: merges settle long before
ENCODE_BATCH = 256  # documents encoded at a time, which bounds memory
FACTS_FILE = "corpus.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A prepared corpus; `tokens` maps its arrays into memory.

    folder: cache entry that holds it. fingerprint: of texts, split, the tokenizer's settings and its package's version.
    tokenizer: name with digest.
    vocab_size: of the tokenizer, which finds no more merges than a small corpus has.
    unigram_loss: validation loss, nats per token, of the best model that ignores context: train frequencies with one
        added to every count. Its exponential is the reference point of the hypervolume.
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

    def tokens(self, split: Split) -> NDArray[np.unsignedinteger]:
        """The token ids of a split, in order of documents, memory-mapped read-only."""
        return np.memmap(Path(self.folder) / f"{split}.bin", dtype=_dtype(self.vocab_size), mode="r")


def default_cache_dir() -> Path:
    """Where corpora are cached: under XDG_CACHE_HOME, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "private-inference-nas"


def prepare(data: str, vocab_size: int, cache_dir: Path | None = None) -> Corpus:
    """The corpus `data` (see `open_source`) in at most `vocab_size` tokens, from the cache if it is there.

    The entry appears in one rename, so that processes preparing it at once cannot see each other's halves.

    Raises ValueError for unknown or unreadable data, a vocabulary too small for bytes, or a split without tokens;
    OSError if the cache cannot be written.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"`vocab_size` must be at least {MIN_VOCAB_SIZE} (every byte), but got {vocab_size}.")
    source = open_source(data)
    settings = [FORMAT, source.fingerprint, vocab_size, VALIDATION_SHARE, TOKENIZER_BYTES, END_OF_TEXT]
    settings.append(tokenizers_version)
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    cache = cache_dir or default_cache_dir()
    entry = cache / fingerprint
    if entry.exists():
        try:
            return open_corpus(entry)
        except ValueError as error:
            warnings.warn(f"preparing the corpus anew: {error}", stacklevel=2)
            _discard(entry)
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{fingerprint}.", dir=cache))
    try:
        _write(draft, source, fingerprint, vocab_size)
        _publish(draft, entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_corpus(entry)


def open_corpus(folder: Path) -> Corpus:
    """The corpus in a cache entry. Raises ValueError if an array is missing or not of its recorded length."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        corpus = decode(Corpus, {**facts, "folder": str(folder)}, str(folder / FACTS_FILE))
        expected = {"train": corpus.num_train_tokens, "validation": corpus.num_validation_tokens}
        width = _dtype(corpus.vocab_size).itemsize
        for split, length in expected.items():
            if (size := (folder / f"{split}.bin").stat().st_size) != length * width:
                raise ValueError(f"{folder / split}.bin must have {length * width} bytes, but has {size}.")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{folder} is not a complete corpus: {error}.") from None
    return corpus


def require_chunks(corpus: Corpus, seq_len: int) -> None:
    """Raises ValueError unless each split holds at least one sequence of seq_len tokens and its next token."""
    for split, length in (("train", corpus.num_train_tokens), ("validation", corpus.num_validation_tokens)):
        if length < seq_len + 1:
            raise ValueError(
                f"the {split} split of data {corpus.data!r} must hold more than {seq_len} tokens, but has {length}; "
                f"use more text or shorter sequences."
            )


def _write(folder: Path, source: Source, fingerprint: str, vocab_size: int) -> None:
    """Tokenizer, arrays and facts, each flushed to disk."""
    text = _train_tokenizer(source, vocab_size)
    tokenizer = Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size()
    lengths: dict[Split, int] = {}
    for split in ("train", "validation"):
        lengths[split] = _encode(tokenizer, source.documents(split), folder / f"{split}.bin")
        if not lengths[split]:
            raise ValueError(
                f"the {split} split of data {source.name!r} is empty; the split is by a hash of file or text, "
                f"so give it more of them."
            )
    _write_flushed(folder / "tokenizer.json", text)
    corpus = Corpus(
        folder=str(folder),
        data=source.name,
        fingerprint=fingerprint,
        tokenizer=f"bpe-{size}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
        vocab_size=size,
        num_train_tokens=lengths["train"],
        num_validation_tokens=lengths["validation"],
        unigram_loss=0.0,
    )
    facts = asdict(corpus) | {"unigram_loss": _unigram_loss(corpus)}
    del facts["folder"]
    _write_flushed(folder / FACTS_FILE, json.dumps(facts, indent=1))


def _train_tokenizer(source: Source, vocab_size: int) -> str:
    """Byte-level BPE on the train split alone, as JSON. Source: Radford et al. 2019, GPT-2, section 2.2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(source.documents("train"), TOKENIZER_BYTES), trainer)
    return str(tokenizer.to_str())


def _first_bytes(documents: Iterable[str], num_bytes: int) -> Iterator[str]:
    for document in documents:
        if num_bytes <= 0:
            return
        num_bytes -= len(document.encode("utf-8", "surrogatepass"))
        yield document


def _encode(tokenizer: Tokenizer, documents: Iterator[str], path: Path) -> int:
    """Writes the token ids of all documents and returns how many there are."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = _dtype(tokenizer.get_vocab_size())
    length = 0
    with path.open("wb") as file:
        while batch := list(islice(documents, ENCODE_BATCH)):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                if encoding.ids:
                    ids = np.asarray([*encoding.ids, end], dtype=dtype)
                    file.write(ids.tobytes())
                    length += len(ids)
        file.flush()
        os.fsync(file.fileno())
    return length


def _unigram_loss(corpus: Corpus) -> float:
    counts = np.bincount(corpus.tokens("train"), minlength=corpus.vocab_size) + 1
    log_shares = np.log(counts / counts.sum())
    return float(-log_shares[corpus.tokens("validation")].mean())


def _publish(draft: Path, entry: Path) -> None:
    """Moves a finished draft into place, unless another process was faster with the same content."""
    try:
        draft.rename(entry)
    except OSError:
        if not entry.exists():
            raise
    descriptor = os.open(entry.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(entry: Path) -> None:
    """Out of the way first, in one rename, so that nobody opens it half deleted."""
    aside = Path(tempfile.mkdtemp(prefix="discarded.", dir=entry.parent))
    try:
        entry.rename(aside / entry.name)
    except FileNotFoundError:
        pass  # another process discarded it
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
