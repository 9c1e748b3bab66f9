"""Models of transformers, read and written: of a known family or, failing that, of our class in `huggingface_model`.

Needs the extra `hf`, which is imported when a function is called. Weights here are deployed weights, by node.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from costmodel.config.schema import decode
from costmodel.config.user_files import read_json
from costmodel.errors import UserError
from nas.conversion.checkpoint_memory import require_memory
from nas.conversion.huggingface_layout import from_theirs, to_theirs
from nas.conversion.pretrained import Pretrained, is_sound
from nas.corpus.documents import GivenTokenizer
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import END_OF_TEXT, TOKENIZER_FILE, kept_tokenizer
from search_spaces.architecture import Architecture, canonical
from search_spaces.checkpoints.checkpoint import (
    OUR_TYPE,
    read_config,
    read_foreign,
    transformers_library,
    what_is_asked,
)
from search_spaces.checkpoints.settings import architecture_of, family_of, plain_settings

WRAPPED = {  # prefixes of names of weights, with remedies
    "_orig_mod.": "save the model from before torch.compile",
    "module.": "save the `module` of the parallel model",
    "base_model.": "save it merged, by merge_and_unload of PEFT",
}


def load_pretrained(path: str) -> Pretrained:
    """Load the model in a folder of `save_pretrained`, or with an id on the hub.

    Raises UserError if there is none, the hub cannot be reached, the family is unknown, transformers is not installed,
    or the weights are incomplete, of wrong shapes, not floating point, not finite or larger than memory.
    """
    config, architecture = _read_config(path)
    require_memory(architecture, path)  # before a model of any size is made
    _require_files_of_its_own(path)
    load = _transformers().AutoModelForCausalLM.from_pretrained
    model, info = read_foreign(
        what_is_asked(path),
        lambda: load(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
            trust_remote_code=False,
        ),
    )
    if missing := sorted(info["missing_keys"]) + [str(key) for key in info["mismatched_keys"]]:
        wrapped = [prefix for prefix in WRAPPED if any(key.startswith(prefix) for key in info["unexpected_keys"])]
        why = f"; names begin with {wrapped[0]!r}, so {WRAPPED[wrapped[0]]}" if wrapped else ""
        raise UserError(f"{path!r} must hold all weights of its config.json, but lacks or misshapes {missing[0]}{why}.")
    state = model.state_dict()
    if bad := [name for name, value in state.items() if not is_sound(value)]:
        raise UserError(f"weights must be finite floating-point numbers, but {bad[0]!r} of {path!r} is not.")
    if config.model_type == OUR_TYPE:
        weights = model.decoder.state_dict()
    else:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if architecture.tied_embeddings and not head.equal(table):  # which transformers does not tie either
            architecture = replace(architecture, tied_embeddings=False)
        weights = from_theirs(family_of(config, path), architecture, state)
    copies = {name: value.float().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    return Pretrained(architecture, copies, _tokenizer(path))


def _require_files_of_its_own(path: str) -> None:
    """Raise UserError if a list of the weights' files names one outside the folder."""
    for index in Path(path).glob("*.index.json"):
        data = read_json(index)
        files = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(files, dict) or any(not isinstance(n, str) or Path(n).name != n for n in files.values()):
            raise UserError(f"`weight_map` of {index} must map weights to files beside it; get the checkpoint again.")


def read_pretrained_architecture(path: str) -> Architecture:
    """Return the architecture that `load_pretrained` loads. Raises UserError as it does for the configuration."""
    return _read_config(path)[1]


def _read_config(path: str) -> tuple[Any, Architecture]:
    _transformers()
    config = read_config(path)
    if config.model_type == OUR_TYPE:
        architecture = decode(Architecture, config.architecture, "`architecture` of config.json")
    else:
        architecture = architecture_of(config, path)
    return config, architecture


def _tokenizer(path: str) -> GivenTokenizer | None:
    """Return the tokenizer that comes with the weights; None if there is none that the package tokenizers can run."""
    try:
        with tokenizing(f"the tokenizer of {path!r}"):
            theirs = _transformers().PreTrainedTokenizerFast.from_pretrained(path)
    except UserError as error:
        if not Path(path, TOKENIZER_FILE).is_file():  # there is none, or one in another form
            return None
        reason = " ".join(str(error).split())
        raise UserError(f"{path!r} must have a {TOKENIZER_FILE} that can be read, but: {reason:.200}.") from None
    tokenizer = theirs.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    name = Path(path).resolve().name if os.path.exists(path) else path  # of a folder, or an id on the hub
    return GivenTokenizer(name=name, json=tokenizer.to_str(), end_of_text=theirs.eos_token or END_OF_TEXT)


def to_transformers(architecture: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """Return a transformers model that computes the same: of one of its families if possible, else of our own class."""
    transformers = _transformers()
    from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM

    plain = plain_settings(architecture, transformers)
    if plain is None:
        block = architecture.block_facts
        facts: dict[str, Any] = {"join": block.join, "rotary_share": block.rotary_share}
        facts |= {name: getattr(block, name) for name in ("query_key_norm", "norms_after")}
        if not block.packs_qkv:
            facts |= {"packs_qkv": False, "biases": list(block.biases)}
        model: Any = DecoderForCausalLM(DecoderConfig(architecture=canonical(architecture), block=facts))
        model.decoder.load_state_dict(weights)
    else:
        family, settings = plain
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**settings))
        expected = model.state_dict()
        theirs = to_theirs(family, architecture, weights)
        model.load_state_dict({name: value for name, value in theirs.items() if name in expected})
    return model.eval()


def save_model(architecture: Architecture, weights: Mapping[str, Tensor], tokenizer: Path, target: Path) -> None:
    """Save the model of `to_transformers` and its tokenizer into a folder, as `save_pretrained` does.

    tokenizer: the folder of the tokenizer's file. Raises UserError if it is gone.
    """
    if not (path := tokenizer / TOKENIZER_FILE).is_file():
        raise UserError(f"the tokenizer of the corpus must be in {tokenizer}, but is gone; prepare the data anew.")
    end_of_text = kept_tokenizer(tokenizer, "").end_of_text
    ours = _transformers().PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        eos_token=end_of_text,
        model_max_length=architecture.context,
        model_input_names=["input_ids", "attention_mask"],
    )
    model = to_transformers(architecture, weights)
    model.config.eos_token_id = model.generation_config.eos_token_id = ours.convert_tokens_to_ids(end_of_text)
    model.save_pretrained(target)
    ours.save_pretrained(target)


def _transformers() -> Any:
    """Return the library with our own class registered."""
    library = transformers_library()
    from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM

    library.AutoConfig.register(OUR_TYPE, DecoderConfig, exist_ok=True)
    library.AutoModelForCausalLM.register(DecoderConfig, DecoderForCausalLM, exist_ok=True)
    return library
