import pytest
import torch

from costmodel.errors import UserError
from nas.model.decoder import build
from nas.model.sampling import sampled
from search_spaces.bases import BASES
from search_spaces.notation import parse

NAMES = [
    ("SM+LN+G", "tiny"),
    ("EReg(SM(t)+ScFuFFN)", "tiny"),
    ("1xLHLRo-1xoooRo", "tiny"),
    ("1xLPLRo-1xLQLRo", "tiny"),
    ("1xLULRo-1xLBLRo", "tiny"),
    ("SM+LN+G", "pythia-70m"),
    ("SM+RMS+SwiGLU", "smollm2-135m"),
]


@pytest.mark.parametrize(("name", "base"), NAMES)
def test_steps_have_the_logits_of_the_whole(name: str, base: str) -> None:
    architecture = parse(name, BASES[base]).architecture
    model = build(architecture, torch.Generator().manual_seed(0)).eval()
    tokens = torch.randint(architecture.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    past: list[list[torch.Tensor]] = [[] for _ in model.layers]
    with torch.no_grad():
        steps = torch.stack([model.step(tokens[:, place], place, past) for place in range(7)], dim=1)
        torch.testing.assert_close(steps, model(tokens, with_entropies=False).logits, rtol=1e-4, atol=1e-5)


def test_a_seed_gives_the_same_text_within_the_vocabulary() -> None:
    model = build(parse("SM+LN+G", BASES["tiny"]).architecture, torch.Generator().manual_seed(0)).eval()
    first, again = (
        sampled(
            model, batch=3, length=9, vocab_size=100, temperature=0.8, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (5, 5)
    )
    assert first.shape == (3, 9)
    assert torch.equal(first, again)
    assert first.max() < 100


def test_a_shaped_block_is_refused() -> None:
    model = build(parse("HH(SM+ScFFN)", BASES["tiny"]).architecture, torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="keeps no keys and values"):
        model.step(torch.zeros(1, dtype=torch.int64), 0, [[] for _ in model.layers])
