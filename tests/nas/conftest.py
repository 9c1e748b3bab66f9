from typing import Any

import pytest

from nas.ledger import Record


@pytest.fixture
def make_record():
    """Makes ledger records with the fields a test does not care about filled in."""

    def make(index: int = 0, **changes: Any) -> Record:
        fields: dict[str, Any] = {
            "event": "finished",
            "trial_id": f"t{index}-s0-a0",
            "candidate_id": f"c{index}",
            "arch_id": f"a{index}",
            "notation": "SM+ScFuFFN",
            "placement": "2xoSoFs",
            "entropy_regularised": False,
            "index": index,
            "generation": 0,
            "role": "candidate",
            "status": "completed",
            "scale": "smoke",
            "width": 8,
            "tokens": 100,
            "corpus": "c",
            "tokenizer": "bpe",
            "split": "validation",
            "val_loss": 2.0,
            "perplexity": 7.389,
            "protocol": "published",
            "network": None,
            "cost_model_id": "m",
            "rounds": None,
            "sent_bytes": 1e9,
            "latency_s": 100.0,
            "latency_s_range": (90.0, 110.0),
            "seed": 0,
            "versions": {"python": "3.11"},
        }
        return Record(**{**fields, **changes})

    return make
