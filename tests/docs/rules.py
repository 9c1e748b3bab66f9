"""How each command of the documentation is tested: as it stands, made small, or parsed.

The rule of a command is that with the longest beginning that the command has. A command without one fails a test.
Of the commands of a rule the first is run; what is more than other flags has a rule of its own.
"""

from typing import Literal, NamedTuple

How = Literal["run", "parse"]

SMALL_TRAINING = "--scale smoke --tokens 512 --data corpus --output-dir NEW"
SMALL_FROM_PARENT = "--tokens 1024 --data corpus --recipe.scale.validation-tokens 1024 --output-dir NEW"
SMALL_PRICES = "--space tiny --budget-latency 20s --dry-run"
SMALL_PARENT = "--parent ./gpt2 --data corpus --space parent --seq-len 32 --dry-run"
SMALL_SEARCH = (
    "--space tiny --budget-latency 6.22s --seq-len 32 --tokens 2048 --num-trials 2 --finalist-seeds 0 --data corpus "
    "--output-dir NEW"
)
TRAINS = "trains for longer than a test may"
OTHER_ENGINE_RUN = "the engine again, by a command whose like is run"


class Rule(NamedTuple):
    """begins: the command's beginning. how: run it here, or only by its own command-line parser.

    more: flags that take the place of those that the command has, or are added; NEW is a folder that does not exist.
    why: of what is only parsed.
    """

    begins: str
    how: How = "run"
    more: str = ""
    why: str = ""


def parsed(begins: str, why: str) -> Rule:
    return Rule(begins, "parse", "", why)


RULES = (
    # prices and spaces: as they stand
    Rule("python -m costmodel estimate"),
    Rule("python -m costmodel estimate SM+LN+R --protocol semi2k --network office.yaml"),
    Rule("python -m costmodel estimate my_models:llama"),
    Rule("python -m costmodel estimate runs/my-model"),
    parsed("python -m costmodel estimate SM+LN+R --protocol cheetah --testbed cheetah.yaml", "needs a testbed"),
    Rule("python -m costmodel diff"),
    Rule("python -m costmodel validate"),
    Rule("python -m costmodel compare runs/mpc/architecture.yaml"),
    parsed("python -m costmodel compare", OTHER_ENGINE_RUN),
    parsed("python -m costmodel calibrate", "an hour on an idle machine"),
    Rule("pi-nas-costmodel estimate"),
    Rule("python -m search_spaces count"),
    Rule("python -m search_spaces count my-space.yaml"),
    Rule("python -m search_spaces list"),
    Rule("python -m search_spaces show"),
    # searches: priced, not trained, but for one
    Rule("python -m nas.search", more=SMALL_PRICES),
    Rule("python -m nas.search --budget-latency 5min --dry-run"),
    Rule("python -m nas.search --budget-latency semi2k=60s,sigma=2s", more="--space tiny --dry-run"),
    Rule("python -m nas.search --budget-latency 5min --parent ./gpt2", more=SMALL_PARENT),
    Rule("python -m nas.search --parent ./my-llama", more=f"{SMALL_PARENT} --train-len 32"),
    Rule("python -m nas.search --budget-latency 5min --parent runs/my-parent", more=SMALL_PARENT),
    Rule("python -m nas.search --budget-latency 5min --searcher my_searcher:FewNorms", more=SMALL_PRICES),
    Rule("python -m nas.search --budget-latency 5min --space my-space.yaml", more="--dry-run"),
    Rule("python -m nas.search --resume latest", more="--dry-run"),
    Rule("python -m nas.search --help"),
    Rule("python -m nas.search --budget-latency 5min --scale smoke", more=SMALL_SEARCH),
    parsed("python -m nas.search --budget-latency 5min --protocol semi2k --network office.yaml --testbed my.yaml",
           "needs a calibrated testbed"),
    # a run: of the workspace
    Rule("python -m nas.status"),
    Rule("python -m nas.plot"),
    Rule("python -m nas.plot latest --protocol semi2k"),
    Rule("python -m nas.report", more="--output NEW.html"),
    Rule("python -m nas.export latest", more="--output-dir NEW"),
    Rule("python -m nas.export runs/my-training", more="--output-dir NEW"),
    parsed("python -m nas.export runs/five-layers", "of a training that is only begun here"),
    parsed("python -m nas.export runs/parent", "of a training that is only begun here"),
    # trainings: of a step or two
    Rule("python -m nas.train", more=SMALL_TRAINING),
    Rule("python -m nas.train SM+LN+R --init-from ./gpt2", more=SMALL_TRAINING),
    Rule("python -m nas.train --help"),
    Rule("python -m nas.train --resume latest"),
    Rule("python -m nas.train 5xlSlRo-7xooooo --parent builtin", more=SMALL_FROM_PARENT),
    parsed("python -m nas.train 'EReg(SM(t)+ScFuFFN_i6)' --parent builtin", "as one that is run"),
    parsed("python -m nas.train SM+LN+G --config nas/parents/gpt2-small-proxy.yaml", "an hour on a core"),
    # answers: of two tokens
    Rule("python -m nas.private runs/my-model --prompt", more="--new-tokens 2"),
    Rule("python -m nas.private runs/my-model --perplexity", more="--perplexity 32"),
    parsed("python -m nas.private", OTHER_ENGINE_RUN),
    parsed("python -m nas.evaluate", "needs tasks and a parent of its tokenizer"),
    parsed("python -m nas.search --parent SmolLM2-135M-Instruct.Q4_1.gguf", "needs the model"),
    parsed("python -m nas.private runs/my-model --party", "needs two machines"),
    # experiments
    Rule("python -m experiments list"),
    parsed("python -m experiments run", TRAINS),
    # set-up
    parsed("make", "installs, and tests everything"),
    parsed("pip install", "needs a package index"),
    parsed("pytest", "minutes long"),
)  # fmt: skip


def rule_of(command: str) -> Rule | None:
    """None for a command that no rule is for."""
    rules = [rule for rule in RULES if command == rule.begins or command.startswith(rule.begins + " ")]
    return max(rules, key=lambda rule: len(rule.begins), default=None)


def small(words: list[str], more: list[str]) -> list[str]:
    """The words of a command with other flags in the place of its own, and with those that it lacks."""
    made = list(words)
    for index, flag in enumerate(more):
        if not flag.startswith("--"):
            continue
        values = more[index + 1 : index + 2] if index + 1 < len(more) and not more[index + 1].startswith("--") else []
        if flag in made:
            at = made.index(flag)
            made[at : at + 1 + len(values)] = [flag, *values]
        else:
            made += [flag, *values]
    return made
