"""Samples of different lengths: packed or padded, they have the same losses and gradients."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config import rules
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Data, Run, Transformer
from ranvier.data.padding import padding_shares, padding_text
from ranvier.data.prepare import prepare
from ranvier.data.token_samples import PackedSamples, TokenSamples, best_fit, cut_runs
from ranvier.data.tokenizer import train
from ranvier.mesh import Mesh
from ranvier.models.packed_sequences import attention_mask, positions_of
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.split.loss import IGNORED
from ranvier.testing.reference import Reference
from tests.covering import first
from tests.tensor.split_parity import SEED, assert_close, gradients_on, tiny_gpt

LENGTHS = [5, 2, 8, 3, 1, 4, 7, 2]
SEQUENCE, VOCAB = 8, 13


def samples(masked=True):
    counts = np.array(LENGTHS) + 1
    stops = np.cumsum(counts)
    tokens = np.random.default_rng(0).integers(0, VOCAB, stops[-1])
    is_target = np.random.default_rng(1).integers(0, 2, stops[-1]) if masked else None
    return TokenSamples(tokens, stops - counts, stops, SEQUENCE, is_target)


def packed_of(plain):
    return PackedSamples(plain, best_fit(plain.sample_lengths, SEQUENCE))


def model():
    return tiny_gpt(hidden=12, heads=4, vocab=VOCAB, dropout=0.0, tied=True)


def expected(plain):
    """Loss and gradients of each sample alone, without any mesh."""
    reference = Reference(model(), seed=SEED, dtype=torch.float64)
    single = [one_microbatch(plain, np.array([number]), length=int(length))
              for number, length in enumerate(plain.sample_lengths)]
    return reference.forward_backward(single), reference.gradients()


def one_microbatch(data, numbers, **length):
    return Microbatch(data.inputs(numbers, None, **length), data.targets(numbers, **length), torch.from_numpy(numbers))


# ---------------------------------------------------------------------- bins and runs

@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_bins_are_never_too_full_and_few(lengths):
    bins = best_fit(np.array(lengths), 9)
    loads = np.bincount(bins, weights=lengths)
    assert loads.max() <= 9 and loads.min() > 0
    assert len(loads) <= 11 / 9 * -(-sum(lengths) // 9) + len(lengths) * 0.5 + 1
    assert (best_fit(np.array(lengths), 9) == bins).all()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 9))
def test_cut_runs_lose_no_target(counts, longest):
    stops = np.cumsum(counts)
    first, last = cut_runs(stops - counts, stops, longest)
    assert ((last - first - 1 >= 1) & (last - first - 1 <= longest)).all()
    targets = [place for start, stop in zip(first, last, strict=True) for place in range(start + 1, stop)]
    wanted = [place for stop, count in zip(stops, counts, strict=True) for place in range(stop - count + 1, stop)]
    assert targets == wanted


def test_positions_restart_and_attention_stays_within_a_sample():
    segments = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0]])
    assert positions_of(segments).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    heads = torch.zeros(1, 1, 8, 2)
    mask = attention_mask(heads, heads, segments)[0, 0].long().tolist()
    assert mask[2] == [1, 1, 1, 0, 0, 0, 0, 0] and mask[4] == [0, 0, 0, 1, 1, 0, 0, 0] and mask[5][5] == 1


def test_targets_are_the_next_tokens_that_count():
    plain = TokenSamples(np.array([5, 6, 7, 8]), np.array([0]), np.array([4]), 5, np.array([0, 0, 1, 0]))
    assert plain.inputs(np.array([0])).tolist() == [[5, 6, 7, 0, 0]]
    assert plain.targets(np.array([0]), 3).tolist() == [[IGNORED, 7, IGNORED]]
    assert plain.num_targets() == 1 and plain.sample_lengths.tolist() == [3]


# ---------------------------------------------------------------------- gradients

@pytest.mark.parametrize("masked", [False, True])
def test_packed_and_padded_samples_have_the_gradients_of_single_ones(masked):
    plain = samples(masked)
    packed = packed_of(plain)
    assert len(packed) == 4 < len(plain)
    loss, gradients = expected(plain)
    for data in (packed, plain):
        reference = Reference(model(), seed=SEED, dtype=torch.float64)
        assert abs(reference.forward_backward([one_microbatch(data, np.arange(len(data)))]) - loss) < 1e-12
        assert_close(reference.gradients(), gradients, 1e-12)


@pytest.mark.parametrize(("mesh", "scheme"), first(
    [(Mesh(row=2, col=2), "stationary"), (Mesh(pipe=2, col=2), "sequence")], [
        (Mesh(data=2, pipe=2), "stationary"), (Mesh(row=2, col=2), "stationary"), (Mesh(row=2, col=2), "summa"),
        (Mesh(pipe=2, col=2), "sequence")]))
def test_packed_samples_have_the_gradients_of_single_ones_on_any_mesh(mesh, scheme):
    plain = samples()
    packed = packed_of(plain)
    loss, gradients = expected(plain)
    numbers = np.split(np.arange(len(packed)), mesh.data)
    batches = [[one_microbatch(packed, part) for part in np.split(own, 2 // mesh.data)] for own in numbers]
    outcome = gradients_on(model, batches, mesh, scheme=scheme)
    assert_close(outcome.gradients, gradients)
    assert all(abs(found - loss) < 1e-10 for found in outcome.losses)


# ---------------------------------------------------------------------- documents of a corpus, and notes

def test_documents_are_packed_without_a_token_lost_and_the_padding_is_told(tmp_path):
    text = [f"document {number} has {'so many ' * (number % 7)}words" for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in text))
    run = Run(model=Transformer(vocab=300, sequence=32),
              data=Data(corpus=str(tmp_path / "rows.jsonl"), packing=True, cache_dir=tmp_path / "cache"))
    data = prepare(run)
    found = []
    for number in range(len(data.train)):
        inputs, targets = data.train.inputs(np.array([number])), data.train.targets(np.array([number]))
        ids, segments = inputs["ids"][0], inputs["segments"][0]
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            assert ids[here][1:].equal(targets[0][here][:-1])
            found.append(data.tokenizer.decode([*ids[here].tolist(), int(targets[0][here][-1])]))
        assert (targets[0][segments == 0] == IGNORED).all()
    whole = "".join(sorted(found))
    assert sum("<|endoftext|>" in one for one in found) == 190 and len(whole) > 190 * 10
    assert data.weight == pytest.approx(sum(data.train.samples.sample_lengths) / len(data.train))
    assert data.padding.count("%") == 3 and data.padding.split("%")[1].startswith(" packed (")
    assert prepare(replace(run, data=replace(run.data, packing=False))).padding == ""
    assert prepare(run).fingerprint != prepare(replace(run, data=replace(run.data, packing=False))).fingerprint


def test_a_packed_document_keeps_a_beginning_that_is_the_separator(tmp_path):
    """Some tokenizers have one token for BOS and EOS."""
    inner = tokenizers.Tokenizer.from_str(train(["some words"], 260).text())
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", inner.token_to_id("<|endoftext|>"))])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"{number:02} words"}) for number in range(40)))
    data = prepare(Run(model=Transformer(vocab=300, sequence=32), data=Data(
        corpus=str(tmp_path / "rows.jsonl"), packing=True, tokenizer=str(tmp_path / "tokenizer.json"),
        cache_dir=tmp_path / "cache")))
    samples = data.train.samples
    firsts = {int(samples.inputs(np.array([number]))[0, 0]) for number in range(len(samples))}
    assert firsts == {data.tokenizer.end} and len(samples) == 38


def test_shares_of_padding():
    run = Run(model=Transformer(sequence=8), batch=Batch(global_size=4, microbatch_size=2), data=Data(packing=True))
    lengths = np.array([8, 8, 4, 4, 2, 2, 2, 2])
    assert padding_shares(lengths, run, can_pack=True) == {
        "packing": 0.0, "longest": 0.0, "maximum": 0.5}
    assert padding_text(lengths, run, can_pack=True) == (
        "0.0% packed (0.0% padded to the longest of a microbatch, 50.0% padded to 8 tokens)")
    alone = replace(run, data=Data())
    assert padding_text(lengths, alone, can_pack=False) == (
        "0.0% padded to the longest of a microbatch (50.0% padded to 8 tokens)")


@pytest.mark.parametrize(("sequence", "data", "where"), [
    (64, {"packing": True}, "data.packing"), (64, {"task": "chat", "train": "quiz"}, "data.padding"),
    (64, {"task": "classification", "train": "sst2"}, "data.padding"),
    (64, {"task": "chat", "train": "quiz", "padding": "maximum"}, None), (64, {}, None), (32, {"packing": True}, None)])
def test_dynamic_rotary_scaling_needs_samples_of_their_own_length(sequence, data, where):
    """The base of the rotary embeddings depends on the length of sequences above `rope_positions`."""
    run = Run(model=Transformer(family="llama", vocab=300, sequence=sequence, num_layers=2, hidden=16, heads=2,
                                rope_scaling="dynamic", rope_factor=2.0, rope_positions=32), data=Data(**data))
    found = [problem for problem in rules.problems(resolve(run), num_blocks=None) if "dynamic" in problem.what]
    assert [problem.where for problem in found] == ([] if where is None else [where])
    assert all("--model.sequence 32" in problem.remedy for problem in found)
