"""What a parent predicts: the same whatever is kept, and in whichever batch a sequence is."""

from pathlib import Path

import pytest
import torch

from nas.model.decoder import Decoder, build
from nas.training.distillation import teacher
from nas.training.distillation.teacher import RECORD, Predictions, Teacher
from search_spaces.bases import BASES
from search_spaces.notation import parse

INPUTS = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Decoder:
    architecture = parse("SM+LN+G", BASES["tiny"]).architecture
    return build(architecture, torch.Generator().manual_seed(1)).requires_grad_(False)


class Refusing(Decoder):
    """Is never asked."""

    def forward(self, *args, **kwargs):
        raise AssertionError("computed what was kept")


def equal(predictions: Predictions, other: Predictions) -> bool:
    return all(left.equal(right) for left, right in zip(predictions, other, strict=True))


def test_the_most_likely_tokens_with_their_log_probabilities(model: Decoder) -> None:
    predictions = Teacher(model, 16).predictions([0, 1, 2], INPUTS)
    expected = model(INPUTS).logits.log_softmax(-1).topk(16)
    assert predictions.tokens.equal(expected.indices)
    torch.testing.assert_close(predictions.log_probabilities, expected.values)


def test_what_was_computed_is_read_back_in_any_batch(model: Decoder, tmp_path: Path) -> None:
    plain = Teacher(model, 16).predictions([5, 0, 9], INPUTS)
    first = Teacher(model, 16, tmp_path / "kept").predictions([5, 0, 9], INPUTS)
    read = Teacher(Refusing(model.architecture), 16, tmp_path / "kept")
    assert equal(first, plain)
    assert equal(read.predictions([5, 0, 9], INPUTS), plain)
    alone = read.predictions([0], INPUTS[1:2])
    assert alone.tokens.equal(plain.tokens[1:2])
    assert equal(Teacher(model, 16).predictions([0], INPUTS[1:2]), alone)


def test_records_that_are_not_whole_are_computed_anew(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    plain = Teacher(model, 16, path).predictions([0, 1], INPUTS[:2])
    raw = bytearray(path.read_bytes())
    raw[8 * 16 * RECORD.itemsize] = 0  # the mark behind sequence 0
    path.write_bytes(raw[: -3 * RECORD.itemsize])  # the end of sequence 1
    assert equal(Teacher(model, 16, path).predictions([0, 1], INPUTS[:2]), plain)
    assert equal(Teacher(Refusing(model.architecture), 16, path).predictions([0, 1], INPUTS[:2]), plain)


def test_a_disk_that_takes_nothing_costs_only_time(model: Decoder, tmp_path: Path) -> None:
    made = Teacher(model, 16, tmp_path / "missing" / "kept")
    assert equal(made.predictions([0], INPUTS[:1]), Teacher(model, 16).predictions([0], INPUTS[:1]))


def test_streams_are_what_norms_read_and_the_same_read_back(model: Decoder, tmp_path: Path) -> None:
    plain = Teacher(model, 16).streams([7, 2, 4], INPUTS)
    first = Teacher(model, 16, streams_path=tmp_path / "kept").streams([7, 2, 4], INPUTS)
    read = Teacher(Refusing(model.architecture), 16, streams_path=tmp_path / "kept").streams([2, 7], INPUTS[[1, 0]])
    passed = model.streams(INPUTS)
    assert plain.equal(first)
    assert read.equal(plain[[1, 0]])
    assert plain[:, 0].equal(model.layers[1].norm1(passed[1]).half())
    assert plain[:, -1].equal(model.final_norm(passed[-1]).half())


def test_a_small_vocabulary_has_fewer_tokens_to_name() -> None:
    architecture = parse("SM+LN+G", BASES["tiny"]).architecture
    made = Decoder(architecture)
    assert Teacher(made, 16).most_likely == min(16, architecture.vocab_size - 1)


def test_sequences_are_predicted_together_as_far_as_memory_says(model: Decoder, monkeypatch) -> None:
    plain = Teacher(model, 16).predictions([0, 1, 2], INPUTS)
    for logits, sizes in ((1 << 22, [3]), (2 * 8 * model.architecture.vocab_size, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setitem(teacher.LOGITS_AT_A_TIME, "cpu", logits)
        seen: list[int] = []
        hook = model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
        assert equal(Teacher(model, 16).predictions([0, 1, 2], INPUTS), plain)
        hook.remove()
        assert seen == sizes
