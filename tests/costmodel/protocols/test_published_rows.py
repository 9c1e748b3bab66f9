from decimal import Decimal


def test_all_rows_are_there_with_their_printed_digits(rows):
    assert len(rows) == 27
    assert sum(row.own_method for row in rows) == 21
    assert len({row.name for row in rows}) == 27
    first = rows[0]
    assert (first.notation, first.num_layers, first.seq_len) == ("SM+LN+G", 12, 128)
    assert (first.sent_gigabytes, first.latency_min) == (Decimal("25.32"), Decimal("8.21"))


def test_units(rows):
    assert rows[0].sent_bytes == 25.32e9
    assert rows[0].latency_s == 492.6  # 8.21 min


def test_a_diverged_row_has_no_perplexity(rows):
    assert [row.name for row in rows if row.perplexity is None] == [
        "HH(SM+ScFuFFN) L=12 T=256",
        "HH(SM+ScFFN) L=18 T=128",
    ]
    assert rows[0].perplexity == 2.69
