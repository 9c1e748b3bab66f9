import subprocess
import sys

import pytest

HEAVY = ("torch", "scipy", "numpy", "networkx", "jsonargparse", "ray", "jax", "matplotlib", "rich")


def loaded_by(code):
    script = f"import sys\n{code}\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import costmodel",
        "import costmodel.cost, costmodel.estimate, costmodel.ops, costmodel.config.units",
        "from costmodel.protocols import load_pricer\n"
        "from costmodel.ops import Softmax\n"
        "load_pricer().price(Softmax(heads=1, queries=1, keys=1))",
    ],
)
def test_prices_need_nothing_heavy(code):
    assert loaded_by(code) == []


def test_the_guard_can_fail():
    assert loaded_by("import scipy") == ["scipy", "numpy"]
