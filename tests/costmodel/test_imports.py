import pytest

from tests.imports import loaded_by


@pytest.mark.parametrize(
    "code",
    [
        "import costmodel; costmodel.__all__; dir(costmodel)",
        "import costmodel.cost, costmodel.estimate, costmodel.ops, costmodel.config.units",
        "from costmodel.protocols import load_pricer\n"
        "from costmodel.ops import Softmax\n"
        "load_pricer().price(Softmax(heads=1, queries=1, keys=1))",
    ],
)
def test_prices_need_nothing_heavy(code):
    assert loaded_by(code) == {"costmodel"}


def test_the_names_of_the_package_are_there_when_they_are_used():
    names = ["Network", "Price", "PricedModel", "PricedOp", "UserError", "price"]
    code = "import costmodel; assert not any(name in vars(costmodel) for name in costmodel.__all__); "
    loaded_by(code + f"assert [getattr(costmodel, name).__name__ for name in costmodel.__all__] == {names}")


def test_pricing_a_name_needs_no_torch():
    code = "import costmodel; costmodel.price('SM+LN+G', protocol='semi2k', network='wan', seq_len=8).to_dict()"
    assert not {"torch", "ray", "jax", "matplotlib", "pandas"} & loaded_by(code)


def test_the_guard_can_fail():
    assert loaded_by("import scipy") == {"scipy", "numpy"}
