"""From settings with `auto` to resolved ones: what each fact decides, what stays, and what is derived from them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedBatch, ResolvedRun, bucket_size, resolve
from ranvier.config.rules import problems, warnings
from ranvier.config.run import Batch, Launch, MeshSettings, Optim, Run, Train, Transformer
from ranvier.mesh import AXES, Mesh
from tests.errors import raises

OPEN = Run(mesh=MeshSettings(data="auto", pipe=2), batch=Batch(global_size=10, microbatch_size="auto"))
ANSWERED = Facts(mesh=Mesh(data=3, pipe=2), microbatch_size=3)


def test_a_plan_closes_mesh_and_microbatch():
    run = resolve(OPEN, ANSWERED)
    assert isinstance(run, ResolvedRun) and run.mesh == Mesh(data=3, pipe=2)
    assert run.batch == ResolvedBatch(global_size=10, microbatch_size=3)
    assert (run.replica_batch_size, run.num_microbatches, run.row_microbatch_size) == (4, 2, 3)
    assert run.last_microbatch_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize(("facts", "where"), [
    (Facts(microbatch_size=2), "mesh.data"), (Facts(mesh=Mesh()), "batch.microbatch-size")])
def test_what_stays_open_is_an_error(facts, where):
    with raises("microbatch-size-auto" if "batch" in where else "mesh-axis-auto", f"--{where}", value="auto"):
        resolve(OPEN, facts)


def test_a_resolved_run_stays_closed():
    run = resolve(OPEN, ANSWERED)
    assert resolve(run) == run and isinstance(replace(run, mesh=Mesh()), ResolvedRun)
    assert replace(run, batch=Batch(microbatch_size=5)).batch == ResolvedBatch(microbatch_size=5)
    with raises("malformed-argument"):
        replace(run, mesh=MeshSettings(data="auto"))
    with raises("malformed-argument", "ResolvedBatch"):
        replace(run, batch=replace(run.batch, microbatch_size="auto"))


def test_closed_settings_in_the_form_of_a_request_are_a_mesh():
    assert resolve(Run(mesh=MeshSettings(pipe=3, tile=None))).mesh == Mesh(pipe=3)
    with raises("mesh-tile-does-not-divide", 3, 1):
        resolve(Run(mesh=MeshSettings(row=3, tile=(2, 1))))


def test_facts_answer_what_is_auto_and_nothing_else():
    facts = Facts(device="cpu", offload="stream", num_samples=25, num_classes=3, tile=(1, 2))
    run = resolve(Run(mesh=Mesh(col=4), train=Train(epochs=2), batch=Batch(global_size=20)), facts)
    assert (run.launch.device, run.optim.offload, run.train.steps, run.model.num_classes) == ("cpu", "stream", 3, 3)
    assert run.mesh.tile == (1, 2)
    given = Run(mesh=Mesh(col=4, tile=(1, 4)), optim=Optim(offload="host"), train=Train(steps=7))
    run = resolve(given, facts)
    assert (run.mesh.tile, run.optim.offload, run.train.steps) == ((1, 4), "host", 7)
    with raises("num-classes-differ", 3, 2):
        resolve(Run(model=Transformer(num_classes=2)), facts)


@given(st.builds(Mesh, **{axis: st.integers(1, 4) for axis in AXES}), st.integers(1, 64), st.integers(1, 64))
def test_shares_add_up(mesh, global_size, microbatch_size):
    run = ResolvedRun(mesh=mesh, batch=Batch(global_size=global_size, microbatch_size=microbatch_size))
    assert 0 <= run.replica_batch_size * mesh.data - global_size < mesh.data
    whole = run.num_microbatches - 1 + run.last_microbatch_fraction
    assert whole * microbatch_size == pytest.approx(run.replica_batch_size) and 0 < run.last_microbatch_fraction <= 1


def test_bucket_sizes():
    assert [bucket_size(Optim(), device) for device in ("cpu", "cuda")] == [262_144, 4_194_304]
    assert bucket_size(Optim(bucket_size=5), "cuda") == 5


def test_a_request_knows_its_open_axes_and_takes_their_sizes():
    asked = MeshSettings(data="auto", row="auto", col=2)
    assert asked.open_axes == ("data", "row") and asked.with_sizes(data=3, row=5) == Mesh(data=3, row=5, col=2)
    with raises("mesh-axis-auto", "mesh.row"):
        asked.with_sizes(data=3)


def test_what_is_written_of_a_resolved_run_reads_as_the_same(tmp_path):
    run = resolve(replace(OPEN, launch=Launch(device="cpu")), ANSWERED)
    read.write(run, tmp_path / "x.toml")
    again = read.merge([read.load(str(tmp_path / "x.toml"))[1]])
    assert again.problems == () and resolve(again.run) == run
    assert read.flatten(run).keys() == read.settings().keys()


def test_meshes_say_which_axes_differ():
    mesh = Mesh(data=2, pipe=3)
    assert mesh.changed_axes(Mesh(data=2, pipe=4, col=2)) == ("pipe", "col") and mesh.changed_axes(mesh) == ()
    assert mesh.sizes == {"data": 2, "pipe": 3, "row": 1, "col": 1}


@pytest.mark.parametrize(("code", "flags"), [
    ("survive-losses-needs", "launch.survive-losses=true comm.transport=mpi"),
    ("too-many-layers", "model.num-layers=100000"), ("fewer-blocks-than-ranks", "mesh.pipe=16"),
    ("fewer-blocks-than-stages", "mesh.pipe=6 pipeline.stages-per-rank=2"),
    ("dynamic-rope-length", "model.family=llama model.rope-scaling=dynamic model.rope-factor=2 model.rope-positions=32 "
                            "model.sequence=64 data.packing=true"),
    ("float8-split", "model.float8=true mesh.col=2"), ("float8-with-lora", "model.float8=true lora.rank=2"),
    ("float8-hidden", "model.float8=true model.hidden=24"), ("mesh-does-not-divide", "mesh.col=3"),
    ("vocab-below-tensor-mesh", "model.vocab=3 mesh.col=4"),
    ("replica-without-samples", "mesh.data=8 batch.global-size=4"),
    ("microbatch-above-share", "mesh.data=2 batch.global-size=4 batch.microbatch-size=4"),
    ("in-backward-microbatches", "optim.update-in-backward=true optim.clip-norm=0"),
    ("resume-without-folder", "resume=auto"),
    ("elastic-cut-stages", "elastic.freeze=cap mesh.pipe=2 elastic.auto-pipe=true pipeline.stages-per-rank=2 "
                           "elastic.cut=reference"),
    ("ema-with-freezing", "elastic.freeze=cap optim.ema=0.9"),
    ("in-flight-below-stages", "mesh.pipe=4 pipeline.in-flight=2"),
    ("clip-from-saves-nothing", "optim.clip-norm=1 optim.clip-from=previous-step"),
    ("clip-from-saves-nothing", "optim.clip-norm=1 optim.clip-from=previous-step guard.bad-step=none precision=fp16"),
    ("warmup-longer-than-run", "train.steps=4 train.warmup-steps=4"),
    ("bucket-size-small", "optim.bucket-size=1")])
def test_settings_that_do_not_go_together(code, flags):
    values = dict(flag.split("=") for flag in flags.split())
    found = read.merge([read.Layer(origin="flag", is_text=True, values={
        name.replace("-", "_"): value for name, value in values.items()})])
    assert found.problems == ()
    run = resolve(found.run)
    problem, *_ = [one for one in (*problems(run, num_blocks=10), *warnings(run)) if one.code == code]
    assert problem.where in {*values, "batch.microbatch-size"} and problem.remedy


def test_rows_above_a_replicas_share_ask_for_a_larger_batch():
    run = read.merge([read.Layer(origin="flag", is_text=True, values={
        "mesh.data": "8", "mesh.row": "8", "batch.global_size": "32", "batch.microbatch_size": "4"})]).run
    problem = next(one for one in problems(resolve(run), num_blocks=10) if one.code == "mesh-does-not-divide")
    assert "--batch.global-size 64 with --batch.microbatch-size 8" in problem.remedy
