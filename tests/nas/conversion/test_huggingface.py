import ast
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from costmodel.errors import UserError  # noqa: E402
from nas.conversion import pretrained  # noqa: E402
from nas.conversion.huggingface import exported_code, load_pretrained, save_model, to_transformers  # noqa: E402
from nas.conversion.huggingface_model import CACHE  # noqa: E402
from nas.model.decoder import Decoder, build  # noqa: E402
from nas.model.layers import Block, PlainDecoder  # noqa: E402
from nas.model.norms import frozen_norms  # noqa: E402
from nas.model.self_attention import SelfAttention, ShapedSelfAttention  # noqa: E402
from nas.model.weights import deployed_weights, load_deployed  # noqa: E402
from search_spaces.architecture import Architecture, canonical  # noqa: E402
from search_spaces.bases import Dimensions, base_architecture  # noqa: E402
from search_spaces.notation import parse  # noqa: E402
from tests.conftest import python  # noqa: E402
from tests.small_models import GPT2, PYTHIA  # noqa: E402

LLAMA = base_architecture(
    "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, head_size=6, d_model=16, d_ff=20, vocab=40, context=16)
)
QWEN2 = replace(LLAMA, block="qwen2", head_size=None, tied_embeddings=False)
PLAIN = [
    (LLAMA, "SM+RMS+SwiGLU", "LlamaForCausalLM"),
    (replace(LLAMA, tied_embeddings=False, num_kv_heads=None), "SM+RMS+ReGLU", "LlamaForCausalLM"),
    (QWEN2, "SM+RMS+SwiGLU", "Qwen2ForCausalLM"),
    (GPT2, "SM+LN+G", "GPT2LMHeadModel"),
    (GPT2, "SM+LN+R", "GPT2LMHeadModel"),
    (PYTHIA, "SM+LN+G", "GPTNeoXForCausalLM"),
    (PYTHIA, "SM+LN+R", "GPTNeoXForCausalLM"),
]
OTHERS = [(GPT2, "SM+ScFuFFN_i1"), (GPT2, "HH(SM(t)+ScFFN)"), (PYTHIA, "SM(t)+R"), (GPT2, "1xLSoGo-1xoSLKs")]
OTHERS += [(LLAMA, "1xMBMBo-1xmHmVs"), (QWEN2, "1xMHoQo-1xooMFo"), (replace(GPT2, num_kv_heads=1), "2xLBLBo")]
OTHERS += [(GPT2, "1xlHmXo-1xooMPo-l"), (PYTHIA, "1xmQlEo-1xMUooo"), (PYTHIA, "2xooLRo"), (GPT2, "SM+RMS+R")]
OTHERS += [(LLAMA, "1xMPMQo-1xmPMWo"), (GPT2, "1xLPLGo-1xLSLGo")]


def made(base: Architecture, name: str) -> Decoder:
    model = build(parse(name, base).architecture, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for place, norm in enumerate(frozen_norms(model).values()):
            norm.sigma.fill_(0.5 + 0.1 * place)
            norm.set_frozen()
    return model


def assert_same_logits(theirs: torch.nn.Module, ours: Decoder, tokens: Tensor) -> None:
    with torch.no_grad():
        logits = ours(tokens).logits
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-5, atol=1e-5 * logits.abs().max())


@pytest.mark.parametrize(("base", "name", "kind"), [*PLAIN, *((*other, "DecoderForCausalLM") for other in OTHERS)])
def test_models_are_those_of_transformers_or_of_our_own_class_both_ways(
    base: Architecture, name: str, kind: str, tmp_path: Path, some_tokens: Callable[..., Tensor]
) -> None:
    model = made(base, name)
    expected = deployed_weights(model)
    theirs = to_transformers(model.architecture, expected)
    assert type(theirs).__name__ == kind
    assert_same_logits(theirs, model, some_tokens())
    theirs.save_pretrained(tmp_path)
    source = load_pretrained(str(tmp_path))
    assert canonical(source.architecture) == canonical(model.architecture)
    assert set(source.weights) == set(expected)
    for key, value in source.weights.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


def greedy(model: Decoder, tokens: Tensor, num_new: int) -> Tensor:
    """Our own decoder's most likely tokens, the whole prompt anew for each of them."""
    with torch.no_grad():
        for _ in range(num_new):
            window = tokens[:, -model.architecture.context :]
            tokens = torch.cat((tokens, model(window).logits[:, -1:].argmax(-1)), dim=1)
    return tokens


def positions_run(model: Any) -> list[int]:
    """Fills with the number of positions of every forward pass from now on."""
    run: list[int] = []
    model.decoder.embed.register_forward_hook(lambda module, given, result: run.append(given[0].shape[1]))
    return run


GENERATED = [*OTHERS, (GPT2, "2xoooRo"), (GPT2, "2xoQoRo"), (PYTHIA, "1xMTlEo-1xooLGo-L")]


@pytest.mark.parametrize(("base", "name"), GENERATED)
def test_new_tokens_run_one_position_each_with_the_logits_of_our_decoder(base: Architecture, name: str) -> None:
    model = made(base, name)
    theirs = to_transformers(model.architecture, deployed_weights(model))
    prompt = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(5))
    run = positions_run(theirs)
    cached = theirs.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert run == [5] + [1] * 9
    run.clear()
    uncached = theirs.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0, use_cache=False)
    assert run == list(range(5, 15))
    assert torch.equal(cached, uncached)
    assert torch.equal(cached, greedy(model, prompt, 10))
    tokens = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        first = theirs(tokens[:, :7], use_cache=True)
        rest = theirs(tokens[:, 7:], **{CACHE: first[CACHE]})
        whole = model(tokens).logits
    joined = torch.cat((first.logits, rest.logits), dim=1)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5 * whole.abs().max())
    with pytest.raises(
        ValueError, match="a sequence must not be longer than the model's context, but got 17 tokens, context=16"
    ):
        theirs(tokens[:, :1], past_key_values=rest[CACHE])


def test_beyond_the_context_the_last_tokens_are_run_anew() -> None:
    model = made(GPT2, "SM+ScFuFFN_i1")
    theirs = to_transformers(model.architecture, deployed_weights(model))
    prompt = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(7))
    run = positions_run(theirs)
    out = theirs.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert run == [12, 1, 1, 1, 1, 16, 16, 16]
    assert torch.equal(out, greedy(model, prompt, 8))


def test_a_token_that_is_alone_attends_to_itself_under_eighth_powers_even_with_a_score_of_0(some_tokens) -> None:
    model = made(GPT2, "1xLPLGo-1xLSLGo")
    attention = model.layers[0].attention
    with torch.no_grad():
        for value in (attention.qkv.weight, attention.qkv.bias):
            value[: GPT2.d_model] = 0  # of queries
        attention.bound.weight.zero_()
    assert model(some_tokens(length=1)).logits.isfinite().all()
    assert_same_logits(to_transformers(model.architecture, deployed_weights(model)), model, some_tokens(length=1))


@pytest.mark.parametrize("base", [GPT2, PYTHIA])
def test_a_tied_table_is_one_tensor(base: Architecture, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = made(base, "SM+ScFFN")
    to_transformers(model.architecture, deployed_weights(model)).save_pretrained(tmp_path)
    tables = {"decoder.embed.weight", "decoder.logits.weight"} & set(load_file(tmp_path / "model.safetensors"))
    assert len(tables) == (1 if base.tied_embeddings else 2)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tied = again.decoder.embed.weight.data_ptr() == again.decoder.logits.weight.data_ptr()
    assert tied is base.tied_embeddings
    assert load_pretrained(str(tmp_path)).architecture.layers == model.architecture.layers


def test_an_export_carries_the_layers_that_were_trained_in_one_file() -> None:
    code = exported_code()
    assert all(inspect.getsource(layer) in code for layer in (PlainDecoder, Block, SelfAttention, ShapedSelfAttention))
    tree = ast.parse(code)
    imported = [name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names]
    imported += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    own = {name.partition(".")[0] for name in imported} - {*sys.stdlib_module_names, "torch", "numpy", "transformers"}
    assert not own
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    defined += [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    assert len(set(defined)) == len(defined)


LOAD_AND_GENERATE = """
import sys

sys.modules.update(dict.fromkeys(("costmodel", "search_spaces", "nas", "experiments")))  # cannot be imported
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
encoded = tokenizer("ab ab", return_tensors="pt")
tokens = encoded.input_ids
out = model.generate(**encoded, max_new_tokens=20, do_sample=False)
greedy = model(out[:, :16]).logits.argmax(-1)
assert torch.equal(greedy[0, tokens.shape[1] - 1 : 15], out[0, tokens.shape[1] : 16])
loss = model(out[:, :16], labels=out[:, :16]).loss
assert loss.isfinite()
print(type(model).__module__, out.shape[1] - tokens.shape[1], tokenizer.decode(out[0]) != "", out[0].tolist())
"""


@pytest.mark.parametrize("name", [pytest.param("SM+ScFFN", marks=pytest.mark.slow), "SM(t)+fLN+R"])
def test_a_saved_model_generates_on_a_machine_without_this_package(name: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = made(PYTHIA, name)
    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", "ab", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = tmp_path / "saved"
    save_model(model.architecture, deployed_weights(model), tmp_path, folder)
    elsewhere = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    printed = python("-c", LOAD_AND_GENERATE, str(folder), cwd=tmp_path, env=elsewhere)
    module, num_new, says, *generated = printed.split(maxsplit=3)
    assert module.startswith("transformers_modules.")
    assert (num_new, says) == ("20", "True")
    assert json.loads(generated[0]) == greedy(model, torch.tensor([[1, 1]]), 20)[0].tolist()


def test_padding_and_a_missing_tokenizer_are_refused(some_tokens: Callable[..., Tensor], tmp_path: Path) -> None:
    model = made(GPT2, "SM")
    theirs = to_transformers(model.architecture, deployed_weights(model))
    with pytest.raises(ValueError, match="`attention_mask` must be all ones"):
        theirs(some_tokens(), attention_mask=torch.tensor([[0] + [1] * 10, [1] * 11]))
    with pytest.raises(ValueError, match="the tokenizer of the corpus must be in"):
        save_model(model.architecture, deployed_weights(model), tmp_path, tmp_path / "out")


def saved(tmp_path: Path) -> Path:
    model = made(GPT2, "SM+LN+G")
    to_transformers(model.architecture, deployed_weights(model)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("activation_function", "silu", "the activation of .* must be one of gelu_new"),
        ("layer_norm_epsilon", 1e-6, "`layer_norm_epsilon` of .* must be 1e-05, but is 1e-06"),
        ("n_embd", 32, r"lacks or misshapes .*, of shape \[.*\] instead of \[.*\]"),
        ("n_layer", 3, "must hold all weights of its config.json"),
        ("model_type", "biogpt", "must be a model of type gpt2, gpt_neox, llama, .* or an export of ours, but is"),
        ("vocab_size", 10**9, "has 32,0.* weights, which take 256.* GB to load .* 50.00 GB of memory are"),
        (
            "model_type",
            "llama",
            "`(n_embd|activation_function)` of .* is .*, but has no meaning here",
        ),
    ],
)
def test_models_that_are_not_ours_are_refused(tmp_path, monkeypatch, setting: str, value: object, message: str) -> None:
    monkeypatch.setattr(pretrained, "free_bytes", lambda: 50 * 10**9)
    folder = saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(ValueError, match=message):
        load_pretrained(str(folder))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.ln_1.weight"][2] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="weights must be finite floating-point numbers, but 'transformer.h.0.ln_1"):
        load_pretrained(str(folder))
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="that can be read, but"):
        load_pretrained(str(folder))


def test_no_model_and_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files.")

    with pytest.raises(ValueError, match="the folder has no config.json"):
        load_pretrained(str(tmp_path))
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(ValueError, match="'no-one/no-model' must be a folder of save_pretrained or a model") as error:
        load_pretrained("no-one/no-model")
    assert "\n" not in str(error.value)


def saved_llama(folder: Path, **settings: Any) -> Any:
    """A small Llama of transformers' own in a folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, max_position_embeddings=16, **sizes, **settings)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def test_a_head_that_differs_from_the_tied_table_is_not_tied(tmp_path: Path) -> None:
    """As a merge that saved the head leaves it; transformers does not tie it either."""
    model = saved_llama(tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded, tokens = load_pretrained(str(tmp_path)), torch.arange(12)[None]
    assert not loaded.architecture.tied_embeddings
    ours = Decoder(loaded.architecture)
    load_deployed(ours, loaded.weights)
    assert_same_logits(model, ours, tokens)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    saved_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    mine = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config | mine))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="without code of its own, which is never run here"):
        load_pretrained(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["./mistyped", "/no/such/folder", "runs/a/b", "~/model"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(name: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **rest: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="but there is no such folder"):
        load_pretrained(name)


def test_a_broken_tokenizer_is_not_said_to_be_missing(tmp_path: Path) -> None:
    saved_llama(tmp_path)
    assert load_pretrained(str(tmp_path)).tokenizer is None
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"must have a tokenizer.json that can be read, but: Expecting value"):
        load_pretrained(str(tmp_path))
