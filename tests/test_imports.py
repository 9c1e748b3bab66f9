from pathlib import Path

import pytest

from tests.conftest import python

RUN = Path(__file__).parent / "nas" / "run" / "stored" / "semi2k"
HEAVY = (
    *("torch", "scipy", "numpy", "networkx", "jsonargparse", "ray", "jax", "spu", "matplotlib", "pandas", "rich"),
    *("transformers", "jinja2", "costmodel", "torch._dynamo"),
)
TRAINING = {"torch", "ray", "jax", "matplotlib"}


def loaded_by(code: str) -> set[str]:
    """The heavy packages that a process has imported at the end of a program."""
    printed = python("-c", f"import sys\n{code}\nprint(*(name for name in {HEAVY} if name in sys.modules))")
    return set(printed.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import costmodel; costmodel.__all__; dir(costmodel)", {"costmodel"}),
        ("import costmodel.cost, costmodel.estimate, costmodel.ops, costmodel.config.units", {"costmodel"}),
        (
            "from costmodel.protocols import load_pricer; from costmodel.ops import Softmax; "
            "load_pricer().price(Softmax(heads=1, queries=1, keys=1))",
            {"costmodel"},
        ),
        ("import nas; nas.__all__; dir(nas)", set()),
        ("import scipy", {"scipy", "numpy"}),  # the check can fail
    ],
)
def test_what_is_light_loads_no_more_than_this(code, loaded):
    assert loaded_by(code) == loaded


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (
            "import costmodel; costmodel.price('SM+LN+G', protocol='semi2k', network='wan', seq_len=8).to_dict()",
            TRAINING | {"pandas"},
        ),
        (
            "from search_spaces.__main__ import count; count('gpt2-small', budget_latency='5min', budget_comm='8GB')",
            TRAINING | {"scipy"},  # a dry run has to answer in seconds
        ),
        ("import nas.private.__main__, nas.study.worker, nas.training.memory", {"torch._dynamo"}),
        ("import nas.recipe.candidate, nas.training.outcome, nas.corpus.corpus", {"torch"}),
        # three seconds of processor time, of which no part of a study needs all
        ("import nas.study.run_study", TRAINING | {"scipy", "pandas", "jinja2"}),
        (
            f"import nas; run = nas.load_run({str(RUN)!r}); run.front, run.table()",
            TRAINING | {"pandas", "transformers"},
        ),
        (f"from nas.plot import plot; plot({str(RUN)!r}, protocol='semi2k')", TRAINING),
    ],
)
def test_what_is_heavy_is_loaded_when_it_is_needed(code, without):
    assert not loaded_by(code) & without


def test_the_names_of_the_package_are_there_when_they_are_used():
    names = ["Network", "Price", "PricedModel", "UserError", "price"]
    code = "import costmodel; assert not any(name in vars(costmodel) for name in costmodel.__all__); "
    loaded_by(code + f"assert [getattr(costmodel, name).__name__ for name in costmodel.__all__] == {names}")
