"""The practical case from end to end: a checkpoint of the user's own, with tied tables, as transformers saved it."""

from pathlib import Path

import pytest
import torch

from nas import export, search
from nas.conversion.pretrained import read_export
from nas.corpus.corpus import prepare, tokenizer_folder
from nas.model.decoder import Decoder
from nas.model.weights import load_deployed
from nas.private import __main__ as private
from nas.report import __main__ as report

SPACE = """
name: own
base: tiny
dimensions: {heads: 4, vocab: 512, context: 32}
members: [SM+LN+R, SM+ScFuFFN]
entropy_regularisation: [false]
"""


@pytest.mark.needs_hf
@pytest.mark.needs_engine
@pytest.mark.usefixtures("without_ray")
def test_a_tied_checkpoint_is_searched_reported_exported_and_run_privately(
    source_files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    tokenizer = tokenizer_folder(prepare(source_files, vocab_size=512).fingerprint) / "tokenizer.json"
    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "space.yaml").write_text(SPACE)

    run, yaml, hf = (tmp_path / name for name in ("run", "yaml", "hf"))
    flags = f"--budget-latency 1h --space {tmp_path}/space.yaml --scale smoke --seq-len 32 --tokens 512 --num-trials 1"
    flags += " --searcher uniform --finalist-seeds 0"
    flags += f" --data {source_files} --parent {tmp_path}/gpt2 --output-dir {run}"
    assert search.main(flags.split()) == 0
    for command, args in (
        (report.main, f"{run} --output {tmp_path}/report.html"),
        (export.main, f"{run} --output-dir {yaml}"),
        (export.main, f"{run} --format hf --output-dir {hf}"),
        (private.main, f"{yaml} --prompt f --new-tokens 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(args.split())
        assert ended.value.code == 0, capsys.readouterr().err
    assert (tmp_path / "report.html").stat().st_size > 0
    trained = read_export(yaml)
    assert trained.architecture.tied_embeddings
    ours = Decoder(trained.architecture)
    load_deployed(ours, trained.weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(hf, trust_remote_code=True)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, ours(tokens).logits)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert trained.weights["embed.weight"].equal(trained.weights["logits.weight"])
