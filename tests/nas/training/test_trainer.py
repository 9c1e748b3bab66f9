import csv
import errno
import json
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import EntropyRegularisation
from nas.training import batches, checkpoint, trainer
from nas.training.memory import TooLargeError
from nas.training.objective import EntropyPenalty, Objective
from nas.training.outcome import EntropySummary, Outcome, RungRecord
from nas.training.trainer import train
from tests.conftest import python
from tests.nas.training import short_runs
from tests.nas.training.short_runs import SCALE, timeless

BOTH_BLOCKS = ("tiny", "pythia-70m")
NAMES = ("SM+LN+G", "SM+LR", "SM", "SM(t)+ScFFN")
CHOICES = "SM+fLN+R SM+fRMS+R SM+SQ SM+RMS+G 1xLHLEo-1xooMPo-l 1xmQmXo-1xLULKs 2xooLRo 1xoHoRo-1xoooXo"
REGULARISED = EntropyRegularisation()


def candidate(name: str = "SM(t)+ScFuFFN", **settings: Any) -> Candidate:
    return short_runs.candidate(name, **settings)


def curve(folder: Path) -> list[dict[str, str]]:
    """metrics.csv but for the seconds."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def test_a_run_drops_the_weights_that_it_started_from(corpus):
    made = candidate()
    initial = {name: value.clone() for name, value in deployed_weights(Decoder(made.initial_architecture)).items()}
    left = [weakref.ref(value) for value in initial.values()]
    run = train(made, corpus, seed=0, initial=initial)
    del initial
    next(run)
    assert not any(value() is not None for value in left)


def test_a_run_yields_its_rungs_and_completes(corpus, tmp_path):
    shares = list[float]()
    *rungs, outcome = train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path, on_progress=shares.append)
    assert shares == [step / 16 for step in range(16)]
    assert [rung.steps for rung in rungs] == list(SCALE.rung_steps) == [4, 8, 16]
    assert [rung.tokens for rung in rungs] == [256, 512, 1024]
    assert (outcome.status, outcome.steps, outcome.tokens) == ("completed", 16, 1024)
    assert outcome.val_loss == rungs[-1].val_loss < rungs[0].val_loss < math.log(300) + 0.1
    assert outcome.val_loss is not None
    assert outcome.perplexity == pytest.approx(math.exp(outcome.val_loss))
    assert [len(heads) for heads in outcome.entropy.head_means] == [2, 2]
    rows = curve(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 17))
    assert [row["step"] for row in rows if row["val_loss"]] == ["4", "8", "16"]
    assert any(float(row["penalty"]) > 0 for row in rows)
    assert list((tmp_path / "tensorboard").glob("events*"))
    seconds = [event.seconds for event in (*rungs, outcome)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("base", "name"), list(product(BOTH_BLOCKS, (*NAMES, *CHOICES.split()))))
def test_every_kind_of_layer_trains(corpus, base, name):
    short = replace(SCALE, tokens=3 * 64, head_dim=8)
    events = list(train(candidate(name, scale=short, entropy=REGULARISED, base=base), corpus, seed=0))
    assert events[-1].status == "completed"
    assert events[-1].val_loss is not None
    assert math.isfinite(events[-1].val_loss)


def test_layers_have_entropies_of_the_heads_they_have_if_any(corpus, tmp_path):
    made = candidate("1xooLRo-1xLHoRo", entropy=REGULARISED)
    *_, outcome = train(made, corpus, seed=0, folder=tmp_path)
    assert [len(heads) for heads in outcome.entropy.head_means] == [0, 1]
    assert list(train(made, corpus, seed=0, folder=tmp_path))[-1] == outcome  # read back
    diagnosis = json.loads((tmp_path / "diagnostics.jsonl").read_text().splitlines()[-1])
    assert [len(heads) for heads in diagnosis["head_entropies"]] == [0, 1]
    assert [len(heads) for heads in diagnosis["thresholds"]] == [0, 1]
    events, plain = (
        timeless(train(candidate("2xooLRo", entropy=entropy), corpus, seed=0)) for entropy in (REGULARISED, None)
    )
    assert events == plain
    assert events[-1].entropy == EntropySummary(
        head_means=((), ()), num_collapsed=0, quarter_shares=(0.0, 0.0, 0.0, 0.0)
    )


IN_ANOTHER_PROCESS = """
import sys, torch
from pathlib import Path
from nas.corpus.corpus import open_corpus
from nas.training.trainer import train
from tests.nas.training.short_runs import candidate

torch.set_num_threads(1)
list(train(candidate("SM(t)+ScFuFFN"), open_corpus(Path(sys.argv[1])), seed=5, folder=Path(sys.argv[2])))
"""


def test_one_seed_one_curve_in_another_process_too(corpus, tmp_path):
    python("-c", IN_ANOTHER_PROCESS, corpus.folder, str(tmp_path / "other"), cwd=Path(__file__).parents[3])
    here = list(train(candidate(), corpus, seed=5, folder=tmp_path / "here"))
    assert timeless(train(candidate(), corpus, seed=5, folder=tmp_path / "other")) == timeless(here)  # read back
    assert curve(tmp_path / "here") == curve(tmp_path / "other")
    assert timeless(train(candidate(), corpus, seed=6)) != timeless(here)


@pytest.mark.parametrize("entropy", [None, REGULARISED, replace(REGULARISED, form="published-code")])
@pytest.mark.parametrize("name", ["1xLTLKs-1xoSoFs", "SM+LN+G", "1xlHmXo-1xMSLRo-l"])
def test_every_parameter_has_the_gradient_of_the_whole_batch_also_in_parts(corpus, name, entropy):
    tokens = torch.randint(300, (8, 17), generator=torch.Generator().manual_seed(0))
    gradients = []
    for num_parts in (1, 4):
        objective = Objective(candidate(name, entropy=entropy), torch.Generator().manual_seed(0))
        losses = objective.backward(tokens[:, :-1], tokens[:, 1:], num_parts=num_parts, penalty_weight=0.16)
        gradients.append([*losses, *(parameter.grad for parameter in objective.parameters())])
    for whole, accumulated in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, accumulated, rtol=1e-5, atol=1e-6)  # none is None


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


def killed_run(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus, folder: Path, *, before_step: int, every_s: float
) -> None:
    """Trains into `folder` until the process would take step `before_step` (0, 1, ...), then dies."""

    def train_batch(corpus, *, step, **rest):
        if step == before_step:
            raise Killed
        return batches.train_batch(corpus, step=step, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_batch", train_batch)
        patch.setattr(trainer, "CHECKPOINT_INTERVAL_S", every_s)
        patch.setattr(trainer, "CHECKPOINT_SHARE", math.inf)
        with pytest.raises(Killed):
            list(train(candidate(entropy=REGULARISED), corpus, seed=0, folder=folder))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> tuple[Path, list[RungRecord | Outcome]]:
    """The folder and the events of a training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, list(train(candidate(entropy=REGULARISED), corpus, seed=0, folder=folder))


@pytest.mark.parametrize(("before_step", "every_s"), [(7, 0.0), (2, math.inf), (4, math.inf), (15, math.inf)])
def test_a_killed_run_resumes_to_the_same_numbers(monkeypatch, corpus, tmp_path, whole, before_step, every_s):
    killed_run(monkeypatch, corpus, tmp_path / "killed", before_step=before_step, every_s=every_s)
    steps = []

    def train_batch(corpus, *, step, **rest):
        steps.append(step)
        return batches.train_batch(corpus, step=step, **rest)

    monkeypatch.setattr(trainer, "train_batch", train_batch)
    resumed = list(train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path / "killed"))
    last_rung = max(step for step in (0, 4, 8) if step <= before_step)  # with a checkpoint in any case
    assert steps == list(range(before_step if every_s == 0.0 else last_rung, 16))
    folders, events = (whole[0], tmp_path / "killed"), whole[1]
    assert timeless(resumed) == timeless(events)
    assert curve(folders[0]) == curve(folders[1])
    diagnoses = [(folder / "diagnostics.jsonl").read_text() for folder in folders]
    assert diagnoses[0] == diagnoses[1]
    ends = [checkpoint.load_latest(folder) for folder in folders]
    assert all(torch.equal(ends[0].weights[key], ends[1].weights[key]) for key in ends[0].weights)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(corpus, tmp_path, whole):
    made = candidate(entropy=REGULARISED)
    run = train(made, corpus, seed=0, folder=tmp_path / "stopped")
    assert [next(run).steps, next(run).steps] == [4, 8]
    run.close()
    assert [int(row["step"]) for row in curve(tmp_path / "stopped")] == list(range(1, 9))
    older, newest = sorted((tmp_path / "stopped" / "checkpoints").iterdir())
    assert (older.name, newest.name) == ("step-000000004", "step-000000008")
    (newest / "weights.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="is damaged and passed over"):
        again = list(train(made, corpus, seed=0, folder=tmp_path / "stopped"))
    assert timeless(again) == timeless(whole[1])
    for folder in (tmp_path / "stopped" / "checkpoints").iterdir():
        (folder / "state.json").write_text("{")
    with pytest.warns(UserWarning, match="is damaged"), pytest.warns(UserWarning, match="has no whole checkpoint left"):
        anew = list(train(made, corpus, seed=0, folder=tmp_path / "stopped"))
    assert timeless(anew) == timeless(whole[1])
    assert len(curve(tmp_path / "stopped")) == 16


def files_left(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_completed_run_keeps_one_checkpoint_without_optimizer_state_and_is_read_back_without_training(
    monkeypatch, corpus, tmp_path
):
    first = list(train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path))
    assert files_left(tmp_path / "checkpoints") == [
        "step-000000016-end/state.json",
        "step-000000016-end/weights.safetensors",
    ]
    kept = checkpoint.load_latest(tmp_path)
    assert (kept.step, kept.optimizer) == (16, None)
    assert kept.weights["embed.weight"].shape == (300, candidate().trained.d_model)
    monkeypatch.setattr(trainer, "train_batch", lambda *args, **rest: pytest.fail("trained again"))
    assert list(train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path)) == first


def test_drafts_of_killed_processes_are_removed(corpus, tmp_path):
    for step in (2, 4):
        draft = tmp_path / "checkpoints" / f"step-{step:09d}.draft"
        draft.mkdir(parents=True)
        (draft / "weights.safetensors").write_bytes(b"half")
    next(train(candidate(), corpus, seed=0, folder=tmp_path))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000004"]


def test_a_checkpoint_of_another_run_is_refused(corpus, tmp_path):
    list(train(candidate(), corpus, seed=0, folder=tmp_path))
    for other, seed, subject in ((candidate("SM+G"), 0, "candidate"), (candidate(), 1, "seed")):
        with pytest.raises(ValueError, match=f"must be of {subject}"):
            list(train(other, corpus, seed=seed, folder=tmp_path))
    with pytest.raises(ValueError, match="must be of corpus"):
        list(train(candidate(), replace(corpus, fingerprint="0" * 16), seed=0, folder=tmp_path))
    with pytest.raises(ValueError, match="must cover the tokenizer's"):
        next(train(candidate(scale=replace(SCALE, vocab_size=280)), corpus, seed=0))


def test_a_full_disk_reaches_the_caller_and_keeps_the_last_checkpoint(monkeypatch, corpus, tmp_path):
    def full(path: Path, raw: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = train(candidate(), corpus, seed=0, folder=tmp_path)
    next(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_through", full)
        with pytest.raises(OSError, match="No space left"):
            list(run)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000004"]
    assert list(train(candidate(), corpus, seed=0, folder=tmp_path))[-1].status == "completed"


def test_bfloat16_trains_with_entropies_in_fp32(corpus, monkeypatch, whole):
    penalised: list[torch.dtype] = []
    penalise = EntropyPenalty.forward

    def observed(penalty: EntropyPenalty, layers: Sequence[torch.Tensor]) -> torch.Tensor:
        penalised.extend(layer.dtype for layer in layers)
        return penalise(penalty, layers)

    monkeypatch.setattr(EntropyPenalty, "forward", observed)
    made = candidate(entropy=REGULARISED)
    lowered = replace(made, recipe=replace(made.recipe, precision="bfloat16"))
    *_, outcome = train(lowered, corpus, seed=0)
    in_fp32 = whole[1][-1].val_loss
    assert set(penalised) == {torch.float32}
    assert outcome.val_loss != in_fp32
    assert outcome.val_loss == pytest.approx(in_fp32, rel=0.01)


def test_memory_that_runs_out_is_told_in_one_line(monkeypatch, corpus, tmp_path, whole):
    def exhausted(self: Objective, *args: object, **rest: object) -> None:
        raise error

    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):  # noqa: B007
        run = train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path / "run")
        next(run)
        with monkeypatch.context() as patch:
            patch.setattr(Objective, "backward", exhausted)
            with pytest.raises(TooLargeError, match="on cpu with 4 sequences of 16 tokens .*; lower `micro_batch`"):
                list(run)
    rest = train(candidate(entropy=REGULARISED), corpus, seed=0, folder=tmp_path / "run")
    assert timeless(rest) == timeless(whole[1])


@pytest.mark.parametrize("name", ["SM+fLN+R", "SM(t)+ScFuFFN"])
def test_layers_computed_again_for_their_gradients_change_no_number(corpus, tmp_path, name):
    for recompute in (False, True):
        made = candidate(name, entropy=REGULARISED, recompute=recompute)
        list(train(made, corpus, seed=0, folder=tmp_path / str(recompute)))
    assert curve(tmp_path / "True") == curve(tmp_path / "False")
    ends = [checkpoint.load_latest(tmp_path / name).weights for name in ("True", "False")]
    assert all(value.equal(ends[1][key]) for key, value in ends[0].items())  # deviations of norms with them


def test_checkpoints_take_a_few_percent_of_the_time(monkeypatch, corpus, tmp_path):
    now_s, saves = 0.0, []

    def step_s(self):
        nonlocal now_s
        now_s += 10.0
        return step(self)

    def save_s(self):
        nonlocal now_s
        saves.append(self.progress.step)
        now_s += 0.57  # 3 % of 19 s
        save(self)

    step, save = trainer.TrainingRun.step, trainer.TrainingRun.save
    monkeypatch.setattr(trainer.TrainingRun, "step", step_s)
    monkeypatch.setattr(trainer.TrainingRun, "save", save_s)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(trainer, "CHECKPOINT_INTERVAL_S", 10.0)
    list(train(candidate(scale=replace(SCALE, rungs=(1.0,))), corpus, seed=0, folder=tmp_path))
    assert saves == [1, 3, 5, 7, 9, 11, 13, 15, 16]
