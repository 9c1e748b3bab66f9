import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel.errors import UserError
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import EntropyRegularisation
from nas.training.device import kind_of, on_device, usual_device
from nas.training.memory import CONTEXT_BYTES, Memory, TooLargeError, available_bytes, require_memory, training_memory
from nas.training.metrics import (
    COLUMNS,
    DIAGNOSTICS_FILE,
    METRICS_FILE,
    NUM_DIAGNOSES,
    Diagnosis,
    MetricsLog,
    StepMetrics,
    diagnose,
    is_due,
)
from nas.training.objective import Objective
from nas.training.trainer import train
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import placement
from tests.nas.training.short_runs import SCALE, assert_resumes, before_every_step, candidate

NOTHING: dict[str, Any] = {"flags": (), "quarter_shares": None, "thresholds": None, "temperatures": {}, "scalars": {}}
DIAGNOSIS = Diagnosis(step=0, head_entropies=[[1.5, None]], num_nan=[3], gradient_norms={"embed": 0.5}, **NOTHING)


def write(folder: Path, steps: range, *, last_step: int = 0) -> None:
    log = MetricsLog(folder, last_step=last_step)
    numbers = {"learning_rate": 1 / 3, "train_loss": 2.5, "penalty": 0.0, "gradient_norm": 1.0, "seconds": 0.1}
    for step in steps:
        log.add(StepMetrics(step=step, tokens=step * 64, **numbers))
        if step % 2 == 0:
            log.add_diagnosis(replace(DIAGNOSIS, step=step))
    log.flush()
    log.close()


def steps_in(folder: Path) -> list[str]:
    header, *rows = (folder / METRICS_FILE).read_text().splitlines()
    assert header.split(",") == list(COLUMNS)
    return [row.split(",")[0] for row in rows]


@pytest.mark.parametrize(
    ("name", "torn"),
    [
        *product([METRICS_FILE], ["", "6", "6,384,0.33", "\x00\x00"]),
        *product([DIAGNOSTICS_FILE], ["", "{", '{"step": 6, "head', '{"stop": 1}\n', "[]\n", "\x00\x00"]),
    ],
)
def test_a_resumed_log_is_that_of_an_unbroken_run_to_the_byte(tmp_path, name, torn):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write(whole, range(1, 7))
    write(resumed, range(1, 6))
    (resumed / name).write_text((resumed / name).read_text() + torn)
    write(resumed, range(4, 7), last_step=3)
    for file in (METRICS_FILE, DIAGNOSTICS_FILE):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    assert steps_in(resumed) == ["1", "2", "3", "4", "5", "6"]
    diagnoses = [json.loads(line) for line in (resumed / DIAGNOSTICS_FILE).read_text().splitlines()]
    assert [(diagnosis["step"], diagnosis["head_entropies"]) for diagnosis in diagnoses] == [
        (step, [[1.5, None]]) for step in (2, 4, 6)
    ]


def test_a_run_that_starts_over_starts_the_log_over_with_numbers_in_full(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(1, 3))
    assert steps_in(tmp_path) == ["1", "2"]
    row = (tmp_path / METRICS_FILE).read_text().splitlines()[1].split(",")
    assert float(row[COLUMNS.index("learning_rate")]) == 1 / 3
    assert row[COLUMNS.index("val_loss")] == ""


SCHEDULE = DistillationSchedule(parent="p", placement=placement(candidate().trained))


def test_moments_are_two_numbers_a_parameter_and_layers_computed_again_keep_what_they_read():
    memory = training_memory(candidate())
    size = sum(4 * value.numel() for value in Objective(candidate(), torch.Generator()).model.parameters())
    assert (memory.parameters, memory.gradients, memory.moments, memory.parent) == (size, size, 2 * size, 0)
    assert memory.total == 4 * size + memory.activations
    usual, again = (training_memory(candidate(recompute=recompute)) for recompute in (False, True))
    assert again.activations < 0.6 * usual.activations
    assert replace(again, activations=0) == replace(usual, activations=0)


@pytest.mark.parametrize("name", ["1xLSLGo-1xLSLRo", "1xLPLGo-1xLPLRo"])
def test_activations_are_what_a_micro_batch_keeps_for_its_gradients(name):
    made = candidate(name)
    objective = Objective(made, torch.Generator().manual_seed(0))
    parameter_addresses = {value.data_ptr() for value in objective.parameters()}
    kept = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    tokens = torch.zeros(SCALE.micro_batch, SCALE.seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        result = objective(tokens, tokens)
    expected = sum(
        value.untyped_storage().nbytes() for place, value in kept.items() if place not in parameter_addresses
    )
    del result
    assert training_memory(made).activations == pytest.approx(expected, rel=0.02)  # another kernel of attention
    doubled = candidate(name, scale=replace(SCALE, batch=8, micro_batch=8))
    assert training_memory(doubled).activations > 1.9 * training_memory(made).activations


def test_what_is_not_trained_has_no_moments_and_a_model_that_is_counted_leaves_nothing():
    made = replace(candidate(), architecture=base_architecture("pythia-70m", Dimensions(layers=1, heads=2, d_model=24)))
    training_memory(made)
    logits, _ = Objective(made, torch.Generator()).model(torch.zeros(1, 4, dtype=torch.int64))
    assert logits.isfinite().all()
    whole = training_memory(candidate("1xLSLGo-1xLSLRo", distillation=SCHEDULE))
    part = training_memory(candidate("1xLSLGo-1xLSLRo", distillation=replace(SCHEDULE, trainable="changed")))
    assert whole.parent == whole.parameters == part.parameters
    width = candidate().trained.d_model
    changed = 4 * (8 * width**2 + (4 + 1 + 2) * width)  # two linears with biases, and a norm
    assert (part.gradients, part.moments) == (changed, 2 * changed)
    assert part.activations < whole.activations


def test_what_does_not_fit_is_refused_in_a_line():
    assert (available_bytes("cpu") or 0) > 1 << 20
    memory = Memory(parameters=10**9, parent=0, gradients=10**9, moments=2 * 10**9, activations=10**9)
    require_memory(memory, 5 * 10**9)
    require_memory(memory, None)  # where the system does not say
    with pytest.raises(UserError, match=r"training needs 5\.00 GB \(.*moments 2.*for each of 2 trials.*9\.00 GB"):
        require_memory(memory, 9 * 10**9, num_trials=2)


TOKENS = torch.arange(4 * 16).view(4, 16)


def objective_with_gradients(name: str, entropy: EntropyRegularisation | None = None) -> Objective:
    objective = Objective(candidate(name, entropy=entropy), torch.Generator().manual_seed(0))
    objective.backward(TOKENS, TOKENS, num_parts=1, penalty_weight=0.16)
    return objective


@pytest.mark.parametrize("num_steps", [1, 7, NUM_DIAGNOSES, 30, 1000])
def test_diagnoses_are_spread_over_a_run_and_end_with_it(num_steps):
    scale = replace(SCALE, tokens=num_steps * 64)
    due = [step for step in range(1, num_steps + 1) if is_due(step, scale)]
    assert len(due) == min(num_steps, NUM_DIAGNOSES)
    assert due[-1] == num_steps


def test_everything_learned_is_told_with_the_models_entropies():
    objective = objective_with_gradients("SM(t)+ScFuFFN", EntropyRegularisation())
    diagnosis = diagnose(objective, TOKENS, step=3)
    means = [layer.mean(dim=(0, 2)) for layer in objective.model(TOKENS).entropies]
    torch.testing.assert_close(torch.tensor(diagnosis.head_entropies), torch.stack(means))
    assert diagnosis.quarter_shares is not None
    assert sum(diagnosis.quarter_shares) == pytest.approx(1)
    assert diagnosis.num_nan == [0, 0]
    assert [pytest.approx(row) for row in diagnosis.thresholds] == [[0.36] * 2] * 2
    assert diagnosis.temperatures == {f"layers.{index}": [pytest.approx(0.1)] * 2 for index in range(2)}
    assert diagnosis.scalars == {
        f"layers.{index}.ffn.residual.{name}": [1.0] for index in range(2) for name in ("alpha", "beta")
    }
    slopes = diagnose(objective_with_gradients("2xoSoKo"), TOKENS, step=1).scalars
    assert slopes == {f"layers.{index}.ffn.activation.slope": [pytest.approx(0.01)] for index in range(2)}
    plain = diagnose(objective_with_gradients("SM+LN+G"), TOKENS, step=1)
    assert (plain.thresholds, plain.temperatures, plain.scalars) == (None, {}, {})


def test_a_diagnosis_makes_no_logits_and_its_gradient_norms_add_up_to_the_whole(monkeypatch):
    objective = objective_with_gradients("SM+LN+G")
    monkeypatch.setattr(objective.model, "logits", None)  # would raise
    assert len(diagnose(objective, TOKENS, step=3).head_entropies) == 2
    objective = objective_with_gradients("SM+LN+G", EntropyRegularisation())
    norms = diagnose(objective, TOKENS, step=1).gradient_norms
    assert {"embed", "position", "layers.0", "layers.1", "penalty"} <= set(norms)
    whole = math.hypot(*(float(p.grad.norm()) for p in objective.parameters() if p.grad is not None))
    assert math.hypot(*(norm or 0.0 for norm in norms.values())) == pytest.approx(whole, rel=1e-5)


def test_nans_are_counted_by_layer_and_written_as_null():
    objective = objective_with_gradients("SM+LN+G")
    objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan
    gradient = objective.model.embed.weight.grad
    gradient[0, 0] = math.inf
    diagnosis = diagnose(objective, TOKENS, step=1)
    assert diagnosis.num_nan == [0, 4 * 16]  # head 0 of layer 1, all 4 x 16 rows
    assert diagnosis.head_entropies[1][0] is None
    assert diagnosis.gradient_norms["embed"] is None
    assert (diagnosis.quarter_shares, diagnosis.flags) == (None, ())


def diagnoses(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_diagnoses_and_they_change_nothing(corpus, tmp_path, monkeypatch):
    made = candidate("SM(t)+ScFuFFN", entropy=EntropyRegularisation())
    *_, kept = train(made, corpus, seed=0, folder=tmp_path)
    *_, unkept = train(made, corpus, seed=0)
    assert kept.val_loss == unkept.val_loss
    assert [diagnosis["step"] for diagnosis in diagnoses(tmp_path)] == list(range(1, 17))
    weight = "model.layers.1.attention.qkv.weight"  # the step that diverged is diagnosed too
    before_every_step(monkeypatch, lambda objective: objective.get_parameter(weight).data[0, 0].fill_(math.nan))
    *_, outcome = train(candidate("SM+LN+G"), corpus, seed=0, folder=tmp_path / "diverged")
    assert outcome.status == "diverged"
    assert [(made["step"], made["num_nan"]) for made in diagnoses(tmp_path / "diverged")] == [(1, [0, 64])]


def test_the_weight_of_the_penalty_follows_its_schedule(corpus, monkeypatch):
    original, weights = Objective.backward, []

    def backward(self, inputs, targets, *, penalty_weight, **rest):
        weights.append(float(penalty_weight))
        return original(self, inputs, targets, penalty_weight=penalty_weight, **rest)

    monkeypatch.setattr(Objective, "backward", backward)
    list(train(candidate("SM", entropy=EntropyRegularisation(weight=0.4, warmup_share=0.25)), corpus, seed=0))
    assert weights == pytest.approx([0.1, 0.2, 0.3, *[0.4] * 13])


OLD, LOWERED = (
    "V100 is too old for bfloat16 products; training in float32 instead",
    "products are in bfloat16, which this CPU",
)


@pytest.mark.parametrize(
    ("device", "asked", "scale", "has_bfloat16", "expected", "said"),
    [
        ("cuda", None, "proxy", True, "bfloat16", ""),
        ("cuda:1", None, "proxy", True, "bfloat16", ""),
        ("cuda", "float32", "proxy", True, "float32", ""),
        ("cuda", "tf32", "proxy", False, "tf32", ""),
        ("cuda", None, "proxy", False, "float32", OLD),
        ("cuda", "bfloat16", "proxy", False, "float32", OLD),
        ("cpu", None, "parent", True, "bfloat16", LOWERED),
        ("cpu", None, "gpu", True, "bfloat16", LOWERED),
        ("cpu", None, "parent", False, None, ""),
        ("cpu", None, "proxy", True, None, ""),
        ("cpu", None, "smoke", True, None, ""),
        ("cpu", "float32", "parent", True, "float32", ""),
        ("cpu", "bfloat16", "proxy", True, "bfloat16", ""),
        ("cpu", "bfloat16", "parent", False, "bfloat16", "they are slower than float32 here"),
    ],
)
def test_a_precision_is_what_was_asked_or_suits_the_device_and_the_scale(
    monkeypatch, caplog, device, asked, scale, has_bfloat16, expected, said
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "V100")
    monkeypatch.setattr("nas.training.device.has_bf16_units", lambda: has_bfloat16)
    caplog.set_level("INFO", "nas")
    assert on_device(RecipeChanges(precision=asked), device, scale).precision == expected
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text


def test_a_cpu_with_bf16_units_is_another_kind_of_device_for_bfloat16_alone(monkeypatch):
    monkeypatch.setattr("nas.training.device.has_bf16_units", lambda: True)
    assert [kind_of("cpu", precision) for precision in ("float32", "bfloat16")] == ["cpu", "cpu with bfloat16 units"]
    assert kind_of("cuda:0", "bfloat16") == "cuda"


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "cuda")])
def test_the_default_device_is_a_gpu_where_there_is_one(monkeypatch, num_gpus, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert usual_device() == device


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


@pytest.mark.parametrize("written_on", ["cuda", None])
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


def test_memory_includes_weights_that_are_rounded_to_bfloat16_on_a_cpu():
    made = candidate("1xLSLGo-1xLSLRo", distillation=SCHEDULE)
    whole, lowered = (
        training_memory(replace(made, recipe=replace(made.recipe, precision=precision)))
        for precision in ("float32", "bfloat16")
    )
    assert lowered.parent == whole.parent * 3 // 2
    assert replace(lowered, activations=0, parent=0) == replace(whole, activations=0, parent=0)
    many = replace(SCALE, batch=512, micro_batch=512, seq_len=16, vocab_size=16_384)
    assert training_memory(candidate(scale=many), "cuda").logits == 512 * 16 * 16_384 * 8
