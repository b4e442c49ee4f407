"""What the cache requires of the frozen blocks and of the data, and whose entries it reads."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from examples.own_family import Convolutional, Mixer
from examples.own_task import Digits, LargeSums
from ranvier import keyed_random
from ranvier.config.run import Batch, Data, Elastic, Optim, Run, Train, Transformer
from ranvier.elastic.cache import _equal, repeatable
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.tensor.layers import Dropout as KeyedDropout
from ranvier.train.caching import check_repeats
from tests.elastic.cached import HIT, MISS, Cached, files
from tests.elastic.runs import BY_HAND, events, losses, read_rows, run_all, tiny

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- blocks that are run twice

def run_twice(module):
    """Run one block as the stage does: in a scope of random keys that depends on the step."""
    def compute(first, state, rows, *, other_keys=False):
        with keyed_random.scope(0, -8 if other_keys else 7, torch.arange(len(state)), "layer0"):
            return module(state)

    return repeatable([(0, "layer0", module)], torch.linspace(0, 1, 24).reshape(4, 6), compute, CPU)[0]


class Draws(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x


@pytest.mark.parametrize("module", [nn.Dropout(0.1), KeyedDropout(0.1), Draws(), Counts()], ids=str)
def test_blocks_that_are_not_repeatable(module):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert run_twice(module) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not buffer for buffer in module.buffers())


@pytest.mark.parametrize("module", [nn.Linear(6, 6), nn.Dropout(0.1).eval(), KeyedDropout(0.1).eval()], ids=str)
def test_blocks_that_are_repeatable(module):
    assert run_twice(module) is None


def test_states_are_compared_within_the_tolerance_of_their_format():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    exact, close = {"exactly": True}, {"exactly": False}
    assert _equal({"x": x}, {"x": x.clone()}, **exact) and _equal(x, x.clone(), **close)
    assert not _equal(x, x * (1 + 1e-6), **exact) and _equal(x, x * (1 + 1e-6), **close)
    assert not _equal(x, x * 1.01, **close) and not _equal(x, x.nan_to_num(), **close)
    assert not _equal(x, x.double(), **close) and not _equal({"x": x}, {"y": x}, **close)


class DroppingMixer(Mixer):
    def __init__(self, hidden, kernel, gated, dtype, keyed):
        super().__init__(hidden, kernel, gated, dtype)
        self.drop = (KeyedDropout if keyed else nn.Dropout)(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))


@dataclass(frozen=True)
class Dropping(Convolutional):
    """A family whose dropout is not a setting of the model."""

    keyed: bool = True

    def model(self, settings, head, *, dtype):
        model = super().model(settings, head, dtype=dtype)
        mixer = partial(DroppingMixer, settings.hidden, self.kernel, self.gated, dtype, self.keyed)
        return replace(model, blocks={name: mixer if name.startswith("layer") else block
                                      for name, block in model.blocks.items()})


def test_dropout_in_a_familys_own_modules_is_not_cached(tmp_path):
    """The losses are the same as without the cache; with dropout off in frozen layers, outputs are cached."""
    lines = (f"{number} fox number {number * 7 % 13} over {number * 3 % 11} dogs" for number in range(40))
    (tmp_path / "text.txt").write_text("\n".join(lines))

    def trained(name, **elastic):
        run = Run(mesh=Mesh(), precision="fp64", batch=Batch(global_size=8, microbatch_size=4), run_dir=tmp_path / name,
                  train=Train(steps=12, learning_rate=3e-3, warmup_steps=0, eval_every=0, eval_sequences=4,
                              sample_tokens=0),
                  data=Data(corpus=str(tmp_path / "text.txt"), cache_dir=tmp_path / "data", max_bytes=700),
                  optim=Optim(offload="none"),
                  model=Transformer(family=f"{__name__}:Dropping", num_layers=2, hidden=16, vocab=300, sequence=12),
                  elastic=Elastic(freeze="manual", manual=("0:2",), **elastic))
        return run, run_all(run)[0]

    cached = {"cache": True, "cache_from": 1, "cache_precision": "full"}
    plain, _ = trained("plain")
    run, results = trained("cached", **cached)
    assert losses(run) == losses(plain) and read_rows(results) == 0
    assert len(events(run, "cache")) == 1
    _, results = trained("still", frozen_dropout=False, **cached)
    assert read_rows(results) > 0


# ---------------------------------------------------------------------- samples that differ between epochs

class Masked(Digits):
    def inputs(self, samples, epochs):
        found = super().inputs(samples, epochs)
        return found | {"ids": found["ids"] + torch.from_numpy(epochs)[:, None]}


@dataclass(frozen=True)
class Augmented(LargeSums):
    says_so: bool = True

    def prepare(self, run, progress):
        return replace(super().prepare(run, progress), train=Masked(0, self.count, run.model.sequence),
                       repeats=not self.says_so)


@pytest.mark.parametrize("says_so", [True, False])
def test_samples_that_differ_between_epochs_are_refused(tmp_path, says_so):
    run = Run(model=Transformer(vocab=10, sequence=8))
    check_repeats(LargeSums(count=20).prepare(run, print))
    with pytest.raises(ConfigError) as refused:
        check_repeats(Augmented(count=20, says_so=says_so).prepare(run, print))
    assert refused.value.where == "elastic.cache" and "--elastic.cache" in refused.value.remedy


# ---------------------------------------------------------------------- whose entries are read

def test_entries_belong_to_one_start_of_a_run(tmp_path):
    with Cached(tmp_path, token="a") as first, Cached(tmp_path, token="b", knows=True) as other:
        assert first.right(0, 1) == other.right(0, 1) == MISS
        assert first.right(0, 1) == other.right(0, 1) == HIT
        assert {path.parent for path in files(tmp_path)} == {first.folder.path, other.folder.path}


def test_a_run_leaves_no_entries(tmp_path, sentences):
    folder = tmp_path / "outputs"
    folder.mkdir()
    (folder / "note.txt").write_text("mine")
    with Cached(folder, token="another") as other:
        other.right(0)
    kept = set(folder.iterdir())
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(data=2), train=Train(steps=14), elastic=replace(
        BY_HAND, auto_pipe=False, auto_dp=False, cache=True, cache_from=1, cache_dir=folder))
    results, _ = run_all(run)
    assert read_rows(results) > 0 and set(folder.iterdir()) == kept
