import json
from dataclasses import replace

import pytest
import torch

from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import Recipe
from nas.training.device import on_device, usual_device
from nas.training.memory import CONTEXT_BYTES, TooLargeError, training_memory
from nas.training.objective import Objective
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, assert_resumes, candidate


@pytest.mark.parametrize(
    ("asked", "device", "has_bfloat16", "expected"),
    [
        (None, "cpu", True, None),
        ("bfloat16", "cpu", False, "bfloat16"),
        (None, "cuda", True, "bfloat16"),
        (None, "cuda:1", True, "bfloat16"),
        ("float32", "cuda", True, "float32"),
        ("tf32", "cuda", False, "tf32"),
        (None, "cuda", False, "float32"),
        ("bfloat16", "cuda", False, "float32"),
    ],
)
def test_a_gpu_trains_in_bfloat16_unless_asked_otherwise_or_too_old(
    monkeypatch, caplog, asked, device, has_bfloat16, expected
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "V100")
    caplog.set_level("INFO", "nas")
    assert on_device(RecipeChanges(precision=asked), device).precision == expected
    fell_back = device == "cuda" and not has_bfloat16 and asked != "tf32"
    assert caplog.messages == ["V100 is too old for bfloat16 products; training in float32 instead"] * fell_back


@pytest.mark.parametrize(("num_gpus", "processes", "device"), [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu")])
def test_the_default_device_is_a_gpu_where_each_process_has_one(monkeypatch, num_gpus, processes, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert usual_device() == device


def test_float16_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="must be bfloat16, tf32 or float32, but got float16, which loses gradients"):
        Recipe(precision="float16")


@pytest.mark.parametrize("frozen", ["SM+LN+G", "SM+fLN+R"])
def test_memory_that_runs_out_once_halves_the_micro_batch_and_changes_only_rounding(
    monkeypatch, caplog, corpus, tmp_path, frozen
):
    made = candidate(frozen)
    *_, whole = train(made, corpus, seed=0)
    original, parts = Objective.backward, []

    def exhausted_once(self, inputs, targets, *, num_parts, **rest):
        parts.append(num_parts)
        losses = original(self, inputs, targets, num_parts=num_parts, **rest)
        if len(parts) == 3:  # after gradients were added up
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    monkeypatch.setattr(Objective, "backward", exhausted_once)
    *_, halved = train(made, corpus, seed=0, folder=tmp_path)
    (line,) = caplog.messages
    assert line.startswith("out of memory with 4 sequences in a forward pass; training continues with 2")
    assert parts == [1] * 3 + [2] * 14  # the third of 16 steps is taken twice
    assert halved.val_loss == pytest.approx(whole.val_loss, rel=1e-5)


def test_memory_that_runs_out_twice_ends_the_training(monkeypatch, corpus):
    def exhausted(*args, **rest):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Objective, "backward", exhausted)
    with pytest.raises(TooLargeError, match="lower `micro_batch`"):
        list(train(candidate(), corpus, seed=0))
    with pytest.raises(TooLargeError):  # a single sequence has no half
        list(train(candidate(scale=replace(SCALE, micro_batch=1)), corpus, seed=0))


@pytest.mark.parametrize("written_on", ["cuda", "cpu", None])
def test_a_checkpoint_of_another_device_is_resumed_with_a_line(caplog, corpus, tmp_path, written_on):
    def run(folder, **rest):
        for path in folder.glob("checkpoints/*/state.json"):
            state = json.loads(path.read_text())
            assert state.pop("device") == "cpu"
            path.write_text(json.dumps(state if written_on is None else state | {"device": written_on}))
        return list(train(candidate(), corpus, seed=0, folder=folder, **rest))

    assert_resumes(run, tmp_path, stopped_after=6)
    assert [text.partition(";")[0] for text in caplog.messages] == (
        ["the checkpoint was written on cuda and training continues on cpu"] if written_on == "cuda" else []
    )


def test_a_gpu_needs_memory_for_its_context_and_a_chunk_of_logits():
    lowered, whole = (candidate(precision=precision) for precision in ("bfloat16", "float32"))
    on_cpu, on_gpu = training_memory(lowered), training_memory(lowered, "cuda")
    tokens = SCALE.micro_batch * SCALE.seq_len
    assert on_gpu == replace(on_cpu, logits=tokens * 300 * 6, context=CONTEXT_BYTES, activations=on_gpu.activations)
    assert 0 < on_gpu.activations <= on_cpu.activations  # compiled layers keep no more
    assert training_memory(whole, "cuda").logits == tokens * 300 * 8
    assert replace(on_cpu, activations=0) == replace(training_memory(whole), activations=0)  # masters in float32
    assert "logits" not in on_cpu.line
    many = replace(SCALE, batch=512, micro_batch=512, seq_len=16, vocab_size=16_384)
    assert training_memory(candidate(scale=many), "cuda").logits == 512 * 16 * 16_384 * 8
