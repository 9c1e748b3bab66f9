"""The n-gram baseline of a corpus: of the tokens that training draws, over those that it validates on, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nas.corpus import ngram_baseline as ngram_cache
from nas.corpus.corpus import Corpus
from nas.corpus.ngram_baseline import ngram_baseline
from nas.corpus.ngrams import kneser_ney
from nas.recipe.recipe import SCALES
from nas.training.batches import train_batch, validation_batches

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
def test_they_are_of_the_tokens_that_a_candidate_draws_and_is_validated_on(fresh: Corpus, seed: int) -> None:
    drawn = rows_of(train_batch(fresh, step=step, batch=4, seq_len=SEQ_LEN, seed=seed) for step in range(10))
    held_out = rows_of(validation_batches(fresh, SCALE))
    expected = [-np.log(probabilities).mean() for probabilities in kneser_ney(drawn, held_out, fresh.vocab_size)]
    baseline = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=40 * SEQ_LEN - 3, seed=seed)
    assert baseline.tokens == 40 * SEQ_LEN
    assert baseline.losses == pytest.approx(expected)


def test_without_a_number_of_tokens_or_with_too_many_all_are_counted_up_to_a_limit(fresh: Corpus, monkeypatch) -> None:
    whole = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200)
    assert whole.tokens == (fresh.num_train_tokens - 1) // SEQ_LEN * SEQ_LEN
    assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=10**12, seed=5) == whole
    monkeypatch.setattr(ngram_cache, "COUNTED_TOKENS", 330)
    assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200).tokens == 320


def test_they_are_computed_once_and_again_if_the_file_is_damaged(fresh, monkeypatch) -> None:
    lines: list[str] = []
    first = ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320, log=lines.append)
    assert lines == ["counting n-grams of 320 training tokens"]
    (path,) = Path(fresh.folder).glob("ngrams-*")
    with monkeypatch.context() as patch:
        patch.setattr(ngram_cache, "kneser_ney", lambda *args: pytest.fail("the cache was not used"))
        assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320, log=lines.append) == first
    for damaged in ('{"tokens": 320', '{"tokens": 320}', '{"tokens": 320, "losses": [1.0]}'):
        path.write_text(damaged)
        assert ngram_baseline(fresh, seq_len=SEQ_LEN, validation_tokens=200, tokens=320) == first


def test_another_question_has_another_answer(fresh: Corpus) -> None:
    question: dict[str, Any] = {"seq_len": SEQ_LEN, "validation_tokens": 200, "tokens": 320, "seed": 0}
    first = ngram_baseline(fresh, **question)
    for change in ({"seq_len": 8}, {"validation_tokens": 400}, {"tokens": 640}, {"seed": 1}):
        assert ngram_baseline(fresh, **(question | change)).losses != first.losses


def test_a_corpus_without_a_sequence_is_refused(fresh: Corpus) -> None:
    with pytest.raises(ValueError, match="the validation split of data .* must hold more than 100000 tokens"):
        ngram_baseline(replace(fresh, num_train_tokens=10**6), seq_len=100_000, validation_tokens=200)
