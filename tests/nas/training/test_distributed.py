import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import EntropyRegularisation
from nas.training import checkpoint
from nas.training.distributed import SOLO, Team, joined
from nas.training.trainer import train
from tests.nas.training import short_runs
from tests.nas.training.short_runs import SCALE

TWENTY = replace(SCALE, tokens=20 * 64, micro_batch=2, validation_tokens=64)  # 20 steps
MEAN = EntropyRegularisation(threshold_init=0.9, margin=0.0)  # far off, so that the penalty weighs in
PENALTIES = {"none": None, "mean": MEAN, "published-code": replace(MEAN, form="published-code", weight=1e-3)}


def candidate(penalty: str) -> Candidate:
    return short_runs.candidate("1xLTLGo-1xlTlGo", TWENTY, entropy=PENALTIES[penalty])


def train_together(rank: int, corpus: Corpus, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with joined("cpu") as (team, device):
        for name in PENALTIES:
            list(train(candidate(name), corpus, seed=0, folder=folder / name, device=device, team=team))


@contextmanager
def in_pair() -> Iterator[None]:
    """What `torchrun --nproc-per-node 2` sets for its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        patch.setenv("MASTER_PORT", str(store.port))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun: rank 0 does not open the store itself
        yield


@pytest.fixture(scope="module")
def together(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    with in_pair():
        multiprocessing.spawn(train_together, args=(corpus, folder), nprocs=2)
    return folder


@pytest.mark.parametrize("penalty", PENALTIES)
def test_two_processes_train_as_one(corpus, together, tmp_path, penalty):
    alone = list(train(candidate(penalty), corpus, seed=0, folder=tmp_path))[-1]
    ends = [checkpoint.load_latest(folder) for folder in (tmp_path, together / penalty)]
    assert ends[0].step == ends[1].step == 20
    assert ends[1].progress["outcome"]["val_loss"] == pytest.approx(alone.val_loss, rel=1e-5)
    for name, weight in ends[0].weights.items():
        parts = [
            tensor.chunk(3)[::2] if name.endswith("qkv.bias") else (tensor,)
            for tensor in (ends[1].weights[name], weight)
        ]
        # but for biases of keys: softmax is blind to them, and AdamW scales up the rounding that is their gradient
        torch.testing.assert_close(*parts, rtol=1e-5, atol=1e-5)
    assert ends[1].progress["losses"] == pytest.approx(list(ends[0].progress["losses"]), rel=1e-5)


def fail_together(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def make() -> str:
        raise UserError(f"refused by {rank}")

    with joined("cpu") as (team, _):
        try:
            team.broadcast_from_leader(make)
        except ValueError as error:
            (folder / str(rank)).write_text(str(error))


def test_what_the_first_process_refuses_is_raised_in_all(tmp_path):
    with in_pair():
        multiprocessing.spawn(fail_together, args=(tmp_path,), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["refused by 0"] * 2


def test_shares_of_a_batch_are_the_batch_and_one_process_exchanges_nothing():
    batch = torch.arange(12).view(6, 2)
    shares = [Team(rank=rank, size=3).share(batch) for rank in range(3)]
    assert [share.tolist() for share in shares] == [part.tolist() for part in batch.split(2)]
    SOLO.average([batch])
    assert batch.tolist() == torch.arange(12).view(6, 2).tolist()
    assert SOLO.broadcast_from_leader(lambda: "a") == "a"


def test_a_batch_that_cannot_be_shared_out_is_refused(corpus):
    with pytest.raises(ValueError, match="`batch` must be a multiple of the number of processes"):
        next(train(candidate("none"), corpus, seed=0, team=Team(rank=0, size=3)))
