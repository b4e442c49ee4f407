"""A chat template is foreign code: it ends within limits of time and size, with an error that names its file."""

import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ranvier.data import chat_template, template_process, template_renderer
from ranvier.data.chat_template import ChatTokenizer, Conversation
from ranvier.data.template_renderer import TemplateError, TemplateLimitError, render
from tests.covering import chosen
from tests.data.test_chat import MARKED, tokenizer_in
from tests.errors import raises

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ASKED = Conversation(messages=[{"role": "user", "content": "assistant"}], place="rows.jsonl, line 7")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A short limit: the start of the process does not count, and these templates need milliseconds."""
    monkeypatch.setattr(template_process, "SECONDS", 0.3)


def over_the_limit(**options):
    raise TemplateLimitError("takes more than 0.3 s")


@pytest.mark.parametrize(("file", "runs"), chosen(
    [("chat_template.jinja", True), ("tokenizer_config.json", False), ("--data.chat-template", False)],
    ["tokenizer_config.json", "chat_template.jinja", "--data.chat-template"], [True, False]))
def test_a_template_that_loops_is_ended_and_its_file_named(tmp_path, monkeypatch, file, runs):
    """runs: the template really loops, so its process is replaced; one use of one kind of file is enough for that."""
    if not runs:
        monkeypatch.setattr(template_renderer, "render", over_the_limit)
    folder = tokenizer_in(tmp_path / "model", LOOPS if file == "tokenizer_config.json" else "{{ messages }}")
    place = folder / file
    if file == "chat_template.jinja":
        place.write_text(LOOPS)
    elif file.startswith("--"):
        (place := tmp_path / "own.jinja").write_text(LOOPS)
    tokenizer = ChatTokenizer(folder, place if file.startswith("--") else None)
    ends = file == "chat_template.jinja"  # ends_of_turns() would skip a template of other conversations
    for use in (tokenizer.prompt, *([lambda _: tokenizer.ends_of_turns()] if ends else [])):
        with raises("chat-template-fails", "0.3 s", where=str(place)) as found:
            use(ASKED)
        monkeypatch.setattr(template_renderer, "render", over_the_limit)
    assert "--data.chat-template" in found.value.remedy


@pytest.mark.parametrize(("template", "says"), [
    pytest.param("{{ 'a' * 10 ** 10 }}", "MiB", marks=pytest.mark.slow),
    pytest.param("{{ '%99999999999d' % 3 }}", "MiB", marks=pytest.mark.slow),
    ("{% set ns = namespace(s='abc') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "MiB"),
    pytest.param("{{ 'a' * 20000000 }}", "16,777,216 characters", marks=pytest.mark.slow),
    pytest.param("{{ (10 ** 3000000) ** 30 }}", "processor time", marks=pytest.mark.slow)])
def test_a_template_that_builds_giants_is_ended(monkeypatch, template, says):
    monkeypatch.setattr(template_process, "SECONDS", 5.0)
    with pytest.raises(TemplateLimitError, match=says):
        render(messages=[], template=template)
    assert render(messages=[], template="{{ 1 + 1 }}").text == "2", "another process replaces the ended one"


def test_a_template_that_is_longer_than_any(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_MOST_TEMPLATE", 9)
    folder = tokenizer_in(tmp_path / "model", "{{ messages }}")
    with raises("chat-template-too-long", 9, "14 characters", where=str(folder)):
        ChatTokenizer(folder)


@pytest.mark.slow
def test_threads_take_turns_and_an_ended_process_is_replaced():
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(lambda number: render(messages=[{"role": "user", "content": number}],
                                                  template="{{ messages[0].content }}").text, range(40))
    assert list(texts) == [str(number) for number in range(40)]
    process = template_renderer._process(os.getpid())
    process._running.send_signal(signal.SIGKILL)
    process._running.wait()
    assert render(messages=[], template="{{ 1 }}").text == "1"
    with pytest.raises(TemplateError, match="no such answer"):
        render(messages=[], template="{{ raise_exception('no such answer') }}")


def test_a_process_that_is_stopped_is_given_up(monkeypatch):
    render(messages=[], template="{{ 1 }}")
    monkeypatch.setattr(template_renderer, "_WAIT_SECONDS", 0.2)
    os.kill(template_renderer._process(os.getpid())._running.pid, signal.SIGSTOP)
    with pytest.raises(TemplateLimitError, match="no answer"):
        render(messages=[], template="{{ 1 }}")


def test_texts_and_marks_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_in(tmp_path / "model", MARKED)
    ours, theirs = ChatTokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [{"role": role, "content": text} for role, text in (
        ("system", "kurz"), ("user", "2 + 2 \u2028"), ("assistant", "vier\u00e4\n"), ("user", "?"), ("assistant", ""))]
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (ids, is_target), = ours.encode(Conversation(messages=messages))
    assert ids == list(found["input_ids"]) and is_target.tolist() == list(map(bool, found["assistant_masks"]))
    assert ours.render(Conversation(messages=messages), prompt=True) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A renderer whose program writes the same answer to each request."""
    def write(answer):
        path = tmp_path / "program.py"
        path.write_text(f"import sys, time\nfor line in sys.stdin:\n    print({answer!r}, end='', flush=True)\n")
        monkeypatch.setattr(template_process, "__file__", str(path))
        return template_renderer._Process()
    return write


def test_half_an_answer_is_not_waited_for_longer_than_for_none(program, monkeypatch):
    monkeypatch.setattr(template_renderer, "_WAIT_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(TemplateLimitError, match="no answer"):
        program('{"text": "x"').ask({})
    assert time.monotonic() - began < 30


def test_an_answer_needs_no_more_open_files(program):
    process = program('{"text": "x"}\n')
    process.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        assert process.ask({}) == {"text": "x"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        process._end()
