"""Measures how fast a candidate trains, on several threads or beside others on one GPU, and stores the rates.

Trainings that share a GPU run in a process each, as trials do. All measured trainings use random tokens and no parent.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from threading import Timer

import numpy as np
import torch

from costmodel.config.bugs import default_cache_dir
from costmodel.config.files import read_json
from costmodel.errors import StoppedError
from nas.corpus.corpus import Corpus
from nas.corpus.held_out import HeldOut
from nas.corpus.tokenizer import id_type
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_id
from nas.storage import replace_file
from nas.study.worker import worker_env
from nas.training import step_graph
from nas.training.trainer import TrainingRun

WARM_UP = step_graph.WARM_UP + 2  # steps before the measured steps, including the capture of a CUDA graph
WINDOW_S = 2.0  # duration of a measurement
LONGEST_S = 120.0  # time limit for all processes to start, compile and train
SERVE = (sys.executable, "-c", "from nas.study.throughput import serve; serve()")
BUSY = (sys.executable, "-S", "-c", "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass")  # until that ends
FILE_NAME = "throughput.json"


@contextmanager
def threads(num: int) -> Iterator[None]:
    """Set the number of torch's threads inside a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def training_rate(
    candidate: Candidate, device: str, *, num_threads: int = 1, num_beside: int = 0, window_s: float | None = None
) -> float:
    """Return the rate of one training in this process, in tokens per second.

    num_threads: threads of torch. num_beside: number of other processes that each keep a core busy during the
        measurement, as other trials would. window_s: seconds to measure; None for WINDOW_S.
    """
    keep_freed_memory()
    with ExitStack() as stack:
        stack.enter_context(threads(num_threads))
        run = _run(candidate, device, Path(stack.enter_context(TemporaryDirectory(prefix="nas-rate-"))))
        beside = [subprocess.Popen((*BUSY, str(os.getpid()))) for _ in range(num_beside)]
        stack.callback(_kill, beside)
        return _rate(run, window_s)


def shared_rates(candidate: Candidate, device: str, counts: Sequence[int]) -> dict[int, float]:
    """Return the total rate of simultaneous trainings on one device, in tokens per second, for each number in `counts`.

    Raises StoppedError if a process ends, for example without enough memory, or all measurements together take longer
    than LONGEST_S.
    """
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="nas-rate-"))  # of workers, which are killed
        env = {**os.environ, **worker_env(1), "TMPDIR": scratch}
        started = (
            subprocess.Popen(SERVE, env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) for _ in range(max(counts))
        )
        workers = [stack.enter_context(worker) for worker in started]
        watchdog = Timer(LONGEST_S, _kill, (workers,))
        stack.callback(watchdog.cancel)
        stack.callback(_kill, workers)
        watchdog.start()
        try:
            for worker in workers:
                _send(worker, pickle.dumps((candidate, device)))
            for worker in workers:
                _answer(worker)
            rates = {}
            for count in counts:
                for worker in workers[:count]:
                    _send(worker, b"\n")
                rates[count] = sum(_answer(worker) for worker in workers[:count])
        except (OSError, ValueError) as error:
            raise StoppedError("a training that was measured ended early, or took too long") from error
    return rates


def serve() -> None:
    """Run a child process of `shared_rates`: read a candidate and its device from stdin, then train and print rates.

    It prints 0.0 when it is ready, and then a rate for each line that it reads.
    """
    candidate, device = pickle.load(sys.stdin.buffer)
    keep_freed_memory()
    with threads(1), TemporaryDirectory(prefix="nas-rate-") as folder:
        run = _run(candidate, device, Path(folder))
        print(0.0, flush=True)
        while sys.stdin.buffer.readline():
            print(_rate(run), flush=True)


def kept_rates(candidate: Candidate, device: str) -> dict[int, float] | None:
    """Return the rates that `keep_rates` wrote for a similar candidate, this device name and version of torch, or None.

    Similar candidates differ at most in data, training and validation tokens, learning rate and distillation.
    """
    kept = _kept().get(_key(candidate, device))
    return None if kept is None else {int(count): rate for count, rate in kept.items()}


def keep_rates(candidate: Candidate, device: str, rates: Mapping[int, float]) -> None:
    """Write rates (tokens per second, by number of trainings or threads) to the cache, if it can be written."""
    with suppress(OSError):
        path = default_cache_dir() / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(_kept() | {_key(candidate, device): rates}))


def _kept() -> dict[str, dict[str, float]]:
    try:
        kept = read_json(default_cache_dir() / FILE_NAME)
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _key(candidate: Candidate, device: str) -> str:
    recipe = _alone(candidate).recipe
    shape = replace(recipe, data="", scale=replace(recipe.scale, tokens=1, validation_tokens=1, learning_rate=1.0))
    text = f"{device}, torch {torch.__version__}, {candidate_id(replace(candidate, recipe=shape))}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _alone(candidate: Candidate) -> Candidate:
    return replace(candidate, recipe=replace(candidate.recipe, distillation=None))


def random_corpus(candidate: Candidate, folder: Path) -> Corpus:
    """Return a corpus of random tokens, written to `folder`, on which the candidate can be trained, not validated."""
    scale, vocab_size = candidate.recipe.scale, candidate.trained.vocab_size
    num_tokens = 4 * scale.batch * scale.seq_len + 1
    corpus = Corpus(
        folder=str(folder),
        data="random",
        fingerprint="random",
        tokenizer="random",
        vocab_size=vocab_size,
        num_train_tokens=num_tokens,
        num_validation_tokens=num_tokens,
        unigram_loss=float(np.log(vocab_size)),
        held_out=HeldOut(),
    )
    tokens = np.random.default_rng(0).integers(vocab_size, size=num_tokens)
    corpus.file("train").write_bytes(tokens.astype(id_type(vocab_size)).tobytes())
    return corpus


def _run(candidate: Candidate, device: str, folder: Path) -> TrainingRun:
    """A training on random tokens in a folder, after WARM_UP steps on a GPU, or one on a CPU."""
    corpus = random_corpus(candidate, folder)
    run = TrainingRun(_alone(candidate), corpus, seed=0, folder=None, device=device, initial={})
    for _ in range(WARM_UP if torch.device(device).type == "cuda" else 1):
        run.step()
    return run


def _rate(run: TrainingRun, window_s: float | None = None) -> float:
    """Tokens a second over a time, WINDOW_S by default, and at least one step."""
    since_s, num_steps, elapsed_s = time.perf_counter(), 0, 0.0
    while elapsed_s < (WINDOW_S if window_s is None else window_s):
        run.step()
        if run.device != "cpu":
            torch.cuda.synchronize()
        num_steps, elapsed_s = num_steps + 1, time.perf_counter() - since_s
    return num_steps * run.scale.batch * run.scale.seq_len / elapsed_s


def _kill(workers: "list[subprocess.Popen[bytes]]") -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


def _send(worker: "subprocess.Popen[bytes]", message: bytes) -> None:
    assert worker.stdin is not None
    worker.stdin.write(message)
    worker.stdin.flush()


def _answer(worker: "subprocess.Popen[bytes]") -> float:
    assert worker.stdout is not None
    return float(worker.stdout.readline())
