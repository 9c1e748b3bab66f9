"""What users name is printed as they wrote it."""

from nas.report.terminal import table_console


def test_brackets_and_colons_are_printed_as_they_are(capsys):
    table_console().print("runs/[b]one[/b]:warning:")
    assert capsys.readouterr().out == "runs/[b]one[/b]:warning:\n"
