"""The block of Python in the README runs as it stands, but for the scale of its search."""

import email
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SMALL = 'budget_latency="6.22s", space="tiny", scale="smoke", seq_len=32, num_trials=2, finalist_seeds=0, data={!r}'


def block() -> str:
    """At smoke scale, on data that is tokenised in a second."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    for large, small in (
        ('budget_latency="5min", time_budget="14min"', SMALL.format(str(Path(email.__file__).parent))),
        ("num_trials=40", "num_trials=3"),
    ):
        assert found.count(large) == 1
        found = found.replace(large, small)
    return found


def test_the_block_of_the_readme_runs(tmp_path: Path) -> None:
    code = block() + "\nprint(more.summary.ended - run.summary.ended, 'trial more')\n"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SM+LN+R on gpt2-small, T=256, protocol semi2k on wan\n")
    assert "VocabProjection" in done.stdout
    assert done.stdout.endswith("1 trial more\n")
    assert len(list((tmp_path / "runs").glob("*/plots/pareto.png"))) == 1
