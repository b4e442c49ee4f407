"""`ranvier generate`: the same greedy text as transformers, on several ranks; chat; what it refuses."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest

from ranvier.cli.generate import _complete, _prompts
from ranvier.cli.main import run_command
from ranvier.data.tokenizer import load, train
from ranvier.inference.generate import StopWords, Text
from ranvier.inference.generation_config import not_followed
from tests.errors import reports

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the brown bear "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama as transformers saves it, with a tokenizer and a chat template."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("model")
    tokenizer = train([TEXT] * 5, 300)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=tokenizer.vocab, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3)).save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "}))
    return path


def written(capsys, *args):
    assert run_command(["generate", *map(str, args), "--temperature", "0", "--max-tokens", "12", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def theirs(folder, prompt):
    """The greedy answer of transformers."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return tokenizer.decode(their_tokens(folder, prompt), skip_special_tokens=True)


def their_tokens(folder, prompt):
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1]:].tolist()


def test_the_text_is_that_of_transformers(folder, capsys, tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("the lazy dog\n\nfox and bear\n")
    found = written(capsys, folder, "--prompt", "the quick", "--prompts", lines)
    assert [one["answer"] for one in sorted(found, key=lambda one: one["prompt"])] == [
        theirs(folder, prompt) for prompt in ("fox and bear", "the lazy dog", "the quick")]


def test_the_models_repetition_penalty_is_that_of_its_folder(folder, capsys, tmp_path):
    """The same tokens as transformers, with the penalty over prompt and answer; the flag overrides the folder's
    penalty."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "repetition_penalty": 0.4, "temperature": 0.6, "do_sample": True, "no_repeat_ngram_size": 0, "min_p": 0.1}))
    (one,) = written(capsys, tmp_path, "--prompt", "the quick brown")
    assert one["answer"] == theirs(tmp_path, "the quick brown")
    (plain,) = written(capsys, tmp_path, "--prompt", "the quick brown", "--repetition-penalty", "1")
    assert plain["answer"] == theirs(folder, "the quick brown") != one["answer"]


@pytest.mark.parametrize(("said", "flags", "told"), [
    ({"do_sample": False, "temperature": 0.6, "min_p": 0.2, "top_k": 20}, {}, ""),
    ({"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 1.0}, {}, "temperature, top_k: not read, give "
                                                                           "--temperature 0.6 --top-k 50"),
    ({"do_sample": True, "temperature": 0.6, "min_p": 0.2}, {"given": {"temperature"}}, "min_p 0.2: not supported"),
    ({"do_sample": True, "min_p": 0.2, "num_beams": 4}, {"samples": False}, "num_beams 4: not supported by generate"),
    ({"suppress_tokens": [], "guidance_scale": None, "num_beams": 1, "max_length": 20, "eos_token_id": [1, 2]}, {}, ""),
    ({"suppress_tokens": [7], "no_repeat_ngram_size": 3}, {}, "no_repeat_ngram_size 3, suppress_tokens [7]: not"),
    ({"max_length": 512}, {}, "max_length 512: not read, give --max-tokens"),
    ({"max_length": 512, "max_new_tokens": 8}, {"given": {"max_tokens"}}, ""),
    ({"token_healing": True}, {}, "token_healing True: not supported")])
def test_what_else_the_folder_says_of_texts_is_told(tmp_path, said, flags, told):
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = not_followed(tmp_path, **{"samples": True, "given": (), **flags})
    assert told in found and bool(found) == bool(told), found


def test_special_tokens_in_a_prompt_are_told(folder, capsys):
    assert run_command(["generate", str(folder), "--prompt", "the <|endoftext|> dog", "--max-tokens", "1"]) == 0
    assert "<|endoftext|>: special tokens in prompts are encoded as plain" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.NDJSON"])
def test_lines_of_prompts_end_as_files_end_them(tmp_path, name):
    """Not at other characters that Python counts as line ends; the byte order mark is not part of the first prompt."""
    prompts = ["one\u2028line", "form\x0cfeed", "next\x85line"] if name == "prompts.txt" else ["one\u2028line", "two"]
    lines = prompts if name == "prompts.txt" else [json.dumps({"prompt": one}, ensure_ascii=False) for one in prompts]
    (tmp_path / name).write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    assert _prompts((), tmp_path / name) == prompts


def test_a_users_message_in_the_chat_template(folder, capsys, tmp_path):
    messages = tmp_path / "messages.jsonl"
    messages.write_text(json.dumps({"messages": [{"role": "user", "content": "the dog"}]}) + "\n")
    expected = theirs(folder, "user: the dog\nassistant: ")
    assert [one["answer"] for one in written(capsys, folder, "--chat", "--prompt", "the dog", "--prompts", messages)
            ] == [expected, expected]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_ends_at_each_end_that_the_model_names(folder, capsys, tmp_path, file, chat):
    """As in transformers, whose chat models name other end tokens than their tokenizers."""
    prompt = "user: the dog\nassistant: " if chat else "the dog"
    flags = ["--chat", "--prompt", "the dog"] if chat else ["--prompt", prompt]
    there = tmp_path / "model"
    shutil.copytree(folder, there)
    (there / "generation_config.json").unlink()
    tokenizer, tokens = load(there / "tokenizer.json"), their_tokens(there, prompt)
    end = tokens[len(tokens) // 2]
    document = json.loads((there / file).read_text()) if (there / file).exists() else {}
    (there / file).write_text(json.dumps(document | {"eos_token_id": [tokenizer.end, end]}))
    found, = written(capsys, there, *flags)
    expected = tokens[:tokens.index(end)]
    assert (found["reason"], found["answer"]) == ("end", tokenizer.decode(expected))
    assert their_tokens(there, prompt) == [*expected, end]


@pytest.mark.slow
def test_ranks_write_what_one_rank_writes_and_stream_it(folder):
    done = subprocess.run([sys.executable, "-m", "ranvier", "generate", str(folder), "--prompt", "the quick",
                           "--temperature", "0", "--max-tokens", "12", "--mesh.pipe", "2"], capture_output=True,
                          text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, theirs(folder, "the quick") + "\n"), done.stderr
    assert "transport" in done.stderr


def test_a_stop_word_is_left_out(folder, capsys):
    whole = theirs(folder, "the quick")
    found, = written(capsys, folder, "--prompt", "the quick", "--stop", whole[4:6])
    assert (found["answer"], found["reason"]) == (whole[:whole.index(whole[4:6])], "stop")


def test_a_stop_word_may_have_a_token_for_each_byte():
    word = "ä long end of an answer, of which no two bytes are one token"
    stops = StopWords(words=[word], decode=lambda written: bytes(written).decode(errors="replace"))
    written = f"Here is {word}".encode()
    assert stops.are_in(written) and not stops.are_in(written[:-1])


def test_what_may_begin_a_stop_word_is_not_streamed_yet():
    """Tokens are characters here; "e" may begin the stop word "end", and so may the "e" of "ex", until the "x"."""
    stops = StopWords(words=["end"], decode="".join)
    text, stream, seen = Text(number=0, prompt=[0]), io.StringIO(), []

    def rounds():
        for character in "aexend":
            text.written.append(character)
            text.reason = "stop" if character == "d" else None
            yield [text]
            seen.append(stream.getvalue())

    assert list(_complete(rounds(), stops, stream)) == [text]
    assert seen == ["a", "a", "aex", "aex", "aex", "aex"]


@pytest.mark.parametrize(("args", "code", "says"), [
    ([], "prompt-missing", "--prompts FILE"),
    (["--prompts", "lines.jsonl"], "prompt-not-json", "lines.jsonl, line 2: "),
    (["--prompts", "messages.jsonl"], "prompts-are-messages", "--chat"),
    (["--prompts", "latin.txt"], "prompts-unreadable", "latin.txt"),
    (["--prompt", "a", "--stop", ""], "stop-empty", "leave it out"),
    (["BARE", "--prompt", "x"], "model-without-tokenizer", "--tokenizer"),
    (["BERT", "--prompt", "x"], "not-a-language-model", "span"),
    (["--prompt", "x", "--tokenizer", "gone.json"], None, "Give a tokenizer.json"),
    (["PLAIN", "--prompt", "x", "--chat"], "chat-without-template", "--tokenizer"),
    (["--prompt", "x", "--top-p", "0"], None, "top-p: cannot be sampled with (got 0.0)"),
    (["--prompt", "x " * 90], None, "prompt 1: leaves no room for an answer")])
def test_refusals(folder, capsys, tmp_path, monkeypatch, args, code, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    (tmp_path / "messages.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    if "BARE" in args:
        shutil.copytree(folder, tmp_path / "BARE", ignore=shutil.ignore_patterns("tokenizer.json"))
    if "PLAIN" in args:
        shutil.copytree(folder, tmp_path / "PLAIN", ignore=shutil.ignore_patterns("tokenizer_config.json"))
    if "BERT" in args:
        transformers = pytest.importorskip("transformers")
        transformers.BertForQuestionAnswering(transformers.BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=16)).save_pretrained(tmp_path / "BERT")
    with reports(code) if code else nullcontext():
        model = [] if {*args[:1]} & {"BARE", "BERT", "PLAIN"} else [str(folder)]
        assert run_command(["generate", *model, *args]) == 2
    assert says in capsys.readouterr().err


def test_what_is_no_language_model(tmp_path, capsys):
    assert run_command(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
