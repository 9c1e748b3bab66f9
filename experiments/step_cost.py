"""Whole training steps on the CPU, optimizer included: regularised, plain, and the published form of the computation.

Plain is our own step without entropy; `sdpa` is the same with torch's scaled_dot_product_attention. All take turns in
one process, so that whatever else the machine does meets them alike; a ratio is the median over rounds of the ratio
within a round. Peak memory is that of a process of its own.
"""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from experiments.bars import Figure, figure_table, fresh_process, median_ratio, table
from nas.attention import causal
from nas.attention.causal import row_bounds
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe
from nas.training.objective import Objective
from nas.training.optimizer import adamw
from search_spaces.bases import Dimensions, base_architecture

Variant = Literal["sdpa", "plain", "regularised", "published"]
VARIANTS: tuple[Variant, ...] = ("sdpa", "plain", "regularised", "published")
Rounds: TypeAlias = dict[Variant, list[float]]  # seconds of a step in every round
RATIO = "{:.3f}"
NUM_MEMORY_STEPS = 3  # the optimizer's state exists from the second on


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it: a GPT-2 like model, tokens a step, and a bar for every sequence length."""

    layers: int
    heads: int
    d_model: int
    vocab: int
    tokens: int
    threads: int
    rounds: int
    seq_lens: tuple[int, ...]
    max_ratio_to_plain: tuple[float, ...]
    min_speedup_over_published: tuple[float, ...]
    max_memory_ratio_to_plain: float


def run(name: str, settings: Settings, console: Console) -> None:
    """Measures and prints seconds, ratios and peak memory."""
    seconds: dict[int, Rounds] = {}
    for seq_len in settings.seq_lens:
        with fresh_process() as pool:
            seconds[seq_len] = pool.submit(step_seconds, settings, seq_len).result()
        console.print(f"T={seq_len} measured")
    peaks: dict[Variant, int] = {}
    for variant in VARIANTS:
        with fresh_process() as pool:
            peaks[variant] = pool.submit(peak_bytes, settings, variant).result()
    for shown in (time_table(settings, seconds), figure_table("ratios", figures(settings, seconds, peaks))):
        console.print(shown)
        console.print()


def step_seconds(settings: Settings, seq_len: int) -> Rounds:
    """Seconds of a step in every round; one round before the first is not counted."""
    torch.set_num_threads(settings.threads)
    steps = {variant: make_step(settings, variant, seq_len) for variant in VARIANTS}
    seconds: Rounds = {variant: [] for variant in VARIANTS}
    for _ in range(settings.rounds + 1):
        for variant, step in steps.items():
            since_s = time.perf_counter()
            step()
            seconds[variant].append(time.perf_counter() - since_s)
    return {variant: rounds[1:] for variant, rounds in seconds.items()}


def peak_bytes(settings: Settings, variant: Variant) -> int:
    """Most memory this process has ever held, after a few steps at the longest sequence length."""
    torch.set_num_threads(settings.threads)
    step = make_step(settings, variant, settings.seq_lens[-1])
    for _ in range(NUM_MEMORY_STEPS):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def make_step(settings: Settings, variant: Variant, seq_len: int) -> Callable[[], None]:
    """A training step of a fresh model on random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(settings.vocab, (settings.tokens // seq_len, seq_len + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    penalty = None if variant in ("sdpa", "plain") else EntropyRegularisation()
    recipe = Recipe(scale=replace(SCALES["paper"], seq_len=seq_len), entropy=penalty)
    dimensions = Dimensions(
        layers=settings.layers,
        heads=settings.heads,
        d_model=settings.d_model,
        vocab=settings.vocab,
        context=settings.seq_lens[-1],
    )
    candidate = Candidate(architecture=base_architecture("gpt2-small", dimensions), recipe=recipe)
    module = PublishedObjective(settings) if variant == "published" else Objective(candidate, generator)
    optimizer = adamw(module, recipe)
    has_native = (lambda head_dim: False) if variant == "sdpa" else causal.has_native

    def step() -> None:
        if isinstance(module, PublishedObjective):
            module(inputs, targets).backward()
        else:
            with patch.object(causal, "has_native", has_native):
                module.backward(inputs, targets, num_parts=1, penalty_weight=0.0 if penalty is None else penalty.weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class PublishedObjective(nn.Module):
    """Cross-entropy plus the penalty as the paper's code computes it: on transformers' GPT-2 with eager attention.

    Source: our reading of what github.com/Nandan91/entropy-guided-attention-llm does.
    """

    def __init__(self, settings: Settings) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=settings.vocab,
            n_positions=settings.seq_lens[-1],
            n_embd=settings.d_model,
            n_layer=settings.layers,
            n_head=settings.heads,
            resid_pdrop=0.0,  # no dropout, as in ours: it would cost the published form time
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = "eager"
        self.model = GPT2LMHeadModel(config)
        self.penalty = EntropyRegularisation(form="published-code", weight=1e-5)
        self.thresholds = nn.Parameter(torch.full((settings.layers, settings.heads), self.penalty.threshold_init))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss; inputs and targets: batch x T."""
        result = self.model(inputs, output_attentions=True)
        cross_entropy = nn.functional.cross_entropy(result.logits.flatten(0, 1), targets.flatten())
        return cross_entropy + self.penalty.weight * published_penalty(
            result.attentions, self.thresholds, self.penalty.margin
        )


def published_penalty(attentions: tuple[Tensor, ...], thresholds: Tensor, margin: float) -> Tensor:
    """The published penalty of attention weights, one batch x heads x T x T a layer: head by head,
    squares summed over batch and rows.
    """
    largest = row_bounds(attentions[0].shape[-1])[-1].item()
    layers = []
    for weights, layer_thresholds in zip(attentions, thresholds, strict=True):
        heads = []
        for head, threshold in enumerate(layer_thresholds):
            head_weights = weights[:, head]
            entropy = -(head_weights * torch.log(head_weights + 1e-9)).sum(dim=-1)  # batch x T
            deviation = entropy - threshold * largest
            heads.append(torch.where(deviation.abs() > margin * largest, deviation.square(), 0.0).sum())
        layers.append(torch.stack(heads).mean())
    return torch.stack(layers).mean()


def time_table(settings: Settings, seconds: dict[int, Rounds]) -> Table:
    """Median seconds of every variant, a row for every sequence length."""
    rows = [
        (str(seq_len), *(f"{statistics.median(measured[variant]):.3f}" for variant in VARIANTS))
        for seq_len, measured in seconds.items()
    ]
    title = f"seconds a step of {settings.tokens:,} tokens on {settings.threads} threads"
    return table(("T", *VARIANTS), rows, title=title)


def figures(settings: Settings, seconds: dict[int, Rounds], peaks: dict[Variant, int]) -> list[Figure]:
    """What regularisation costs in time, at every sequence length, and in memory, at the longest."""
    listed = []
    bars = zip(settings.seq_lens, settings.max_ratio_to_plain, settings.min_speedup_over_published, strict=True)
    for seq_len, most, least in bars:
        measured = seconds[seq_len]
        for other in ("plain", "sdpa"):
            ratio = median_ratio(measured["regularised"], measured[other])
            listed.append(Figure(f"T={seq_len}: regularised/{other}", ratio, RATIO, most=most))
        speedup = median_ratio(measured["published"], measured["regularised"])
        listed.append(Figure(f"T={seq_len}: published/regularised", speedup, least=least))
    memory = ", ".join(f"{variant} {peaks[variant] / 1e6:,.0f} MB" for variant in VARIANTS)
    title = f"peak memory at T={settings.seq_lens[-1]}, regularised/plain ({memory})"
    ratio = peaks["regularised"] / peaks["plain"]
    return [*listed, Figure(title, ratio, RATIO, most=settings.max_memory_ratio_to_plain)]
