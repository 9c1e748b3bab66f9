"""A model next to its parent: likelihoods as transformers has them, tables, resumption, and what is refused."""

import csv
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

transformers = pytest.importorskip("transformers")

from costmodel.errors import UserError  # noqa: E402
from nas.corpus.second import second_source  # noqa: E402
from nas.evaluate import __main__ as command  # noqa: E402
from nas.evaluate import texts  # noqa: E402
from nas.evaluate.__main__ import Parts, find_judged  # noqa: E402
from nas.evaluate.likelihood import Request, likelihoods, request_of  # noqa: E402
from nas.evaluate.table import (  # noqa: E402
    sums_of,
    task_columns,
    task_lines,
    task_rows,
    text_lines,
    text_rows,
    writing_lines,
    writing_row,
)
from nas.evaluate.tasks import Item, Task, read_tasks  # noqa: E402
from nas.evaluate.texts import collapses, compared, first_difference, windows_of, written  # noqa: E402
from nas.model.decoder import build  # noqa: E402
from search_spaces.notation import parse  # noqa: E402
from tests.small_models import GPT2, LLAMA  # noqa: E402

ITEMS = [
    ("Question: what barks?\nAnswer:", (" a dog", " the cat that sat", " a"), 0),
    ("Question: what is a day after a night?\nAnswer:", (" another day, and a night", " no", " yes"), 1),
    ("The space is here ", ("and there", " twice"), 1),
    ("Question: what barks?\nAnswer:", (" a tree", " a dog"), 1),
    ("".join(map(chr, range(33, 123))) + "\nAnswer:", (" yes", " no, it is not"), 0),
]
SETTINGS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SETTINGS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SETTINGS |= {"initializer_range": 0.5}


def write_task(folder: Path, metric: str, items: list, num_shots: int = 0, task: str = "quiz") -> None:
    folder.mkdir(parents=True)
    config = {"task_name": task, "primary_metric": metric, "num_shots": num_shots}
    (folder / "config.json").write_text(json.dumps({"task_config": config}))
    rows = [
        {"request": {"context": context, "continuation": text}, "idx": index, "doc_id": doc, "label": label}
        for doc, (context, texts, label) in enumerate(items)
        for index, text in enumerate(texts)
    ]
    rows += [row | {"doc_id": 1_000_000 + row["doc_id"]} for row in rows[:1]]
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, `begins` and `unlike` with others, tasks and texts."""
    folder = tmp_path_factory.mktemp("evaluate")
    words = "".join(context + " ".join(texts) for context, texts, _ in ITEMS[:4])
    for name, seed, begin, size in (("parent", 0, (), 300), ("model", 1, (), 300), ("begins", 2, ("<s>",), 300),
                                    ("unlike", 3, (), 280)):  # fmt: skip
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["</s>", "<s>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([words], trainer)
        if begin:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(vocab_size=300, eos_token_id=0, bos_token_id=1, **SETTINGS)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    write_task(folder / "tasks/quiz/rc_0shot", "acc_per_char", ITEMS)
    write_task(folder / "tasks/quiz/rc_5shot", "acc_raw", ITEMS, num_shots=5)
    write_task(folder / "tasks/last/bpb", "logits_per_byte", [(c, t[:1], ["x"]) for c, t, _ in ITEMS], task="last")
    write_task(folder / "tasks/code/bpb", "bits_per_byte", ITEMS, task="code")
    for name in ("prose", "talk"):
        (folder / name).mkdir()
        for number in range(3):
            (folder / name / f"{number}.txt").write_text((ITEMS[number][0] + name) * 4)
    (folder / "nothing").mkdir()
    return folder


def theirs(folder: Path, context: str, continuation: str) -> tuple[float, bool]:
    """The likelihood by transformers, of tokens as lm-evaluation-harness makes them of a pair."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
    before = tokenizer(context).input_ids
    after = tokenizer(context + continuation).input_ids[len(before) :]
    kept = torch.tensor((before + after)[-65:])
    if len(before + after) > 65 and tokenizer("a").input_ids[0] == 1:
        kept[0] = 1
    logits = model(kept[None, :-1]).logits[0, -len(after) :].log_softmax(dim=-1)
    wanted = torch.tensor(after)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(dim=-1) == wanted).all())


@pytest.mark.parametrize("name", ["parent", "begins"])
def test_likelihoods_are_those_of_transformers(there: Path, name: str) -> None:
    judged = find_judged(str(there / name))
    pairs = [(context, text) for context, texts, _ in ITEMS for text in texts]
    requests = [request for pair in pairs if (request := request_of(judged.encoder, *pair, 64))]
    assert [request.is_cut for request in requests] == [False] * 10 + [True] * 2
    expected = [theirs(there / name, *pair) for pair in pairs]
    found = likelihoods(judged.decoder, requests)
    np.testing.assert_allclose([each[0] for each in found], [each[0] for each in expected], rtol=1e-4)
    assert [each[1] for each in found] == [each[1] for each in expected]


@pytest.mark.parametrize(
    ("name", "base"), [("SM+RMS+SwiGLU", LLAMA), ("HH(SM+ScFFN)", GPT2), ("1xLPLGo-1xLQLGo", GPT2)]
)
def test_shared_contexts_change_nothing(name, base):
    model = build(parse(name, base).architecture, torch.Generator().manual_seed(0)).eval()
    parts = [((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((1, 2, 3), (7, 8, 9, 1)), ((3, 2, 1), (4, 5)), ((1, 2), (3,))]
    together = likelihoods(model, [Request(*pair, False) for pair in [*parts, parts[0]]])
    for (context, after), ours in zip([*parts, parts[0]], together, strict=True):
        logits = model(torch.tensor([context + after])[:, :-1]).logits[0, -len(after) :].log_softmax(dim=-1)
        expected = float(logits.gather(1, torch.tensor(after)[:, None]).sum())
        assert ours.log_likelihood == pytest.approx(expected, abs=1e-4)


def test_the_words_of_a_continuation(there: Path) -> None:
    encoder = find_judged(str(there / "parent")).encoder
    assert request_of(encoder, "what", " barks" * 80, 64) is None
    assert request_of(encoder, "", " a dog", 64).context == (encoder.end,)
    given = find_judged(str(there / "begins")).encoder
    assert request_of(given, "", " a dog", 64).context == (1,)


def test_text_is_compared_by_document_or_by_window(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, parent = (find_judged(str(there / name)) for name in ("model", "parent"))
    documents = second_source(str(there / "prose")).documents
    monkeypatch.setattr(texts, "FEW", 3)
    text = windows_of("prose", documents, parent.encoder, 16, 120)
    assert text.num_tokens >= 120
    found = compared(model.decoder, parent.decoder, text)
    assert len(found) == 3
    monkeypatch.setattr(texts, "FEW", 4)
    by_window = windows_of("prose", documents, parent.encoder, 16, 120)
    assert len(compared(model.decoder, parent.decoder, by_window)) == len(text.windows) > 3
    assert (text.kind, by_window.kind) == ("documents", "windows")
    (alone,) = text_rows({"prose": [found[0]]})
    assert (alone.change_low, alone.change_high) == (None, None)
    losses = np.zeros(4)
    for window in text.windows:
        tokens = torch.tensor([window])
        ours, its = (each.decoder(tokens[:, :-1]).logits[0].log_softmax(-1) for each in (model, parent))
        nats = [-float(each.gather(1, tokens[0, 1:, None]).sum()) for each in (its, ours)]
        losses += [*nats, float((its.exp() * (its - ours)).sum()), int((its.argmax(-1) == ours.argmax(-1)).sum())]
    np.testing.assert_allclose(np.sum([row[1:] for row in found], axis=0), losses, rtol=1e-4)
    same = compared(parent.decoder, parent.decoder, text)
    assert [sum(numbers) for numbers in list(zip(*same, strict=True))[3:]] == [0, text.num_tokens]


def test_both_write_greedily(there: Path) -> None:
    decoder = find_judged(str(there / "parent")).decoder
    (made,) = written(decoder, [[5, 6, 7]], 6, ends=())
    tokens = [5, 6, 7]
    for _ in range(6):
        tokens.append(int(decoder(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert made == tokens[3:]
    assert written(decoder, [[5, 6, 7]], 6, ends={made[2]}) == [made[: made.index(made[2])]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7] * 33, True),
        ([7] * 32, False),
        ([*range(30), *([1, 2, 3] * 12)], True),
        ([*range(16)] * 3, True),
        ([*range(17)] * 4, False),
        ([*([1] * 40), 2], False),
    ],
)
def test_repetition_at_the_end_is_a_collapse(tokens, expected):
    assert collapses(tokens) is expected


def test_the_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 2
    assert first_difference([1, 2], [1]) == 2
    (line,) = writing_lines([[7] * 40, [1], [2]], [[7] * 40, [1], [3]], 40)
    assert "1 of the model and 1 of the parent collapse into repetition (+0, 95 % interval +0 to +0): each" in line
    row = writing_row([[1]] * 10, [[7] * 40] * 3 + [[1]] * 7)
    assert (row.of_parent, row.of_model, row.change, row.change_low, row.change_high) == (0, 3, 3, 1, 6)
    assert "most are equal to their end; 2 do not differ" in line


def test_the_table_of_a_task():
    items = tuple(Item(choices=(("q", "a"), ("q", "bbbb")), label=0) for _ in range(40))
    task = Task(name="t", metric="acc_per_char", items=items)
    first, second = [(-2.0, False, 1), (-9.0, False, 2)], [(-2.0, False, 1), (-7.0, False, 2)]  # -2 to -2.25, to -1.75
    columns = task_columns(task, [first] * 36 + [second] * 3 + [None], [first] * 30 + [second] * 9 + [None])
    assert columns.sum(axis=0).tolist() == [39, 19.5, 36, 30, 6]
    *_, row = task_lines({task: columns})
    assert row.startswith("| t, per character | 39 | 50.0% | 92.3% (")
    assert "| 64% (" in row  # (30 - 19.5) / (36 - 19.5)
    assert "| -15.4 (" in row
    assert "| 15.4% (" in row
    guessing = columns.copy()
    guessing[:, 2] = [0, 1] * 19 + [0]
    assert "the parent guesses" in task_lines({task: guessing})[-1]
    other = Task(name="u", metric="acc_per_char", items=items[:39])
    assert task_lines({task: columns, other: guessing})[-1].startswith("| mean over tasks |  | 50.0% | 70.5% (")
    only, *_, mean = task_rows({task: columns, other: guessing})
    assert only[:5] == ("task", "t", 39, 36 / 39, 30 / 39)
    assert (only.change, only.agreement) == pytest.approx((-6 / 39, 33 / 39))
    assert mean.kind == "mean"
    assert mean.change_low < mean.change < mean.change_high


def test_intervals_are_of_pairs():
    rows = np.stack([np.ones(50), *[np.arange(50.0)] * 2, np.zeros(50), np.ones(50)], axis=1)
    line = text_lines({"text": rows * [1, 0.1, 0.1, 1, 1]}, {"text": "documents"})[-1]
    assert "| +0.0% |" in line  # each sample has the same documents of both
    assert sums_of(rows).samples.shape == (2000, 5)
    assert line.endswith("|  |")  # each has a single token


def test_the_document_that_loses_most_is_told():
    units = [(1000, 2000.0, 2000.0, 1.0, 900), (64, 128.0, 256.0, 1.0, 60), (63, 63.0, 630.0, 1.0, 60)]
    assert text_lines({"text": units}, {"text": "documents"})[-1].endswith("| +639% |")  # e^2 - 1; 63 are too few
    assert [row.worst_change for row in text_rows({"text": units})] == [pytest.approx(math.expm1(2))]
    assert [row.worst_change for row in text_rows({"text": units[2:]})] == [None]


def evaluated(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(list(args))
    return int(ended.value.code or 0)


def test_a_killed_evaluation_continues(there, tmp_path, capsys, monkeypatch):
    given = f"{there}/model --versus {there}/parent --text {there}/prose {there}/talk --tasks {there}/tasks --output"
    args = [*given.split(), str(tmp_path / "new/out.md")]
    assert evaluated(*args) == 0
    out, err = capsys.readouterr()
    table, kept = (tmp_path / "new/out.md").read_text(), tmp_path / "new/out.jsonl"
    assert out == table
    assert "[8/8] writing, model: done" in err
    assert "left out 1 tasks that are not judged by accuracy, such as code/bpb" in err
    assert "quiz/rc_0shot: 1 of 5 items lost the beginning of their context" in table
    assert "quiz/rc_5shot" not in table
    with (tmp_path / "new/out.csv").open() as file:
        rows = {(row["kind"], row["name"]): row for row in csv.DictReader(file)}
    prose = rows["text", f"{there}/prose"]
    for number in (
        f"{float(prose['of_model']):.2f}",
        f"{float(prose['change_low']):+.1%} to",
        f"{float(prose['kl_nats']):.4f}",
    ):
        assert number in table
    assert {kind for kind, _ in rows} == {"text", "task", "mean", "writing"}
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20])  # a part is torn
    again = Mock(wraps=written)
    monkeypatch.setattr(command, "likelihoods", None)
    monkeypatch.setattr(command, "written", again)
    assert evaluated(*args) == 0
    assert (tmp_path / "new/out.md").read_text() == table
    assert (kept.read_bytes(), again.call_count) == (whole, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("parent --versus parent", "there must be something to evaluate on"),
        ("parent --text prose", "--versus must name the parent"),
        ("parent --versus parent --text prose --only quiz", "--only is for --tasks"),
        ("parent --versus parent --text prose prose", "--text must name each folder once, but has prose again"),
        ("parent --versus parent --text absent", "data must be stdlib"),
        ("parent --versus parent --text nothing", "nothing must hold text in"),
        ("parent --versus parent --tasks absent", "--tasks must be a folder, but absent is none"),
        ("parent --versus parent --tasks prose", "--tasks prose must have a task"),
        ("parent --versus parent --tasks tasks --only chess", "there must be a task named chess"),
        ("parent --versus parent --tasks tasks/code", "there must be a task in tasks/code whose metric is one of"),
        ("parent --versus parent --text prose --items 0", "--items must be at least 1, but got 0"),
        ("parent --versus parent --text prose --output out", "--output must be a Markdown file"),
        ("parent --versus parent --text prose --output there.md", "--output there.md is no evaluation"),
        ("parent --versus parent --text prose --output numbers.md", "--output numbers.csv is no evaluation"),
        ("unlike --versus parent --text prose", "must have the tokenizer of parent, since"),
        ("begins --versus parent --text prose", "one begins a text with '<s>' and the other with None"),
        ("absent.gguf --versus parent --text prose", "absent"),
    ],
)
def test_bad_input_is_refused_in_a_line(there, tmp_path, monkeypatch, capsys, args, message):
    for name in there.iterdir():
        (tmp_path / name.name).symlink_to(name)
    (tmp_path / "there.md").write_text("my notes")
    (tmp_path / "numbers.csv").write_text("my numbers")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert evaluated(*args.split()) == 2
    assert message in (err := capsys.readouterr().err)
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 must be a JSON object"),
        ('{"text": "prose"}', "line 1 must be a request with `doc_id`"),
        ('{"request": {"context": "a", "continuation": " "}, "doc_id": 0, "idx": 0}', "must have a continuation"),
        ('{"request": {"context": "a", "continuation": "b"}, "doc_id": 0, "idx": 0}', "must have choices from `idx` 0"),
        ('{"request": {"context": "\\ud800", "continuation": "b"}, "doc_id": 0, "idx": 0}', "must be a request with"),
        ("", "must have a request, but has none"),
    ],
)
def test_requests_of_another_format_are_refused(tmp_path, line, message):
    write_task(tmp_path / "quiz", "acc_raw", ITEMS)
    (tmp_path / "quiz/requests.jsonl.gz").unlink()
    (tmp_path / "quiz/requests.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_tasks(str(tmp_path), [], 5)


def test_labels_configurations_and_kept_parts_of_another_format_are_refused(tmp_path):
    write_task(tmp_path / "a/quiz", "acc_raw", [("a", (" b", " c"), 2)])
    with pytest.raises(UserError, match="must have a `label` from 0 to 1, but has 2"):
        read_tasks(str(tmp_path / "a"), [], 5)
    (tmp_path / "a/quiz/config.json").write_text('{"metric": "acc"}')
    with pytest.raises(UserError, match="must name the task_name and primary_metric"):
        read_tasks(str(tmp_path / "a"), [], 5)
    write_task(tmp_path / "b/quiz", "logits_per_byte", ITEMS)
    with pytest.raises(UserError, match="must have a single continuation"):
        read_tasks(str(tmp_path / "b"), [], 5)
    for content in ("my notes", '{"text": "a row"}\n'):
        (tmp_path / "kept.jsonl").write_text(content)
        with pytest.raises(UserError, match="name another --output"):
            Parts(tmp_path / "kept.jsonl")


def test_a_model_whose_logits_overflow_is_named_and_nothing_is_kept(tmp_path):
    parts = Parts(tmp_path / "kept.jsonl")
    with pytest.raises(UserError, match="task quiz, model must give finite numbers"):
        parts.result("task quiz, model", [], lambda: [[float("nan"), False, 1]])
    assert not parts.known


def test_evaluations_share_a_file(tmp_path):
    path = tmp_path / "out.jsonl"
    Parts(path).result("one", [], lambda: 1)
    path.write_bytes(path.read_bytes() + path.read_bytes()[:9])  # of a process that was killed
    first, second = Parts(path), Parts(path)
    for number, parts in enumerate((first, second), 2):
        parts.result(f"part {number}", [], Mock(return_value=number))
    assert sorted(Parts(path).known.values()) == [1, 2, 3]


def test_the_form_with_the_fewest_examples_is_run_and_a_sample_is_even(there, tmp_path):
    tasks, others = read_tasks(str(there / "tasks"), [], 3)
    names = ["last/bpb", "quiz/rc_0shot"]
    assert [(task.name, len(task.items)) for task in tasks] == [(name, 3) for name in names]
    assert others == ["code/bpb"]
    for only, chosen in (("quiz", ["quiz/rc_0shot"]), ("quiz/*", ["quiz/rc_0shot", "quiz/rc_5shot"])):
        assert [task.name for task in read_tasks(str(there / "tasks"), [only], 3)[0]] == chosen
    for form, num_shots, task in (("rc_0shot", 0, "quiz"), ("mc_5shot", 5, "quiz:mc")):
        write_task(tmp_path / "quiz" / form, "acc_raw", ITEMS, num_shots, task)
    assert [task.name for task in read_tasks(str(tmp_path), ["quiz"], 3)[0]] == ["quiz/rc_0shot"]
    for task in ("last", "quiz"):
        write_task(tmp_path / "beside/set" / task, "acc_raw", ITEMS, 0, task)
    assert [task.name for task in read_tasks(str(tmp_path / "beside"), [], 3)[0]] == ["set/last", "set/quiz"]
    (five,), _ = read_tasks(str(there / "tasks"), ["*/rc_5shot"], 3)
    assert (five.name, five.metric) == ("quiz/rc_5shot", "acc_raw")
    assert five.items == tasks[1].items
    (alone,), _ = read_tasks(str(there / "tasks/quiz/rc_0shot"), [], 9)
    assert alone.name == "rc_0shot"
    assert alone.items[0].choices[1] == (ITEMS[0][0], ITEMS[0][1][1])
