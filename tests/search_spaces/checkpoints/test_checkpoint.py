from pathlib import Path
from typing import Any

import pytest

import costmodel
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.checkpoint import is_checkpoint, read_checkpoint

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def saved(kind: str, folder: Path, **settings: Any) -> str:
    """A folder with the settings of a small model alone."""
    getattr(transformers, f"{kind}Config")(**SIZES, **settings).save_pretrained(folder)
    return str(folder)


def test_a_folder_its_config_and_a_traced_module_cost_the_same(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path, num_key_value_heads=2)
    priced, from_file = (
        costmodel.price(name, protocol="semi2k", seq_len=16) for name in (folder, f"{folder}/config.json")
    )
    traced = costmodel.price(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)),
        protocol="semi2k",
        seq_len=16,
    )
    assert priced.total == from_file.total
    assert (priced.sent_bytes, priced.rounds) == (traced.sent_bytes, traced.rounds)
    assert priced.asked.heading == f"{folder} (block llama), T=16"
    assert priced.deployed is not None


def test_a_family_that_is_no_block_of_ours_is_traced_without_weights_and_no_architecture(tmp_path: Path) -> None:
    folder = saved("Phi", tmp_path)
    checkpoint = read_checkpoint(folder)
    assert {value.device.type for value in checkpoint.model.parameters()} == {"meta"}
    assert checkpoint.unlike is not None
    assert "'phi'" in checkpoint.unlike
    priced = costmodel.price(folder, protocol="semi2k", seq_len=16)
    assert priced.asked.heading == f"{folder} (traced from PhiForCausalLM), T=16"
    assert priced.sent_bytes > 0
    from search_spaces.bases import BASES
    from search_spaces.resolve import resolve

    with pytest.raises(costmodel.UserError, match="'phi'.* It is only priced, by `python -m costmodel estimate`"):
        resolve(saved("Phi", tmp_path), BASES["gpt2-small"])


def test_a_model_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, **large).save_pretrained(tmp_path)
    architecture = read_checkpoint(str(tmp_path)).model
    assert isinstance(architecture, Architecture)
    assert (architecture.num_layers, architecture.d_model) == (80, 8192)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{folder}", "but the folder has no config.json"),
        ("{folder}/nothing", "but there is no such folder"),
        ("{folder}/nothing.gguf", "must be a GGUF file, but there is none"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, name: str, said: str) -> None:
    assert is_checkpoint(name.format(folder=tmp_path))
    with pytest.raises(costmodel.UserError, match=said) as refused:
        costmodel.price(name.format(folder=tmp_path), protocol="semi2k")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["SM+LN+G", "EReg(SM(t)+ScFuFFN)", "6xLSLGo-6xoSoFs", "some.module:factory", "a/b.yaml"]
)
def test_other_names_stay_what_they_are(name: str) -> None:
    assert not is_checkpoint(name)
