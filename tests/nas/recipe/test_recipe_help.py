import pytest

from nas import search, train


@pytest.mark.parametrize("command", [search, train])
def test_the_recipe_has_one_entry_in_the_help_and_a_list_of_its_own(command, capsys) -> None:
    for flag, shown in (("--help", False), ("--recipe.help", True)):
        with pytest.raises(SystemExit, match="^0$"):
            command.parse([flag]) if command is search else command.main([flag])
        text = capsys.readouterr().out
        assert ("--recipe.scale.learning-rate" in text) is shown
        assert ("--recipe.precision VALUE" in text) is shown
        assert ("--recipe.help" in text) is not shown
