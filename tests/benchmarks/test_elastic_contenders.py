"""Contenders of the elastic benchmarks do the same work: the same samples in the same order, and, if nothing is frozen,
the same losses as transformers' model under torch's DDP. The programs run, and their files are complete."""

import json
import threading
from collections import defaultdict
from dataclasses import replace

import psutil
import pytest

from benchmarks.elastic import alpha, cache_depth, microbatches, pareto, parts, program, two_ranks
from benchmarks.elastic.contender import PEER, contenders, named
from benchmarks.elastic.rounds import ContenderFailed, Stand, run_one
from benchmarks.elastic.task import task_run
from ranvier.data.loader import Loader

pytest.importorskip("transformers")


@pytest.fixture
def taken(monkeypatch):
    """Step -> replica -> numbers of the training samples that it took, for the run since the last clear()."""
    found, lock, load = defaultdict(dict), threading.Lock(), Loader.microbatches

    def recorded(loader, step):
        batch = load(loader, step)
        if loader.total is None:
            with lock:
                found[step][loader.replica] = [int(sample) for part in batch for sample in part.samples]
        return batch

    monkeypatch.setattr(Loader, "microbatches", recorded)
    return found


def order(taken):
    """The samples of each step, whichever replica has them: batches are sorted by length before they are shared."""
    return [sorted(sample for part in parts.values() for sample in part) for _, parts in sorted(taken.items())]


@pytest.mark.slow
def test_the_same_losses_without_freezing_and_the_same_order_with_it(tmp_path, taken):
    stand = Stand(folder=tmp_path, threads=True)
    base = task_run("quick", tmp_path / "data", seed=3, epochs=2, dropout=0.0)
    outcomes, orders = {}, {}
    for one in named(contenders(base), ["none", "gpipe-dp", "freeze", "all", PEER]):
        taken.clear()
        outcomes[one.name], orders[one.name] = run_one(one, base, stand), order(taken)
    none, peer = outcomes["none"], outcomes[PEER]
    assert len(none.losses) == 24 and none.samples == peer.samples == 192 and len(set(none.losses)) > 20
    for name in ("gpipe-dp", PEER):
        assert outcomes[name].losses == pytest.approx(none.losses, rel=1e-10)
        assert outcomes[name].accuracy == none.accuracy and outcomes[name].count == none.count == 30
    assert all(one == orders["none"] for one in orders.values())
    for epoch in (orders["none"][:12], orders["none"][12:]):
        assert sorted(sample for step in epoch for sample in step) == list(range(96))
    frozen = outcomes["freeze"]
    assert frozen.losses[:12] == pytest.approx(none.losses[:12], rel=1e-10)
    assert max(abs(a - b) for a, b in zip(frozen.losses[12:], none.losses[12:], strict=True)) > 1e-6
    assert outcomes["all"].losses == pytest.approx(frozen.losses, rel=1e-3)  # the cache keeps half precision
    assert frozen.course[-1]["frozen"] == outcomes["all"].course[-1]["frozen"] == 2
    for one in outcomes.values():
        assert 0 < one.seconds < one.wall_seconds and len(one.step_seconds) == 24
    assert not (tmp_path / f"seed3-{PEER}" / "initial").exists()


@pytest.mark.slow
def test_images(tmp_path):
    """The ViT of transformers trains like ours: weight decay of class token, positions and patches is the same."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(12):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    quick = task_run("quick", tmp_path / "data", epochs=3, dropout=0.0)
    base = replace(quick, model=replace(quick.model, image_size=8, patch_size=4, num_layers=2),
                   optim=replace(quick.optim, weight_decay=0.5),
                   data=replace(quick.data, task="images", train=str(tmp_path / "images"), eval=None,
                                train_samples=16, eval_samples=None))
    ours, theirs = (run_one(one, base, Stand(folder=tmp_path, threads=True))
                    for one in named(contenders(base, ranks=2), ["none", PEER]))
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-10) and len(ours.losses) == 6


@pytest.mark.slow
def test_a_decoder_trains_as_transformers_does(tmp_path):
    """A Llama on text, on one and on two replicas: the same losses and the same held-out losses after each epoch,
    except for the norms and angles that transformers computes in fp32."""
    base = task_run("quick-decoder", tmp_path / "data", epochs=2, eval_epochs=1)
    found = named(pareto.pareto_contenders(base), ["plain", "none"])
    theirs, ours = (run_one(one, base, Stand(folder=tmp_path, threads=True)) for one in found)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-7) and len(ours.losses) == base.train.steps
    assert theirs.samples == ours.samples == base.train.steps * 8 * 12 and ours.accuracy is None
    assert [score for _, score in theirs.curve] == pytest.approx([score for _, score in ours.curve], rel=1e-7)
    assert len(ours.curve) == 2 and ours.curve[-1][1] == pytest.approx(-ours.losses[-1], rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["quick", "quick-decoder"])
def test_peers_freeze_and_adapt_as_ours_do(tmp_path, task):
    """With static freezing, and with adapters from the same start; the cache keeps half precision."""
    base = task_run(task, tmp_path / "data", epochs=2, eval_epochs=1, dropout=0.0)
    found = named(pareto.pareto_contenders(base), ["plain-static-4", "plain-lora", "static-4", "lora"])
    by = {one.name: run_one(one, base, Stand(folder=tmp_path, threads=True)) for one in found}
    assert by["plain-lora"].losses == pytest.approx(by["lora"].losses, rel=1e-7)
    assert by["plain-static-4"].losses == pytest.approx(by["static-4"].losses, rel=1e-3)
    assert len({losses for one in by.values() for losses in one.losses[-1:]}) >= 3


@pytest.mark.slow
def test_curves_of_a_decoder(tmp_path):
    pareto.measure(pareto.parse(["--quick", "--task", "decoder", "--only", "cap", "lora-cache", "--output",
                                 str(tmp_path / "x.json")]))
    found, table = result(tmp_path, "x")
    assert len(table) == 1 + 11 and "perplexity" in (tmp_path / "x.md").read_text()
    by = {one["name"]: one for one in found["outcomes"]}
    assert by["cap"]["course"][-1]["frozen"] > 0 and by["lora-cache"]["course"][-1]["frozen"] == 3


def result(folder, name):
    path = folder / f"{name}.json"
    assert path.with_suffix(".png").stat().st_size > 5_000
    found = json.loads(path.read_text())
    assert found.keys() >= {"date", "commit", "machine", "versions", "command", "options"}
    return found, [line for line in path.with_suffix(".md").read_text().splitlines()
                   if line.startswith("| ") and "---" not in line]


@pytest.mark.slow
def test_cache_depth(tmp_path):
    cache_depth.measure(cache_depth.parse(["--quick", "--depths", "2", "--output", str(tmp_path / "x.json")]))
    found, table = result(tmp_path, "x")
    (row,) = found["rows"]
    assert row["frozen"] == 2 and row["hits"] == 32 + 24 and len(table) == 2  # all but the first step's, after writing
    assert row["gain"][0] > 0 and found["pays_from"] in (2, None)


@pytest.mark.slow
def test_outcomes_that_are_kept_are_not_run_again(tmp_path, monkeypatch):
    options = ["--quick", "--epochs", "1", "--only", "none", "--keep", str(tmp_path / "runs"), "--outcomes",
               str(tmp_path / "kept.jsonl"), "--output", str(tmp_path / "x.json")]
    first = parts.measure(parts.parse(options))["outcomes"]
    monkeypatch.setattr(program, "run_one", lambda contender, base, stand: pytest.fail("runs again"))
    assert parts.measure(parts.parse(options))["outcomes"] == first
    with pytest.raises(pytest.fail.Exception, match="runs again"):
        parts.measure(parts.parse([*options, "--seeds", "1"]))
    with pytest.raises(pytest.fail.Exception, match="runs again"):
        parts.measure(parts.parse([*options, "--dropout", "0.2"]))


@pytest.mark.slow
def test_parts_with_real_ranks(tmp_path):
    parts.measure(parts.parse(["--quick", "--processes", "--dropout", "0", "--epochs", "2", "--only", "none", "all",
                               PEER, "--output", str(tmp_path / "x.json")]))
    found, table = result(tmp_path, "x")
    assert [line["name"] for line in found["lines"]] == ["none", "all", PEER] and len(table) == 4
    losses = {one["name"]: one["losses"] for one in found["outcomes"]}
    assert losses[PEER] == pytest.approx(losses["none"], rel=1e-10)
    assert all(one["process_seconds"] > one["wall_seconds"] > 0 for one in found["outcomes"])
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_a_contender_that_fails_is_told_with_its_output(tmp_path):
    base = task_run("quick", tmp_path / "data", epochs=1)
    (none,) = named(contenders(base), ["none"])
    (tmp_path / "bad.tsv").write_text("label\tsentence\n1\n")  # an error that a look at the header does not find
    base = replace(base, data=replace(base.data, train=str(tmp_path / "bad.tsv")))
    with pytest.raises(ContenderFailed, match=r"(?s)seed0-none ended with code .*bad\.tsv"):
        run_one(none, base, Stand(folder=tmp_path))
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("measured", [alpha, microbatches, pareto, two_ranks])
def test_programs(tmp_path, measured):
    measured.measure(measured.parse(["--quick", "--output", str(tmp_path / "x.json")]))
    found, table = result(tmp_path, "x")
    match measured.__name__.rpartition(".")[2]:
        case "alpha":
            assert [line["name"] for line in found["lines"]] == ["none", "alpha 1/3", "alpha 1/2"] and len(table) == 4
        case "microbatches":
            assert {(row["pipe"], row["microbatches"]) for row in found["rows"]} == {
                (4, 4), (4, 8), (2, 2), (2, 4), (1, 1), (1, 2)} and set(found["best"]) == {"4", "2", "1"}
        case "pareto":
            points = {one["name"]: len(one["curve"]) for one in found["outcomes"]}
            assert len(points) == 19 == len(table) - 1
            assert all(count == {"short": 2, "shorter": 1}.get(name.rpartition("-")[2], 3)
                       for name, count in points.items())
            assert found["claim"].endswith("Seeds: 1, of at least 10 that a claim needs.")
        case "two_ranks":
            assert [line["name"] for line in found["lines"]] == ["none", "all"]
            assert len(found["simulated"]) == 4 and len(table) == 3 + 1 + 4 * 6
