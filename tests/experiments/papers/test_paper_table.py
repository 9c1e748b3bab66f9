import csv
import math

from experiments.papers.paper_table import Column, PaperTable, csv_text, latex, markdown

TABLE = PaperTable(
    "costs",
    "costs of a_b",
    (Column("net"), Column("GB, 100 %", ".2f"), Column("perplexity", ".4g")),
    (("SM_i6", 1 / 3, math.inf), ("SM", None, 3.25)),
    ("printed: table 3",),
)


def test_markdown_rounds_as_columns_say():
    assert markdown(TABLE).splitlines() == [
        "**costs of a_b**",
        "",
        "| net | GB, 100 % | perplexity |",
        "| --- | ---: | ---: |",
        "| SM_i6 | 0.33 | diverged |",
        "| SM | - | 3.25 |",
        "",
        "- printed: table 3",
    ]


def test_csv_keeps_every_digit():
    rows = list(csv.reader(csv_text(TABLE).splitlines()))
    assert float(rows[1][1]) == 1 / 3
    assert rows[1][2] == "inf"
    assert rows[2] == ["SM", "", "3.25"]


def test_latex_escapes_what_it_would_read_as_commands():
    text = latex(TABLE)
    assert r"SM\_i6 & 0.33 & diverged \\" in text
    assert r"\caption{costs of a\_b. Printed: table 3.}" in text
    assert r"GB, 100 \%" in text
    assert text.count("{") == text.count("}")
