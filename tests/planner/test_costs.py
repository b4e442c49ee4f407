"""What a step costs: work is counted once, and the effects of frozen, tied, uneven and badly placed parts."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.tensor import exposed
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import (
    Batch,
    Data,
    Elastic,
    Guard,
    Launch,
    Memory,
    Optim,
    Pipeline,
    TensorParallel,
    Train,
    Transformer,
)
from ranvier.cost import transition
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.hardware import Link
from ranvier.cost.kernels import backward_of, weight_gradients_of
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.planner.candidates import predict
from ranvier.planner.count import laid_out
from ranvier.planner.elastic_plan import course, elastic_variants
from ranvier.planner.plan import simulation
from ranvier.planner.report import course_dict, course_lines
from ranvier.planner.run_cost import run_cost, run_pipeline
from ranvier.planner.search import search
from ranvier.planner.work import Work
from tests.covering import first
from tests.errors import raises

CLUSTER = load_cluster("h100")
WORK = Work()  # counted once for all tests
TINY = ResolvedRun(model=Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=32), precision="bf16",
           batch=Batch(global_size=16, microbatch_size=2))


def found(run, cluster=CLUSTER, frozen=0, **options):
    return run_cost(run, cluster, WORK.stages(run, frozen), **options)


def seconds_of(block):
    """Seconds of the forward, of the backward, and of weight gradients in fp32."""
    return [CLUSTER.device.seconds(kernels, "bf16") for kernels in (
        block.kernels, backward_of(block.kernels), weight_gradients_of(block.kernels, 4))]


def test_tied_parameters_are_reduced_and_updated_once():
    """GPT's head shares the embedding's weight: 512 x 64 numbers."""
    model = families.model_of(TINY)
    modules = model.build()
    whole = sum(parameter.numel() for parameter in modules.parameters())
    (blocks,) = WORK.stages(TINY)
    assert sum(block.num_owned for block in blocks) == whole - 512 * 64
    assert sum(block.num_trainable for block in blocks) == whole
    first, last = WORK.stages(replace(TINY, mesh=Mesh(pipe=2)))
    assert last[-1].num_trainable - last[-1].num_owned == first[0].num_trainable - 32 * 64 == 512 * 64


def test_what_every_second_layer_recomputes_is_counted_as_it_is():
    """Two of 3 layers are recomputed, two of 4, and on two stages with one layer each both."""
    def extra(layers, recompute, pipe):
        run = replace(TINY, mesh=Mesh(pipe=pipe), model=replace(TINY.model, num_layers=layers),
                      pipeline=Pipeline(boundaries=(3,) if pipe == 2 else None),
                      memory=replace(TINY.memory, recompute=recompute))
        cost = found(run, exact=False)
        return cost.hardware_flops - cost.model_flops

    for layers, pipe, share in ((3, 1, 2 / 3), (4, 1, 1 / 2), (2, 2, 1)):
        assert extra(layers, "alternate", pipe) == pytest.approx(share * extra(layers, 1, pipe))


def test_frozen_layers_in_front_have_no_backward():
    """With four equal layers, the head and the embedding: frozen blocks have no backward."""
    whole = found(TINY, exact=False).stages[0]
    for frozen in (1, 2, 4):
        stage = found(TINY, frozen=frozen, exact=False).stages[0]
        assert stage.forward_seconds == pytest.approx(whole.forward_seconds)
        blocks = WORK.blocks(TINY, frozen)
        begins = next(place for place, block in enumerate(blocks) if block.num_trainable)
        assert begins == 1 + 2 * frozen
        behind = [seconds_of(block) for block in blocks[begins:]]
        assert stage.backward_seconds + stage.weight_seconds == pytest.approx(sum(
            backward + weight for _, backward, weight in behind))
        assert stage.update_seconds < whole.update_seconds
    checkpointed = replace(TINY, memory=replace(TINY.memory, recompute=1))
    again = found(checkpointed, frozen=2, exact=False).stages[0]
    layer = sum(CLUSTER.device.seconds(kernels, "bf16") for attention, mlp in pairwise(WORK.blocks(TINY)[-5:-1])
                if mlp.name.endswith("mlp") for kernels in (attention.repeated_kernels, mlp.last_repeated_kernels))
    assert again.backward_seconds + again.weight_seconds == pytest.approx(
        found(TINY, frozen=2, exact=False).stages[0].microbatch_seconds - again.forward_seconds + layer)


def test_a_last_microbatch_that_is_smaller_takes_less():
    """12 sequences in microbatches of 8 are one and a half microbatches."""
    run = replace(TINY, batch=Batch(global_size=12, microbatch_size=8))
    stage = found(run, exact=False).stages[0].microbatch_seconds
    assert found(run, exact=False).pipeline_seconds == pytest.approx(1.5 * stage)


def test_replicas_wait_for_the_one_whose_stages_lie_on_two_nodes():
    """Six devices a node, four stages: the second replica's ranks are 4, 5 on one node and 6, 7 on the next."""
    cluster = replace(CLUSTER, devices_per_node=6, between=Link(bandwidth=1e9, latency_seconds=1e-3))
    run = replace(TINY, mesh=Mesh(pipe=4))
    edges = run_pipeline(run, cluster, WORK.stages(run)).edges
    assert set(edges.latency) == {CLUSTER.inside.latency_seconds}
    run = replace(TINY, mesh=Mesh(pipe=4, data=2))
    edges = run_pipeline(run, cluster, WORK.stages(run)).edges
    assert edges.latency == (CLUSTER.inside.latency_seconds, 1e-3, CLUSTER.inside.latency_seconds)


def test_ranks_that_share_cores_take_turns():
    laptop = load_cluster("laptop")
    laptop = replace(laptop, device=replace(laptop.device, cores=2))
    run = replace(TINY, precision="fp32", launch=replace(TINY.launch, device="cpu"))
    two, four = (found(replace(run, mesh=Mesh(data=data)), laptop) for data in (2, 4))
    assert two.cores_seconds == pytest.approx(two.pipeline_seconds) and four.cores_seconds == four.pipeline_seconds
    assert four.pipeline_seconds == pytest.approx(two.pipeline_seconds, rel=0.01)
    assert four.update_seconds == pytest.approx(2 * two.update_seconds, rel=0.01)


def test_stages_on_several_nodes_wait_at_the_same_time():
    laptop = load_cluster("laptop")
    laptop = replace(laptop, devices_per_node=4, device=replace(laptop.device, cores=2, turn_seconds=1e-3))
    run = replace(TINY, mesh=Mesh(pipe=2, row=2, col=2), precision="fp32", launch=replace(TINY.launch, device="cpu"),
                  batch=Batch(global_size=16, microbatch_size=4))
    plain = replace(laptop, device=replace(laptop.device, turn_seconds=0.0))
    apart, together = (found(run, replace(cluster, nodes=2)).cores_seconds - found(
        run, replace(plain, devices_per_node=cluster.devices_per_node, nodes=2)).cores_seconds
        for cluster in (laptop, replace(laptop, devices_per_node=8)))
    assert together == pytest.approx(2 * apart) and apart > 0


@pytest.mark.parametrize(("mesh", "count"), [
    (Mesh(row=2, col=2), 2 * 10 * (2 + 3) + 10 * 2),  # two axes, ten blocks; a layer's two blocks have 4 forward and 6
    (Mesh(pipe=2, col=2), 10 * (2 + 3 + 2)), (Mesh(data=2, col=2), 10 * (2 + 3 + 2)),  # backward, its norms 2 and 2
    (Mesh(data=2, row=2), 10 * (2 + 3)), (Mesh(pipe=4), 0)], ids=str)
def test_collectives_wait_for_ranks_that_are_not_running(mesh, count):
    """Collectives wait if ranks share cores; replicas wait at the same time."""
    laptop = load_cluster("laptop")
    run = replace(TINY, mesh=mesh, precision="fp32", batch=Batch(global_size=16 * mesh.data, microbatch_size=4),
                  launch=replace(TINY.launch, device="cpu"))
    for cores, expected in ((2, 4 * count * 1e-3), (4, 0.0)):
        plain, waits = (found(run, replace(laptop, device=replace(laptop.device, cores=cores, turn_seconds=seconds)))
                        for seconds in (0.0, 1e-3))
        assert waits.cores_seconds - plain.cores_seconds == pytest.approx(expected)


def test_norms_send_nothing_where_the_sequence_is_sharded():
    run = replace(TINY, mesh=Mesh(row=2, col=2), precision="fp32")
    hidden, sequence = (found(replace(run, tensor=TensorParallel(sequence_sharding=sharded)), load_cluster("laptop")
                              ).stages[0] for sharded in (False, True))
    assert sequence.exchange_seconds < hidden.exchange_seconds


def test_messages_travel_beside_products_where_devices_compute_meanwhile():
    """Llama's layers on eight columns by sequence: inside a node at least 30 % of their messages is hidden; on links so
    slow that products cannot hide the messages, most of them are exposed."""
    run = replace(TINY, mesh=Mesh(col=8), tensor=TensorParallel(sequence_sharding=True), launch=Launch(device="cuda"),
                  model=Transformer(family="llama", num_layers=1, hidden=4096, heads=32, vocab=512, sequence=2048))
    stage, slow = (found(run, cluster).stages[0] for cluster in (CLUSTER, replace(
        CLUSTER, inside=Link(bandwidth=1e9))))
    travelling = run_cost(run, CLUSTER, WORK.stages(run), as_published=True).stages[0]
    assert 0 < stage.exchange_seconds < 0.7 * travelling.exchange_seconds
    computing = stage.microbatch_seconds - stage.exchange_seconds
    assert slow.microbatch_seconds - slow.exchange_seconds == pytest.approx(computing)
    assert slow.microbatch_seconds > 2 * computing


def test_messages_that_are_hidden_slow_down_what_is_computed_beside_them():
    """Gathered weights of wide layers: the multiprocessors that copy are lost to products while the weights travel; if
    they travel longer than the products take, nothing more is lost."""
    run = replace(TINY, mesh=Mesh(row=8), launch=Launch(device="cuda"), batch=Batch(global_size=16, microbatch_size=16),
                  model=replace(TINY.model, num_layers=1, hidden=2048, sequence=1024))
    lost = [found(run, replace(CLUSTER, device=replace(CLUSTER.device, message_multiprocessors=count))
                  ).stages[0].exchange_seconds for count in (0, 16, 32)]
    assert lost[0] < lost[1] < lost[2]
    slow = [found(run, replace(CLUSTER, inside=Link(bandwidth=1e9), device=replace(
        CLUSTER.device, message_multiprocessors=count))).stages[0].exchange_seconds for count in (0, 16)]
    assert slow[1] == pytest.approx(slow[0], rel=0.01)


def test_gradients_are_summed_beside_the_last_backward_on_devices():
    """All but the last of 15 chunks are hidden while the backward runs, which they make slower."""
    run = replace(TINY, mesh=Mesh(data=8), launch=Launch(device="cuda"), optim=Optim(bucket_size=1 << 12),
                  guard=Guard(bad_step="none"))
    slow = replace(CLUSTER, inside=Link(bandwidth=1e8))
    kept = 1.0 - CLUSTER.device.message_share
    for cluster, longer in ((CLUSTER, False), (slow, True)):
        stage = found(run, cluster).stages[0]
        computing = stage.backward_seconds + stage.weight_seconds
        hidden = 14 / 15 * computing
        assert longer is (stage.reduction_seconds > 2 * computing)
        assert stage.after_seconds == pytest.approx(
            stage.reduction_seconds - kept * hidden + stage.update_seconds / 15)
    for other in (replace(run, optim=Optim()), run):  # one chunk; cores that copy
        stage = found(other, CLUSTER if other is not run else replace(
            CLUSTER, device=replace(CLUSTER.device, cores=8))).stages[0]
        assert stage.after_seconds >= stage.reduction_seconds > 0
    judged = replace(run, guard=Guard(bad_step="skip"), optim=replace(run.optim, shard=True))
    stage = found(judged, slow).stages[0]  # updates fit in during the gathers, which begin when all is summed
    assert stage.after_seconds == pytest.approx(
        stage.reduction_seconds - kept * hidden + stage.update_seconds / 15)


def test_products_that_are_all_recomputed_do_not_wait_behind_the_sums():
    """Also under a policy that defers: these blocks have nothing to defer."""
    run = replace(TINY, mesh=Mesh(data=2, pipe=2), launch=Launch(device="cuda"), memory=Memory(recompute=1),
                  optim=Optim(bucket_size=1 << 10))
    driven, fixed = (found(replace(run, pipeline=Pipeline(policy=policy)), CLUSTER).stages[0]
                     for policy in ("message-driven", "1f1b"))
    assert driven.weight_seconds == 0 and driven.after_seconds == fixed.after_seconds < fixed.reduction_seconds


@pytest.mark.parametrize(("placement", "turns"), [("v-shape", 1), ("interleaved", 4)])
def test_chunks_of_several_stages_are_complete_one_stage_after_the_other(placement, turns):
    """On slow links the backwards of two stages hide sums, or one and one more for each rank."""
    run = replace(TINY, mesh=Mesh(data=2, pipe=4), launch=Launch(device="cuda"), optim=Optim(bucket_size=1 << 10),
                  pipeline=Pipeline(stages_per_rank=2, placement=placement, defer_bytes=0))
    stage = found(run, replace(CLUSTER, inside=Link(bandwidth=1e6))).stages[0]
    hidden = (turns + 1) * (stage.backward_seconds + stage.weight_seconds) * (1.0 - CLUSTER.device.message_share)
    exposed = stage.after_seconds - stage.update_seconds
    assert stage.reduction_seconds - hidden <= exposed <= stage.reduction_seconds - 0.8 * hidden


@pytest.mark.parametrize(("policy", "per_rank", "count"), [
    ("message-driven", 2, 4), ("1f1b", 1, 2), ("message-driven", 1, 2)])
def test_stages_as_published_are_held_up_by_every_message(policy, per_rank, count):
    """All but AxoNN's stages: message-driven, with one stage on each rank."""
    run = replace(TINY, mesh=Mesh(pipe=2),
                  pipeline=Pipeline(stages_per_rank=per_rank, placement="interleaved", policy=policy))
    times, beside = (run_pipeline(run, CLUSTER, WORK.stages(run), as_published=as_published).times
                     for as_published in (True, False))
    held_up = [one.forward - other.forward for one, other in zip(times, beside, strict=True)]
    is_axonn = policy == "message-driven" and per_rank == 1
    assert [seconds > 0 for seconds in held_up] == [not is_axonn] * (count - 1) + [False]


@pytest.mark.parametrize(("sequences", "recompute", "deferred", "row"), first(
    [(1, "none", True, 2)], [
        (1, "none", False, 1), (4, "none", False, 1), (4, 1, False, 1), (1, "none", True, 1), (4, "none", True, 1),
        (1, "none", True, 2)]))
def test_a_layer_waits_for_messages_as_the_engine_does(sequences, recompute, deferred, row):
    """The waits are counted by running layers of a GPT on eight columns, or on two rows and four columns; attention
    hides nothing. Only products and bytes take time. A backward that defers is counted with its weight gradients; on
    rows one layer's sum is late, since the product after it is smaller."""
    device = replace(CLUSTER.device, multiprocessors=None, message_multiprocessors=0, operation_seconds=1e-12)
    cluster = replace(CLUSTER, device=device, collective_seconds=0.0, inside=replace(CLUSTER.inside, latency_seconds=0))
    hidden, scheme = 4096 * row, "megatron" if row == 1 else "stationary"
    case = exposed.Case(scheme=f"{scheme}-sequence", row=row, col=8 // row, sequences=sequences, sequence=4096,
                        hidden=hidden, recomputed=recompute == 1, deferred=deferred)
    waited = sum(one.waited_seconds for one in exposed.transfers(case, cluster)) / exposed.LAYERS
    run = replace(TINY, mesh=Mesh(row=row, col=8 // row), tensor=TensorParallel(scheme=scheme, sequence_sharding=True),
                  model=replace(TINY.model, num_layers=1, hidden=hidden, heads=32, sequence=4096,
                                attention_kernel="flash"), memory=Memory(recompute=recompute),
                  batch=Batch(global_size=sequences * row, microbatch_size=sequences * row),
                  launch=replace(TINY.launch, device="cuda"))

    def held_up(count):
        own = replace(run, model=replace(run.model, num_layers=count))
        (times,) = run_pipeline(own, cluster, WORK.stages(own)).times
        longer = times.longer_backward + (times.deferred_factor - 1.0) * times.weight
        return found(own, cluster).stages[0].exchange_seconds + deferred * longer

    assert held_up(2) - held_up(1) == pytest.approx(waited, rel=0.07)


def test_a_backward_that_defers_takes_as_long_with_its_weight_gradients_at_least():
    """This holds on all links; on CPU cores, and without a tensor mesh, it takes exactly as long."""
    run = replace(TINY, mesh=Mesh(pipe=2, row=2, col=2), launch=Launch(device="cuda"))
    for bandwidth in (1e12, 1e10, 1e8, 1e6):
        slow = replace(CLUSTER, inside=Link(bandwidth=bandwidth))
        for each, cluster in ((run, slow), (run, replace(slow, device=replace(slow.device, cores=8))),
                              (replace(run, mesh=Mesh(pipe=2)), slow)):
            times = run_pipeline(each, cluster, WORK.stages(each)).times
            longer = [one.longer_backward + (one.deferred_factor - 1.0) * one.weight for one in times]
            assert min(longer) >= 0.0 and (max(longer) > 0.0) is (each is run and cluster is slow)


def test_weights_that_stay_gathered_cost_messages_once():
    run = replace(TINY, mesh=Mesh(row=2), tensor=TensorParallel(scheme="stationary"))
    kept = replace(run, tensor=replace(run.tensor, keep_weights=True))
    slow = replace(CLUSTER, inside=Link(bandwidth=1e9))
    assert found(kept, slow).stages[0].exchange_seconds < found(run, slow).stages[0].exchange_seconds


def test_gradients_of_kept_weights_are_held_whole_and_summed_once():
    """Four layers' products need fp32 gradients, as for a bf16 model, if there are several microbatches."""
    for keeps, expected in ((False, 0), (True, 4 * 12 * 64 ** 2 * 4)):
        run = replace(TINY, mesh=Mesh(row=2), tensor=TensorParallel(keep_weights=keeps))
        several, one = (laid_out(replace(run, batch=Batch(global_size=size, microbatch_size=2)))[1][0]
                        for size in (16, 2))
        assert several.device["workspace"] - one.device["workspace"] == expected


def test_images_have_patches_instead_of_tokens():
    run = ResolvedRun(model=Transformer(num_layers=2, hidden=32, heads=2, image_size=28, patch_size=14, num_classes=10),
              data=Data(task="images", train="cifar10"), batch=Batch(global_size=8, microbatch_size=2))
    assert families.tokens_of(run) == 5 and found(run).tokens == 40


# --- elastic ---------------------------------------------------------------------------------------------------------


LARGE = replace(TINY, model=replace(TINY.model, hidden=2048, heads=16, sequence=1024, num_classes=2),
                batch=Batch(global_size=64, microbatch_size=2), data=Data(task="classification", train="sentiment"))


@pytest.fixture
def free_transitions(monkeypatch):
    """Transitions without cost."""
    monkeypatch.setattr(transition, "PRIOR_SECONDS", 1e-9)
    monkeypatch.setattr(transition, "PRIOR_BYTES_PER_SECOND", 1e15)


def elastic(run=TINY, times=1, **settings):
    """times: by how much the run is longer."""
    return replace(run, mesh=Mesh(pipe=4), train=Train(steps=100 * times), elastic=Elastic(
        freeze="manual", manual=(f"{20 * times}:2", f"{60 * times}:4"), **settings))


def test_the_course_of_a_run_that_freezes(free_transitions):
    periods = course(elastic(), CLUSTER, WORK).periods
    assert [(period.first_step, period.frozen) for period in periods if period.step_seconds] == [
        (0, 0), (20, 2), (60, 4)]
    assert sum(period.steps for period in periods) == 100
    seconds = [period.step_seconds for period in periods]
    assert seconds == sorted(seconds, reverse=True) and {period.mesh for period in periods} == {Mesh(pipe=4)}
    whole = course(elastic(), CLUSTER, WORK)
    assert json.loads(json.dumps(course_dict(whole)))["periods"][0]["mesh"]["pipe"] == 4
    assert whole.speedup > 1 and whole.seconds == sum(period.seconds for period in whole.periods)


def test_a_run_that_cannot_be_has_no_course():
    """Without data no mesh would be valid, and the present mesh would seem to be the best."""
    run = elastic(LARGE, auto_pipe=True, auto_dp=True)
    with raises("train-data-missing"):
        course(replace(run, data=replace(run.data, train=None)), CLUSTER, WORK)


def test_layers_that_are_frozen_from_the_start():
    run = elastic()
    run = replace(run, elastic=replace(run.elastic, manual=("0:2", "60:4")))
    periods = course(run, CLUSTER, WORK).periods
    assert [(period.first_step, period.steps, period.frozen) for period in periods] == [(0, 60, 2), (60, 40, 4)]


@pytest.mark.slow
def test_what_packs_takes_the_quickest_mesh_and_pays_for_the_way(monkeypatch):
    monkeypatch.setattr(transition, "PRIOR_SECONDS", 0.25)
    monkeypatch.setattr(transition, "PRIOR_BYTES_PER_SECOND", 1e12)
    periods = course(elastic(LARGE, auto_pipe=True, auto_dp=True), CLUSTER, WORK).periods
    assert periods[0].mesh == Mesh(pipe=4) and periods[-1].mesh.data > 1
    moved = [period.transition_seconds for period in periods]
    assert moved[0] == 0 and all(0.25 < seconds < 0.26 for seconds in moved[1:])  # another cut also moves blocks
    work = WORK
    runs = [replace(LARGE, mesh=mesh) for mesh in (Mesh(pipe=4), Mesh(data=2, pipe=2), Mesh(data=4))]
    others = [run_cost(run, CLUSTER, work.stages(run, periods[-1].frozen)).seconds for run in runs]
    assert min(others) <= periods[-1].step_seconds <= 1.1 * min(others), "another change would not pay"
    assert {period.mesh.data for period in course(elastic(LARGE, auto_pipe=True), CLUSTER, WORK).periods} == {1}


def test_a_batch_that_grows_takes_fewer_steps(free_transitions):
    """Every sample is used once an epoch; the policy is asked at the ends of epochs."""
    run = replace(LARGE, mesh=Mesh(pipe=4), data=replace(LARGE.data, train_samples=64 * 10), train=Train(epochs=5),
                  elastic=Elastic(freeze="cap", alpha=0.5, auto_pipe=True, auto_dp=True))
    keep, grow = (course(replace(run, elastic=replace(run.elastic, global_batch=how)), CLUSTER, WORK)
                  for how in ("keep", "grow"))
    for periods in (keep.periods, grow.periods):
        assert all(period.first_step == sum(before.steps for before in periods[:place])
                   for place, period in enumerate(periods))
        begun = [sum(before.steps * before.global_size for before in periods[:place]) for place in range(len(periods))]
        assert [at for at in begun if at % 640 >= periods[-1].global_size] == []
        assert 0 <= sum(period.steps * period.global_size for period in periods) - 5 * 640 < periods[-1].global_size
    assert {period.global_size for period in keep.periods} == {64}
    assert {period.global_size // period.mesh.data for period in grow.periods} == {64}
    assert any(f"data 4 x pipe 1, batch {grow.periods[-1].global_size}, " in line
               for line in course_lines(replace(predict(run, CLUSTER), course=grow)))
    assert grow.periods[-1].mesh.data > 1 and grow.periods[-1].steps < keep.periods[-1].steps


def test_a_mesh_that_does_not_pay_or_fit_is_not_taken():
    """As in the run, a transition must pay in the steps that are left, and must fit the memory."""
    packs = {"auto_pipe": True, "auto_dp": True}
    late = elastic(LARGE, **packs)
    late = replace(late, elastic=replace(late.elastic, manual=("99:4",)))
    assert {period.mesh for period in course(late, CLUSTER, WORK).periods} == {Mesh(pipe=4)}
    run = elastic(LARGE, times=1000, **packs)
    whole = course(run, CLUSTER, WORK).periods[-1].mesh
    needs = {mesh: max(entry.device_bytes for entry in WORK.memory(replace(run, mesh=mesh), 4))
             for mesh in (Mesh(pipe=4), whole)}
    assert whole == Mesh(data=4) and needs[Mesh(pipe=4)] < needs[whole]
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=needs[whole] - 1, reserved_bytes=0))
    assert course(run, small, WORK).periods[-1].mesh != whole


@pytest.mark.slow
def test_packing_makes_microbatches_smaller_and_takes_any_divisor(free_transitions):
    run = elastic(replace(LARGE, batch=Batch(global_size=16, microbatch_size=8)), auto_pipe=True, auto_dp=True)
    assert course(run, CLUSTER, WORK).periods[-1].mesh == Mesh(data=4)
    odd = replace(elastic(replace(LARGE, batch=Batch(global_size=96, microbatch_size=2)), auto_pipe=True, auto_dp=True),
                  mesh=Mesh(data=2, pipe=3))
    assert course(odd, CLUSTER, WORK).periods[-1].mesh.shape[:2] in {(3, 2), (6, 1)}


def test_the_norms_rule_leaves_the_last_layer():
    run = replace(LARGE, mesh=Mesh(pipe=2), data=replace(LARGE.data, train_samples=64 * 10), train=Train(epochs=9),
                  elastic=Elastic(freeze="gradient-norm", alpha=0.5))
    assert [period.frozen for period in course(run, CLUSTER, WORK).periods] == [0, 2, 3]
    cap = replace(run, elastic=replace(run.elastic, freeze="cap"))
    assert [period.frozen for period in course(cap, CLUSTER, WORK).periods] == [0, 2, 3, 4]


def test_the_cache_is_written_for_an_epoch_however_often_the_policy_is_asked():
    run = replace(LARGE, mesh=Mesh(pipe=2), data=replace(LARGE.data, train_samples=64 * 20), train=Train(steps=100),
                  elastic=Elastic(freeze="cap", alpha=0.9, every=5, cache=True, frozen_dropout=False))
    periods = course(run, CLUSTER, WORK).periods
    assert [(period.first_step, period.frozen) for period in periods] == [(0, 0), (5, 4), (25, 4)]
    assert periods[2].step_seconds < periods[1].step_seconds
    unknown = replace(run, data=replace(run.data, train_samples=None))
    assert [period.first_step for period in course(unknown, CLUSTER, WORK).periods] == [0, 5]


def test_what_is_cached_is_not_computed_after_the_epoch_that_writes_it():
    run = replace(LARGE, data=replace(LARGE.data, train_samples=64 * 10))
    plain, cached = (course(elastic(run, cache=cache, frozen_dropout=False), CLUSTER, WORK).periods
                     for cache in (False, True))
    at = {period.first_step: period.step_seconds for period in cached}
    assert set(at) == {0, 20, 30, 60}  # the first stage has no more layers to freeze at 60, and writes nothing
    computed = {period.first_step: period.step_seconds for period in plain}
    assert at[20] == pytest.approx(computed[20]) and at[30] < at[20] and at[60] <= at[30]


def test_what_is_not_known_is_not_predicted():
    run = elastic()
    assert course(replace(run, elastic=Elastic()), CLUSTER, WORK) is None
    assert course(replace(run, elastic=replace(run.elastic, dry_run=True)), CLUSTER, WORK) is None
    epochs = replace(run, train=Train(epochs=3))
    assert course(epochs, CLUSTER, WORK) is None
    cap = replace(run, elastic=Elastic(freeze="cap"))
    assert course(cap, CLUSTER, WORK) is None  # the policy is asked after each epoch
    assert course(replace(cap, elastic=replace(cap.elastic, every=10)), CLUSTER, WORK) is not None
    assert course(replace(epochs, data=Data(train_samples=16 * 10)), CLUSTER, WORK) is None  # samples of a text
    known = course(replace(epochs, data=Data(task="classification", train="sentiment", train_samples=16 * 10)),
                   CLUSTER, WORK)
    assert sum(period.steps for period in known.periods) == 30


@pytest.mark.slow
def test_a_search_follows_the_whole_run_where_layers_freeze():
    """Without dropout in frozen layers outputs may be cached; settings that are not searched do not change."""
    run = elastic(replace(LARGE, data=replace(LARGE.data, train_samples=64 * 10)), frozen_dropout=False)
    found = search(run, CLUSTER, 4, ("mesh", "elastic")).best
    followed = [one.course.seconds for one in found if one.course]
    assert len(found) == len(followed) == 6 and followed == sorted(followed)
    best = found[0].run.elastic
    assert best.cache and best.freeze == "manual"
    for packs in (False, True):
        for cache in (False, True):
            other = replace(found[0].run, elastic=replace(best, auto_pipe=packs, auto_dp=packs, cache=cache))
            assert course(other, CLUSTER, WORK).seconds >= found[0].course.seconds
    kept = search(run, CLUSTER, 4, ("mesh",)).best[0]
    assert kept.run.elastic == run.elastic and kept.course.seconds > found[0].course.seconds
    lines = "\n".join(course_lines(found[0]))
    assert "cached outputs" in lines and f"{found[0].course.speedup:.2f} times as fast" in lines
    steady = search(replace(run, elastic=Elastic()), CLUSTER, 4, ("mesh", "elastic")).best[0]
    assert steady.course is None and course_lines(steady) == []


def test_dropout_in_frozen_layers_leaves_the_cache_out():
    run = elastic(replace(LARGE, model=replace(LARGE.model, dropout=0.1)))
    assert {other.elastic.cache for other in elastic_variants(run)} == {False} and len(elastic_variants(run)) == 2


@pytest.mark.parametrize("cluster", ["h100", "laptop"])
@pytest.mark.parametrize("mesh", [Mesh(data=5), Mesh(data=2, pipe=2), Mesh(pipe=4)], ids=str)
def test_plan_and_simulation_agree_where_the_last_microbatch_is_not_whole(cluster, mesh):
    cluster = load_cluster(cluster)
    run = replace(TINY, mesh=mesh, precision="fp32", batch=Batch(global_size=16, microbatch_size=3))
    simulated = simulation(run, cluster)
    assert simulated.seconds == pytest.approx(run_cost(simulated.run, cluster, WORK.stages(simulated.run)).seconds)
    assert simulated.seconds == pytest.approx(simulated.cost.seconds), "the printed cost is of the same step"
    whole = replace(run, batch=Batch(global_size=18 * mesh.data, microbatch_size=3))
    assert simulated.pipeline_seconds < simulation(whole, cluster).pipeline_seconds


def test_cores_that_are_shared_count_a_partial_microbatch_in_part():
    """Four ranks on one core: in total they compute the same with 4 + 4 + 1 samples as with 3 + 3 + 3."""
    laptop = load_cluster("laptop")
    one_core = replace(laptop, device=replace(laptop.device, cores=1))
    thirds, partial = (found(replace(TINY, mesh=Mesh(data=4), precision="fp32", batch=Batch(
        global_size=36, microbatch_size=size)), one_core).cores_seconds for size in (3, 4))
    assert partial == pytest.approx(thirds, rel=0.2)
