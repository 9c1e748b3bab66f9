import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from costmodel.engine.registry import CRYPTEN_VERSION
from tests.conftest import python

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = PROJECT["scripts"]
PACKAGES = ("costmodel", "search_spaces", "nas", "experiments")
OF_NAS = ("search", "status", "plot", "report", "export", "train", "private", "evaluate")
COMMANDS = ("costmodel", "search_spaces", "experiments", *(f"nas.{name}" for name in OF_NAS))


def test_the_lock_has_a_hash_and_a_fitting_version_of_every_dependency():
    text = (ROOT / "requirements.lock").read_text()
    locked = {}
    for entry in text.partition("\n")[2].replace(" \\\n", "").splitlines():
        pinned, *hashes = entry.split()
        name, version = pinned.split("==")
        locked[canonicalize_name(name)] = version
        assert hashes
        assert all(len(each.removeprefix("--hash=sha256:")) == 64 for each in hashes), pinned
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(each for name in extras.keys() - {"eval", "fhe"} for each in extras[name])]
    for requirement in map(Requirement, (*asked, f"crypten=={CRYPTEN_VERSION}")):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def exit_code(name: str, *args: str) -> object:
    """What the program that pip makes of an entry point exits with."""
    try:
        return EntryPoint(name=name, value=SCRIPTS[name], group="console_scripts").load()(list(args))
    except SystemExit as end:
        return end.code


def test_every_command_has_a_program():
    modules = {name: value.partition(":")[0].removesuffix(".__main__") for name, value in SCRIPTS.items()}
    assert set(modules.values()) == set(COMMANDS)
    for name, module in modules.items():
        assert name == "pi-nas-" + module.removeprefix("nas.").replace("_", "-")


@pytest.mark.parametrize("name", SCRIPTS)
def test_programs_exit_as_their_commands_do(name, capsys):
    assert exit_code(name, "--help") == 0
    assert "usage: python -m" in capsys.readouterr().out
    assert exit_code(name, "--no-such-flag") == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_program_returns_the_code_of_its_command(capsys):
    assert exit_code("pi-nas-search-spaces", "count", "tiny") == 0
    assert capsys.readouterr().out.startswith("tiny: ")
    assert exit_code("pi-nas-search-spaces", "count", "tiny", "--budget-latency", "1ms") == 3


def test_the_citation_is_of_this_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert all(author["name"] for author in citation["authors"])
    assert citation["title"].startswith(PROJECT["name"])
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_workflow_tests_on_a_python_that_the_package_takes():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    assert "make test" in [step.get("run") for step in job["steps"]]
    (version,) = (step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {}))
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    assert PROJECT["requires-python"] == f">={version}"


def test_hooks_run_the_tools_of_make_check():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]]
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    assert [line.partition("$(BIN)/")[2] for line in recipe.splitlines() if "$(BIN)/" in line] == [
        {"ruff format": "ruff format --check .", "ruff check": "ruff check ."}.get(hook, hook) for hook in hooks
    ]


def test_the_map_has_every_folder():
    rows = [line.split("`") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    listed = [row[1].rstrip("/") for row in rows if row[1].endswith("/")]
    packages = [folder for name in PACKAGES for folder in (ROOT / name, *(ROOT / name).iterdir()) if folder.is_dir()]
    folders = [
        folder.relative_to(ROOT).as_posix()
        for folder in packages
        if folder.name != "__pycache__" and any(path.is_file() for path in folder.iterdir())
    ]
    assert sorted(listed) == sorted([*folders, "docs", "docs/images", "examples", "tests"])


RUN = ROOT / "tests/nas/run/stored/semi2k"
HEAVY = (
    *("torch", "scipy", "numpy", "networkx", "jsonargparse", "ray", "jax", "spu", "matplotlib", "pandas", "rich"),
    *("transformers", "jinja2", "costmodel", "torch._dynamo"),
)
TRAINING = {"torch", "ray", "jax", "matplotlib"}


def loaded_by(*programs: str) -> Iterator[set[str]]:
    """The heavy packages that a process has imported at the end of each of some programs that it runs in turn."""
    look = f"print('loaded', *(name for name in {HEAVY} if name in sys.modules))"
    printed = python("-c", "\n".join(["import sys", *(f"{code}\n{look}" for code in programs)]))
    return (set(line.split()[1:]) for line in printed.splitlines() if line.startswith("loaded"))


def test_what_is_light_loads_no_more_than_this():
    price = "from costmodel.protocols import load_pricer; from costmodel.ops import Softmax; "
    programs = {
        "import nas; nas.__all__; dir(nas)": set[str](),
        "import costmodel; costmodel.__all__; dir(costmodel)": {"costmodel"},
        "import costmodel.cost, costmodel.estimate, costmodel.ops, costmodel.config.units": {"costmodel"},
        price + "load_pricer().price(Softmax(heads=1, queries=1, keys=1))": {"costmodel"},
        "import scipy": {"costmodel", "scipy", "numpy"},  # the check can fail
    }
    assert list(loaded_by(*programs)) == [*programs.values()]


def test_what_is_heavy_is_loaded_when_it_is_needed():
    count = "from search_spaces.__main__ import count; "
    programs = {
        # a dry run has to answer in seconds
        count + "count('gpt2-small', budget_latency='5min', budget_comm='8GB')": TRAINING | {"scipy"},
        # three seconds of processor time, of which no part of a study needs all
        "import nas.study.run_study": TRAINING | {"scipy", "pandas", "jinja2"},
        "import nas.recipe.candidate, nas.training.outcome, nas.corpus.corpus": {"torch"},
        "import costmodel; costmodel.price('SM+LN+G', protocol='semi2k', network='wan', seq_len=8).to_dict()": TRAINING
        | {"pandas"},
        f"import nas; run = nas.load_run({str(RUN)!r}); run.front, run.table()": TRAINING | {"pandas", "transformers"},
        f"from nas.plot import plot; plot({str(RUN)!r}, protocol='semi2k')": TRAINING,
        "import nas.private.__main__, nas.study.worker, nas.training.memory": {"torch._dynamo"},
    }
    for (code, without), loaded in zip(programs.items(), loaded_by(*programs), strict=True):
        assert not loaded & without, code
