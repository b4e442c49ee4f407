"""Conversations: the template, which tokens the assistant wrote, what is stored, and what is refused."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from ranvier.cli import check
from ranvier.config.run import Batch, Data, Run, Train, Transformer
from ranvier.data import chat, chat_template, quiz
from ranvier.data.cache import PreparationProgress
from ranvier.data.chat_template import ChatTokenizer, Conversation
from ranvier.data.prepare import load_cached, prepare, problems
from ranvier.errors import DataError
from ranvier.tensor.split.loss import IGNORED
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from ranvier.train.setup import write_tokenizer
from tests import errors
from tests.errors import raises

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


def encode(tokenizer, talk, **more):
    """The tokens and targets of a conversation that gives one sample."""
    sample, = tokenizer.encode(Conversation(messages=talk, **more))
    return sample


def written(tokenizer, talk):
    ids, is_target = encode(tokenizer, talk)
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
    ids, is_target = encode(tokenizer, TALK)
    prompt = encode(tokenizer, TALK[:4])[0]
    assert ids[:len(prompt)] == prompt and not is_target[len(prompt)]
    assert written(tokenizer, TALK[:2])[1] == []


def test_a_template_may_mark_what_the_assistant_writes(tmp_path):
    for mark in ("{%generation%}", "{%-  generation -%}", "{%+ generation %}", "{% generation %}"):
        tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", MARKED.replace("{% generation %}", mark)))
        assert written(tokenizer, TALK)[1] == ["Hi, you.<|end|>", "B\u00fce \U0001f600.<|end|>"]
    commented = ChatTokenizer(tokenizer_in(tmp_path / "tok", CHATML + "{# without {% generation %} #}"))
    assert written(commented, TALK)[1] == ["Hi, you.<|end|>\n", "B\u00fce \U0001f600.<|end|>\n"]
    (tmp_path / "other.jinja").write_text(MARKED)
    other = ChatTokenizer(tokenizer_in(tmp_path / "tok"), tmp_path / "other.jinja")
    assert encode(other, TALK)[0] == encode(tokenizer, TALK)[0] and other.fingerprint == tokenizer.fingerprint


def test_further_templates_of_a_tokenizer_go_into_the_runs_folder(tmp_path):
    """As transformers saves a tokenizer with several: without them the run has no template."""
    folder = tokenizer_in(tmp_path / "tok")
    (folder / "chat_template.jinja").write_text(MARKED)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(f"{{{{ tools | length }}}}{MARKED}")
    (tmp_path / "run").mkdir()
    for template, of_tools in ((None, True), (folder / "chat_template.jinja", False)):
        write_tokenizer(ChatTokenizer(folder, template), tmp_path / "run")
        again = ChatTokenizer(tmp_path / "run")
        with_tools = again.render(Conversation(messages=TALK, tools=[{"name": "sum"}]))
        assert with_tools == ("1" if of_tools else "") + again.render(Conversation(messages=TALK))
        shutil.rmtree(tmp_path / "run/additional_chat_templates", ignore_errors=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja",
                                  "additional_chat_templates/tool_use.jinja"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_tokenizers_folder_has_its_own_files(tmp_path, name, kind):
    """Its files are copied into the run's folder; links and pipes in their place are refused."""
    folder = tokenizer_in(tmp_path / "tok")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_text("{}")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(DataError) as refused:
        ChatTokenizer(folder)
    assert refused.value.where in (str(folder), "data.tokenizer")
    assert name == "tokenizer.json" or name in str(refused.value.value)


def test_a_configuration_of_very_many_objects_is_refused(tmp_path):
    """transformers would copy the objects, which takes far more memory than the file's bytes."""
    folder = tokenizer_in(tmp_path / "tok")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "more": [[]] * 50_000}))
    with pytest.raises(DataError) as refused:
        ChatTokenizer(folder)
    assert refused.value.where == str(folder) and "50,000 objects" in str(refused.value.value)


def test_templates_that_cannot_be_used_are_named(tmp_path, monkeypatch):
    forgetful = ChatTokenizer(tokenizer_in(tmp_path / "tok", FORGETFUL))
    with raises("turn-without-place", 3):
        encode(forgetful, TALK)
    broken = ChatTokenizer(tokenizer_in(tmp_path / "tok", "{{ raise_exception('no system turn') }}"))
    with raises("refused-by-chat-template"):
        encode(broken, TALK)
    with raises("folder-without-chat-template"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok", None))
    with raises("chat-tokenizer-missing"):
        ChatTokenizer(tmp_path / "none")
    with raises("chat-template-missing"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"), tmp_path / "none.jinja")
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    with raises("not-a-transformers-tokenizer"):
        ChatTokenizer(tmp_path / "tok")
    monkeypatch.setattr(chat_template, "has_package", lambda name: False)
    with raises("chat-packages-missing"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"))
    run = run_of(tmp_path)
    unfetched = replace(run, model=replace(run.model, pretrained="smollm2-135m-instruct"),
                        data=replace(run.data, train="quiz", tokenizer="bpe"))
    assert [problem.code for problem in problems(unfetched)] == ["chat-packages-missing"]
    assert problems(unfetched, elsewhere=True) == []
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises("chat-packages-missing"):
        ChatTokenizer(tokenizer_in(tmp_path / "tok"))


def test_of_several_templates_each_conversation_has_its_own(tmp_path):
    """The generation marks and the keys that are read are those of the template that is rendered."""
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": MARKED + "{# tools, mood #}"}]
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", both))
    moody = [TALK[1], {**TALK[2], "mood": "good"}]
    ids, is_target = encode(tokenizer, moody, tools=[{"name": "add"}])
    assert tokenizer.decode(np.array(ids)[is_target]) == "Hi, you.<|end|>"
    assert written(tokenizer, TALK)[1] == ["Hi, you.<|end|>\n", "B\u00fce \U0001f600.<|end|>\n"]
    with raises("message-key-not-read", "mood"):
        encode(tokenizer, moody)
    only = ChatTokenizer(tokenizer_in(tmp_path / "tok", both[1:]))
    assert only.ends_of_turns() == frozenset()
    with raises("refused-by-chat-template", "no default"):
        encode(only, TALK)


# Templates that write earlier turns differently: without their thoughts; with an end of text after the last turn; with
# a prompt that begins a thought; with another end of the last turn.
FORGETS_THOUGHTS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% if loop.last %}{{ '(' + (message['thinking'] or '') + ')' }}{% endif %}{% endif %}"
    "{{ message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
ENDS_TEXTS = ("{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
              "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<s>' }}{% endif %}")
BEGINS_THOUGHTS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'].split('</think>')[-1] + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}")
OTHER_END = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{{ ': ' }}{% endif %}{{ message['content'] }}{% if loop.last and message['role'] == 'assistant' %}{{ '<s>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "hm"},
         {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "thinking": "oh"}]


@pytest.mark.parametrize(("template", "samples"), [
    (FORGETS_THOUGHTS, [("<|user|>a<|end|><|assistant|>(hm)b<|end|>", ["(hm)b<|end|>"]),
                        ("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>(oh)d<|end|>",
                         ["(oh)d<|end|>"])]),
    (ENDS_TEXTS, [("<|user|>a<|end|><|assistant|>b<|end|><s>", ["b<|end|><s>"]),
                  ("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|><s>", ["d<|end|><s>"])]),
    (BEGINS_THOUGHTS, [("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>",
                        ["b<|end|>", "d<|end|>"])]),
    (OTHER_END, [("<|user|>a<|end|><|assistant|>: b<s>", [": b<s>"]),
                 ("<|user|>a<|end|><|assistant|>: b<|end|><|user|>c<|end|><|assistant|>: d<s>", [": d<s>"])])])
def test_a_template_that_writes_earlier_turns_otherwise_gives_a_sample_for_each_turn(tmp_path, template, samples):
    """Each turn is learnt after exactly the prompt that it is written for."""
    template = template.replace("message['thinking'] or ''", "message['thinking'] if 'thinking' in message else ''")
    template += "{# thinking #}"
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", template))
    found = tokenizer.encode(Conversation(messages=TURNS))
    assert [(tokenizer.decode(ids), [tokenizer.decode(part) for part in runs_of(np.array(ids), is_target)])
            for ids, is_target in found] == samples
    last = tokenizer.encode(Conversation(messages=TURNS, unlearnt=frozenset({1})))
    assert [tokenizer.decode(part) for ids, is_target in last for part in runs_of(np.array(ids), is_target)] == [
        samples[-1][1][-1]]


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|end|>"), (MARKED, "<|end|>"), (OTHER_END, "<s>"),
                                                ("{{ raise_exception('no') }}", None), (FORGETFUL, None)])
def test_the_template_says_what_ends_a_turn(tmp_path, template, end):
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", template))
    assert tokenizer.ends_of_turns() == (set() if end is None else {tokenizer.numbers()[end]})


def test_turns_that_are_not_learnt_are_read(tmp_path):
    for template in (CHATML, MARKED):
        tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", template))
        ids, is_target = encode(tokenizer, TALK)
        without, fewer = encode(tokenizer, TALK, unlearnt=frozenset({2}))
        assert ids == without and 0 < fewer.sum() < is_target.sum() and not (fewer & ~is_target).any()
        learnt = tokenizer.decode(np.array(ids)[fewer])
        assert "B\u00fce" in learnt and "Hi" not in learnt


TOOLS = ("{% if tools %}{{ '<|system|>' + tools[0]['name'] }}{% endif %}{% if loud %}{{ '!' }}{% endif %}" + CHATML)


def test_tools_variables_and_what_is_not_learnt_come_from_the_data_set(tmp_path):
    rows = [{"messages": [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}], "tools": tools,
             "chat_template_kwargs": {"loud": True}, "id": 7}
            for tools in ([{"name": "add"}], '[{"name": "add"}]')]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = ChatTokenizer(tokenizer_in(tmp_path / "tok", TOOLS))
    for conversation in chat.conversations(str(tmp_path / "talks.jsonl"), "train", Data()):
        (ids, is_target), = tokenizer.encode(conversation)
        assert tokenizer.decode(ids).startswith("<|system|>add!<s>")
        assert "Hi" not in tokenizer.decode(np.array(ids)[is_target])
        assert tokenizer.decode(tokenizer.prompt(conversation)).endswith("<|end|>\n<|assistant|>\n")


def row(*messages, **more):
    return json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                    *messages], **more})


@pytest.mark.parametrize(("line", "code", "facts"), [
    (row({"role": "user", "content": "c", "mood": "good"}), "message-key-not-read", ["mood", "data.chat-template"]),
    (row({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}), "message-key-not-read",
     ["tool_calls"]),
    (row({"role": "assistant", "content": "c", "reasoning_content": "d"}), "message-key-not-read",
     ["reasoning_content"]),
    (row({"role": "gpt", "content": "c"}), "unknown-role", ["gpt", "assistant"]),
    (row({"role": "narrator", "content": "c"}), "unknown-role", ["narrator", "assistant"]),
    (row({"role": "user", "content": "c", "train": True}), "weight-of-other-role", ["user", "train"]),
    (row({"role": "assistant", "content": "c", "weight": 0.5}), "message-weight", [0.5, 0, 1]),
    (row({"role": "user", "content": None}), "message-without-role", ["content"]),
    (row({"from": "human", "value": "c"}), "message-without-role", ["human"]),
    (row({"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "image_url"}]}), "content-not-text",
     ["image_url"]),
    (row({"role": "user", "content": {"type": "text", "text": "c"}}), "content-not-text", ["text"]),
    (row({"role": "user", "content": float("nan")}), "content-not-text", ["nan"]),
    (row(tools=[{"name": "add"}]), "conversation-column-not-read", ["tools", "add", "data.chat-template"]),
    (row(tools="add"), "column-of-other-kind", ["tools", "add"]),
    (row(chat_template_kwargs=[1]), "column-of-other-kind", ["chat_template_kwargs", [1]]),
    (row(chat_template_kwargs={"loud": True}), "conversation-column-not-read", ["loud", "data.chat-template"]),
    (row(functions=[{}]), "column-without-effect", ["functions", "tools"]),
    (row({"role": "user", "content": "\ud83d half"}), "row-half-surrogate", ["ud83d", "U+FFFD"])])
def test_what_a_conversation_says_without_effect_is_refused_with_its_line(tmp_path, line, code, facts):
    run = run_of(tmp_path)
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join([row(), line]))
    with raises(code, *facts, where=f"{path} line 2"):
        prepare(run)


def pretrained_in(folder, *, vocab=300, **tokens):
    """A folder with the config.json of a model, and the tokenizer of these tests with other tokens at some numbers."""
    tokenizer_in(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    document = json.loads((folder / "tokenizer.json").read_text())
    for one in document["added_tokens"]:
        one["content"] = tokens.get(f"number{one['id']}", one["content"])
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_a_tokenizer_must_have_the_tokens_of_the_pretrained_model(tmp_path):
    def refusal(folder, vocab=300):
        run = run_of(tmp_path, vocab=vocab)
        return problems(replace(run, model=replace(run.model, pretrained=str(folder))))

    assert refusal(pretrained_in(tmp_path / "same")) == []
    found, = refusal(pretrained_in(tmp_path / "other", number258="<|robot|>"))
    assert (found.where, found.value) == ("data.tokenizer", str(tmp_path / "tok"))
    assert "'<|user|>'" in found.what or "'<|system|>'" in found.what
    assert "258" in found.what and "<|robot|>" in found.what
    found, = refusal(pretrained_in(tmp_path / "small", vocab=260), Transformer.vocab)
    errors.check(found, "tokenizer-above-pretrained", 261, 260, where="data.tokenizer")
    fewer = pretrained_in(tmp_path / "fewer")
    document = json.loads((fewer / "tokenizer.json").read_text())
    document["added_tokens"].pop()
    (fewer / "tokenizer.json").write_text(json.dumps(document))
    assert refusal(fewer) == [], "a new token at a free number"
    (fewer / "tokenizer.json").write_text("{}")
    found, = refusal(fewer)
    errors.check(found, "tokenizer-file-unreadable", where=str(fewer / "tokenizer.json"))


# ---------------------------------------------------------------------- the task

def test_inputs_targets_and_lengths_of_conversations(tmp_path):
    run = run_of(tmp_path, [TALK] * 20 + [TALK[:3]] * 20)
    data, tokenizer = prepare(run), ChatTokenizer(tmp_path / "tok")
    by_length = {len(encode(tokenizer, talk)[0]) - 1: talk for talk in (TALK, TALK[:3])}
    assert set(data.train.sample_lengths) == set(by_length)
    for number, length in enumerate(data.train.sample_lengths[:5]):
        ids, is_target = encode(tokenizer, by_length[length])
        inputs = data.train.inputs(np.array([number]), None, int(length))
        assert inputs[0].tolist() == ids[:-1]
        targets = data.train.targets(np.array([number]), int(length))[0]
        assert targets.tolist() == np.where(is_target, ids, IGNORED)[1:].tolist()
    assert "conversations" in data.about and "%" in data.padding and data.weight > 1
    assert len(data.train) + len(data.eval) == 40


def test_the_cache_is_of_the_tokenizers_special_tokens_too(tmp_path):
    """A template may refer to special tokens, which only tokenizer_config.json defines."""
    run, found = run_of(tmp_path), []
    for end in ("<|end|>", "<|user|>"):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end,
                    "chat_template": CHATML.replace("'<|end|>\\n'", "eos_token")}
        (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(settings))
        data = prepare(run)
        found.append(data.tokenizer.decode(data.train.inputs(np.array([0]), np.zeros(1))[0].tolist()).count(end))
    assert found == [4, 4 + 2]  # without the last end of turn; with the turns of the user


@pytest.mark.slow
def test_several_processes_write_the_same_files(tmp_path):
    run = run_of(tmp_path, [TALK] * 20 + [TALK[:3]] * 20)
    one, two = (prepare(replace(run, data=replace(run.data, cache_dir=tmp_path / name)),
                        PreparationProgress(tell=print, processes=processes)).fingerprint
                for name, processes in (("one", 1), ("two", 2)))
    assert one == two


def test_long_and_silent_conversations(tmp_path):
    run = run_of(tmp_path, [TALK] * 6 + [TALK[:2]] * 6 + [TALK[:1] * 9 + TALK] * 3, sequence=60)
    assert not check.check(run).warnings
    for _ in range(2):  # written, and read again
        data = prepare(run)
        assert max(data.train.sample_lengths) <= 60
        assert re.search("; 3 of 15 left out, whose .* 60 tokens; 6 of 15 left out, .*nothing; 6 of 15 cut", data.about)
        warning, = data.warnings
        errors.check(warning, "samples-left-out", "60.0%", where=f"data.train {run.data.train}", value=9)
        assert re.search(r"model\.sequence: .* (\d+)\.", warning.remedy)
    assert [str(one) for one in check.check(run).warnings] == [str(warning)]
    stream = io.StringIO()
    run_ranks(lambda world: train(replace(run, run_dir=tmp_path / "run"), "chat", world, stream=stream), 1)
    assert "warning: data.train" in " ".join(stream.getvalue().split())
    longest = int(re.search(r"(\d+)\.$", warning.remedy)[1])
    roomy = prepare(replace(run, model=replace(run.model, sequence=longest)))
    assert "beyond" not in roomy.about and "cut" not in roomy.about and max(roomy.train.sample_lengths) == longest
    with raises("nothing-said"):
        prepare(run_of(tmp_path, [TALK[:2]] * 6))
    with raises("too-few-samples"):
        prepare(run_of(tmp_path, [TALK]))


@pytest.mark.parametrize(("row", "error"), [
    ('{"talk": []}', ("form-unknown",)), ("", ("table-without-rows",)),
    ('{"messages": "hello"}', ("not-a-conversation", 1)), ('{"messages": []}', ("not-a-conversation", 1)),
    ('{"messages": [{"role": "user"}]}', ("message-without-role", 1))])
def test_rows_that_are_no_conversations_are_problems(tmp_path, row, error):
    run = run_of(tmp_path)
    (tmp_path / "talks.jsonl").write_text(row)
    with raises(*error):
        raise check.check(run).problems[0]


def test_settings_that_cannot_be(tmp_path):
    run = run_of(tmp_path)
    assert problems(run) == []

    def first(vocab=300, **data):
        changed = replace(run, model=replace(run.model, vocab=vocab), data=replace(run.data, **data))
        found = problems(changed)
        if found:
            raise found[0]
        prepare(changed)

    with raises("train-data-missing", "chat", where="data.train"):
        first(train=None)
    with raises("unknown-data", where="data.train"):
        first(train="none.jsonl")
    with raises("tokenizer-without-chat-template", where="data.tokenizer", value="bpe"):
        first(tokenizer="bpe")
    with raises("eval-with-mixture", where="data.eval"):
        first(eval="x.jsonl", mixture=(f"{tmp_path}/talks.jsonl",))
    with raises("vocab-below-tokenizer", 261, where="model.vocab"):
        first(vocab=100)
    (tmp_path / "talks.txt").write_text("hello")
    with raises("not-a-table", where="data.train"):
        first(train=str(tmp_path / "talks.txt"))


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_on_conversations_trains_and_check_tells_the_padding(tmp_path, packing):
    run = run_of(tmp_path, [TALK, TALK[:3]] * 20, packing=packing)
    run = replace(run, run_dir=tmp_path / "run", checkpoint=replace(run.checkpoint, every=0))
    assert load_cached(run) is None
    out = io.StringIO()
    summary = run_ranks(lambda world: train(run, "chat", world, stream=out), 1)[0]
    assert summary["final_loss"] == summary["final_loss"]
    told = load_cached(run).padding
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


@pytest.mark.slow
def test_a_run_on_the_quiz(tmp_path):
    run = run_of(tmp_path)
    run = replace(run, data=replace(run.data, train="quiz"))
    assert problems(run) == []
    data = prepare(run)
    assert "1,835 conversations in OpenAI's form, 203 held out" in data.about
