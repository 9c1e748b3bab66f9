"""What users name is printed as they wrote it."""

from costmodel.commands.output import console


def test_brackets_and_colons_are_printed_as_they_are(capsys) -> None:
    console().print("runs/[b]one[/b]:warning:")
    assert capsys.readouterr().out == "runs/[b]one[/b]:warning:\n"
