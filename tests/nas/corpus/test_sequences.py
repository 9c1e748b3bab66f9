"""Which tokens validate, and what each document counts for."""

from dataclasses import replace

import numpy as np
import pytest

from nas.corpus.corpus import Corpus, prepare
from nas.corpus.documents import by_hash
from nas.corpus.sequences import gather, held_out_targets, loss_shares, mean_loss

SEQ_LEN = 16


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Corpus:
    """About 30 validation documents, of 10 to 3,000 tokens; those that are trained on are short."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(600):
        name, longest = f"module_{index}.py", index % 7 * index // 3
        count = 1 + longest * (by_hash(name) == "validation")
        (folder / name).write_text("".join(f"value_{index}_{line} = {line * index}\n" for line in range(count)))
    return prepare(str(folder), 300, tmp_path_factory.mktemp("cache"))


def test_every_target_is_known_by_its_document(uneven: Corpus) -> None:
    targets = held_out_targets(uneven, SEQ_LEN, 10**9)
    owners = np.repeat(np.arange(len(uneven.held_out.documents)), [size for _, size in uneven.held_out.documents])
    assert (targets.documents.ravel() == owners[1 : 1 + targets.documents.size]).all()
    some = held_out_targets(uneven, SEQ_LEN, 2_000)
    assert (some.documents == targets.documents[some.indices]).all()
    assert len(some.indices) == 2_000 // SEQ_LEN
    assert (np.diff(some.indices) > 0).all()


def test_documents_are_taken_from_evenly(uneven: Corpus) -> None:
    all_, some = (held_out_targets(uneven, SEQ_LEN, tokens).documents[:, SEQ_LEN // 2 - 1] for tokens in (10**9, 4_000))
    available, taken = (np.bincount(documents, minlength=len(uneven.held_out.documents)) for documents in (all_, some))
    assert (taken <= available).all()
    assert taken.sum() == 4_000 // SEQ_LEN
    assert (taken >= np.minimum(available, taken.max() - 1)).all()


def test_no_document_counts_for_more_than_a_twentieth(uneven: Corpus) -> None:
    shares = held_out_targets(uneven, SEQ_LEN, 10**9).shares
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == pytest.approx(1 / 20)
    # 20 each of 100 and 5 of 4: 25 have room for a twentieth, the small ones share what 100 ones of 5 % leave: nothing
    assert loss_shares(np.array([*[100] * 18, 10, 20, 30])).tolist() == pytest.approx(
        [*[0.05] * 18, 0.1 / 60 * 10, 0.1 / 60 * 20, 0.05]
    )
    assert loss_shares(np.array([5, 5, 0, 5] * 10)).max() == pytest.approx(1 / 30)


def test_of_few_documents_none_counts_for_more_than_twice_an_equal_share() -> None:
    assert loss_shares(np.array([7])).tolist() == [1]
    assert loss_shares(np.array([30, 10])).tolist() == [0.75, 0.25]
    assert loss_shares(np.array([900, 50, 25, 25])).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])


def test_the_loss_is_the_mean_of_documents_by_their_shares(uneven: Corpus) -> None:
    targets = held_out_targets(uneven, SEQ_LEN, 3_000)
    sequences = gather(uneven, "validation", targets.indices, SEQ_LEN)[:, 1:].astype(float)
    losses = targets.by_document(sequences)
    for document, (share, loss) in enumerate(losses):
        inside = sequences[targets.documents == document]
        assert share == targets.shares[document]
        assert loss == pytest.approx(inside.mean() if inside.size else 0)
    assert mean_loss(losses) == pytest.approx(sum(share * loss for share, loss in losses))
    assert mean_loss(targets.by_document(np.full_like(sequences, 2.5))) == pytest.approx(2.5)


def test_sequences_that_were_cut_within_documents_belong_to_them(uneven: Corpus) -> None:
    documents = (("a", 2 * (SEQ_LEN + 1)), ("b", SEQ_LEN + 1))
    cut = replace(
        uneven,
        chunk_len=SEQ_LEN,
        num_validation_tokens=3 * (SEQ_LEN + 1),
        held_out=replace(uneven.held_out, documents=documents),
    )
    assert held_out_targets(cut, SEQ_LEN, 10**9).documents.tolist() == [[0] * SEQ_LEN] * 2 + [[1] * SEQ_LEN]
