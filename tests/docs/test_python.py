"""Blocks of Python run as they stand, one after another as on their page; those of the API at the scale of a test."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, blocks

pytestmark = pytest.mark.timeout(1200)  # the first test that is run makes the workspace: minutes on a busy machine

OWN_FIXTURE = "python.md"  # its blocks make the workspace
WITH_PYTHON = [page for page in PAGES if blocks(page.read_text(), "python") and page.name != OWN_FIXTURE]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_blocks_run(page, tmp_path):
    code = "\n".join(block.text for block in blocks(page.read_text(), "python"))
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_page_on_python_says_what_its_blocks_print(workspace):
    printed = workspace.printed
    assert printed.startswith("SM+LN+R on gpt2-small, T=256, protocol semi2k on wan\n")
    assert "VocabProjection" in printed
    (run,) = (workspace.folder / "runs").glob("*/plots/pareto.png")
    assert str(run.relative_to(workspace.folder)) in printed
    assert "\n1 more ended\n" in printed
    assert "\ncompleted " in printed
