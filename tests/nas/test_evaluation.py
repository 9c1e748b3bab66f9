import json
import re
from pathlib import Path

import pytest

from nas import export, train
from nas.conversion.huggingface import save_model
from nas.conversion.parent import load_initial
from nas.conversion.pretrained import read_export, write_pretrained
from tests.conftest import python
from tests.nas.test_begin_of_text import checkpoint  # noqa: F401  # a fixture

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def harness(folder: Path, model: str, *more: str) -> str:
    """What lm-evaluation-harness prints of a task of four items in a folder."""
    items = [{"question": f"def f{index}(x):", "choices": [" return x", " zebra"], "answer": 0} for index in range(4)]
    (folder / "items.json").write_text(json.dumps(items))
    (folder / "choice.yaml").write_text(CHOICE.format(items=folder / "items.json"))
    command = ["-m", "lm_eval", "--model", "hf", "--tasks", "local_choice", "--device", "cpu", "--model_args", model]
    return python(*command, "--include_path", str(folder), *more, env={"HF_HUB_OFFLINE": "1"})


@pytest.mark.slow
@pytest.mark.needs_hf
def test_a_local_task_runs_on_an_export(source_files: str, tmp_path: Path) -> None:
    smoke = ("--base", "tiny", "--scale", "smoke", "--seq-len", "32", "--tokens", "4096", "--data", source_files)
    assert train.main(["1xLSLGo-1xLSLRo", *smoke, "--parent", "none", "--output-dir", str(tmp_path / "trained")]) == 0
    export.export(str(tmp_path / "trained"), format="hf", output_dir=str(tmp_path / "hf"))
    printed = harness(tmp_path, f"pretrained={tmp_path / 'hf'},trust_remote_code=True", "--batch_size", "2")
    assert re.search(r"\|local_choice\|.*\|acc +\|↑ +\| +[01]", printed)


@pytest.mark.slow
@pytest.mark.needs_hf
@pytest.mark.parametrize("kind", ["gemma", "llama3"])
def test_a_parent_and_its_unchanged_export_score_the_same(kind: str, checkpoint, tmp_path: Path) -> None:  # noqa: F811
    folder = checkpoint(kind)
    write_pretrained(load_initial(str(folder)), tmp_path / "parent")
    kept = read_export(tmp_path / "parent")
    save_model(kept.architecture, kept.weights, tmp_path / "parent", tmp_path / "export")
    scores = []
    for path in (folder, tmp_path / "export"):
        harness(tmp_path, f"pretrained={path}", "--log_samples", "--output_path", str(path / "scores"))
        (samples,) = (path / "scores").rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        scores.append([float(answer[0]) for line in lines for answer in line["filtered_resps"]])
    assert len(scores[0]) == 8
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
