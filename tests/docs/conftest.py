"""A folder as a reader has it who has followed the pages: a run, a training, exports, files of their own."""

import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import trials_here
from tests.docs.pages import PAGES, ROOT, blocks, files
from tests.docs.program import run

SMALL = (
    "budget_latency='6.22s', space='tiny', scale='smoke', seq_len=32, tokens=2048, num_trials=2, finalist_seeds=0, "
    "data='corpus'"
)


class Workspace(NamedTuple):
    """folder: where commands are run. printed: by the blocks of the page on Python."""

    folder: Path
    printed: str


def small_python() -> str:
    """The blocks of the page on Python, at smoke scale, on data that is tokenised in a second."""
    code = "\n".join(block.text for block in blocks((ROOT / "docs/python.md").read_text(), "python"))
    for large, tiny in (('budget_latency="5min", time_budget="14min"', SMALL), ("num_trials=40", "num_trials=3")):
        assert large in code
        code = code.replace(large, tiny)
    return code


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install -e '.[hf]'")
    folder = tmp_path_factory.mktemp("docs")
    # text that the builtin parent was not trained on
    shutil.copytree(ROOT / "search_spaces", folder / "corpus", ignore=shutil.ignore_patterns("__pycache__"))
    for page in PAGES:
        for name, text in files(page.read_text()).items():
            (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed, trials_here():
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        exec(small_python(), {"__name__": "__main__"})
        of_python = printed.getvalue()
        for asked in (
            "nas.train SM+LN+G --base tiny --scale smoke --tokens 256 --data corpus --output-dir runs/my-training",
            "nas.train SM+LN+G --base tiny --scale smoke --tokens 256 --data corpus",  # the latest
            "nas.export runs/my-training --format hf --output-dir gpt2",
            "nas.export latest --fold --output-dir runs/my-model",
            "nas.export latest --format mpc --output-dir runs/mpc",
        ):
            module, *args = asked.split()
            assert run(module, args) in (0, None), asked
    return Workspace(folder, of_python)
