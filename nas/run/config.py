"""The configuration of a study: space, budget and data; and the recipe that it gives a candidate."""

import math
import re
from dataclasses import dataclass, field, replace

from costmodel.config.units import parse_seconds
from costmodel.cost import Budget
from costmodel.deployment.deploy import Deployment, Projection
from costmodel.deployment.known_layers import public_layers
from costmodel.errors import UserError
from costmodel.ops import Encoding
from costmodel.protocols import SETTINGS, Setting, setting_of
from costmodel.protocols.primitives import Holder, WeightMasks
from nas.corpus.documents import OWN_RULE
from nas.recipe.candidate import Candidate, recipe_at
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.overrides import RecipeChanges, changed
from nas.recipe.recipe import MAX_SEED, Foldable, Recipe, ScaleName, check_precision, check_seed, layers_kept_foldable
from search_spaces.budget.options import BudgetOptions
from search_spaces.budget.priced_space import CostForm
from search_spaces.lower import Workload
from search_spaces.notation import Member

RAY_ADDRESS = re.compile(r"auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", re.ASCII)
USUAL_SPACE = "gpt2-small"
NO_PARENT = "none"  # candidates are trained from scratch
PROXY_EVALS = 3  # low-fidelity evaluations per final training: they take half of all training tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig(BudgetOptions):
    """What a study searches and trains on, with the costs and budgets of `BudgetOptions`.

    Args:
        space: a shipped search space, the path of a space's YAML file, or parent: the layers of --parent and cheaper
            replacements. The default is gpt2-small, or parent if --parent has another block or other dimensions.
        projection: whether the logits of all tokens of the prompt are computed, as in the papers, or of the last token
            only.
        embedding: whether the client one-hot encodes tokens, or the protocol looks them up.
        public_layers: first layers whose weights all parties know, such as embed,0-5, because they are those of a
            public checkpoint. Every candidate keeps them from --parent, untrained, at the cost of public weights.
        client_layers: number of first layers that the client computes in plaintext, with the embedding. Every candidate
            keeps them from --parent, untrained, at no cost.
        weights: whether weights are secret-shared (the default) or known to the server (semi2k, aby3, cheetah only).
        weight_masks: whether semi2k hides weights behind fresh masks for every token, or keeps masks: the first of
            several new tokens opens the weights, and for a single token an earlier run has opened them.
        new_tokens: number of tokens generated after the prompt, with a KV cache; costs are per new token.
        cost_of: whether costs are of the folded model, which you would deploy, or of the unfolded one, as in the
            papers.
        searcher: how candidates are chosen: trellis, evolution, stratified, uniform, nsga2, tpe, gp, optuna:NAME for
            another sampler, or module:Class of your own.
        generation_size: candidates chosen at a time; two generations are in training at once. The default is 2, or half
            of what the cores or GPUs can train at a time when the run begins, at most a quarter of the trials.
        num_trials: number of candidates that get the final training, without baselines.
        num_proxy_evals: number of candidates that get a low-fidelity evaluation, by searchers that use it; by default 3
            for each final training. With 0, all candidates get the final training.
        finalist_seeds: largest number of further seeds for each member of the front, trained after all candidates; for
            all members together, at most half of --num-trials, rounded up.
        time_budget: plan for this time, with a unit, counted from the start of the command: as many trainings as fit,
            and at least one. The run can be resumed, with as much time again.
        time_limit: end the run after this time in any case, with a unit, even if nothing is trained.
        trial_timeout: a trial fails if it takes longer than this since it was last started; with a unit, such as 20min.
        max_failures: stop after this many failed trials, divergence not counted; by default never. The run can be
            resumed.
        scale: size of the trained models, training tokens and learning rate. parent, the size of --parent, is the
            default if --parent does not have the head size and vocabulary of proxy.
        train_len: tokens of a training sequence, at least as many as --seq-len, the default.
        tokens: tokens of a final training; by default the scale's, or with a parent 5/8 of them (all at scale parent).
        parent: the trained model that candidates start from: builtin, a folder of nas.export, nas.train or
            save_pretrained, `latest` for the last training, a .gguf file, an id on the Hugging Face hub, or none to
            train from scratch. The default is builtin at scale proxy, if it has the dimensions of the space, else none.
        data: stdlib, codeparrot (from the hub), codeparrot:FOLDER or languini:FOLDER (a local copy), or the path of
            a text, jsonl, json, csv, tsv or parquet file or of a folder.
        begin_of_text: the token that begins each sequence and is not predicted: tokenizer, for the rule of --parent's
            tokenizer; none; or a token such as <s>. Costs count it as one of the --seq-len tokens.
        second_eval_data: a second corpus on which completed trials are validated too: dependencies (the Python source
            of packages that this one needs), a path as for --data, or none. The default is dependencies with the
            builtin parent on stdlib, else none.
        max_concurrent: trials at a time; by default one per core, or as many as share the GPUs. It does not change
            results.
        gpus_per_trial: share of a GPU per trial, at most 1; 0 trains on the CPU. By default, if this machine has GPUs,
            the share that fits their memory and was measured to be fastest; at scales smoke and proxy, 0 unless GPUs
            were measured to be faster. On a cluster with GPUs, the default is 1.
        threads_per_trial: threads of a trial on a CPU. The default is 1, except at scales above proxy on a machine with
            more cores than trials at a time: the trials then share all cores, as far as that was measured to be faster.
            The number changes results only by rounding.
        ray_address: an existing Ray cluster whose nodes share the run folder: auto, HOST:PORT or ray://HOST:PORT.
        seed: the same seed gives the same trials and, on a CPU, the same numbers. Further seeds are the next numbers.
        recipe: changes to the default recipe of scale and data.
    """

    budget_latency: str
    space: str = USUAL_SPACE
    projection: Projection = "all"
    embedding: Encoding = "one-hot"
    public_layers: str | None = None
    client_layers: int | None = None
    weights: Holder | None = None
    weight_masks: WeightMasks | None = None
    new_tokens: int = 1
    cost_of: CostForm = "folded"
    searcher: str = "trellis"
    generation_size: int | None = None
    num_trials: int = 14  # with evaluations, baselines and further seeds, 15 minutes on two cores
    num_proxy_evals: int | None = None
    finalist_seeds: int = 2  # the fewest that show a spread, and a mean that does not depend on one unlucky seed
    time_budget: str | None = None
    time_limit: str | None = None
    trial_timeout: str | None = None
    max_failures: int | None = None
    scale: ScaleName = "proxy"
    train_len: int | None = None
    tokens: int | None = None
    parent: str | None = None
    data: str = "stdlib"
    begin_of_text: str = OWN_RULE
    second_eval_data: str | None = None
    max_concurrent: int | None = None
    gpus_per_trial: float | None = None
    threads_per_trial: int | None = None
    ray_address: str | None = None
    seed: int = 0
    recipe: RecipeChanges = field(default_factory=RecipeChanges)

    def __post_init__(self) -> None:
        for name in (
            *("seq_len", "num_trials", "tokens", "max_concurrent", "generation_size", "max_failures"),
            *("threads_per_trial", "train_len"),
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{flag(name)} must be at least 1, but got {value}.")
        for name in ("finalist_seeds", "num_proxy_evals"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f"{flag(name)} must not be negative, but got {value}.")
        if self.sequence_len < self.seq_len:
            raise UserError(
                f"--train-len must be at least the {self.seq_len} tokens of the prompt (--seq-len), but got "
                f"{self.train_len}."
            )
        check_seed(self.seed, MAX_SEED - self.finalist_seeds)
        if self.gpus_per_trial is not None and not 0 <= self.gpus_per_trial <= 1:
            raise UserError(
                f"--gpus-per-trial must be from 0 to 1, as a trial trains on one GPU, but got {self.gpus_per_trial:g}."
            )
        check_precision(self.recipe.precision)
        if self.ray_address is not None and not RAY_ADDRESS.fullmatch(self.ray_address):
            raise UserError(
                f"--ray-address must be auto, HOST:PORT or ray://HOST:PORT, but got {self.ray_address!r:.80}."
            )
        for name in ("trial_timeout", "time_budget"):
            for whole in ("time_budget", "time_limit"):
                if (getattr(self, f"{name}_s") or 0) > (getattr(self, f"{whole}_s") or math.inf):
                    raise UserError(
                        f"{flag(name)} must be at most the {flag(whole)}, {getattr(self, whole)}, of the whole run, "
                        f"but got {getattr(self, name)}."
                    )
        for name in ("head_dim", "vocab_size"):
            if getattr(self.recipe.scale, name) is not None:
                raise UserError(f"--recipe.scale.{flag(name)[2:]} is that of --scale in a search; leave it out.")
        if self.scale == "parent" and self.parent in (None, NO_PARENT):
            raise UserError("--scale parent is the size of a trained model; name it by --parent.")
        shares = [text for said in self.asked.values() for text in said.values() if is_share(text)]
        if shares and self.parent in (None, NO_PARENT):
            raise UserError(f"a budget of {shares[0]} is a share of what --parent takes; name it, or give a unit.")
        _ = shares or self.budget, self.workload
        if self.kept_layers is not None and self.parent in (None, NO_PARENT):
            raise UserError("--public-layers and --client-layers are of --parent, whose weights they keep; name it.")
        if self.kept_layers is not None and self.recipe.distillation.spread_over_depth:
            raise UserError(
                "--recipe.distillation.spread-over-depth moves layers that --public-layers and --client-layers "
                "keep; drop it."
            )
        if self.asked[self.protocols[0]]["budget_latency"] is None:
            raise UserError(
                f"--budget-latency must bound the first protocol, {self.protocols[0]}, whose seconds the front is of, "
                f"but got {self.budget_latency!r}."
            )

    @property
    def sequence_len(self) -> int:
        """Number of tokens of a training sequence."""
        return self.seq_len if self.train_len is None else self.train_len

    @property
    def short_finetune(self) -> bool:
        """Whether candidates train on far fewer tokens than their parent did (`SearchProblem.short_finetune`)."""
        return self.scale == "parent"

    def setting_of(self, protocol: str) -> Setting | None:
        """Return the setting of a protocol with the study's `weights` and `weight_masks`; None if neither is given.

        For a protocol that the study does not use, `weight_masks` is left out, and the result is None if the protocol
        has no settings. Raises UserError for a value that the protocol does not have.
        """
        if protocol in self.protocols:
            return setting_of(protocol, weights=self.weights, weight_masks=self.weight_masks)
        return setting_of(protocol, weights=self.weights) if protocol in SETTINGS else None

    @property
    def budget(self) -> Budget:
        """The budget under the first protocol; its field `also` has the budgets under the other protocols.

        Raises UserError for shares of the parent's cost, which `nas.study.priced_study.price_study` resolves.
        """
        first, *others = self.budgets.values()
        return replace(first, also=tuple(zip(self.protocols[1:], others, strict=True)))

    @property
    def workload(self) -> Workload:
        """The prompt and the new tokens whose cost is predicted."""
        deployment = Deployment(
            embedding=self.embedding,
            projection=self.projection,
            public_layers=self.public_layers,
            client_layers=self.client_layers,
        )
        return Workload(prompt_len=self.seq_len, new_tokens=self.new_tokens, deployment=deployment)

    @property
    def kept_layers(self) -> int | None:
        """Number of first layers that candidates keep from the parent, untrained, as public or client layers.

        None if neither option is set. Raises UserError for public layers that cannot be parsed or are not the first.
        """
        if self.public_layers is None and self.client_layers is None:
            return None
        numbers = public_layers(self.public_layers or "embed") - {"embed"}
        if numbers != set(range(len(numbers))):
            raise UserError(
                f"--public-layers of a search must be the first ones, such as embed,0-5, since others are trained, or "
                f"move where folding drops a layer, but got {self.public_layers}; leave the others out."
            )
        return max(len(numbers), self.client_layers or 0)

    @property
    def most_proxy_evals(self) -> int:
        """Largest number of candidates that get a low-fidelity evaluation, by searchers that use it."""
        return PROXY_EVALS * self.num_trials if self.num_proxy_evals is None else self.num_proxy_evals

    @property
    def most_replicates(self) -> int:
        """Largest number of further seeds, summed over the front: half of `num_trials`, rounded up; 0 if not wanted."""
        return math.ceil(self.num_trials / 2) if self.finalist_seeds else 0

    @property
    def time_budget_s(self) -> float | None:
        """Seconds that the search is planned for; None without `time_budget`."""
        return None if self.time_budget is None else parse_seconds(self.time_budget, "--time-budget")

    @property
    def time_limit_s(self) -> float | None:
        """Seconds after which the search ends, even if nothing is trained; None if not limited."""
        return None if self.time_limit is None else parse_seconds(self.time_limit, "--time-limit")

    @property
    def trial_timeout_s(self) -> float | None:
        """Seconds that a trial may take since its last start; None if not limited."""
        return None if self.trial_timeout is None else parse_seconds(self.trial_timeout, "--trial-timeout")


def is_share(budget: str | None) -> bool:
    """Whether a budget is a share of the parent's cost, such as 60%."""
    return budget is not None and budget.rstrip().endswith("%")


def flag(name: str) -> str:
    """Return the command-line flag of a field, such as --num-trials for num_trials."""
    return "--" + name.replace("_", "-")


def study_recipe(config: StudyConfig, distillation: DistillationSchedule | None) -> Recipe:
    """Return the recipe that `study_candidate` adapts to each candidate. It has an entropy regulariser.

    distillation: the parent's schedule; None from scratch. If costs are folded costs, linear FFNs are kept foldable, so
    that verified costs equal predicted ones.
    """
    recipe = recipe_at(
        config.scale,
        config.data,
        entropy_regularised=True,
        distillation=distillation,
        seq_len=config.sequence_len,
        tokens=config.tokens,
    )
    recipe = changed(recipe, config.recipe)
    if recipe.distillation is not None and config.kept_layers is not None:
        recipe = replace(
            recipe, distillation=replace(recipe.distillation, kept_layers=config.kept_layers, spread_over_depth=False)
        )
    return replace(recipe, foldable=recipe.foldable or (Foldable() if config.cost_of == "folded" else None))


def study_candidate(recipe: Recipe, member: Member) -> Candidate:
    """Return a member as a candidate. Its recipe is the study's, without `entropy` or `foldable` if not applicable."""
    if not member.entropy_regularised:
        recipe = replace(recipe, entropy=None)
    made = Candidate(architecture=member.architecture, recipe=recipe)
    if layers_kept_foldable(made.architecture if recipe.distillation is None else made.trained):
        return made
    return replace(made, recipe=replace(recipe, foldable=None))
