"""Conformance of families, tasks, corpora and freeze policies: Ranvier's follow their protocols, and errors name
faults."""

import json
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from ranvier.block import Initial, Model
from ranvier.config.run import Batch, Data, Elastic, Run, Transformer
from ranvier.config.task_form import SHIPPED
from ranvier.data.class_numbers import Accuracy
from ranvier.data.corpus import Document, OpenCorpus, open_corpus
from ranvier.data.prepare import task_of
from ranvier.data.task import Prepared, Task
from ranvier.elastic.freezing import Cap, GradientNorm, Manual, NoFreezing
from ranvier.elastic.named_policy import policy_of
from ranvier.models.bert import BERT
from ranvier.models.family import ModelFacts, ModelFamily
from ranvier.models.gpt import GPT
from ranvier.models.vit import VIT
from ranvier.testing.corpora import check_corpus
from ranvier.testing.families import check_family
from ranvier.testing.freezing import check_freeze_policy
from ranvier.testing.tasks import check_task
from tests.config.test_effects import texts

SMALL = Transformer(num_layers=2, hidden=16, heads=2, vocab=40, sequence=8, image_size=8, patch_size=4, dropout=0.1)


@pytest.mark.parametrize(("family", "head"), [(GPT, "tokens"), (BERT, "classes"), (BERT, "span"), (VIT, "classes")],
                         ids=["gpt", "bert classes", "bert span", "vit"])
def test_our_families_conform(family, head):
    check_family(family, SMALL, head)


class Lookup(nn.Module):
    def __init__(self, vocab, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(vocab, vocab, dtype=dtype))

    def forward(self, ids):
        return self.weight[ids]


def mean_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets.numel()


def summed_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


class Bigram(ModelFamily):
    """The smallest family; each test changes one thing."""

    def model(self, settings, head, *, dtype):
        return Model(blocks={"table": lambda: Lookup(settings.vocab, dtype)}, loss=summed_loss,
                     initial=lambda name: Initial("normal", 0.02))

    def sample(self, settings, head, count):
        ids = torch.zeros(count, settings.sequence, dtype=torch.int64)
        return ids, ids

    def flops_per_sample(self, settings, *, recomputed=False):
        return 0.0

    def describe(self, settings):
        return ModelFacts(text="bigram", tokens=settings.sequence)


def changed(**methods):
    return type("Changed", (Bigram,), methods)()


def other_model(**fields):
    return lambda self, settings, head, *, dtype: replace(Bigram().model(settings, head, dtype=dtype), **fields)


def test_a_small_family_conforms():
    check_family(Bigram(), SMALL, "tokens")


@pytest.mark.parametrize(("methods", "message"), [
    ({"model": None}, "Changed has no method `model`, but an attribute of this name"),
    ({"problems": lambda *_: [ValueError("bad")]}, "problems: these settings should have none, and have: bad"),
    ({"describe": lambda *_: "bigram"}, "describe: returns a str"),
    ({"describe": lambda *_: ModelFacts(text="a\nb", tokens=1)}, "one line"),
    ({"describe": lambda *_: ModelFacts(text="a", tokens=0)}, "at least 1, not 0"),
    ({"model": lambda *_, **__: [nn.Linear(1, 1)]}, "model: returns a list"),
    ({"model": other_model(layers=(("table",),))}, "declares 1 layers, and the settings say 2"),
    ({"model": other_model(alike={"table": "none"})}, "which is no earlier block"),
    ({"model": other_model(tied=(("table.weight", "head.weight"),))}, "tied names head.weight, which no block has"),
    ({"model": other_model(initial=lambda name: {}[name])}, "initial.*KeyError"),
    ({"model": other_model(loss=mean_loss)}, "the sum of their own losses"),
    ({"model": other_model(loss=lambda y, t: (y.sum(), 0.0))}, "weight 0"),
    ({"model": other_model(loss=lambda y, t: (y.sum() * float("nan"), 1))}, "loss: is nan"),
    ({"model": other_model(loss=lambda y, t: (y, 1))}, "a sum without dims"),
    ({"model": other_model(blocks={"table": lambda: Lookup(40, torch.float32)})}, "is torch.float32 instead of"),
    ({"model": other_model(blocks={"table": lambda: nn.Linear(3, 3)})}, "block table on the meta device"),
    ({"sample": lambda self, settings, head, count: (torch.zeros(8, 8, dtype=torch.int64),) * 2}, "for 1 samples"),
    ({"sample": lambda self, settings, head, count: (torch.zeros(count, 8, dtype=torch.int64),
                                                     torch.zeros(count, 8))}, "targets must be int64"),
    ({"flops_per_sample": lambda self, settings, recomputed=False: 1e9}, "flops_per_sample: says 1e[+]09"),
    ({"flops_per_sample": lambda self, settings, recomputed=False: -float(recomputed)}, "recomputation adds nothing"),
])
def test_faults_of_a_family_are_named(methods, message):
    with pytest.raises(AssertionError, match=message):
        check_family(changed(**methods), SMALL, "tokens")


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tasks")
    texts(made)
    article = {"paragraphs": [{"context": f"The colour of box {number} is red.", "qas": [
        {"id": str(number), "question": "Which colour?", "answers": [{"text": "red", "answer_start": 24}]}]}
        for number in range(10, 30)]}
    (made / "squad.json").write_text(json.dumps({"version": "1.1", "data": [article]}))
    return made


@pytest.mark.parametrize(("task", "train", "output"), [
    ("lm", None, None), ("classification", "train.tsv", lambda targets: torch.randn(len(targets), 2)),
    ("qa", "squad.json", lambda targets: torch.randn(len(targets["start"]), 24, 2)),
    ("images", "images", lambda targets: torch.randn(len(targets), 2))])
def test_our_tasks_conform(task, train, output, folder):
    torch.manual_seed(0)
    run = Run(model=replace(SMALL, vocab=300, sequence=24), batch=Batch(global_size=4, microbatch_size=2),
              data=Data(task=task, train=train and str(folder / train), corpus=str(folder / "texts"),
                        cache_dir=folder / "cache"))
    check_task(task_of(run), run, output)


class Numbers:
    def __init__(self, noise=0.0):
        self.noise = noise

    def __len__(self):
        return 20

    def inputs(self, samples, epochs):
        return torch.from_numpy(samples * 1.0)[:, None] + self.noise * random.random() * len(samples)

    def targets(self, samples):
        return torch.from_numpy(samples % 2)


class Drifting(Numbers):
    def inputs(self, samples, epochs):
        return super().inputs(samples, epochs) + torch.from_numpy(epochs)[:, None]


class Parity(Task):
    """Whether a number is odd."""

    form = SHIPPED["classification"]

    def __init__(self, **changed):
        self.changed = changed

    def problems(self, run, *, elsewhere):
        return self.changed.get("problems", [])

    def warnings(self, run):
        return []

    def prepare(self, run, progress):
        return Prepared(**dict(train=Numbers(), eval=Numbers(), fingerprint="parity", about="numbers", weight=1.0,
                               num_classes=2, scoring=Accuracy) | {
            name: value() if name == "fingerprint" else value for name, value in self.changed.items()
            if name != "problems"})


class Forgetful(Accuracy):
    def total(self, parts):
        return super().total(parts[:1])


class Uncounted(Accuracy):
    def total(self, parts):
        return {"eval_accuracy": super().total(parts)["eval_accuracy"]}


class Flat(Numbers):
    def targets(self, samples):
        return torch.from_numpy(samples % 2).float()


class Short(Numbers):
    def inputs(self, samples, epochs):
        return torch.zeros(3)


def right(targets):
    return torch.nn.functional.one_hot(targets, 2).float()


def test_a_small_task_conforms():
    assert len(check_task(Parity(), Run(), right).train) == 20


@pytest.mark.parametrize(("settings", "message"), [
    ({"problems": [ValueError("bad")]}, "problems: these settings should have none, and have: bad"),
    ({"fingerprint": lambda: str(random.random())}, "another fingerprint"),
    ({"weight": 0.0}, "weight must be positive"), ({"class_names": ("odd",)}, "as many as num_classes"),
    ({"train": Numbers(noise=1.0)}, "train: samples are others in another order"),
    ({"eval": Drifting()}, "eval: samples differ between epochs"), ({"train": Drifting()}, "Prepared.repeats is true"),
    ({"train": Flat()}, "targets must be int64"), ({"train": Short()}, r"shape \(3,\) for 8 samples"),
    ({"scoring": Forgetful}, "one rank gives"), ({"scoring": Uncounted}, "eval_count")])
def test_faults_of_a_task_are_named(settings, message):
    with pytest.raises(AssertionError, match=message):
        check_task(Parity(**settings), Run(), right)


# --- corpora ---------------------------------------------------------------------------------------------------------


def test_our_corpora_conform(folder):
    for name in ("python-stdlib", str(folder / "texts")):
        check_corpus(open_corpus(name, folder / "cache", lambda line: None))


@pytest.mark.parametrize(("texts", "message"), [
    (lambda limit: [], "gives no text"), (lambda limit: ["a"], "gives a str"),
    (lambda limit: [Document("a", 3)], "the text of a is a int"),
    (lambda limit: [Document("a", "\ud800")], "is no Unicode text"),
    (lambda limit: [Document("a", str(random.random()))], "other documents when it is called again"),
    (lambda limit: [Document("a", "word" * 100 if limit > 64 else "w")], "less than the first 64 bytes")])
def test_faults_of_a_corpus_are_named(texts, message):
    with pytest.raises(AssertionError, match=message):
        check_corpus(OpenCorpus(name="own", fingerprint="own", read=lambda limit: iter(texts(limit))))


def test_a_corpus_without_a_method_is_named():
    with pytest.raises(AssertionError, match="Numbers has no attribute `fingerprint`"):
        check_corpus(Numbers())


# --- freeze policies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [NoFreezing(), GradientNorm(alpha=1 / 3), Cap(alpha=0.4), Manual(depths=((20, 1),))])
def test_our_freeze_policies_conform(policy):
    check_freeze_policy(lambda: policy)


@dataclass
class Counting:
    """Freezes one more layer with each call; its kept state is wrong in different ways."""

    keeps: object = "times"
    times: int = 0

    def frozen_layers(self, facts):
        self.times += 1
        return max(facts.frozen, min(self.times, facts.num_layers)) if self.keeps != "beyond" else facts.num_layers + 1

    def state_dict(self):
        return {"times": {"set": {1}, "nothing": 0}.get(self.keeps, self.times)}

    def load_state_dict(self, state):
        self.times = state["times"]


def test_a_policy_that_remembers_conforms():
    check_freeze_policy(Counting)


@pytest.mark.parametrize(("keeps", "message"), [("beyond", "must be a whole number of layers"),
                                                ("set", "not serialisable as JSON"),
                                                ("nothing", "where it was restored")])
def test_faults_of_a_freeze_policy_are_named(keeps, message):
    with pytest.raises(AssertionError, match=message):
        check_freeze_policy(lambda: Counting(keeps=keeps))


def test_an_elastic_setting_is_one_of_these_policies():
    for freeze in ("none", "gradient-norm", "cap"):
        check_freeze_policy(lambda freeze=freeze: policy_of(Elastic(freeze=freeze)))

