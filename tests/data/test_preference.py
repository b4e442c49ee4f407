"""Pairs of answers: which rows are accepted, what is learnt from them, what is left out, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ranvier.config import rules
from ranvier.config.resolve import resolve
from ranvier.config.run import Data, Launch, Preference, Run, Transformer
from ranvier.data.conversation_rows import pair_of
from ranvier.data.preference import PREFERENCE, open_pairs
from ranvier.data.prepare import prepare, problems
from ranvier.data.tables import Row
from ranvier.errors import DataError
from ranvier.tensor.split.loss import IGNORED
from ranvier.testing.tasks import check_task
from tests.data.test_chat import tokenizer_in
from tests.errors import check, raises

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

USER, RIGHT, WRONG = ({"role": role, "content": text} for role, text in (
    ("user", "2 + 2?"), ("assistant", "4"), ("assistant", "55")))
OTHERWISE = ("{% for one in messages %}{{ one.role + ':' }}"
             "{{ one.content if loop.last or one.role == 'user' else '...' }}{{ '\\n' }}{% endfor %}"
             "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
"""A template that writes earlier turns of the assistant differently."""
SYSTEM, EARLIER = {"role": "system", "content": "Count."}, {"role": "assistant", "content": "Yes?"}


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run_of(tmp_path, rows, *, sequence=96, **data):
    return Run(model=Transformer(num_layers=1, hidden=16, heads=2, vocab=300, sequence=sequence),
               data=Data(**{"task": "preference", "train": str(written(tmp_path / "pairs.jsonl", rows)),
                            "tokenizer": str(tokenizer_in(tmp_path / "tokenizer")), "cache_dir": tmp_path / "cache"}
                         | data))


def rows_of(count):
    return [{"prompt": f"{number}?", "chosen": "yes" * (1 + number % 3), "rejected": "no"} for number in range(count)]


@pytest.mark.parametrize("row", [
    {"prompt": "2 + 2?", "chosen": "4", "rejected": "55"},
    {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
    {"prompt": "2 + 2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
], ids=["texts", "messages", "prompt twice", "no prompt"])
def test_forms_of_pairs(row):
    pair = pair_of(Row("here", row))
    assert [list(one.messages) for one in (pair.chosen, pair.rejected)] == [[USER, RIGHT], [USER, WRONG]]
    assert not pair.chosen.unlearnt and not pair.rejected.unlearnt


def test_turns_of_the_assistant_before_the_answer_are_not_learnt():
    context = [SYSTEM, USER, EARLIER, USER]
    for row in ({"prompt": context, "chosen": "4", "rejected": "55"},
                {"system": "Count.", "prompt": context[1:], "chosen": "4", "rejected": "55"},
                {"chosen": [*context, RIGHT], "rejected": [*context, WRONG]}):
        pair = pair_of(Row("here", row))
        assert list(pair.rejected.messages) == [*context, WRONG]
        assert pair.chosen.unlearnt == pair.rejected.unlearnt == {2}


@pytest.mark.parametrize(("row", "code", "value"), [
    ({"chosen": "4", "rejected": "55"}, "not-a-pair", "None"),
    ({"prompt": "?", "chosen": "4"}, "not-a-turn", "None"),
    ({"prompt": "?", "chosen": "4", "rejected": " "}, "not-a-turn", "' '"),
    ({"prompt": "other", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "not-a-pair", "'other'"),
    ({"chosen": [USER, RIGHT], "rejected": [USER]}, "not-a-pair", repr([USER])),
    ({"prompt": "?", "chosen": [USER, RIGHT], "rejected": "55"}, "not-a-pair", "'?'"),
])
def test_rows_that_are_no_pairs_are_refused(row, code, value):
    with raises(code, where="line 7", value=value[:80]):
        pair_of(Row("line 7", row))


@pytest.mark.parametrize(("value", "margin"), [(0, 0.0), (-0.5, -0.5), ("1.5", 1.5), ("", None), (None, None)])
def test_margins_of_pairs(value, margin):
    assert pair_of(Row("here", rows_of(1)[0] | {"margin": value})).margin == margin


@pytest.mark.parametrize("value", [True, "much", [1], float("nan")])
def test_margins_that_are_no_numbers_are_refused(value):
    with raises("margin-not-number", where="line 7", value=repr(value)):
        pair_of(Row("line 7", rows_of(1)[0] | {"margin": value}))


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_margins_are_of_the_task_reward(tmp_path, task):
    """As in TRL, whose DPOTrainer does not read them."""
    rows = [row | {"margin": number / 4} for number, row in enumerate(rows_of(12))]
    run = run_of(tmp_path, rows, eval=str(tmp_path / "pairs.jsonl"), task=task)
    data = prepare(run)
    targets = data.train.targets(np.arange(12))
    if task == "preference":
        check(data.warnings[0], "margin-without-effect", where=f"data.train {run.data.train}", value=12)
        assert "margin" not in targets
    else:
        assert targets["margin"].tolist() == [number / 4 for number in range(12)]
    for place, code in ((5, rows_of(1)), (0, rows_of(1))):
        mixed = [*rows[:place], *code, *rows[place:]]
        with raises("margin-of-some-pairs", where=f"{tmp_path / 'pairs.jsonl'} line {max(place + 1, 2)}"):
            prepare(run_of(tmp_path, mixed, task=task))


def test_a_sample_is_a_pair(tmp_path):
    run = run_of(tmp_path, rows_of(12))
    data = prepare(run)
    assert (len(data.train), len(data.eval), data.weight) == (11, 1, 1.0)
    assert data.about.endswith("11 pairs of answers, 1 held out")
    numbers, length = np.arange(11), int(data.train.sample_lengths.max())
    inputs, targets = data.train.inputs(numbers, numbers, length), data.train.targets(numbers, length)
    tokenizer = data.tokenizer
    for row in range(11):
        at = int(targets["rejected_from"][row])
        assert [*inputs["segments"][row].unique_consecutive()][:2] == [1, 2] and inputs["segments"][row, at] == 2
        answers = [tokenizer.decode(part[part != IGNORED].tolist())
                   for part in (targets["tokens"][row, :at], targets["tokens"][row, at:])]
        assert answers[1] == "no<|end|>\n" and answers[0].replace("yes", "") == "<|end|>\n"
    assert "reference" not in targets
    data.train.reference = np.arange(22.0).reshape(11, 2)
    assert data.train.targets(np.array([3]))["reference"].tolist() == [[6.0, 7.0]]


def test_pairs_of_one_prompt_are_held_out_together(tmp_path):
    rows = [{"prompt": f"{number % 10}?", "chosen": f"yes {number}", "rejected": "no"} for number in range(40)]
    data = prepare(run_of(tmp_path, rows))

    def prompts(part):
        return {data.tokenizer.decode(ids[:12].tolist()) for ids in part.inputs(np.arange(len(part)),
                                                                               np.arange(len(part)))["ids"]}
    assert len(data.eval) == 4 and not prompts(data.train) & prompts(data.eval)


def test_what_is_left_out_is_said(tmp_path):
    rows = [*rows_of(12), {"prompt": "long?", "chosen": "a" * 100, "rejected": "b"},
            {"prompt": "same?", "chosen": "c", "rejected": "c"}]
    data = prepare(run_of(tmp_path, rows))
    assert "1 of 14 left out, whose answers have more than 96 tokens together" in data.about
    assert "1 of 14 left out, whose answers are the same" in data.about
    warning, few = data.warnings
    check(warning, "pairs-left-out", 127, value=2)
    check(few, "batch-beyond-data", len(data.train), where="batch.global-size", value=32)
    both = run_of(tmp_path, rows, eval=str(tmp_path / "pairs.jsonl"))
    assert f"; data.eval {both.data.eval}: 1 of 14 left out" in prepare(both).about


def test_columns_and_names_are_checked_before(tmp_path):
    run = run_of(tmp_path, [{"prompt": "a", "completion": "b"}])
    found, = problems(run)
    assert "chosen" in found.what and found.value == "completion, prompt"
    assert [len(list(open_pairs("quiz", "train", "auto").rows(())))] == [2038]


@pytest.mark.parametrize(("rows", "code", "value"), [
    ([{"prompt": "a", "chosen": "b" * 99, "rejected": "c"}] * 3, "no-pairs", 3),
    ([{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3, "no-pairs", 3),
    (rows_of(1), "too-few-samples", 1)])
def test_too_few_pairs_are_refused(tmp_path, rows, code, value):
    with pytest.raises(DataError) as caught:
        prepare(run_of(tmp_path, rows))
    assert (caught.value.code, caught.value.value) == (code, value)
    assert ("model.sequence" in caught.value.settings) == (len(rows[0]["chosen"]) == 99)


def test_answers_of_several_turns_need_a_template_that_writes_each_alike(tmp_path):
    answer = [RIGHT, USER, RIGHT]
    run = run_of(tmp_path, [{"prompt": f"{number}?", "chosen": answer, "rejected": "no"} for number in range(4)],
                 sequence=200)
    assert len(prepare(run).train) == 3
    run = replace(run, data=replace(run.data, tokenizer=str(tokenizer_in(tmp_path / "other", OTHERWISE))))
    with pytest.raises(DataError) as caught:
        prepare(run)
    assert (caught.value.code, caught.value.value) == ("answer-of-several-turns", 2)


def test_settings_that_cannot_be_with_pairs():
    run = Run(model=Transformer(family="llama", sequence=64, rope_scaling="dynamic", rope_positions=32),
              data=Data(task="preference"), launch=Launch(join_address="127.0.0.1"))

    def codes(run):
        return {one.code for one in rules.problems(resolve(run), num_blocks=None)}
    found = {"pairs-with-dynamic-rope", "join-with-reference"}
    assert codes(run) >= found
    assert not codes(replace(run, model=replace(run.model, sequence=32), preference=Preference(loss="simpo"))) & found


def test_the_task_keeps_its_protocol(tmp_path):
    run = replace(run_of(tmp_path, rows_of(20)), preference=Preference(loss="simpo"))
    data = check_task(PREFERENCE, run, lambda targets: torch.randn(*targets["tokens"].shape, 300, dtype=torch.float64))
    assert data.scoring().total([])["eval_count"] == 0
