"""The recipe by which a candidate is trained: scale, optimizer, schedules and losses.

A recipe does not change predicted costs. A `Recipe` contains its scale in full, so that a stored recipe stays the same
if the numbers of a named scale change.
"""

import math
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from costmodel.errors import UserError
from nas.recipe.distillation import DistillationSchedule
from search_spaces.architecture import Architecture, scaled
from search_spaces.deployed import absorbed_layers

ScaleName = Literal["smoke", "proxy", "parent", "gpu", "paper"]
RateSchedule = Literal["cosine", "linear"]
Compilation = Literal["auto", "off"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]  # float16 is refused with the reason
OptimizerName = Literal["adamw", "muon"]
SlopeSharing = Literal["layer", "global"]
NormalisedLinears = Literal["qk", "ffn", "qk+ffn", "qkv+ffn", "qkvo+ffn"]
PenaltyForm = Literal["mean", "published-code"]
EntropyMaximum = Literal["ln-t", "causal"]

MAX_SEED = 2**63 - 1  # torch's generators take seeds of 64 bits
MAX_COUNT = 2**63 - 1  # of tokens, which torch and numpy index with 64 bits
MAX_SIZE = 2**28  # of one dimension, so that the bytes of any tensor with two of them fit into 64 bits


def check_seed(seed: int, most: int = MAX_SEED) -> None:
    """Raise UserError for a seed that is negative or above `most`."""
    if not 0 <= seed <= most:
        raise UserError(f"--seed must be {'at least 0' if seed < 0 else f'from 0 to {most}'}, but got {seed}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size, length and learning rate of a candidate's training.

    Args:
        head_dim: the trained model has width heads x head_dim; None keeps the architecture's width.
        vocab_size: entries of the tokenizer; None keeps the architecture's.
        seq_len: tokens per sequence.
        tokens: training tokens of a final training.
        batch: sequences per optimizer step.
        micro_batch: sequences per forward pass, a divisor of the batch; fewer need less memory.
        learning_rate: peak learning rate.
        warmup_share: share of the steps before the learning rate reaches its peak.
        rungs: shares of the tokens after which the model is validated, ending with 1.
        validation_tokens: largest number of tokens of the last validation, spread evenly over documents
            (`nas.corpus.sequences`); earlier validations use a quarter.

    Raises UserError if a number is out of range, `micro_batch` does not divide `batch`, or `rungs` do not rise to 1.
    """

    name: ScaleName
    head_dim: int | None
    vocab_size: int | None
    seq_len: int
    tokens: int
    batch: int
    micro_batch: int
    learning_rate: float
    warmup_share: float = 0.05  # 5 % of the steps, as in the training code of arXiv 2410.13060
    rungs: tuple[float, ...] = (0.25, 0.5, 1.0)  # a low-fidelity evaluation ends at the first
    validation_tokens: int

    def __post_init__(self) -> None:
        most = dict.fromkeys(("head_dim", "vocab_size", "seq_len", "batch", "micro_batch"), MAX_SIZE)
        for name, limit in (most | {"tokens": MAX_COUNT, "validation_tokens": MAX_COUNT}).items():
            if (value := getattr(self, name)) is not None and not 1 <= value <= limit:
                most_too = f" and at most {limit}" if value > limit else ""
                raise UserError(f"`{name}` of a scale must be at least 1{most_too}, but got {value}.")
        if self.batch % self.micro_batch:
            raise UserError(f"`micro_batch` must divide `batch`, but got {self.micro_batch} and {self.batch}.")
        if not 0 < self.learning_rate < math.inf or not 0 <= self.warmup_share < 1:
            raise UserError(
                f"`learning_rate` must be positive and finite, and `warmup_share` in [0, 1), "
                f"but got {self.learning_rate} and {self.warmup_share}."
            )
        if not self.rungs or self.rungs[-1] != 1 or list(self.rungs) != sorted(set(self.rungs)) or self.rungs[0] <= 0:
            raise UserError(f"`rungs` must rise from above 0 to 1, but got {self.rungs}.")

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of a final training: enough whole batches for `tokens`."""
        return -(-self.tokens // (self.batch * self.seq_len))

    @property
    def seen_tokens(self) -> int:
        """Training tokens of all steps, at least `tokens`."""
        return self.num_steps * self.batch * self.seq_len

    @property
    def rung_steps(self) -> tuple[int, ...]:
        """Numbers of the steps after which the model is validated, rising, from 1 to num_steps."""
        return tuple(sorted({max(1, round(share * self.num_steps)) for share in self.rungs}))

    @property
    def rung_validation_tokens(self) -> int:
        """Largest number of tokens of each validation before the last: a quarter of the last one's, rounded up."""
        return -(-self.validation_tokens // 4)

    @property
    def warmup_steps(self) -> int:
        """Number of steps over which the learning rate rises to its peak."""
        return math.ceil(self.warmup_share * self.num_steps)


PARENT_STEP = 512  # tokens of a step at scale `parent`: sequences of other lengths change the batch
# Learning rate at scale `parent`, over the root mean square of the parent's weights. Best rates differ between parents
# as these do: 5e-5 for SmolLM2-135M (0.19), 1e-5 for Gemma 3 270M (0.034), which 5e-5 ruins (docs/research-log.md).
PARENT_RATE = 2.6e-4

_SIZES: dict[ScaleName, tuple[float | None, ...]] = {
    # head_dim, vocab_size, seq_len, tokens, batch, micro_batch, learning_rate, validation_tokens
    # Seconds on one core, for tests and for trying a command out.
    "smoke": (4, 512, 32, 8_192, 8, 8, 3e-3, 2_048),
    # For a laptop CPU: depth, heads and layers of the full model, but narrow. It was chosen to rank published rows as
    # the papers do (docs/proxies.md), for which the number of tokens matters most. The rate is for Muon and these
    # tokens; with AdamW, architectures without norms diverge at it. Validation uses nearly all of five large files of
    # the standard library.
    "proxy": (8, 512, 128, 524_288, 8, 8, 1.2e-2, 65_536),
    # For a trained parent, a small language model, on a few cores: eleven minutes of recovery per candidate for
    # SmolLM2-135M on one core. A step has at most PARENT_STEP tokens, and `from_parent` adapts the rate to the weights.
    "parent": (None, None, 128, 131_072, 4, 4, 5e-5, 32_768),
    # For one GPU: under an hour per candidate by arithmetic, not measured yet.
    "gpu": (32, 16_384, 128, 200_000_000, 256, 128, 1e-3, 1_048_576),
    # Source: arXiv 2410.13060, training code: 65,536 tokens a step, 2.1e9 tokens, AdamW at 1e-3.
    "paper": (None, None, 128, 2_100_000_000, 512, 32, 1e-3, 4_194_304),
}
_, *_OF_SIZES = (field.name for field in fields(Scale) if field.default is MISSING)  # all but the scale's name
SMALL_SCALES: tuple[ScaleName, ...] = ("smoke", "proxy")  # for a CPU; too narrow to keep a GPU busy
SCALES: dict[ScaleName, Scale] = {
    name: Scale(name=name, **dict[str, Any](zip(_OF_SIZES, sizes, strict=True))) for name, sizes in _SIZES.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyRegularisation:
    """Pulls the attention entropy of every head into a band around a learned share of its maximum E_max (in nats).

    Args:
        form: mean penalises the mean entropy of each head and averages over sequences, heads and layers (Algorithm 1 of
            the paper, independent of batch and length). published-code penalises every query row and sums over rows and
            sequences, as the authors' code does, so that the effect of its weight depends on the batch.
        maximum: E_max. ln-t, as in the paper, is ln(seq_len) for every row; causal is the attainable maximum: ln i for
            row i, and ln(T!) / T for a head's mean.
        weight: lambda, the factor of the penalty in the loss.
        warmup_share: share of the steps over which the weight rises linearly from 0; 0 for a constant weight.
        margin: gamma, half the width of the band in units of E_max.
        threshold_init: theta, the initial centre of the band as a share of E_max, which is learned.

    Source: arXiv 2501.03489, Algorithm 1.
    """

    form: PenaltyForm = "mean"
    maximum: EntropyMaximum = "ln-t"
    weight: float = 0.16  # the paper's 1e-5, which its code sums over 128 rows x 128 sequences
    warmup_share: float = 0.0  # arXiv 2501.03489 has no schedule
    margin: float = 0.20  # arXiv 2501.03489, section 5
    threshold_init: float = 0.36  # not stated in the paper; the middle of its learned values, 0.20 to 0.52

    def weight_at(self, step: int, num_steps: int) -> float:
        """Return the weight of the penalty in `step`, counted from 0, of a training of `num_steps` steps."""
        rising = self.warmup_share * num_steps
        return self.weight * min(1.0, (step + 1) / rising) if rising else self.weight

    def __post_init__(self) -> None:
        shares = (self.warmup_share, self.margin, self.threshold_init)
        if not (0 <= self.weight < math.inf and all(0 <= share <= 1 for share in shares)):
            raise UserError(
                f"entropy regularisation needs a finite `weight` >= 0 and `warmup_share`, `margin`, `threshold_init` "
                f"in [0, 1], but got {self.weight}, {self.warmup_share}, {self.margin}, {self.threshold_init}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """Trains linears in a normalised form, from which the weights of the deployed model are computed once.

    kind: `weight` learns the length of every row separately from its direction; `spectral` keeps the largest singular
        value of every matrix at 1.
    linears: the linears to normalise; q, k, v and o are those of queries, keys, values and output of attention.

    Source: arXiv 2410.13060, table of normalised FFNs and attention; Salimans and Kingma 2016, arXiv 1602.07868; Miyato
    et al. 2018, arXiv 1802.05957.
    """

    kind: Literal["weight", "spectral"]
    linears: NormalisedLinears = "ffn"  # the best choice in the table of the source


@dataclass(frozen=True, kw_only=True, slots=True)
class Freezing:
    """When the norms of an architecture with frozen norms are frozen: one after another, at equal distances.

    Args:
        start_share: share of the steps before the first norm is frozen.
        end_share: share of the steps before the last norm is frozen.

    Source: arXiv 2507.02559, which removes norms from trained models one after another.
    """

    start_share: float = 0.4
    end_share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.start_share <= self.end_share <= 1:
            raise UserError(
                f"freezing needs 0 <= `start_share` <= `end_share` <= 1, but got {self.start_share}, {self.end_share}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Foldable:
    """Keeps linear FFNs invertible enough to be folded into the basis of the residual stream.

    Args:
        floor: smallest allowed singular value of a layer's map of the residual stream; without an FFN, all singular
            values are 1. Setting it turns corrections on.
        every: optimizer steps between corrections; one more follows the last step. Setting it turns corrections on.

    See `nas.training.distillation.foldable`.
    """

    floor: float = 0.5  # with 0.3, two linears fail the fold check (nas/training/distillation/foldable.py)
    every: int = 32  # costs 1.5 % of a step at scale `proxy` on a core, if every layer needs a correction

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1 or not 1 <= self.every <= MAX_COUNT:
            raise UserError(
                f"`floor` of foldable FFNs must be above 0 and at most 1, and `every` at least 1 and at most "
                f"{MAX_COUNT}, but got {self.floor} and {self.every}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All settings of a training. None of them changes the predicted cost of the candidate.

    Args:
        data: stdlib, codeparrot, languini, NAME:FOLDER for a copy of the last two, or a path.
        entropy: the entropy regulariser, or None to train on cross-entropy alone.
        normalisation: normalised weights of linears, or None.
        freezing: when frozen norms are frozen; without effect if the architecture has none.
        foldable: keeps linear FFNs foldable, or None; without effect if `layers_kept_foldable` returns no layer.
        distillation: the distillation schedule from a trained parent, or None to train from scratch.
        slopes: whether each leaky ReLU learns its own slope, or all share one.
        optimizer: muon trains the weights of the layers' linears with Muon, at AdamW's rate, and the rest with AdamW.
        schedule: decay of the learning rate after warm-up.
        final_rate_share: last learning rate as a share of the peak.
        beta1: decay of AdamW's running mean of gradients.
        beta2: decay of AdamW's running mean of squared gradients.
        eps: constant added to AdamW's denominator.
        weight_decay: decay of the weights of linears and embedding tables.
        clip_norm: norm of the whole gradient above which it is scaled down.
        temperature_init: initial value of learned softmax temperatures.
        precision: type of the factors of matrix products; parameters, optimizer states, sums and losses are in float32.
            By default, commands use bfloat16 on a GPU that has it and, except at scales smoke and proxy, on a CPU with
            units for it; else float32. tf32 is for GPUs.
        recompute: whether layers are computed again for their gradients, which saves most of the memory of activations,
            adds about a third to the time and changes no number.
        compile: on CUDA, auto compiles losses and (without `recompute`) layers, and launches small steps as one CUDA
            graph; off does neither.

    Raises UserError if a number is out of range, for float16, or if `foldable` is set beside a `normalisation` of FFNs.
    """

    scale: Scale = SCALES["proxy"]
    data: str = "stdlib"
    entropy: EntropyRegularisation | None = None
    normalisation: Normalisation | None = None
    freezing: Freezing = Freezing()
    foldable: Foldable | None = None
    distillation: DistillationSchedule | None = None
    slopes: SlopeSharing = "layer"
    optimizer: OptimizerName = "adamw"
    schedule: RateSchedule = "cosine"
    final_rate_share: float = 0.1  # Hoffmann et al. 2022, arXiv 2203.15556, section 3: cosine to a tenth
    beta1: float = 0.9
    beta2: float = 0.95  # arXiv 2501.03489's Languini runs
    eps: float = 1e-8  # torch's default
    weight_decay: float = 0.1  # training code of arXiv 2410.13060; not for biases, norms and scalars
    clip_norm: float = 1.0  # training code of arXiv 2410.13060
    temperature_init: float = 0.1  # arXiv 2501.03489, Languini; its 1e-2 for CodeParrot is worse at scale proxy
    precision: Precision = "float32"
    recompute: bool = False
    compile: Compilation = "auto"

    def __post_init__(self) -> None:
        check_precision(self.precision)
        for name in ("eps", "clip_norm", "temperature_init"):
            value, no_clipping = getattr(self, name), name == "clip_norm" and self.clip_norm == math.inf
            if not (0 < value < math.inf or no_clipping):
                raise UserError(f"`{name}` of a recipe must be positive and finite, but got {value}.")
        if not 0 <= self.final_rate_share <= 1:
            raise UserError(f"`final_rate_share` of a recipe must be between 0 and 1, but got {self.final_rate_share}.")
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise UserError(f"`{name}` of a recipe must be at least 0 and below 1, but got {value}.")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"`weight_decay` must be finite and not negative, but got {self.weight_decay}.")
        if self.foldable is not None and self.normalisation is not None and self.normalisation.linears != "qk":
            raise UserError(
                f"FFNs are kept foldable or trained with normalised weights, not both, but got `foldable` and "
                f"normalisation of {self.normalisation.linears!r}; leave one out."
            )


def check_precision(precision: Precision | None) -> None:
    """Raise UserError for float16; accept the other precisions, and None."""
    if precision == "float16":
        raise UserError(
            "--recipe.precision must be bfloat16, tf32 or float32, but got float16, which loses gradients below 6e-8 "
            "unless the loss is scaled, which no training here does; bfloat16 products are as fast."
        )


def from_parent(recipe: Recipe, distillation: DistillationSchedule) -> Recipe:
    """Adapt a recipe to start from a trained parent, which needs fewer and smaller steps than random weights.

    The recipe gets AdamW, early freezing, so that most of the training is recovery, a decay to 2 % of the peak rate,
    and weight 10 for hidden states, or 0 if predictions have weight 0. At scale `parent`, new sub-layers are first
    trained on their own, and then only changed parts (`trainable`), at PARENT_RATE x `weight_rms`. Other scales get an
    eighth of the rate, half the batch and five eighths of the tokens, as chosen at scale `proxy`
    (`experiments/data/fidelity-levers.csv`).
    """
    scale, freezing = recipe.scale, Freezing(start_share=0.02, end_share=0.25)
    recipe = replace(recipe, optimizer="adamw", final_rate_share=0.02, freezing=freezing)
    weight = 10.0 if distillation.prediction_weight else 0.0  # without a teacher: text alone
    distillation = replace(distillation, hidden_state_weight=weight)
    if scale.name == "parent":
        distillation = replace(distillation, blockwise_tokens=32_768, teacher_top_k=64, trainable="changed")
        rms = distillation.weight_rms
        rate = scale.learning_rate if rms is None else float(f"{PARENT_RATE * rms:.2g}")
        return replace(recipe, scale=replace(scale, learning_rate=rate), distillation=distillation)
    batch = max(1, scale.batch // 2)
    changed = replace(
        scale,
        learning_rate=scale.learning_rate / 8,
        batch=batch,
        micro_batch=math.gcd(scale.micro_batch, batch),
        tokens=max(1, scale.tokens * 5 // 8),
    )
    return replace(recipe, scale=changed, distillation=distillation)


def usual_scale(parent: Architecture | None) -> ScaleName:
    """Return the default scale: `proxy`, or `parent` with a parent of another head size or vocabulary size."""
    scale = SCALES["proxy"]
    narrow = parent is None or (parent.head_dim, parent.vocab_size) == (scale.head_dim, scale.vocab_size)
    return "proxy" if narrow else "parent"


def layers_kept_foldable(architecture: Architecture) -> list[int]:
    """Return the indices of the layers that `Foldable` acts on: their FFN folds away and has no norm before it."""
    return [index for index in absorbed_layers(architecture) if architecture.layers[index].norm2 == "none"]


def trained_architecture(architecture: Architecture, scale: Scale) -> Architecture:
    """Return the architecture to train: the same depth, heads and layers with the scale's width and vocabulary size.

    If the scale has a `head_dim`, `d_ff` and `head_size` keep their ratios to the width, rounded down, and the context
    becomes the length of a sequence.
    Raises UserError if the architecture's context is shorter than the scale's sequences, or a dimension is too large
    for a tensor.
    """
    vocab_size = architecture.vocab_size if scale.vocab_size is None else scale.vocab_size
    if architecture.context < scale.seq_len:
        raise UserError(
            f"the context must cover a sequence of scale {scale.name!r}, but got "
            f"context={architecture.context}, seq_len={scale.seq_len}."
        )
    if scale.head_dim is None:
        trained = replace(architecture, vocab_size=vocab_size)
    else:
        width = architecture.num_heads * scale.head_dim
        trained = scaled(architecture, d_model=width, vocab_size=vocab_size, context=scale.seq_len)
    for name in ("d_model", "d_ff", "vocab_size", "context"):
        if (value := getattr(trained, name)) > MAX_SIZE:
            raise UserError(f"`{name}` of a model to train must be at most {MAX_SIZE}, but got {value}.")
    return trained
