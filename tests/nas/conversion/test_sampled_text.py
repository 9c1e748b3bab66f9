from pathlib import Path

import pytest

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent, load_parent
from nas.conversion.sampled_text import sampled_source
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.documents import DocumentSource


@pytest.fixture(scope="module")
def parent() -> Parent:
    return load_parent(BUILTIN)


def source_of(parent: Parent, data: str = "parent", tokens: int = 2048) -> DocumentSource:
    source = sampled_source(data, parent.model, parent.digest, tokens)
    assert source is not None
    return source


def test_a_corpus_is_prepared_from_what_the_parent_writes(parent: Parent, tmp_path: Path) -> None:
    def prepared(cache: str) -> Corpus:
        return prepare(
            "parent", 512, tmp_path / cache, tokenizer=parent.model.tokenizer, source=source_of(parent), tokens=2048
        )

    corpus, again = prepared("a"), prepared("b")
    assert corpus.num_train_tokens >= 2048
    assert corpus.num_validation_tokens > 0
    assert corpus.fingerprint == again.fingerprint
    assert (corpus.tokens("train") == again.tokens("train")).all()
    texts = [document.text for batch in source_of(parent).streams[1].batches(None) for document in batch.documents]
    assert "def " in "".join(texts)


def test_a_stream_goes_on_where_it_was(parent: Parent) -> None:
    stream = source_of(parent, tokens=12_000).streams[1]
    first, second, *_ = stream.batches(None)
    (resumed, *_) = stream.batches(first.position)
    assert resumed.documents == second.documents
    assert first.documents != second.documents


def test_settings_decide_the_text(parent: Parent) -> None:
    names = ("parent", "parent:temperature=0.5", "parent:seed=1", "parent:tokens=4096")
    assert len({source_of(parent, name).fingerprint for name in names}) == len(names)
    assert source_of(parent, "parent:tokens=4096").fingerprint == source_of(parent, tokens=4096).fingerprint
    assert sampled_source("stdlib", parent.model, parent.digest, 1) is None


@pytest.mark.parametrize(
    ("data", "has_parent", "said"),
    [
        ("parent", False, "is text that the parent generates, but there is none; name a --parent"),
        ("parent:heat=1", True, "--data parent:heat=1 must be `parent`, or say temperature, tokens, seed as in"),
        ("parent:temperature=0", True, "needs a temperature from 0.1 to 10"),
        ("parent:tokens=many", True, "must be `parent`, or say temperature"),
    ],
)
def test_bad_settings_are_one_line(parent: Parent, data: str, has_parent: bool, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        sampled_source(data, parent.model if has_parent else None, parent.digest, 2048)
    assert "\n" not in str(refused.value)
