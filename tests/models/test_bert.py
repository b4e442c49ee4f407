"""BERT against transformers: logits, losses, raw gradients; masks, dropout, and how it is built and initialised."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ranvier import keyed_random
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Transformer
from ranvier.models import bert
from ranvier.tensor.split.loss import IGNORED, ClassLoss, SpanLoss
from tests.errors import raises
from tests.hf_peers import (
    BERT,
    assert_classes,
    assert_gradients,
    assert_starts,
    blocks_of,
    forward,
    gradients_as_ours,
    parameters,
    peer,
    relative,
    saved,
)


def inputs_of(batch=3, length=9, vocab=37, seed=3):
    """Random tokens of two texts, with more padding in each sample. Token 0 is transformers' padding: no gradient."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length - 2 * sample for sample in range(batch)])
    place = torch.arange(length)
    return {"ids": torch.randint(1, vocab, (batch, length), generator=generator),
            "mask": (place < lengths[:, None]).long(),
            "types": ((place >= lengths[:, None] // 2) & (place < lengths[:, None])).long()}


def theirs_of(model, inputs):
    return model(input_ids=inputs["ids"], attention_mask=inputs["mask"], token_type_ids=inputs["types"])


@pytest.mark.parametrize("settings", [{}, {"intermediate_size": 96, "layer_norm_eps": 1e-5, "num_labels": 5}])
def test_classes_equal_transformers(tmp_path, settings):
    model = peer("BertForSequenceClassification", **BERT | settings)
    found = Pretrained(saved(model, tmp_path / "model"))
    assert (found.missing, found.head, found.config.family) == ((), "classes", "bert")
    blocks = blocks_of(bert.bert(found.config, "classes", dtype=torch.float64), found)
    inputs = inputs_of()
    assert_classes(blocks, inputs, model, theirs_of(model, inputs).logits, tmp_path / "gradients")


def test_spans_equal_transformers_without_padding(tmp_path):
    model = peer("BertForQuestionAnswering", **BERT)
    found = Pretrained(saved(model, tmp_path / "model"))
    assert (found.missing, found.head) == ((), "span")
    blocks = blocks_of(bert.bert(found.config, "span", dtype=torch.float64), found)
    inputs = inputs_of()
    inputs["mask"] = torch.ones_like(inputs["mask"])
    start, end = torch.tensor([1, 0, 3]), torch.tensor([4, 0, 8])
    theirs = model(input_ids=inputs["ids"], attention_mask=inputs["mask"], token_type_ids=inputs["types"],
                   start_positions=start, end_positions=end)
    logits = forward(blocks, inputs)
    assert relative(logits, torch.stack([theirs.start_logits, theirs.end_logits], -1)) < 1e-10
    total, weight = SpanLoss()(logits, {"start": start, "end": end})
    assert weight == 3 and relative(total / weight, theirs.loss) < 1e-12
    (total / weight).backward()
    theirs.loss.backward()
    assert_gradients(blocks, gradients_as_ours(model, tmp_path / "gradients"))


def test_spans_have_no_part_in_padding(tmp_path):
    """Scores of tokens are those of transformers, unlike those of padding; the loss is computed over tokens only."""
    model = peer("BertForQuestionAnswering", **BERT)
    blocks = blocks_of(bert.bert(Pretrained(saved(model, tmp_path)).config, "span", dtype=torch.float64),
                       Pretrained(tmp_path))
    inputs = inputs_of()
    logits, theirs, is_token = forward(blocks, inputs), theirs_of(model, inputs), inputs["mask"].bool()
    assert relative(logits[is_token], torch.stack([theirs.start_logits, theirs.end_logits], -1)[is_token]) < 1e-10
    assert (logits[~is_token] == torch.finfo(torch.float64).min).all()
    start, end = torch.tensor([1, 0, IGNORED]), torch.tensor([4, 6, 2])
    total, weight = SpanLoss()(logits, {"start": start, "end": end})
    expected = sum(functional.cross_entropy(logits[sample, :length, place][None], target[sample][None])
                   for sample, length in ((0, 9), (1, 7)) for place, target in ((0, start), (1, end))) / 2
    assert weight == 2 and relative(total, expected) < 1e-12
    total.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in parameters(blocks).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_padding_is_no_number_too_large(dtype):
    """A score of the format's lowest number leaves the loss and its gradients finite."""
    blocks = {name: build() for name, build in bert.bert(tiny(), "span", dtype=dtype).blocks.items()}
    target = torch.tensor([1, 2, 0])
    total, weight = SpanLoss()(forward(blocks, inputs_of()), {"start": target, "end": target})
    assert weight == 3 and total.isfinite() and total.dtype is torch.float32
    total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in parameters(blocks).values())


def tiny(**changed) -> Transformer:
    return Transformer(**dict(family="bert", num_layers=2, hidden=24, heads=3, vocab=37, sequence=12) | changed)


@pytest.mark.parametrize("head", ["classes", "span"])
def test_padding_changes_nothing(head):
    blocks = {name: build() for name, build in bert.bert(tiny(), head, dtype=torch.float64).blocks.items()}
    inputs = inputs_of()
    shorter = {name: tensor[1:2, :7] for name, tensor in inputs.items()}
    whole, alone = forward(blocks, inputs), forward(blocks, shorter)
    whole = whole[1:2] if head == "classes" else whole[1:2, :7]
    assert relative(whole, alone) < 1e-12


@pytest.mark.parametrize("head", ["classes", "span"])
def test_a_sample_of_padding_alone_is_no_nan(head):
    """Its first position counts as a token, so that attention has a key."""
    model = bert.bert(tiny(), head, dtype=torch.float64)
    blocks = {name: build() for name, build in model.blocks.items()}
    inputs = {name: torch.zeros(2, 5, dtype=torch.int64) for name in ("ids", "mask", "types")}
    assert blocks["embedding"](inputs)["mask"].tolist() == [[True, False, False, False, False]] * 2
    one = {name: tensor[:, :1] for name, tensor in inputs.items()} | {"mask": torch.ones(2, 1)}
    found, expected = forward(blocks, inputs), forward(blocks, one)
    assert relative(found if head == "classes" else found[:, :1], expected) < 1e-12
    ignored = torch.full((2,), IGNORED)
    total, weight = model.loss(forward(blocks, inputs), ignored if head == "classes" else {
        "start": ignored, "end": ignored})
    assert (total, weight) == (0, 0)
    total.backward()
    assert all((parameter.grad == 0).all() for parameter in parameters(blocks).values())


def test_masks_may_be_bool_and_the_state_is_a_dict():
    blocks = {name: build() for name, build in bert.bert(tiny(), "classes", dtype=torch.float64).blocks.items()}
    inputs = inputs_of()
    state = blocks["embedding"](inputs)
    assert set(state) == {"hidden", "mask"} and state["mask"].dtype is torch.bool
    assert state["hidden"].shape == (3, 9, 24) and state["mask"].shape == (3, 9)
    assert torch.equal(forward(blocks, inputs), forward(blocks, inputs | {"mask": inputs["mask"].bool()}))


def test_dropout_is_keyed_and_has_its_places():
    """Dropout is at the embedding, at each sublayer's output, and at the classifier's input."""
    blocks = {name: build() for name, build in bert.bert(tiny(dropout=0.5), "classes").blocks.items()}
    inputs = inputs_of()

    def run(step):
        state = inputs
        for name, block in blocks.items():
            with keyed_random.scope(0, step, torch.arange(3), name):
                state = block(state)
        return state

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    calls = {}
    for name, block in blocks.items():
        calls[name] = sum(isinstance(module, type(blocks["head"].dropout)) for module in block.modules())
    assert set(calls.values()) == {1}
    for block in blocks.values():
        block.eval()
    assert torch.equal(run(1), run(2))


def test_longer_sequences_are_refused():
    blocks = {name: build() for name, build in bert.bert(tiny(sequence=5), "classes").blocks.items()}
    with raises("sequence-beyond-positions", 9):
        forward(blocks, inputs_of())


def test_heads_must_divide_hidden():
    with raises("heads-do-not-divide-hidden", 24, 5, 4):
        bert.bert(tiny(heads=5), "classes")


@pytest.mark.parametrize(("loss", "logits", "targets", "error"), [
    (ClassLoss(), (3, 2), torch.zeros(2, dtype=torch.int64), ("targets-do-not-fit-logits", 3, 2)),
    (ClassLoss(), (3, 2), torch.zeros(3), ("targets-do-not-fit-logits", "float32")),
    (ClassLoss(), (3, 2), None, ("targets-do-not-fit-logits", 3, 2)),
    (SpanLoss(), (3, 4, 2), torch.zeros(3, dtype=torch.int64), ("targets-do-not-fit-logits",)),
    (SpanLoss(), (3, 4, 2), {"start": torch.zeros(3), "end": torch.zeros(2)}, ("targets-do-not-fit-logits", 2)),
])
def test_targets_that_do_not_fit(loss, logits, targets, error):
    with raises(*error):
        loss(torch.zeros(logits), targets)


@pytest.mark.parametrize("head", ["classes", "span"])
def test_samples_starts_and_names(head):
    config = tiny(num_classes=4)
    blocks = assert_starts(bert.bert(config, head), *bert.BERT.sample(config, head, 2))
    sizes = {"classes": {"head.pooler.weight": (24, 24), "head.classifier.weight": (4, 24)},
             "span": {"head.span.weight": (2, 24)}}[head]
    assert {name: tuple(one.shape) for name, one in parameters(blocks).items()
            if name.startswith("head.") and name.endswith("weight")} == sizes


def test_two_classes_where_nobody_says():
    assert bert.family.num_classes(tiny()) == 2 and bert.family.num_classes(tiny(num_classes=7)) == 7


def test_flops_count_the_layers_products():
    config = tiny(intermediate=40)
    blocks = {name: build() for name, build in bert.bert(config, "span").blocks.items()}
    with FlopCounterMode(display=False) as counter:
        total, _ = SpanLoss()(forward(blocks, bert.BERT.sample(config, "span", 1)[0]),
                              {"start": torch.zeros(1, dtype=torch.int64), "end": torch.zeros(1, dtype=torch.int64)})
        total.backward()
    head = 3 * 2 * config.sequence * config.hidden * 2
    attention = 12 * config.num_layers * config.sequence**2 * config.hidden  # its CPU kernel may not be counted
    assert counter.get_total_flops() - head in (bert.flops_per_sequence(config),
                                                bert.flops_per_sequence(config) - attention)
    assert bert.flops_per_sequence(config, recomputed=True) == 4 / 3 * bert.flops_per_sequence(config)
