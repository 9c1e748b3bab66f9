from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nas.corpus import ngrams as ngram_cache
from nas.corpus.corpus import Corpus
from nas.corpus.ngrams import NAMES, NgramBaseline, kneser_ney, ngram_baseline
from nas.recipe.recipe import SCALES
from nas.training.batches import train_batch, validation_batches

Gram = tuple[int, ...]


def grams(rows: list[Gram], order: int) -> Iterator[Gram]:
    """The n-grams inside rows; a row's first token is no target."""
    for row in rows:
        for end in range(max(1, order - 1), len(row)):
            yield row[end + 1 - order : end + 1]


def literal(rows: list[Gram], vocab_size: int, context: Gram, token: int, *, highest: bool = True) -> float:
    """P(token | context) with discount 0.75; below the highest order, counts are of distinct tokens before."""
    order = len(context) + 1
    counts = Counter(grams(rows, order)) if highest else Counter(gram[1:] for gram in set(grams(rows, order + 1)))
    after = {gram: count for gram, count in counts.items() if gram[:-1] == context}
    lower = literal(rows, vocab_size, context[1:], token, highest=False) if context else 1 / vocab_size
    if not after:
        return lower
    discounted = max(after.get((*context, token), 0) - 0.75, 0)
    return (discounted + 0.75 * len(after) * lower) / sum(after.values())


@st.composite
def texts(draw: st.DrawFn) -> tuple[int, NDArray[np.uint16], NDArray[np.uint16]]:
    vocab_size, length = draw(st.integers(2, 5)), draw(st.integers(2, 8))
    row = st.lists(st.integers(0, vocab_size - 1), min_size=length, max_size=length)
    train, held_out = (draw(st.lists(row, min_size=1, max_size=4)) for _ in range(2))
    return vocab_size, np.array(train, dtype=np.uint16), np.array(held_out, dtype=np.uint16)


@given(texts())
def test_every_probability_is_that_of_the_formula(text):
    vocab_size, train, held_out = text
    rows = [tuple(row) for row in train.tolist()]
    for order, probabilities in enumerate(kneser_ney(train, held_out, vocab_size), 1):
        expected = [
            [
                literal(rows, vocab_size, tuple(row[max(0, end + 1 - order) : end]), row[end])
                for end in range(1, len(row))
            ]
            for row in held_out.tolist()
        ]
        np.testing.assert_allclose(probabilities, expected, rtol=1e-12)
    assert order == len(NAMES)


def test_all_next_tokens_share_probability_one():
    rng = np.random.default_rng(0)
    vocab_size = 70_000
    train = rng.integers(0, 3, (20, 9)).astype(np.uint32) * 34_999
    for context in (train[0, :8], train[3, 1:9], np.array([5] * 8, dtype=np.uint32)):
        asked = np.column_stack([np.tile(context, (vocab_size, 1)), np.arange(vocab_size, dtype=np.uint32)])
        for probabilities in kneser_ney(train, asked, vocab_size):
            assert probabilities[:, -1].min() > 0
            assert probabilities[:, -1].sum() == pytest.approx(1)


def test_perplexities_by_order_and_name(ngrams):
    assert ngrams.perplexity(3) == pytest.approx(18)
    assert ngrams.perplexities == pytest.approx(
        {"unigram": 200, "bigram": 40, "trigram": 18, "4-gram": 15, "5-gram": 14}
    )
    with pytest.raises(ValueError, match="`losses` must be one of each order, 5, but got 1."):
        NgramBaseline(tokens=1, losses=(1.0,))


SEQ_LEN = 16
SCALE = replace(SCALES["smoke"], seq_len=SEQ_LEN, validation_tokens=200, micro_batch=4)


@pytest.fixture
def fresh(corpus: Corpus) -> Corpus:
    """Without n-grams in its cache."""
    for path in Path(corpus.folder).glob("ngrams-*"):
        path.unlink()
    return corpus


def rows_of(batches) -> np.ndarray:
    """Inputs, and the last target after them."""
    return np.concatenate([np.column_stack([inputs, targets[:, -1]]) for inputs, targets in batches])


@pytest.mark.parametrize("seed", [0, 1])
def test_they_are_of_the_tokens_that_a_candidate_draws_and_is_validated_on(fresh, seed):
    drawn = rows_of(train_batch(fresh, step=step, batch=4, seq_len=SEQ_LEN, seed=seed) for step in range(10))
    held_out = rows_of(validation_batches(fresh, SCALE))
    expected = [-np.log(probabilities).mean() for probabilities in kneser_ney(drawn, held_out, fresh.vocab_size)]
    baseline = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=40 * SEQ_LEN - 3, seed=seed)
    assert baseline.tokens == 40 * SEQ_LEN
    assert baseline.losses == pytest.approx(expected)


def test_without_a_number_of_tokens_or_with_too_many_all_are_counted_up_to_a_limit(fresh, monkeypatch):
    whole = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200)
    assert whole.tokens == (fresh.num_train_tokens - 1) // SEQ_LEN * SEQ_LEN
    assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=10**12, seed=5) == whole
    monkeypatch.setattr(ngram_cache, "COUNTED_TOKENS", 330)
    assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200).tokens == 320


def test_they_are_computed_once_and_again_if_the_file_is_damaged(fresh, monkeypatch, caplog):
    caplog.set_level("INFO", "nas")
    first = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320)
    assert caplog.messages == ["counting n-grams of 320 training tokens"]
    (path,) = Path(fresh.folder).glob("ngrams-*")
    with monkeypatch.context() as patch:
        patch.setattr(ngram_cache, "kneser_ney", lambda *args: pytest.fail("the cache was not used"))
        assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320) == first
    for damaged in ('{"tokens": 320', '{"tokens": 320}', '{"tokens": 320, "losses": [1.0]}'):
        path.write_text(damaged)
        assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320) == first


def test_another_question_has_another_answer_and_one_without_a_sequence_none(fresh):
    question: dict[str, Any] = {"seq_len": SEQ_LEN, "validation_tokens": 200, "tokens": 320, "seed": 0}
    first = ngram_baseline(fresh, **question)
    for change in ({"seq_len": 8}, {"validation_tokens": 400}, {"tokens": 640}, {"seed": 1}):
        assert ngram_baseline(fresh, **(question | change)).losses != first.losses
    with pytest.raises(ValueError, match="the validation split of data .* must hold more than 100000 tokens"):
        ngram_baseline(replace(fresh, num_train_tokens=10**6), seq_len=100_000, validation_tokens=200)
