"""What is learnt from chats of several turns, compared with TRL's training templates
(tests/data/trl_templates/README.md).

TRL's variant of a template keeps a conversation in one sample, and marks what the assistant writes; with some of them
the prompt for an answer counts, too. The model's own template gives what the model writes after that prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from ranvier.data.chat_template import ChatTokenizer, Conversation

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
HERE = Path(__file__).parent / "trl_templates"
TOKENS = {
    "qwen3": ("<|im_end|>", "<|im_start|>", "<think>", "</think>"),
    "phi3": ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "deepseekv3": ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
                   "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "gptoss": ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>")}
"""Name of a template -> the special tokens of its model, the end of a text first."""
PROMPT_COUNTS = {"deepseekv3": "<\uff5cAssistant\uff5c>", "gptoss": "<|start|>assistant"}
"""The part of the prompt for an answer that TRL counts among the assistant's tokens."""
EARLIER_END = {"phi3": ("<|end|>\n<|endoftext|>", "<|end|>\n"), "gptoss": ("<|return|>", "<|end|>")}
"""The end of a turn when it is the last one, and TRL's end of an earlier turn."""
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hi, you."}, {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "B\u00fce \U0001f600."}, {"role": "user", "content": "\u2026"},
        {"role": "assistant", "content": "Bye."}]
TALKS = {"three turns": TALK, "one turn": TALK[:3], "without a system message": TALK[1:5]}


@pytest.fixture(params=TOKENS)
def name(request):
    return request.param


def folder_of(name, template, folder):
    """A byte-level tokenizer with the model's special tokens."""
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({token: place for place, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(TOKENS[name]))
    inner.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": TOKENS[name][0], **({"bos_token": TOKENS[name][1]} if name == "deepseekv3" else {})}
    settings["chat_template"] = (HERE / f"{template}.jinja").read_text()
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def learnt(tokenizer, ids, is_target):
    """The texts that are learnt, run by run."""
    runs, before = [], False
    for token, counts in zip(ids, is_target, strict=True):
        if counts:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = counts
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("talk", TALKS)
def test_a_training_template_gives_the_masks_of_trl(tmp_path, name, talk):
    folder = folder_of(name, f"{name}_training", tmp_path / "model")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder)).apply_chat_template(
        TALKS[talk], return_dict=True, return_assistant_tokens_mask=True)
    (ids, is_target), = ChatTokenizer(folder).encode(Conversation(messages=TALKS[talk]))
    assert ids == list(theirs["input_ids"]) and is_target.tolist() == list(map(bool, theirs["assistant_masks"]))
    assert is_target.any()


@pytest.mark.parametrize("talk", TALKS)
def test_the_models_own_template_teaches_what_it_writes_behind_its_prompt(tmp_path, name, talk):
    own = ChatTokenizer(folder_of(name, name, tmp_path / "own"))
    marked = ChatTokenizer(folder_of(name, f"{name}_training", tmp_path / "marked"))
    messages = TALKS[talk]
    (ids, is_target), = marked.encode(Conversation(messages=messages))
    theirs = learnt(marked, ids, is_target)
    samples = own.encode(Conversation(messages=messages))
    ours = [run for sample in samples for run in learnt(own, *sample)]
    assert len(ours) == len(theirs) == sum(message["role"] == "assistant" for message in messages)
    last, earlier = EARLIER_END.get(name, ("", ""))
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if place < len(ours) - 1 and last:
            assert one.endswith(last)
            one = one.removesuffix(last) + earlier
        assert PROMPT_COUNTS.get(name, "") + one == other
    if name == "deepseekv3":  # writes earlier turns like the last one; its prompt begins a thought that no turn has
        assert len(samples) == 1
        return
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for (ids, is_target), number in zip(samples, turns, strict=True):
        assert own.prompt(Conversation(messages=messages[:number])) == ids[:is_target.tolist().index(True)]
