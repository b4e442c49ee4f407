"""Questions about texts: windows, the places of answers, F1 and exact match over windows and ranks, and bad files."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.run import Data, Run, Transformer
from ranvier.data import squad
from ranvier.data.loader import Loader
from ranvier.data.prepare import prepare, problems
from ranvier.data.qa import BEST, LONGEST, best_spans, exact_match, f1_score, normalised, step_of, windows
from ranvier.data.sampler import Sampler
from ranvier.data.squad import Question, parse
from ranvier.data.wordpiece import SPECIAL, WordPiece
from ranvier.tensor.split.loss import IGNORED
from tests.errors import check, raises

WORDS = [f"w{number}" for number in range(40)]
TOKENIZER = WordPiece([*SPECIAL, *WORDS, "who", "?"])


def asked(question, context, *answers):
    """A question in SQuAD's form, with the places of its answers in the context."""
    return context, {"question": question, "id": "x", "answers": [
        {"text": answer, "answer_start": context.index(answer)} for answer in answers]}


def document(*questions):
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [
        {"context": context, "qas": [question]} for context, question in questions]}]}


def made(tmp_path, train, held=None, *, sequence=12, vocab=80, **data):
    for name, questions in (("train", train), ("eval", held)):
        if questions is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(document(*questions), ensure_ascii=False))
    if held is not None:
        data["eval"] = str(tmp_path / "eval.json")
    return Run(model=Transformer(vocab=vocab, sequence=sequence),
               data=Data(task="qa", train=str(tmp_path / "train.json"), cache_dir=tmp_path / "cache", **data))


def refused(run, code, *facts):
    with raises(code, *facts):
        prepare(run)


def many(count, words=20):
    """Questions, each about its own text; all answers differ."""
    return [asked(f"who {WORDS[number % 40]}?", f"Text {number}: " + " ".join(
        WORDS[(number + place) % 40] for place in range(words)), WORDS[(number + min(3, words - 1)) % 40])
            for number in range(count)]


def question(text, context, answer, start=None):
    return Question(text, context, ((answer, context.index(answer) if start is None else start),), "place")


# ---------------------------------------------------------------------- windows

def test_windows_cover_the_context_and_know_the_answer():
    context = " ".join(WORDS[:20])
    found = windows([question("who?", context, "w9 w10")], TOKENIZER, 12, with_places=True)
    ids = found["ids"].tolist()
    room, step = 12 - 2 - 3, step_of(12)
    assert (room, step, len(ids)) == (7, 4, 5)
    for number, row in enumerate(ids):
        part = WORDS[:20][number * step:number * step + room]
        text = ["[CLS]", "who", "?", "[SEP]", *part, "[SEP]"]
        assert TOKENIZER.decode(row[:len(text)]).split() == " ".join(text).replace(" ?", "?").split()
        assert found["lengths"][number] == len(text) and not any(row[len(text):])
        inside = found["places"][number, 4:4 + len(part)]
        assert [context[first:last] for first, last in inside] == part
        whole = "w9" in part and "w10" in part
        assert (found["starts"][number], found["ends"][number]) == (
            (4 + part.index("w9"), 4 + part.index("w10")) if whole else (0, 0))
    assert found["starts"].tolist() == [0, 9, 5, 0, 0] and found["ends"].tolist() == [0, 10, 6, 0, 0]
    assert set(found["firsts"]) == {4} and set(found["questions"]) == {0}
    assert "places" not in windows([question("who?", context, "w9")], TOKENIZER, 12, with_places=False)


@given(st.integers(1, 90), st.integers(5, 60), st.integers(1, 30))
def test_every_token_of_a_context_is_in_a_window(count, sequence, length):
    words = [WORDS[number % 40] for number in range(count)]
    length = min(length, sequence - 4)
    found = windows([question(" ".join(["who"] * length), " ".join(words), words[0])], TOKENIZER, sequence,
                    with_places=True)
    places = {tuple(place) for row, first, last in zip(found["places"], found["firsts"], found["lengths"], strict=True)
              for place in row[first:last - 1].tolist()}
    assert len(places) == count
    assert (found["starts"] > 0).any() and (found["lengths"] <= sequence).all()


def test_steps_are_berts_or_a_third():
    assert [step_of(sequence) for sequence in (384, 512, 300, 5)] == [128, 128, 100, 1]


@pytest.mark.parametrize(("context", "answer", "tokens"), [
    ("Größe W1, w2.", "w2", [3]), ("w1 (w2)", "(w2)", [1, 3]), ("w1w2 w3", "w3", [1]), ("ﬁ w1 中w2", "w2", [3]),
    ("w1 \u200b w2", "\u200b", [])])
def test_answers_are_found_by_their_characters(context, answer, tokens):
    found = windows([question("who", context, answer)], TOKENIZER, 20, with_places=True)
    first = 3
    expected = [first + tokens[0], first + tokens[-1]] if tokens else [0, 0]
    assert [found["starts"][0], found["ends"][0]] == expected
    if tokens:
        start, stop = found["places"][0, expected[0], 0], found["places"][0, expected[1], 1]
        assert context[start:stop] == answer


def test_long_questions_are_cut_and_need_room():
    long = question("who " * 100, "w1 w2", "w1")
    assert windows([long], TOKENIZER, 80, with_places=False)["firsts"][0] == 66
    with raises("question-too-long", 67, 64, 68):
        windows([long], TOKENIZER, 67, with_places=False)


# ---------------------------------------------------------------------- samples

def test_samples_have_types_masks_and_both_ends(tmp_path):
    train, held = many(6), many(3, words=3)
    prepared = prepare(made(tmp_path, train, held))
    data = prepared.eval
    inputs = data.inputs(np.array([1, 0]), np.zeros(2, dtype=np.int64))
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64} and inputs["ids"].shape == (2, 12)
    for row in range(2):
        ids, mask, kinds = (inputs[name][row].tolist() for name in ("ids", "mask", "types"))
        separators = [place for place, token in enumerate(ids) if token == 3]
        assert mask == [1] * (separators[-1] + 1) + [0] * (11 - separators[-1])
        assert kinds == [int(separators[0] < place <= separators[-1]) for place in range(12)]
    targets = prepared.train.targets(np.arange(len(prepared.train)))
    assert set(targets) == {"start", "end"} and targets["start"].dtype == torch.int64
    assert (targets["end"] >= targets["start"]).all() and (targets["start"] > 0).any()
    assert (prepared.weight, prepared.num_classes, prepared.repeats) == (1.0, None, True)
    assert prepared.about.startswith(f"{tmp_path}/train.json: 6 questions in {len(prepared.train)} windows, 3 in ")
    again = prepare(made(tmp_path, train, held))
    assert again.fingerprint == prepared.fingerprint
    assert prepare(made(tmp_path, train, held, sequence=13)).fingerprint != prepared.fingerprint


def test_every_tenth_context_is_held_out(tmp_path):
    prepared = prepare(made(tmp_path, [entry for entry in many(20) for _ in range(2)], sequence=64))
    assert (len(prepared.train), len(prepared.eval)) == (36, 4)
    one = prepare(made(tmp_path, [asked(f"who w{number}?", "w1 w2", "w1") for number in range(20)], sequence=64))
    assert (len(one.train), len(one.eval)) == (18, 2)
    refused(made(tmp_path, many(1)), "too-few-samples", "data.train", 1)
    refused(made(tmp_path, many(2), []), "too-few-samples")


def test_subsets_count_questions_and_take_all_their_windows(tmp_path):
    run = made(tmp_path, many(9), many(8), train_samples=4, eval_samples=2)
    few, whole = prepare(run), prepare(made(tmp_path, many(9), many(8)))
    train, held = (part.whole.questions[part.chosen] for part in (few.train, few.eval))
    assert len(np.unique(train)) == 4 and len(np.unique(held)) == 2
    per = len(whole.train) // 9
    assert len(few.train) == 4 * per and few.fingerprint != whole.fingerprint
    rows = np.flatnonzero(np.isin(whole.train.whole.questions, train))
    everything = np.arange(len(few.train))
    assert few.train.inputs(everything, None)["ids"].equal(whole.train.inputs(rows, None)["ids"])
    assert few.train.targets(everything)["end"].equal(whole.train.targets(rows)["end"])
    refused(made(tmp_path, many(9), many(8), eval_samples=9), "more-samples-than-there-are", "data.eval-samples", 8)


def logits_for(data, right=True):
    """Scores of a model that knows all answers, or of one that finds the first token of the context."""
    targets = data.targets(np.arange(len(data)))
    scores = torch.zeros(len(data), data.inputs(np.arange(1), None)["ids"].shape[1], 2)
    for window in range(len(data)):
        first = int(data.whole.firsts[data.chosen[window]])
        start, end = (int(targets[name][window]) for name in ("start", "end"))
        if right and start:
            scores[window, start, 0] = scores[window, end, 1] = 9.0
        elif not right:
            scores[window, first, 0] = scores[window, first, 1] = 5.0
    return scores, targets


@pytest.mark.parametrize("ranks", [1, 3])
def test_scoring_over_windows_and_ranks(tmp_path, ranks):
    held = many(5)
    prepared = prepare(made(tmp_path, many(6), held))
    for right in (True, False):
        scorings = [prepared.scoring() for _ in range(ranks)]
        scores, targets = logits_for(prepared.eval, right)
        for number, scoring in enumerate(scorings):
            samples = torch.arange(len(prepared.eval))[number::ranks]
            part = {name: target[samples] for name, target in targets.items()}
            scoring.add(scores[samples], part, samples)
            # a padding sample has no target, and does not count
            scoring.add(scores[:1] + 100, {name: torch.full((1,), IGNORED) for name in targets}, torch.tensor([0]))
        parts = [json.loads(json.dumps(scoring.part())) for scoring in scorings]
        total = scorings[-1].total(parts)
        assert total["eval_count"] == 5
        assert total["eval_f1"] == total["eval_exact_match"] == total["eval_accuracy"] == float(right)


def test_the_best_of_a_questions_windows_answers(tmp_path):
    context = " ".join(WORDS[:20])
    prepared = prepare(made(tmp_path, many(3), [asked("who?", context, "w9 w10", "w9"), asked("who?", "w1 w2", "w2")]))
    data = prepared.eval
    scores = torch.full((len(data), 12, 2), -5.0)
    scores[1, 9, 0], scores[1, 10, 1] = 1.0, 1.0  # the right answer
    scores[3, 5, 0], scores[3, 6, 1] = 1.0, 0.5  # w13 w14, with less
    scores[4, 2, 0], scores[4, 3, 1] = 90.0, 90.0  # in the question, which is not searched
    targets = data.targets(np.arange(len(data)))
    scoring = prepared.scoring()
    scoring.add({"logits": scores}, targets, torch.arange(len(data)))
    last = len(data) - 1
    assert scoring.part()[1][2:] == [9, 10]
    assert scoring.total([scoring.part()])["eval_exact_match"] == 0.5
    scores[3, 6, 1] = 2.0
    scores[last, 5, 0] = scores[last, 5, 1] = 3.0  # w2, the other question's
    scoring = prepared.scoring()
    scoring.add(scores, targets, torch.arange(len(data)))
    assert scoring.total([scoring.part()]) == {
        "eval_accuracy": 0.5, "eval_exact_match": 0.5, "eval_f1": 0.5, "eval_count": 2}
    some = prepared.scoring()
    some.add(scores[last:], {name: target[last:] for name, target in targets.items()}, torch.tensor([last]))
    assert some.total([some.part()])["eval_count"] == 1
    nothing = prepared.scoring()
    nothing.add(scores * float("nan"), targets, torch.arange(len(data)))
    assert nothing.part()[0][1] is None and nothing.total([nothing.part()])["eval_f1"] == 0.0
    assert np.isnan(nothing.total([])["eval_f1"])


def plain_best(scores, first, stop):
    """`best_spans`, span by span."""
    starts, ends = (sorted(range(first, stop), key=lambda place, column=column: -scores[place][column])[:BEST]
                    for column in (0, 1))
    return max((scores[start][0] + scores[end][1] for start in starts for end in ends
                if start <= end < start + LONGEST), default=-np.inf)


@given(st.integers(0, 2**31), st.integers(2, 80), st.data())
def test_the_best_span_is_that_of_a_plain_search(seed, length, data):
    first = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(first, length))
    scores = torch.randn(2, length, 2, generator=torch.Generator().manual_seed(seed))
    score, start, end = best_spans(scores, torch.tensor([first, 0]), torch.tensor([stop, length]))
    assert score[0] == pytest.approx(plain_best(scores[0].tolist(), first, stop))
    assert score[1] == pytest.approx(plain_best(scores[1].tolist(), 0, length))
    if np.isfinite(float(score[0])):
        assert first <= start[0] <= end[0] < min(stop, int(start[0]) + LONGEST)
        assert score[0] == scores[0, start[0], 0] + scores[0, end[0], 1]


@pytest.mark.parametrize("tokens", [1, 30, 31])
def test_answers_have_at_most_thirty_tokens(tokens):
    scores = torch.zeros(1, 40, 2)
    scores[0, 4, 0] = scores[0, 4 + tokens - 1, 1] = 9.0
    score, _, _ = best_spans(scores, torch.tensor([3]), torch.tensor([40]))
    assert score == (18.0 if tokens <= 30 else 9.0)


@pytest.mark.parametrize(("answer", "right", "exact", "f1"), [
    ("The Cat!", "cat", 1, 1), ("a  cat sat", "cat", 0, 2 / 3), ("dog", "cat", 0, 0), ("", "cat", 0, 0),
    ("the", "an", 1, 0), ("theatre", "atre", 0, 0), ("to be or not to be", "to be", 0, 0.5), ("U.S.", "us", 1, 1),
    ("x-ray", "xray", 1, 1), ("Größe", "größe", 1, 1), ("b a", "a b", 1, 1), ("c b", "b c", 0, 1)])
def test_f1_and_exact_match_by_hand(answer, right, exact, f1):
    assert (exact_match(answer, right), f1_score(answer, right)) == (exact, pytest.approx(f1))
    assert normalised("  The  quick, (brown) Fox — AND an owl.") == "quick brown fox — and owl"


# ---------------------------------------------------------------------- files

GOOD = document(*many(2))


def changed(*path, value=None, drop=False):
    root = json.loads(json.dumps(GOOD))
    holder = root
    for key in path[:-1]:
        holder = holder[key]
    if drop:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(root).encode()


QAS = ("data", 0, "paragraphs", 1, "qas")
ANSWER = (*QAS, 0, "answers", 0)
CONTEXT = GOOD["data"][0]["paragraphs"][1]["context"]
NEGATIVE = CONTEXT.index("w4") - len(CONTEXT)
"""A negative index, which Python would count from the end."""


@pytest.mark.parametrize(("data", "error"), [
    (b"", ("squad-not-json",)), (b"{", ("squad-not-json",)), (b"\xff\xfe\x00", ("squad-not-json",)),
    (b"[" * 100_000, ("squad-not-json",)), (b"[]", ("squad-lacks-field",)),
    (b'{"data": {}}', ("squad-lacks-field",)),
    (b'{"data": [3]}', ("squad-lacks-field",)),
    (changed("data", 0, "paragraphs", 1, "context", value=3),
     ("squad-lacks-field", 3)),
    (changed(*QAS, drop=True), ("squad-lacks-field",)),
    (changed(*QAS, 0, "question", drop=True), ("squad-lacks-field",)),
    (changed(*QAS, 0, "answers", value=None), ("squad-lacks-field",)),
    (changed(*QAS, 0, "answers", value=[]), ("question-without-answer",)),
    (changed(*ANSWER, "text", value=None), ("squad-lacks-field",)),
    (changed(*ANSWER, "answer_start", value=True), ("squad-lacks-field",)),
    (changed(*ANSWER, "answer_start", value=1.0), ("squad-lacks-field",)),
    (changed(*ANSWER, "answer_start", value=1), ("answer-not-in-context", 1)),
    (changed(*ANSWER, "answer_start", value=-1), ("answer-not-in-context",)),
    (changed(*ANSWER, "answer_start", value=NEGATIVE), ("answer-not-in-context",)),
    (changed(*ANSWER, "answer_start", value=10**30), ("answer-not-in-context",)),
    (changed(*ANSWER, "text", value=""), ("answer-not-in-context",)),
    (changed(*ANSWER, value={"text": " ", "answer_start": CONTEXT.index(" ")}), ("answer-not-in-context",)),
    (changed(*QAS, 0, "question", value="\ud800"), ("question-not-unicode",))])
def test_faults_of_files_are_told_with_their_place(data, error):
    with raises(*error):
        parse(data, "f")


def test_forms_of_files():
    data = json.dumps(document(asked("wer? 中", "Größe 🙂 w1\0", "🙂", "w1")), ensure_ascii=False)
    for encoded in (data.encode(), data.encode("utf-8-sig"), json.dumps(json.loads(data)).encode()):
        found, = parse(encoded, "f")
        assert found.answers == (("🙂", 6), ("w1", 8)) and found.text == "wer? 中"


def test_settings_that_cannot_be(tmp_path):
    run = made(tmp_path, many(3))
    assert problems(run) == []

    def problem(model=None, **data):
        found, = problems(replace(run, model=replace(run.model, **(model or {})), data=replace(run.data, **data)))
        return found

    check(problem(train=None), "train-data-missing", "qa", where="data.train")
    check(problem(train="squad2"), "unknown-data", "squad", where="data.train")
    check(problem(augment_repeats=True), "augment-without-images", "qa", where="data.augment")
    check(problem({"sequence": 4}), "sequence-too-short-for-question", where="model.sequence", value=4)
    assert problem({"vocab": 3}).where == "model.vocab"
    refused(replace(run, data=replace(run.data, train=str(tmp_path))), "data-not-file", "data.train")


def test_squad_is_asked_for_by_its_name(tmp_path, monkeypatch):
    asked_for = []

    def load_dataset(name, configuration, split):
        asked_for.append((name, configuration, split))
        return [{"id": str(number), "question": entry["question"], "context": context, "answers": {
            "text": [answer["text"] for answer in entry["answers"]],
            "answer_start": [answer["answer_start"] for answer in entry["answers"]]}}
                for number, (context, entry) in enumerate(many(4))]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    run = replace(made(tmp_path, many(4), many(4)), data=Data(task="qa", train="squad", cache_dir=tmp_path / "cache"))
    prepared = prepare(run)
    assert asked_for[:2] == [("rajpurkar/squad", None, "train"), ("rajpurkar/squad", None, "validation")]
    own = prepare(made(tmp_path, many(4), many(4)))
    everything = np.arange(len(own.train))
    assert prepared.train.inputs(everything, None)["ids"].equal(own.train.inputs(everything, None)["ids"])
    held = squad.read_questions(squad.open_part(str(tmp_path / "train.json"), "train", print),
                                squad.open_part("squad", "eval", print))[1]
    assert len(held) == 4 and held[0].place == "rajpurkar/squad validation row 0"
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *a, split: [{"context": 1}]))
    refused(replace(run, data=replace(run.data, cache_dir=tmp_path / "new")), "hub-rows", "rajpurkar/squad")


def test_the_loader_fills_up_with_windows_that_do_not_count(tmp_path):
    prepared = prepare(made(tmp_path, many(2), many(1, words=3)))
    loader = Loader(prepared.eval, Sampler(len(prepared.eval), None), global_size=4, microbatch_size=4, part=1,
                    num_parts=2, total=1)
    batch, = loader.microbatches(0)
    assert batch.targets["start"].tolist() == [IGNORED] and batch.inputs["ids"].shape == (1, 12)
    scoring = prepared.scoring()
    scoring.add(torch.zeros(1, 12, 2), batch.targets, batch.samples)
    assert scoring.part() == []
