"""Conversations: the template, which tokens the assistant wrote, what is stored, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from ranvier.cli import check
from ranvier.config.run import Batch, Data, Run, Train, Transformer
from ranvier.data import chat_template, quiz
from ranvier.data.chat_template import ChatTokenizer
from ranvier.data.prepare import known_padding, prepare, problems
from ranvier.data.publish import PreparationProgress
from ranvier.errors import DataError
from ranvier.tensor.split.loss import IGNORED
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

CHATML = ("{{ '<s>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
          "{{ '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}")
MARKED = ("{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
          "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ message['content'] }}"
          "{% endif %}{% endfor %}")
FORGETFUL = ("{% for message in messages %}{{ message['role'] }}{% if loop.last %}{{ message['content'] }}{% endif %}"
             "{% endfor %}")
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hi, you."}, {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "B\u00fce \U0001f600."}]


def tokenizer_in(folder, template=CHATML):
    """A byte-level tokenizer with special tokens, as transformers saves it."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({token: place for place, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversations(path, talks):
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return path


def run_of(tmp_path, talks=(TALK,) * 12, *, sequence=160, vocab=300, **data):
    data = {"tokenizer": str(tokenizer_in(tmp_path / "tok"))} | data
    return Run(model=Transformer(vocab=vocab, sequence=sequence, num_layers=2, hidden=16, heads=2),
               batch=Batch(global_size=4, microbatch_size=2), train=Train(steps=3, eval_sequences=2),
               data=Data(task="chat", train=str(conversations(tmp_path / "talks.jsonl", talks)),
                         cache_dir=tmp_path / "cache", **data))


def written(tokenizer, talk):
    ids, is_target = tokenizer.encode(talk)
    return tokenizer.decode(ids), [tokenizer.decode(part) for part in runs_of(np.array(ids), is_target)]


def runs_of(ids, chosen):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
    return [ids[start:stop] for start, stop in edges.reshape(-1, 2)]


# ---------------------------------------------------------------------- templates

def test_the_assistants_turns_and_their_ends_are_learnt_and_nothing_else(tmp_path):
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok"))
    text, parts = written(tokenizer, TALK)
    assert text == ("<s><|system|>\nBe brief.<|end|>\n<|user|>\nHello?<|end|>\n<|assistant|>\nHi, you.<|end|>\n"
                    "<|user|>\nAnd now?<|end|>\n<|assistant|>\nB\u00fce \U0001f600.<|end|>\n")
    assert parts == ["Hi, you.<|end|>\n", "B\u00fce \U0001f600.<|end|>\n"]
    ids, is_target = tokenizer.encode(TALK)
    prompt = tokenizer.encode(TALK[:4])[0]
    assert ids[:len(prompt)] == prompt and not is_target[len(prompt)]
    assert written(tokenizer, TALK[:2])[1] == []


def test_a_template_may_mark_what_the_assistant_writes(tmp_path):
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", MARKED))
    assert written(tokenizer, TALK)[1] == ["Hi, you.<|end|>", "B\u00fce \U0001f600.<|end|>"]
    (tmp_path / "other.jinja").write_text(MARKED)
    other = ChatTokenizer(tokenizer_in(tmp_path / "tok"), tmp_path / "other.jinja")
    assert other.encode(TALK)[0] == tokenizer.encode(TALK)[0] and other.fingerprint == tokenizer.fingerprint


def test_templates_that_cannot_be_used_are_named(tmp_path, monkeypatch):
    forgetful = ChatTokenizer(tokenizer_in(tmp_path / "tok", FORGETFUL))
    with pytest.raises(DataError, match=r"chat template: has no place for a turn.*turn 3.*{% generation %}"):
        forgetful.encode(TALK)
    broken = ChatTokenizer(tokenizer_in(tmp_path / "tok", "{{ raise_exception('no system turn') }}"))
    with pytest.raises(DataError, match=r"is refused by the chat template.*no system turn"):
        broken.encode(TALK)
    with pytest.raises(DataError, match=r"data.tokenizer: has no chat template"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok", None))
    with pytest.raises(DataError, match=r"data.tokenizer: has no tokenizer.json"):
        ChatTokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"data.chat-template: is not a file that exists"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"), tmp_path / "none.jinja")
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer as transformers saves it"):
        ChatTokenizer(tmp_path / "tok")
    monkeypatch.setattr(chat_template, "has_package", lambda name: False)
    with pytest.raises(DataError, match="needs the packages transformers and jinja2"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match="needs the packages transformers and jinja2"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"))


# ---------------------------------------------------------------------- the task

def test_inputs_targets_and_lengths_of_conversations(tmp_path):
    run = run_of(tmp_path, [TALK] * 20 + [TALK[:3]] * 20)
    data, tokenizer = prepare(run), ChatTokenizer(tmp_path / "tok")
    by_length = {len(tokenizer.encode(talk)[0]) - 1: talk for talk in (TALK, TALK[:3])}
    assert set(data.train.sample_lengths) == set(by_length)
    for number, length in enumerate(data.train.sample_lengths[:5]):
        ids, is_target = tokenizer.encode(by_length[length])
        inputs = data.train.inputs(np.array([number]), None, int(length))
        assert inputs[0].tolist() == ids[:-1]
        targets = data.train.targets(np.array([number]), int(length))[0]
        assert targets.tolist() == np.where(is_target, ids, IGNORED)[1:].tolist()
    assert "conversations" in data.about and "%" in data.padding and data.weight > 1
    assert len(data.train) + len(data.eval) == 40


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path):
    run = run_of(tmp_path, [TALK] * 20 + [TALK[:3]] * 20)
    one, two = (prepare(replace(run, data=replace(run.data, cache_dir=tmp_path / name)),
                        PreparationProgress(tell=print, processes=processes)).fingerprint
                for name, processes in (("one", 1), ("two", 2)))
    assert one == two


def test_long_and_silent_conversations(tmp_path):
    lines = []
    data = prepare(run_of(tmp_path, [TALK] * 6 + [TALK[:2]] * 6, sequence=60), lines.append)
    assert max(data.train.sample_lengths) <= 60
    assert any("cut" in line and "conversations" in line for line in lines)
    assert any("in which the assistant says nothing" in line for line in lines)
    with pytest.raises(DataError, match="has no conversation in which the assistant says something"):
        prepare(run_of(tmp_path, [TALK[:2]] * 6))
    with pytest.raises(DataError, match="has too few conversations to train on some"):
        prepare(run_of(tmp_path, [TALK]))


@pytest.mark.parametrize(("row", "message"), [
    ('{"talk": []}', r"has no column `messages` \(got 'talk'\). Set --data.messages-column"),
    ('{"messages": "hello"}', "line 1: is no conversation"), ('{"messages": []}', "line 1: is no conversation"),
    ('{"messages": [{"role": "user"}]}', "line 1: has a message without `role` and `content`")])
def test_rows_that_are_no_conversations_are_problems(tmp_path, row, message):
    run = run_of(tmp_path)
    (tmp_path / "talks.jsonl").write_text(row)
    with pytest.raises(DataError, match=message):
        raise check.check(run).problems[0]


def test_settings_that_cannot_be(tmp_path):
    run = run_of(tmp_path)
    assert problems(run) == []

    def first(vocab=300, **data):
        changed = replace(run, model=replace(run.model, vocab=vocab), data=replace(run.data, **data))
        found = problems(changed)
        if found:
            return str(found[0])
        with pytest.raises(DataError) as refused:
            prepare(changed)
        return str(refused.value)

    assert first(train=None).startswith("data.train: is missing: the task chat")
    assert first(train="none.jsonl").startswith("data.train: is neither a known name nor a path")
    assert first(tokenizer="bpe").startswith("data.tokenizer: has no chat template (got 'bpe')")
    assert first(eval="x.jsonl", mixture=(f"{tmp_path}/talks.jsonl",)).startswith("data.eval: is not used with")
    assert first(vocab=100).startswith("model.vocab: is smaller than the tokenizer's vocabulary of 261")
    (tmp_path / "talks.txt").write_text("hello")
    assert first(train=str(tmp_path / "talks.txt")).startswith("data.train: is not a table of conversations")


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_on_conversations_trains_and_check_tells_the_padding(tmp_path, packing):
    run = run_of(tmp_path, [TALK, TALK[:3]] * 20, packing=packing)
    run = replace(run, run_dir=tmp_path / "run", checkpoint=replace(run.checkpoint, every=0))
    assert known_padding(run) == ""
    out = io.StringIO()
    summary = run_ranks(lambda world: train(run, "chat", world, stream=out), 1)[0]
    assert summary["final_loss"] == summary["final_loss"]
    told = known_padding(run)
    assert told.count("%") == 3 and told in " ".join(out.getvalue().split())
    assert check.check(run).padding == told


# ---------------------------------------------------------------------- the shipped set

def test_the_quiz_is_the_same_everywhere_and_its_answers_are_right(tmp_path):
    pairs = [[message["content"] for message in row.values["messages"]] for row in quiz.open_quiz().rows(["messages"])]
    assert len(pairs) == 2038 and len({question for question, _ in pairs}) == len(pairs)
    assert quiz.open_quiz().fingerprint == "d491ac51af1eaaaa"
    answers = dict(pairs)
    sums = [question for question in answers if re.fullmatch(r"What is \d+ [+-] \d+\?", question)]
    assert len(sums) == 800
    for question in sums:
        first, sign, second = question[len("What is "):-1].split()
        found = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert answers[question] == f"{first} {sign} {second} = {found}."
    for question, answer in answers.items():
        if question.startswith("Put"):
            words = question.partition(": ")[2].rstrip(".").split(", ")
            assert answer == f"{', '.join(sorted(words))}."
        if question.startswith("Which number"):
            assert answer == f"{max(map(int, re.findall(r'[0-9]+', question)))} is larger."
    assert quiz._words(0) == "zero" and quiz._words(14) == "fourteen" and quiz._words(80) == "eighty"
    assert quiz._words(700) == "seven hundred" and quiz._words(999) == "nine hundred and ninety-nine"
    assert answers["Which day comes before Monday?"] == "Sunday comes before Monday."


def test_a_run_on_the_quiz(tmp_path):
    run = run_of(tmp_path)
    run = replace(run, data=replace(run.data, train="quiz"))
    assert problems(run) == []
    data = prepare(run)
    assert "1,835 conversations, 203 held out" in data.about
