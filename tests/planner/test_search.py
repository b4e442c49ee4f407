"""Searches find the best of all plans that fit, with the numbers of `check`, and report impossible requests."""

import json
import re
import sys
from dataclasses import replace
from functools import cache

import pytest

from ranvier.cli import check
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, MeshSettings, Pipeline, Run, Transformer
from ranvier.cost.blocks import BlockCost
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.memory import PROCESS_BYTES
from ranvier.errors import ConfigError
from ranvier.mesh import Mesh
from ranvier.plan import block_costs as costs_module
from ranvier.plan.block_costs import block_costs
from ranvier.planner import candidates, report, trial
from ranvier.planner import search as search_module
from ranvier.planner import work as work_module
from ranvier.planner.candidates import SEARCHED, _microbatches, in_flight_variants, predict, variants
from ranvier.planner.count import laid_out
from ranvier.planner.problems import problems
from ranvier.planner.run_cost import run_cost
from ranvier.planner.search import search
from ranvier.planner.work import Work
from tests.errors import raises

TINY = ResolvedRun(model=Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=32),
           batch=Batch(global_size=16, microbatch_size=2))


@cache
def plan_for_two():
    """Plans that differ in their microbatches, and little in their times."""
    return search(replace(TINY, mesh=Mesh(pipe=2)), load_cluster("laptop"), 2, ("microbatch",))


def gpt(name, **changes):
    run = read.merge([read.load(name)[1]]).run
    return replace(run, **changes)


@pytest.mark.parametrize(("mesh", "size"), [(Mesh(), 3), (Mesh(pipe=2), 4), (Mesh(row=2, col=2), 4),
                                            pytest.param(Mesh(pipe=2, col=2), 5, marks=pytest.mark.slow)], ids=str)
def test_scaled_work_is_counted_work(mesh, size):
    """Counted for small microbatches and scaled to all others; bytes and FLOPs are exact."""
    run = replace(TINY, mesh=mesh, batch=Batch(global_size=20, microbatch_size=size))
    table, _ = laid_out(run)
    found, counted = ([replace(block, kernels=(), repeated=replace(block.repeated, kernels=())) for block in blocks]
                      for blocks in (Work().blocks(run), table.costs))
    assert found == counted
    stages = Work().stages(run)
    assert [tuple(block.name for block in blocks) for blocks in stages] == [row.blocks for row in table.rows]
    assert all(isinstance(block, BlockCost) for blocks in stages for block in blocks)


@pytest.mark.parametrize("mesh", [Mesh(pipe=3), Mesh(row=2)], ids=str)
def test_scaled_kernels_take_as_long_as_counted_ones(mesh):
    """So the plan cuts stages as the engine does; norms, biases and tables of positions do not grow."""
    run = replace(TINY, mesh=mesh, batch=Batch(global_size=24, microbatch_size=24))
    table, _ = laid_out(run)
    assert [block.weight("cuda") for block in Work().blocks(run)] == [block.weight("cuda") for block in table.costs]


def test_meshes_that_divide_no_norm_of_keys_are_no_candidates():
    """A norm over all heads of keys, with fewer heads than columns, is refused before the model is split."""
    model = Transformer(family="llama", num_layers=1, hidden=32, heads=8, kv_heads=2, head_dim=4, vocab=300,
                        sequence=16, qk_norm="all")
    run = replace(TINY, model=model)
    found = {candidate.mesh.col for candidate in variants(run, load_cluster("h100"), 4)}
    assert found == {1, 2}
    for cols in (2, 4):
        found = problems(tried := replace(run, mesh=Mesh(col=cols)))
        assert [(one.code, one.where) for one in found] == [("mesh-does-not-divide", "mesh.col")] * (cols == 4)
    with raises("layer-not-divisible"):
        laid_out(tried)


def test_limits_above_a_steps_microbatches_are_tried():
    """The limit decides which action is due first, so these limits give other orders of four microbatches."""
    run = replace(TINY, mesh=Mesh(pipe=3), batch=Batch(global_size=16, microbatch_size=4))
    assert run.num_microbatches == 4
    assert [one.pipeline.in_flight for one in in_flight_variants(run)] == [6, 9]


def test_other_searches_in_this_process_count_no_block_again(monkeypatch):
    """Except if anything differs that affects what a rank computes."""
    counted = []
    monkeypatch.setattr(costs_module, "_known", costs_module.Known(64))
    monkeypatch.setattr(work_module, "block_costs", lambda *args: counted.append(args) or block_costs(*args))
    small = replace(TINY, model=replace(TINY.model, num_layers=1), batch=Batch(global_size=4, microbatch_size=1))
    others = [replace(small, mesh=Mesh(col=2)), replace(small, mesh=Mesh(row=2)), replace(small, precision="bf16"),
              replace(small, launch=replace(small.launch, device="cuda")),
              replace(small, batch=Batch(global_size=4, microbatch_size=2)),
              replace(small, mesh=Mesh(col=2), tensor=replace(small.tensor, scheme="megatron"))]
    found = [Work().blocks(run) for run in (small, *others)]
    trained = Work().blocks(small, frozen=1)
    assert len(counted) == len(found) + 1 and trained != found[0]
    assert [Work().blocks(run) for run in (small, *others)] == found and len(counted) == len(found) + 1
    assert Work().blocks(replace(small, mesh=Mesh(pipe=3, data=2))) == found[0] and len(counted) == len(found) + 1


@pytest.mark.slow
def test_a_faster_network_has_no_slower_plan():
    """Meshes whose gradients take the same time gain unequally from smaller chunks, so the fastest with usual chunks
    need not be the fastest."""
    h100, work, seconds = load_cluster("h100"), Work(), []
    fp32 = replace(h100.device.rates["fp32"], peak_flops=33e12)
    device = replace(h100.device, memory_bandwidth=2.5e12, rates={"fp32": fp32})
    run = Run(model=Transformer(num_layers=2, hidden=128, heads=4, vocab=32000, sequence=128),
              mesh=MeshSettings(data="auto", pipe=1, row=1, col="auto"), batch=Batch(global_size=64))
    for faster in (0.7, 0.8, 1.2):
        cluster = replace(h100, devices_per_node=6, device=device, inside=replace(h100.inside, bandwidth=faster * 22e9),
                          between=replace(h100.between, bandwidth=faster * 13e9))
        seconds.append(search(run, cluster, 8, ("mesh", "microbatch", "scheme", "chunks"),
                              work=work).best[0].cost.seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("bandwidth", "shard"), [(50e9, False), (10e9, True)])
def test_optimizer_states_are_whole_where_that_is_faster(bandwidth, shard):
    """Parameters that other replicas update must arrive before the next step; chunks are tuned for both layouts."""
    h100 = load_cluster("h100")
    cluster = replace(h100, devices_per_node=1, between=replace(h100.between, bandwidth=bandwidth))
    run = Run(model=Transformer(num_layers=2, hidden=128, heads=4, vocab=32000, sequence=128),
              mesh=Mesh(data=8), batch=Batch(global_size=64, microbatch_size=8))
    whole = search(run, cluster, 8, ("chunks",)).best[0].cost.seconds
    best = search(run, cluster, 8, ("chunks", "shard")).best[0]
    assert best.run.optim.shard is shard and best.cost.seconds <= whole


def test_candidates_are_all_meshes_and_all_of_them_can_be():
    found = list(variants(TINY, load_cluster("h100"), 8))
    assert {run.mesh.shape for run in found} >= {(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 2, 4), (2, 2, 1, 2)}
    assert len({(run.mesh, run.batch.microbatch_size, run.tensor) for run in found}) == len(found)
    schemes = {shape: {report.scheme(run) for run in found if run.mesh.shape == shape} for shape in (
        (8, 1, 1, 1), (2, 1, 4, 1), (2, 1, 1, 4), (2, 1, 2, 2))}
    assert schemes == {(8, 1, 1, 1): {""}, (2, 1, 4, 1): {"stationary"}, (2, 1, 1, 4): {
        "stationary", "stationary by sequence", "megatron", "megatron by sequence"}, (2, 1, 2, 2): {
        "stationary", "stationary by sequence", "summa"}}
    assert all(run.mesh.size == 8 and not problems(run) for run in found)
    only = list(variants(replace(TINY, mesh=Mesh(pipe=2)), load_cluster("h100"), 2, ("microbatch",)))
    assert {run.mesh for run in only} == {Mesh(pipe=2)}
    assert {run.batch.microbatch_size for run in only} == {1, 2, 4, 8, 16}


@pytest.mark.slow
def test_the_plan_is_the_fastest_of_all_that_fit():
    cluster = load_cluster("h100")
    plan = search(TINY, cluster, 4)
    seconds = [found.cost.seconds for found in plan.best]
    assert seconds[0] == min(seconds) and all(found.fits and found.memory for found in plan.best)
    work = Work()
    everything = [run_cost(run, cluster, work.stages(run)).seconds for run in variants(
        replace(TINY, launch=replace(TINY.launch, device="cuda")), cluster, 4)]
    assert plan.considered == len(everything) > len(plan.best) and seconds[0] <= min(everything)


@pytest.mark.slow
def test_what_saves_memory_waits_for_its_turn():
    """With little memory the plan is the fastest of all variants that fit, each predicted separately."""
    cluster = load_cluster("h100")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=1_504_000_000))
    searched = ("microbatch", "recompute", "offload")
    run = replace(TINY, mesh=Mesh(pipe=2))
    plan = search(run, small, 2, searched)
    every = [predict(replace(run, batch=replace(run.batch, microbatch_size=size), memory=replace(
        run.memory, recompute=checkpoint), optim=replace(run.optim, offload=offload)), small)
        for size in (1, 2, 4, 8, 16) for checkpoint in ("none", "auto") for offload in ("none", "stream", "host")]
    fitting = [found.cost.seconds for found in every if found.fits]
    assert 0 < len(fitting) < len(every)
    assert plan.best[0].cost.seconds == pytest.approx(min(fitting), rel=1e-3)
    assert plan.best[0].run.optim.offload != "none" or plan.best[0].run.memory.recompute != "none"


@pytest.mark.parametrize(("cluster", "mesh", "settings"), [
    ("laptop", Mesh(pipe=2, data=2), {}),
    pytest.param("h100", Mesh(pipe=3, col=2), {"checkpoint": "auto"}, marks=pytest.mark.slow),
    pytest.param("h100", Mesh(pipe=2, row=2), {"offload": "stream"}, marks=pytest.mark.slow),
    ("summit", Mesh(data=4), {"shard": True}),
    pytest.param("h100", Mesh(pipe=6), {"checkpoint": 1}, marks=pytest.mark.slow)], ids=str)
def test_memory_is_what_check_says(cluster, mesh, settings):
    run = replace(TINY, mesh=mesh, memory=replace(TINY.memory, recompute=settings.get("checkpoint", "none")),
                  optim=replace(TINY.optim, offload=settings.get("offload", "none"), shard="shard" in settings))
    work = Work()
    predict(replace(run, batch=replace(run.batch, microbatch_size=4)), load_cluster(cluster), work)  # known blocks
    found = predict(run, load_cluster(cluster), work)
    assert found.memory == check.check(found.run, cluster=cluster).memory and found.fits


def test_ranks_of_a_node_share_its_memory():
    """Two nodes of three ranks have stages 0, 0, 1 and 1, 2, 2, so the node that needs more decides."""
    cluster = replace(load_cluster("laptop"), devices_per_node=3, nodes=2)
    run = replace(TINY, mesh=Mesh(pipe=3, col=2), pipeline=Pipeline(policy="1f1b"))  # needs the least
    memory = predict(run, cluster).memory
    needed = [PROCESS_BYTES + entry.device_bytes + entry.host_bytes for entry in memory]
    nodes = sorted([2 * needed[0] + needed[1], needed[1] + 2 * needed[2]])
    assert nodes[0] != nodes[1]
    for available, fits in ((nodes[1], True), (nodes[1] - 1, False), (nodes[0], False)):
        small = replace(cluster, host=replace(cluster.host, memory_bytes=available))
        assert predict(run, small).fits == fits


def test_a_mesh_that_may_not_change_has_as_many_ranks_as_are_planned_for():
    with raises("mesh-not-searched", 2, 4, where="mesh"):
        search(replace(TINY, mesh=Mesh(pipe=2)), load_cluster("h100"), 4, ("microbatch",))


def test_what_does_not_fit_is_dropped_with_its_reason(monkeypatch):
    """If no fast candidate fits, the search continues beyond the number of candidates that it usually predicts."""
    monkeypatch.setattr(search_module, "_LOOKED_AT", 2)
    cluster = load_cluster("h100")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=1_504_000_000))  # 4 MB are left
    plan = search(TINY, small, 2, ("mesh", "microbatch", "recompute", "offload"))
    assert len(plan.dropped) > 2
    assert plan.dropped and all(re.match(r"memory of the device is too small: a rank of stage \d needs .* MiB|"
                                         r"a rank needs at least [\d,]+ MiB of its device, and there are \d+$",
                                         found.reason) for found in plan.dropped)
    assert all(found.memory for found in plan.dropped[:3]), "predicted in full"
    assert max(report.device_bytes(found) for found in plan.best) <= 4_000_000
    assert any("Memory is a bottleneck, too" in line for line in report.explanation(plan))


@pytest.mark.parametrize(("bandwidth", "flops", "says"), [
    (1e6, 989e12, "The bottleneck is the link between stages: a microbatch's activations take longer on it than"),
    (450e9, 1e9, "After computing, the bottleneck is the bubble: 2 stages wait")])
def test_the_bottleneck_between_stages(bandwidth, flops, says):
    cluster = load_cluster("h100")
    cluster = replace(cluster, inside=replace(cluster.inside, bandwidth=bandwidth), device=replace(
        cluster.device, rates={"fp32": replace(cluster.device.rates["fp32"], peak_flops=flops)}))
    run = replace(TINY, mesh=Mesh(pipe=2), batch=Batch(global_size=4, microbatch_size=2))
    assert says in " ".join(report.explanation(search(run, cluster, 2, ("in-flight",))))


def test_what_is_asked_for_in_vain(tmp_path):
    with raises("ranks-above-cluster", 1, "H200", 2):
        search(TINY, load_cluster("h200"), 2)
    with raises("precision-without-rate", "fp16"):
        search(replace(TINY, precision="bf16"), load_cluster("frontera"), 2)


def test_chunks_are_large_where_each_is_dear():
    """TINY has 0.2 million parameters: with buckets of 2048 and one bucket a chunk, a hundred chunks."""
    cluster = replace(load_cluster("h100"), chunk_seconds=1.0)
    run = replace(TINY, mesh=Mesh(data=4), optim=replace(TINY.optim, bucket_size=2048, chunk_buckets=1))
    best = search(run, cluster, 4, ("chunks",)).best[0]
    assert (best.run.optim.bucket_size, best.run.optim.chunk_buckets) == (8192, 16)
    assert best.cost.seconds < 0.1 * predict(run, cluster).cost.seconds
    assert search(run, cluster, 4, ("microbatch",)).best[0].run.optim.bucket_size == 2048


def test_chunks_for_which_memory_makes_the_schedule_slower_are_left(monkeypatch):
    cluster = replace(load_cluster("h100"), chunk_seconds=1.0)
    run = replace(TINY, mesh=Mesh(data=4), optim=replace(TINY.optim, bucket_size=2048, chunk_buckets=1))
    within = candidates.with_memory

    def slower(found, *rest, **options):
        found = within(found, *rest, **options)
        larger = found.run.optim.chunk_buckets > 1
        return replace(found, cost=replace(found.cost, seconds=1e6)) if larger else found

    monkeypatch.setattr(candidates, "with_memory", slower)
    best = search(run, cluster, 4, ("chunks",)).best[0]
    assert best.run.optim.chunk_buckets == 1 and best.cost.seconds < 1e6


@pytest.mark.slow
def test_where_cores_are_shared_alike_plans_are_ordered_by_what_waits(monkeypatch):
    """Replicas come before stages that are slightly faster; if ranks have their own devices, the fastest is first."""
    def together(found):
        return found.run.mesh.pipe * found.run.mesh.stage_size

    laptop = load_cluster("laptop")
    laptop = replace(laptop, device=replace(laptop.device, cores=2))
    run = replace(TINY, precision="fp32", launch=replace(TINY.launch, device="cpu"))
    for cluster in (laptop, load_cluster("h100")):
        for alike in (1.0, 100.0):
            monkeypatch.setattr(search_module, "_ALIKE", alike)
            first, *others = search(run, cluster, 4, ("mesh", "microbatch")).best
            if alike == 1.0 or cluster is not laptop:
                assert first.cost.seconds <= min(found.cost.seconds for found in others)
            else:
                assert together(first) == min(map(together, others)) and len(set(map(together, others))) > 1


def larger_cluster_in(text):
    """Devices, nodes and mesh that the error suggests."""
    words = re.search(r"It fits ([\d,]+) devices \(([\d,]+) nodes\) as data (\d+) x pipe (\d+) x col (\d+), with", text)
    devices, nodes, *shape = (int(word.replace(",", "")) for word in words.groups())
    return devices, nodes, Mesh(**dict(zip(("data", "pipe", "col"), shape, strict=True)))


@pytest.mark.slow
def test_a_model_that_is_far_too_large_is_told_what_would_work():
    run = gpt("gpt-100b", mesh=Mesh())
    with pytest.raises(ConfigError) as caught:
        search(replace(run, precision="bf16", batch=replace(run.batch, global_size=64)), load_cluster("laptop"), 8)
    text = str(caught.value)
    assert re.search(r"model: does not fit 8 devices of Laptop in any of \d+ configurations; the one that needs least "
                     r"\(.*\): memory of the machine is too small: .* MiB", text)
    words = re.search(r"With --model.num-layers (\d+) --model.hidden (\d+) --model.heads (\d+) it fits here", text)
    layers, hidden, heads = map(int, words.groups())
    smaller = replace(run, precision="bf16", batch=replace(run.batch, global_size=64), model=replace(
        run.model, num_layers=layers, hidden=hidden, heads=heads))
    assert search(smaller, load_cluster("laptop"), 8).best[0].fits
    devices, nodes, mesh = larger_cluster_in(text)
    assert mesh.size == devices < 5000 and nodes == -(-devices // 8)
    sparing = replace(run, precision="bf16", mesh=mesh, batch=replace(run.batch, global_size=64, microbatch_size=1),
                      memory=replace(run.memory, recompute="auto"), optim=replace(run.optim, offload="none"),
                      pipeline=replace(run.pipeline, defer_bytes=0))
    assert predict(resolve(sparing), replace(load_cluster("laptop"), nodes=nodes)).fits


@pytest.mark.slow
def test_a_model_that_is_too_large_is_told_what_would_work():
    cluster = load_cluster("h100")
    small = replace(cluster, nodes=4, device=replace(cluster.device, memory_bytes=1_500_600_000))  # 0.6 MB are left
    with pytest.raises(ConfigError) as caught:
        search(TINY, small, 2)
    text = str(caught.value)
    assert re.search(r"model: does not fit 2 devices of H100 in any of \d+ configurations; the one that needs least "
                     r"\(.*\): memory of the device is too small: .* MiB", text)
    assert "it fits here, with microbatches of 1 and all that saves memory." in text
    devices, nodes, mesh = larger_cluster_in(text)
    assert mesh.size == devices > 2 and nodes == -(-devices // 8)
    assert search(TINY, replace(small, nodes=nodes), devices, SEARCHED).best[0].fits
    flags = {name.replace("-", "_"): int(size) for name, size in re.findall(r"--model.([a-z-]+) (\d+)", text)}
    assert set(flags) == {"num_layers", "hidden", "heads"} and flags["hidden"] < 64
    assert search(replace(TINY, model=replace(TINY.model, **flags)), small, 2).best[0].fits


def test_what_would_fit_is_named_where_it_was_not_looked_for():
    cluster = load_cluster("h100")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=1_503_000_000))  # 3 MB are left
    run = replace(TINY, batch=replace(TINY.batch, microbatch_size=4), mesh=Mesh(data=4))
    text = (r"the one that needs least \(data 4 .*\): memory of the device is too small: .*\. "
            r"It would fit as data 1 x pipe 4 x row 1 x col 1, microbatch 1")
    with pytest.raises(ConfigError, match=text):
        search(run, small, 4, ("microbatch",))


@pytest.mark.slow
def test_auto_where_nothing_fits():
    cluster = load_cluster("h100")
    small = replace(cluster, nodes=4, device=replace(cluster.device, memory_bytes=1_500_600_000))
    run = Run(model=TINY.model, precision=TINY.precision, mesh=MeshSettings(data="auto"),
              batch=Batch(global_size=TINY.batch.global_size, microbatch_size="auto"))
    with raises("nothing-fits", 2):
        search(run, small, 2, ("mesh", "microbatch"))


# --- the command -----------------------------------------------------------------------------------------------------


def command(capsys, *words):
    code = run_command(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.slow
def test_the_command_plans_and_writes_a_run_that_can_be(capsys, tmp_path):
    code, out, err = command(capsys, "plan", "gpt-tiny", "--cluster", "laptop", "--out", str(tmp_path / "best.toml"),
                             "--explain")
    assert code == 0, err
    assert "gpt-tiny on 4 of the 8 devices of Laptop" in out and "takes" in out
    assert "pipeline.memory" not in out, "the best mesh has one stage"
    assert re.search(r"MFU .*\n1 ", out)
    run = read.merge([read.load(str(tmp_path / "best.toml"))[1]]).run
    assert run.mesh.size == 4 and not check.check(run, 4).problems
    assert f"ranvier check {tmp_path / 'best.toml'} --cluster laptop" in out


def test_the_run_file_of_a_plan_says_what_differs_from_the_defaults_and_is_the_same_run(capsys, tmp_path):
    """Also if the user's value is the default and the preset has another; every setting in it has an effect."""
    path = tmp_path / "best.toml"
    code, out, err = command(capsys, "plan", "smollm2-135m", "--cluster", "h100", "--ranks", "2",
                             "--model.num-layers", "2", "--model.vocab",
                             str(read.settings()["model.vocab"].default), "--out", str(path), "--json")
    assert code == 0, err
    merged = read.merge([read.load(str(path))[1]])
    best = json.loads(out)["plans"][0]
    assert merged.run.model.vocab == read.settings()["model.vocab"].default
    assert merged.run.mesh.document() == best["mesh"] and merged.run.model.preset == "smollm2-135m"
    assert merged.run.batch.microbatch_size == best["microbatch_size"]
    report = check.check(merged.run, 2, chosen=merged.chosen, cluster="h100")
    assert not report.problems and not [one for one in report.warnings if "has no effect" in str(one)]
    assert len(path.read_text().splitlines()) < 50


def test_a_plan_chooses_the_number_format_where_nobody_did(capsys):
    """The output says so, and how to keep the format; with `--search` only the named settings change."""
    flags = ("plan", "gpt-tiny", "--cluster", "h100", "--ranks", "1")
    said = "The plan uses bf16, in which this device computes faster"
    out = command(capsys, *flags)[1]
    assert "batch 32 of 128 tokens, bf16\n" in out and said in out and "--precision fp32" in out
    for chosen in ("bf16", "fp32"):
        out = command(capsys, *flags, "--precision", chosen)[1]
        assert f"batch 32 of 128 tokens, {chosen}" in out and said not in out
    assert "batch 32 of 128 tokens, fp32 (faster here with --precision bf16)" in command(
        capsys, *flags, "--search", "mesh")[1]
    assert "batch 32 of 128 tokens\n" in command(capsys, *flags, "--search", "mesh,precision")[1]
    out = command(capsys, "plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "1", "--json")[1]
    assert json.loads(out)["plans"][0]["precision"] == "fp32", "bf16 is no faster here"


def test_what_is_measured_orders_the_plan(monkeypatch):
    """The third plan by prediction is the fastest of the three measured; the others' predictions are corrected."""
    plan = plan_for_two()
    real = {id(found.run): factor * found.cost.seconds
            for found, factor in zip(plan.best, (9.0, 6.0, 5.0), strict=False)}
    monkeypatch.setattr(trial, "step_seconds", lambda run, folder: real[id(run)])
    after = trial.measure_plan(plan, 3)
    assert after.measured_over_predicted == pytest.approx(6.0)
    expected = [found.expected_seconds(after.measured_over_predicted) for found in after.best]
    assert expected == sorted(expected) and after.best[0] == replace(
        plan.best[2], measured_seconds=real[id(plan.best[2].run)])
    assert "s measured" in report.table(after).header
    said = " ".join(report.explanation(after))
    measured = report.four_digits(after.best[0].measured_seconds)
    assert f"takes {measured} s per step" in said and "% slower." in said and "-" not in (
        said.partition("Next is ")[2].partition("% slower")[0].rpartition(", ")[2])
    assert report.document(after, "x")["plans"][0]["measured_seconds"] == after.best[0].measured_seconds


def test_the_one_that_was_measured_stays_first(monkeypatch):
    """Whatever the predictions of the others, which were not measured."""
    plan = plan_for_two()
    plan = replace(plan, best=(plan.best[1], plan.best[0], *plan.best[2:]))
    monkeypatch.setattr(trial, "step_seconds", lambda run, folder: 1.0)
    after = trial.measure_plan(plan, 1)
    assert after.best[0].run == plan.best[0].run and after.best[0].measured_seconds == 1.0
    assert re.search(r"Next is .* \d+\.\d% faster by the prediction, but it was not measured\.", " ".join(
        report.explanation(after)))


@pytest.mark.slow
def test_the_command_measures(capsys):
    code, out, err = command(capsys, "plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "1", "--measure", "1",
                             "--model.num-layers", "1", "--model.hidden", "32", "--search", "mesh,microbatch")
    assert code == 0, err
    assert "s per step predicted" in err and re.search(r"Measured steps take \d+\.\d\d times the predicted time", out)


def test_what_cannot_be_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "_SECONDS", 0.01)
    with raises("trial-failed", 10, 0):
        trial.step_seconds(TINY, tmp_path / "slow")
    monkeypatch.setattr(trial, "_SECONDS", 60.0)
    says = "import sys; sys.exit('more before it\\nlaunch.device: is not here')"
    monkeypatch.setattr(trial.child, "python", lambda *words: [sys.executable, "-c", says])
    with raises("trial-failed", "launch.device: is not here") as found:
        trial.step_seconds(TINY, tmp_path / "none")
    assert "more before it" not in str(found.value)


@pytest.mark.slow
def test_what_the_run_itself_refuses_cannot_be_measured(tmp_path):
    with raises("trial-failed", "launch.device"):
        trial.step_seconds(replace(TINY, launch=replace(TINY.launch, device="cuda")), tmp_path / "none")


@pytest.mark.slow
def test_the_command_prints_json(capsys):
    code, out, _ = command(capsys, "plan", "gpt-tiny", "--cluster", "h100", "--ranks", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["ranks"] == 2 and found["plans"][0]["reason"] == ""
    assert sum(found["plans"][0]["shares"].values()) == pytest.approx(1.0)
    steps = [plan["step_seconds"] for plan in found["plans"]]
    assert steps[0] == min(steps) and found["plans"][0]["device_bytes"] > 0


def test_memory_against_speed_of_the_best_plan(capsys, tmp_path):
    """The same table as `check` shows for the written run file."""
    words = ["gpt-tiny", "--mesh.data", "1", "--mesh.pipe", "4", "--pipeline.memory", "1.5"]
    code, out, _ = command(capsys, "plan", *words, "--cluster", "h100", "--search", "recompute", "--explain",
                           "--out", str(tmp_path / "best.toml"))
    assert code == 0
    shown = out[out.index("\nschedule: "):out.index("\nwritten to ")]
    assert re.search(r"pipeline\.memory +1 +1\.1 +1\.25 +1\.5 +2\n", shown)
    code, out, _ = command(capsys, "check", str(tmp_path / "best.toml"), "--ranks", "4", "--cluster", "h100",
                           "--all")
    assert shown.strip() in out


@pytest.mark.parametrize(("words", "text"), [
    (["plan", "gpt-tiny", "--cluster", "nowhere"], "cluster: is neither a shipped cluster nor a .toml file"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--search", "colour"],
     "--search: cannot be searched (got 'colour'). Name some of: mesh, microbatch"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "9"],
     "ranks: is more than the 8 devices of Laptop (got 9)"),
    (["plan", "gpt-tiny", "--cluster", "h100", "--ranks", "37"], "mesh: cannot be made of 37 ranks: of their divisors "
     "none suits the model's 10 blocks, its 4 heads and a batch of 32 (got '37 ranks'). 36 and 38 ranks would do."),
    (["plan", "gpt-tiny", "--cluster", "summit", "--precision", "bf16"], "precision: has no rate on V100 16 GB"),
    (["plan", "gpt-tiny", "--cluster", "h100", "--elastic.freeze", "untrained"],
     "elastic.freeze: freezes no layer: the first one has trainable parameters"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--search", ","], "--search: cannot be searched"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--batch.global-size", "none"], "batch.global-size: must be"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--out", "/no/such/folder/x.toml"],
     "--out: cannot be written: no such folder"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--out", "best"],
     "--out: must end in .toml (got 'best'). Name it best.toml."),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--mtbf-hours", "inf"], "--mtbf-hours: must be a finite number"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--jitter", "nan"], "--jitter: must be a finite number"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--search", "recompute", "--mesh.pipe", "1", "--mesh.data", "4",
      "--batch.global-size", "8", "--batch.microbatch-size", "4"], "batch.microbatch-size: "),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--search", "recompute", "--pipeline.boundaries", "99"],
     "pipeline.boundaries: "),
    (["simulate", "gpt-tiny", "--cluster", "h200"], "mesh: needs 4 devices, and H200 has 1"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--slow", "0:9:2"],
     "--slow: must be REPLICA:STAGE:FACTOR, with an existing replica and stage (got '0:9:2')"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--draw", "/no/such/folder/x.png"],
     "--draw: cannot be written"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--draw", "."], "--draw: cannot be written: it is a folder"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--model.heads", "3"], "model.heads: does not divide"),
    (["simulate", "gpt-tiny", "--cluster", "summit", "--precision", "bf16"],
     "precision: has no rate on V100 16 GB (got 'bf16'). Set --precision fp16"),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--mesh.data", "auto"], "mesh.data: needs to know how many ranks"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--model.hidden", "4000000000000", "--model.heads", "4"],
     "model: cannot be laid out: "),
    (["simulate", "gpt-tiny", "--cluster", "laptop", "--model.hidden", "4000000000000", "--model.heads", "4"],
     "model: cannot be laid out: "),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "2", "--search", "microbatch"],
     "mesh: has 4 ranks, not 2, and may not change"),
    (["doctor", "--out", "x.toml"], "--out: has no effect without --measure (got 'x.toml'). Add --measure."),
    (["doctor", "--measure", "--out", "/no/such/folder/x.toml"], "--out: cannot be written"),
    (["doctor", "--measure", "--out", "here"], "--out: must end in .toml"),
    (["doctor", "--measure", "--out", "."], "--out: cannot be written: it is a folder"),
    (["plan", "gpt-tiny", "--cluster", "laptop", "--out", ""], "--out: cannot be written: it is a folder"),
])
def test_what_the_commands_refuse(capsys, words, text):
    code, _, err = command(capsys, *words)
    assert code == 2 and any(line.startswith(f"ranvier: error: {text}") for line in err.splitlines()), err


def test_the_command_simulates(capsys, tmp_path):
    code, out, err = command(capsys, "simulate", "gpt-tiny", "--cluster", "laptop", "--jitter", "0.2", "--mesh.data",
                             "4", "--mesh.pipe", "2", "--slow", "1:0:1.5", "--mtbf-hours", "1000", "--draw",
                             str(tmp_path / "x"), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["replicas"] == 4 and found["replicas_simulated"] == 4 and len(found["stages"]) == 2
    assert found["stages"][0]["actions"].startswith("F0 F1 ") and 0 < found["goodput"]["share"] <= 1
    assert 0 < found["bubble_fraction"] < 1 and len(picture := (tmp_path / "x").read_bytes()) > 20_000
    assert picture[1:4] == b"PNG", "a name without an ending stays as it is"
    code, out, _ = command(capsys, "simulate", "gpt-tiny", "--cluster", "laptop")
    assert code == 0 and "a step takes" in out and "stage 0: F0 " in out


def test_searched_settings_have_names():
    assert set(SEARCHED) == {"mesh", "microbatch", "in-flight", "recompute", "offload", "shard", "chunks",
                             "elastic", "scheme", "stages-per-rank"}


@pytest.mark.slow
def test_the_table_tells_apart_what_it_ranks():
    """It has columns only for settings that differ between its rows."""
    def headers(plan):
        return set(report.table(plan).header)

    searched = ("microbatch", "precision", "scheme")
    many = search(replace(TINY, mesh=Mesh(col=4)), load_cluster("h100"), 4, searched)
    assert {"precision", "scheme"} <= headers(many) and "s measured" not in headers(many)
    assert {"precision", "scheme", "deferred", "s the run"}.isdisjoint(
        headers(search(TINY, load_cluster("h100"), 1, ("mesh", "microbatch"))))
    described = [report.describe(found.run) for found in many.best]
    assert len(set(described)) == len(described)
    row = report.as_dict(many.best[0])
    assert row["defer_bytes"] == "auto" and row["sequence_sharding"] in (True, False)


def test_microbatches_of_a_batch_of_any_size():
    """No loop runs over all divisors of the batch."""
    def sizes(batch: int) -> list[int]:
        return _microbatches(Run(batch=Batch(global_size=batch)), Mesh(row=3))

    assert sizes(90) == [3, 6, 9, 12, 15, 18, 24, 30, 45, 48, 90]
    assert sizes((1 << 62) - 1) == [3, 6, 12, 24, 48, 96, 192]
