"""Memory of a run: predictions agree with measurements, a run that cannot fit is refused, and running out is
explained."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from torch import nn

from examples.own_family import Convolutional
from ranvier.cli import check
from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import (
    Batch,
    Checkpoint,
    Elastic,
    Lora,
    Memory,
    Optim,
    Pipeline,
    TensorParallel,
    Train,
    Transformer,
)
from ranvier.cost.memory import PROCESS_BYTES, StoredMicrobatches, activation_bytes, remedies, too_large
from ranvier.mesh import Mesh
from ranvier.plan.limits import schedules
from ranvier.planner import count
from ranvier.planner.count import laid_out
from ranvier.planner.work import Work
from ranvier.schedule.limits import Limits
from ranvier.system import machine
from ranvier.system.machine import available_memory_bytes
from ranvier.tensor import float8
from ranvier.train import loop, memory, report_page, runtime
from ranvier.world import World
from tests.covering import quick
from tests.errors import raises
from tests.train.test_loop import corpus, lines, run_all, tiny

__all__ = ["corpus"]


def larger(corpus, run_dir, **changed):
    """A run whose layers are wide enough to outweigh memory that is not counted, such as the loss's scratch."""
    model = Transformer(num_layers=4, hidden=64, heads=2, vocab=300, sequence=64)
    settings = {"batch": Batch(global_size=8, microbatch_size=2), "train": Train(steps=3, sample_tokens=0),
                "precision": "fp32", "memory_report": True, "model": model} | changed
    return tiny(corpus, run_dir, **settings)


LLAMA = Transformer(family="llama", num_layers=4, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=300,
                    sequence=64, qk_norm="head", tied=True)


LEAST = {"llama, checkpointed on stages": 0.48}
"""Least used share of the predicted working memory where it is below a half: the prediction adds what a recomputed
layer keeps and what its attention allocates, which do not exist at the same time."""


@pytest.mark.parametrize(("name", "changed"), quick(2, [
    ("fp32", {}), pytest.param("bf16", {"precision": "bf16"}, marks=pytest.mark.slow),
    ("offloaded", {"precision": "bf16", "optim": Optim(offload="stream", bucket_size=10_000, accumulate="half")}),
    pytest.param("on the host", {"precision": "bf16", "optim": Optim(offload="host", bucket_size=10_000)},
                 marks=pytest.mark.slow),
    ("partly offloaded, shared out", {
        "precision": "bf16", "mesh": Mesh(data=2),
        "optim": Optim(offload="hybrid", offload_share=0.3, bucket_size=10_000, shard=True)}),
    ("checkpointed", {"memory": Memory(recompute=1), "mesh": Mesh(pipe=2)}),
    ("checkpointed selectively", {"memory": Memory(recompute="selective"), "mesh": Mesh(pipe=2)}),
    pytest.param("llama, checkpointed selectively", {
        "model": LLAMA, "memory": Memory(recompute="selective"), "mesh": Mesh(pipe=2, col=2)}, marks=pytest.mark.slow),
    pytest.param("shared out", {
        "precision": "bf16", "mesh": Mesh(data=3), "batch": Batch(global_size=9, microbatch_size=1),
        "optim": Optim(offload="stream", bucket_size=5000, chunk_buckets=3, shard=True)}, marks=pytest.mark.slow),
    ("shared out on the host", {"precision": "bf16", "mesh": Mesh(data=2, pipe=2),
                                "optim": Optim(offload="host", bucket_size=700, shard=True, accumulate="half")}),
    ("updated in the backward, shared out", {
        "optim": Optim(update_in_backward=True, shard=True, offload="stream", bucket_size=5000, chunk_buckets=1),
        "batch": Batch(global_size=4, microbatch_size=2), "mesh": Mesh(data=2)}),
    pytest.param("updated in the backward", {"optim": Optim(update_in_backward=True),
                                             "batch": Batch(global_size=4, microbatch_size=2)}, marks=pytest.mark.slow),
    pytest.param("rows and columns", {"mesh": Mesh(row=2, col=2)}, marks=pytest.mark.slow),
    ("weights gathered together in other groups in the backward", {
        "mesh": Mesh(row=2, col=2), "precision": "bf16", "batch": Batch(global_size=2, microbatch_size=2),
        "model": replace(LLAMA, hidden=128, heads=2, kv_heads=1, intermediate=384, sequence=32, bias="qkv")}),
    pytest.param("rows, columns and stages, frugal", {
        "mesh": Mesh(row=2, col=2, pipe=2), "precision": "bf16",
        "tensor": TensorParallel(keep_weights=True), "batch": Batch(global_size=16, microbatch_size=8),
        "optim": Optim(offload="stream", bucket_size=5000, shard=True)}, marks=pytest.mark.slow),
    pytest.param("summa", {"mesh": Mesh(row=2, col=2), "tensor": TensorParallel(scheme="summa")},
                 marks=pytest.mark.slow),
    pytest.param("megatron", {"mesh": Mesh(col=2, data=2), "tensor": TensorParallel(scheme="megatron")},
                 marks=pytest.mark.slow),
    ("megatron, sequence sharded, updated in the backward", {
        "mesh": Mesh(col=2), "tensor": TensorParallel(scheme="megatron", sequence_sharding=True),
        "optim": Optim(update_in_backward=True), "batch": Batch(global_size=4, microbatch_size=4)}),
    pytest.param("float8", {"precision": "bf16", "mesh": Mesh(), "model": Transformer(
        num_layers=4, hidden=64, heads=2, vocab=300, sequence=64, float8=True)}, marks=pytest.mark.skipif(
            not float8.runs_on_cpu(), reason="this torch has no products in float8 on a CPU")),
    ("llama, more columns than heads of keys", {"model": LLAMA, "mesh": Mesh(col=4)}),
    pytest.param("llama, checkpointed on stages", {"model": LLAMA, "memory": Memory(recompute=1), "mesh": Mesh(
        pipe=2, data=2), "precision": "bf16"}, marks=pytest.mark.slow),
    ("several stages on each rank", {"mesh": Mesh(pipe=2), "pipeline": Pipeline(stages_per_rank=2),
                                     "batch": Batch(global_size=16, microbatch_size=2)}),
    ("sgd on one rank", {"optim": Optim(algorithm="sgd"), "mesh": Mesh()}),
    *(pytest.param(name, {"mesh": Mesh(pipe=pipe), "pipeline": pipeline, "batch": Batch(
        global_size=32, microbatch_size=2)}, marks=pytest.mark.slow) for name, pipe, pipeline in (
        ("deferred on four stages", 4, Pipeline(memory=2.0)),
        ("deferred, as many as may be", 4, Pipeline(deferred=(0, 3, 6, 9))),
        ("as 1f1b", 4, Pipeline(policy="1f1b")),
        ("nothing deferred on several stages of each rank", 2, Pipeline(stages_per_rank=3, defer_bytes=0)),
        ("interleaved, with more memory", 2, Pipeline(stages_per_rank=3, placement="interleaved", memory=2.0))))]))
def test_what_is_predicted_is_what_is_measured(corpus, tmp_path, name, changed):
    """Memory that lives from step to step is predicted to the byte; the rest, which is a bound, within a half."""
    run = larger(corpus, tmp_path / "run", **changed)
    summaries, text = run_all(run)
    predicted = laid_out(resolve(run))[1]
    for rank, measured in enumerate(summaries[0]["memory"]):
        entry = predicted[run.mesh.coordinates(rank).pipe]
        for place in ("device", "host"):
            for category, size in measured[place].items():
                if category == "working":
                    expected = sum(entry.device[part] for part in memory._WORKING)
                    assert LEAST.get(name, 0.5) * expected < size < 1.2 * expected, f"{category} of rank {rank}"
                elif category == "checkpoint":  # the first of the ranks with the same elements writes them
                    assert size <= entry.host["checkpoint"], f"rank {rank}"
                    if rank == 0:
                        assert size > 0.95 * entry.host["checkpoint"]
                else:
                    assert size == getattr(entry, place).get(category, 0), f"{category} of rank {rank}"
    assert "memory in MiB" in text and "device in all" in text
    assert json.loads((run.run_dir / "summary.json").read_text())["memory"] == summaries[0]["memory"]


ONE = Batch(global_size=1, microbatch_size=1)
LARGE = Transformer(family="llama", num_layers=1, hidden=128, heads=2, vocab=300, sequence=4)


class Shifted(nn.Sequential):
    """Has a frozen parameter in fp32, a buffer that checkpoints contain, one that they do not contain, and one that
    shares a parameter's memory."""

    def __init__(self, block, hidden, dtype):
        super().__init__(block)
        self.still = nn.Parameter(torch.zeros(500, hidden, dtype=dtype), requires_grad=False)
        self.register_buffer("shift", torch.zeros(500, hidden, dtype=dtype))
        self.register_buffer("mask", torch.ones(1000, hidden, dtype=torch.bool), persistent=False)
        self.register_buffer("over", next(block.parameters()).detach()[:1], persistent=False)

    def forward(self, x):
        return super().forward(x + self.shift[:x.shape[1]] + self.still[:x.shape[1]].to(x.dtype))


class WithBuffers(Convolutional):
    """torch's own layers, and buffers that are larger than their weights."""

    def model(self, settings, head, *, dtype):
        model = super().model(settings, head, dtype=dtype)
        return replace(model, keep_fp32=("*.still",), blocks={name: build if name in ("embedding", "head") else partial(
            shifted, build, settings.hidden, dtype) for name, build in model.blocks.items()})


def shifted(build, hidden, dtype):
    return Shifted(build(), hidden, dtype)


@pytest.mark.parametrize("changed", [
    *(pytest.param({"mesh": mesh, "precision": precision, "checkpoint": Checkpoint(background=background),
                    "memory": Memory(recompute=recompute), "model": Transformer(
                        family=f"{__name__}:WithBuffers", num_layers=2, hidden=128, vocab=300, sequence=16)},
                   id=name, marks=pytest.mark.filterwarnings("ignore:dtype=torch.bfloat16 casts buffers"))
      for name, mesh, precision, background, recompute in (
          ("buffers, and gradients of torch's layers", Mesh(), "fp32", True, "none"),
          ("buffers of replicas", Mesh(data=2), "bf16", True, "none"),
          ("buffers of recomputed layers", Mesh(), "fp32", True, 1),
          ("buffers of stages, saved one by one", Mesh(pipe=2), "fp32", False, "none"))),
    pytest.param({"mesh": Mesh(pipe=2), "pipeline": Pipeline(policy="gpipe")}, id="logits of each microbatch"),
    pytest.param({"batch": Batch(global_size=2, microbatch_size=2)}, id="scratch of the loss"),
    pytest.param({"batch": Batch(global_size=32, microbatch_size=1), "model": Transformer(
        num_layers=1, hidden=4, heads=1, vocab=300, sequence=64)}, id="samples of a step"),
    *(pytest.param({"optim": Optim(algorithm=algorithm), "batch": ONE}, id=f"update by {algorithm}")
      for algorithm in ("lion", "adafactor")),
    pytest.param({"optim": Optim(algorithm="muon"), "batch": ONE, "model": LARGE}, id="update by muon"),
    pytest.param({"batch": ONE, "model": LARGE, "precision": "bf16", "memory": Memory(recompute=1),
                  "optim": Optim(algorithm="sgd")}, id="gradients of recomputed weights"),
    *(pytest.param({"batch": ONE, "model": replace(LARGE, family="gpt"), "optim": Optim(algorithm="sgd"),
                    "precision": precision}, id=f"{precision} gradients of a tied table")
      for precision in ("fp32", "bf16")),
    pytest.param({"batch": ONE, "model": replace(LARGE, vocab=1000), "precision": "bf16",
                  "optim": Optim(algorithm="sgd"), "mesh": Mesh(pipe=2)}, id="gradient of a table"),
    pytest.param({"batch": Batch(global_size=2, microbatch_size=1), "model": LARGE, "precision": "bf16",
                  "mesh": Mesh(data=2), "optim": Optim(algorithm="sgd")}, id="sums of half precision"),
    pytest.param({"batch": ONE, "model": replace(LARGE, family="gpt", vocab=1000), "mesh": Mesh(pipe=2),
                  "optim": Optim(algorithm="sgd")}, id="ends of a tie"),
    pytest.param({"batch": Batch(global_size=2, microbatch_size=1), "mesh": Mesh(data=2),
                  "optim": Optim(algorithm="adafactor")}, id="states of whole tensors"),
    pytest.param({"batch": ONE, "model": replace(LARGE, hidden=256), "precision": "bf16", "memory": Memory(recompute=1),
                  "lora": Lora(rank=4, base_format="int8")}, id="values of quantized weights"),
    pytest.param({"batch": Batch(global_size=3, microbatch_size=1), "mesh": Mesh(pipe=2),
                  "lora": Lora(rank=4, dropout=0.1), "pipeline": Pipeline(policy="gpipe"), "precision": "bf16",
                  "model": Transformer(num_layers=1, hidden=32, heads=2, vocab=300, sequence=32, dropout=0.1,
                                       untied=True)},
                 id="masks beside what is not kept"),
    *(pytest.param({"batch": Batch(global_size=2, microbatch_size=2), "model": LARGE, "precision": "bf16",
                    "optim": Optim(algorithm="sgd", bucket_size=5000), "mesh": mesh,
                    "tensor": TensorParallel(scheme=scheme)}, id=name)
      for name, mesh, scheme in (
          ("operands in fp32", Mesh(col=2), "stationary"), ("weights gathered together", Mesh(row=2), "stationary"),
          ("sums of weight gradients", Mesh(row=2, col=2), "summa")))])
def test_no_prediction_is_below_what_is_measured(corpus, tmp_path, changed):
    """With a vocabulary that is large relative to the width, and an update that is large relative to the
    activations."""
    model = Transformer(family="llama", num_layers=2, hidden=32, heads=2, vocab=2048, sequence=16)
    run = larger(corpus, tmp_path / "run", **{"mesh": Mesh(), "model": model, "train": Train(
        steps=2, sample_tokens=0, eval_sequences=1)} | changed)
    predicted = laid_out(resolve(run))[1]
    for rank, measured in enumerate(run_all(run)[0][0]["memory"]):
        size, entry = sum(measured["device"].values()), predicted[run.mesh.coordinates(rank).pipe]
        assert size < 1.01 * entry.device_bytes < 1.3 * size, f"rank {rank}"
        assert sum(measured["host"].values()) <= entry.host_bytes, f"rank {rank}"


TIED = Transformer(num_layers=2, hidden=64, heads=2, vocab=2048, sequence=32)


@pytest.mark.parametrize("changed", [
    pytest.param({"mesh": Mesh(pipe=2), "pipeline": Pipeline(policy="1f1b"), "model": TIED}, id="ends of a tie"),
    pytest.param({"mesh": Mesh(), "model": TIED}, id="gradients of a table, after the loss"),
    pytest.param({"mesh": Mesh(data=2), "precision": "bf16", "model": replace(TIED, vocab=300)}, id="sums of all"),
    *(pytest.param({"mesh": Mesh(), "model": TIED, "batch": Batch(global_size=size, microbatch_size=size),
                    "optim": Optim(algorithm="adafactor", update_in_backward=True)}, id=f"updates, batch of {size}")
      for size in (1, 4)),
    pytest.param({"mesh": Mesh(), "model": TIED, "batch": ONE, "optim": Optim(ema=0.9), "train": Train(
        steps=2, sample_tokens=0, eval_every=1, eval_sequences=1, eval_ema=True)}, id="parameters beside averages")])
def test_what_comes_when_activations_are_gone_takes_their_place(corpus, tmp_path, changed):
    run = larger(corpus, tmp_path / "run", **changed)
    predicted = laid_out(resolve(run))[1]
    for rank, measured in enumerate(run_all(run)[0][0]["memory"]):
        size, entry = sum(measured["device"].values()), predicted[run.mesh.coordinates(rank).pipe]
        assert size < 1.01 * entry.device_bytes < 1.06 * size, f"rank {rank}"


GPT = Transformer(num_layers=4, hidden=64, heads=4, vocab=512, sequence=64)
PLAIN = Pipeline(policy="1f1b")


@pytest.mark.parametrize("changed", [
    pytest.param({"mesh": Mesh(), "lora": Lora(rank=4), "memory": Memory(recompute=1)}, id="adapters"),
    pytest.param({"mesh": Mesh(), "model": replace(GPT, dropout=0.1, num_layers=1)}, id="masks"),
    pytest.param({"mesh": Mesh(pipe=4), "pipeline": PLAIN, "memory": Memory(recompute=1), "batch": Batch(
        global_size=12, microbatch_size=2)}, id="a layer on each stage"),
    pytest.param({"mesh": Mesh(pipe=2), "pipeline": PLAIN, "lora": Lora(rank=4), "precision": "bf16", "model": replace(
        GPT, family="llama", kv_heads=2)}, id="adapters on stages, in bf16", marks=pytest.mark.slow)])
def test_a_stage_works_in_what_is_alive_at_once(corpus, tmp_path, changed):
    """A posted receive is predicted, and is not measured between threads."""
    run = larger(corpus, tmp_path / "run", **{"model": GPT, "train": Train(steps=2, sample_tokens=0),
                                              "batch": Batch(global_size=8, microbatch_size=2)} | changed)
    predicted = laid_out(resolve(run))[1]
    for rank, measured in enumerate(run_all(run)[0][0]["memory"]):
        size, entry = sum(measured["device"].values()), predicted[run.mesh.coordinates(rank).pipe]
        assert 0.98 * size < entry.device_bytes < 1.09 * size, f"rank {rank}"


@pytest.mark.parametrize("recompute", ["none", 1])
def test_gradients_of_weights_on_cuda(recompute):
    """The gradient of the table, or of a recomputed layer's weights, exists in bf16 and then in fp32, in addition to
    what is left when the backward gets there. Other gradients are accumulated in one product."""
    run = resolve(ResolvedRun(model=LARGE, batch=ONE, precision="bf16", memory=Memory(recompute=recompute)),
                  Facts(device="cuda"))
    costs = Work().stages(run)[0]
    place = 0 if recompute == "none" else -2
    left = sum(cost.kept_bytes + cost.loss_bytes for cost in costs[place + 1:])
    elements = costs[place].table_elements + costs[place].weight_elements
    assert elements == (300 * 128 if recompute == "none" else 128 * 512)
    left = left if recompute == "none" else 0  # recomputed activations have already replaced it
    assert laid_out(run)[1][0].device["workspace"] == costs[place].backward_bytes + 6 * elements - left


def two_in_flight(stage=0, num_stages=2, deferred=0):
    run = ResolvedRun(mesh=Mesh(pipe=num_stages), batch=Batch(global_size=2, microbatch_size=1))
    return StoredMicrobatches(run=run, stage=stage, limits=Limits(in_flight=2, deferred=(deferred,) * num_stages))


def costs_of_four_blocks(**sizes):
    run = ResolvedRun(model=Transformer(num_layers=1, hidden=8, heads=2, vocab=16, sequence=4))
    costs = [replace(cost, loss_bytes=0, **sizes) for cost in Work().stages(run)[0]]
    assert len(costs) == 4
    return costs


@pytest.mark.parametrize(("stage", "messages"), [(0, 3 * 7), (1, 10 + 3 * 7), (2, 2 * 10)])
def test_messages_are_what_enters_and_what_leaves(stage, messages):
    """The last of three stages stores one of two microbatches, and the stage before it has sent both."""
    costs = costs_of_four_blocks(input_bytes=10, output_bytes=7)
    assert activation_bytes(costs, [], two_in_flight(stage, 3), {}, [0] * 4)["messages"] == messages


@pytest.mark.parametrize("deferred", [0, 1])
def test_a_segment_runs_again_when_what_is_behind_it_is_free(deferred):
    """If weight gradients are deferred, their operands are not free."""
    *layers, head = costs_of_four_blocks(kept_bytes=100, input_bytes=10, defers=True)
    microbatches = two_in_flight(deferred=deferred)
    assert microbatches.stored == 2

    def beside_two(segments, head):
        return activation_bytes([*layers, head], segments, microbatches, {}, [0] * 4)["recomputed"]

    assert beside_two([range(1, 3)], replace(head, kept_bytes=30)) == (200 if deferred else 170)
    assert beside_two([range(1, 3)], replace(head, kept_bytes=500)) == (200 if deferred else 0)
    assert beside_two([range(0, 1), range(1, 3)], replace(head, kept_bytes=0)) == 200


def test_one_stage_of_a_rank_recomputes_at_a_time():
    first, second = ({"activations": stored, "recomputed": again, "deferred": 0, "workspace": workspace}
                     for stored, again, workspace in ((10, 5, 1), (20, 3, 4)))
    assert count._sum_stages(ResolvedRun(), [first, second]) == {"activations": 33, "deferred": 0, "workspace": 4}


def test_no_report_unless_it_is_asked_for(corpus, tmp_path):
    summaries, text = run_all(larger(corpus, tmp_path / "run", memory_report=False))
    assert "memory" not in summaries[0] and "memory in MiB" not in text


def test_compiled_blocks_are_not_measured_on_a_cpu(corpus, tmp_path):
    """torch compiles nothing while operations are watched, and reports it as if the block could not be compiled."""
    with raises("memory-report-compiled", "--model.compile false"):
        run_all(larger(corpus, tmp_path / "run", mesh=Mesh(), model=replace(LARGE, compile=True)))


def test_the_whole_process_is_compared_with_the_whole_run(corpus, tmp_path, monkeypatch):
    """Also with the memory that the run needed before layers froze."""
    compared = []
    monkeypatch.setattr(report_page, "memory_rows", lambda predicted, peaks, *_, **__: compared.extend(peaks) or [])
    run = larger(corpus, tmp_path / "run", mesh=Mesh(), elastic=Elastic(freeze="manual", manual=("1:2",), every=1))
    summaries, _ = run_all(run)
    (before,), (after,) = (laid_out(resolve(run), frozen)[1] for frozen in (0, 2))
    assert summaries[0]["memory"][0]["device"]["moments"] == after.device["moments"] < before.device["moments"]
    assert compared == [before.device_bytes + before.host_bytes + PROCESS_BYTES]


@pytest.mark.slow
def test_checkpointing_takes_less(corpus, tmp_path):
    """With one microbatch in flight, so that all runs have the same order: with a message-driven schedule, what a stage
    stores at a time depends on what has arrived."""
    def working(checkpoint):
        run = larger(corpus, tmp_path / str(checkpoint), memory=Memory(recompute=checkpoint), mesh=Mesh(pipe=2),
                     pipeline=Pipeline(policy="1f1b", in_flight=1))
        return [facts["device"]["working"] for facts in run_all(run)[0][0]["memory"]]

    plain, every, auto = working("none"), working(1), working("auto")
    assert max(every) < 0.7 * max(plain) and max(auto) <= max(every)


# ---------------------------------------------------------------------- what cannot fit

def test_a_run_that_cannot_fit_is_refused_before_it_is_built(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 10 << 20)
    monkeypatch.setattr(runtime, "_loaders", lambda *args: pytest.fail("built"))
    with raises("memory-too-small", 4, 10, "--batch.microbatch-size", 2, "--memory.recompute"):
        run_all(larger(corpus, tmp_path / "run"))


def test_devices_and_hosts_are_judged_apart():
    run = ResolvedRun(mesh=Mesh(pipe=2), precision="bf16", optim=Optim(offload="stream"))
    entries = laid_out(run)[1]
    device, host = max(entry.device_bytes for entry in entries), sum(entry.host_bytes for entry in entries)
    settings = {"run": run, "processes": 1}
    assert too_large(entries, place="device", available_bytes=device, **settings) is None
    assert "memory of the device: is too small: a rank of stage" in str(
        too_large(entries, place="device", available_bytes=device - 1, **settings))
    settings = {"run": run, "processes": 2}
    assert too_large(entries, place="host", available_bytes=host, **settings) is None
    assert "memory of the machine: is too small: 2 ranks here need" in str(
        too_large(entries, place="host", available_bytes=host - 1, **settings))
    assert too_large(entries, place="host", available_bytes=host, process_bytes=1, **settings) is not None


def test_remedies_are_those_that_are_left():
    run = ResolvedRun(mesh=Mesh(data=2))
    assert remedies(run, shared=False) == [
        "lower `--batch.microbatch-size` (it is 4)",
        "set `--memory.recompute selective`, or to auto if that is not enough", "set `--optim.shard true`",
        "set `--precision bf16`", "set `--optim.offload hybrid`", "raise `--mesh.pipe`, with more ranks"]
    frugal = replace(run, batch=Batch(microbatch_size=1), memory=Memory(recompute="auto"), precision="bf16",
                     optim=Optim(shard=True, offload="stream"))
    assert remedies(frugal, shared=True) == remedies(frugal, shared=False) == ["raise `--mesh.pipe`, with more ranks"]
    columns = replace(frugal, mesh=Mesh(col=2), tensor=TensorParallel(scheme="megatron"))
    assert remedies(columns, shared=False)[0] == "set `--tensor.sequence-sharding true`"
    assert len(remedies(replace(columns, mesh=Mesh(col=3)), shared=False)) == 1  # 3 columns do not divide the sequence
    half = replace(run, model=replace(run.model, float8=True))
    assert "set `--memory.recompute auto`" in remedies(half, shared=False)  # selective is refused with float8
    assert remedies(run, shared=False, on_host=True)[0] == "set `--optim.shard true`"  # activations are on the device
    stages = replace(frugal, mesh=Mesh(pipe=2))
    assert remedies(stages, shared=False)[0] == "lower `--pipeline.memory` to 1 (it is 1.1)"
    plain = replace(stages, pipeline=replace(stages.pipeline, memory=1.0))
    assert remedies(plain, shared=False)[0] == "set `--pipeline.policy 1f1b`"


@pytest.mark.parametrize(("name", "ranks"), [
    ("gpt-12b", 48), pytest.param("gpt-50b", 192, marks=pytest.mark.slow),
    pytest.param("gpt-24b", 96, marks=pytest.mark.slow), pytest.param("gpt-100b", 384, marks=pytest.mark.slow)])
def test_recipes_of_the_paper_fit_their_devices_as_they_do_under_1f1b(name, ranks):
    """AxoNN's own configurations, on Summit."""
    run = read.merge([read.load(name)[1]]).run
    auto, plain = (check.check(replace(run, pipeline=replace(run.pipeline, policy=policy)), ranks, cluster="summit")
                   for policy in ("message-driven", "1f1b"))
    assert not [problem for one in (auto, plain) for problem in one.problems if "memory" in problem.where]
    most, most_plain = (max(entry.device_bytes for entry in one.memory) for one in (auto, plain))
    assert most <= 1.12 * most_plain


def test_a_containers_limit_counts(tmp_path):
    assert available_memory_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(tmp_path) == 600_000
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 100000\nactive_file 5\n")
    assert available_memory_bytes(tmp_path) == 700_000, "memory that the kernel can drop is free"
    (tmp_path / "memory.current").write_text("2000000\n")
    assert available_memory_bytes(tmp_path) == 0
    assert machine.memory_limit_bytes(tmp_path) == 1_000_000


# ---------------------------------------------------------------------- what runs out

@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError("no room"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to")])
def test_an_allocator_that_gives_up_is_explained(corpus, tmp_path, monkeypatch, error):
    def fail(session, step):
        raise error

    monkeypatch.setattr(loop, "take_step", fail)
    with raises("out-of-memory", "--batch.microbatch-size") as caught:
        run_all(larger(corpus, tmp_path / "run"))
    assert caught.value.__cause__ is error


def test_other_errors_stay_what_they_are(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "take_step", lambda session, step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_all(larger(corpus, tmp_path / "run"))


_LIMITED = """
import resource, sys, torch
from ranvier.cli.main import main
import ranvier.train.loop, matplotlib.figure, tokenizers
import psutil
now = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20),) * 2)
sys.exit(main())
"""


@pytest.mark.slow
def test_a_real_allocator(corpus, tmp_path):
    """A process that may allocate 400 MiB more, and a model that keeps more: exit code 2, and the table."""
    command = ["train", "gpt-tiny", "--mesh.data", "1", "--mesh.pipe", "1", "--data.corpus", str(corpus / "texts"),
               "--data.cache-dir", str(corpus / "cache"), "--model.vocab", "300", "--batch.microbatch-size", "32",
               "--batch.global-size", "32", "--model.hidden", "512", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", _LIMITED, *command], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert "ran out of memory" in done.stderr and "predicted memory, MiB:" in done.stderr
    assert "In this order: lower --batch.microbatch-size (it is 32)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills(corpus, tmp_path):
    """The parent's last output is the table."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "ranvier", "train", "gpt-tiny", "--mesh.data", "1", "--mesh.pipe", "2",
               "--data.corpus", str(corpus / "texts"), "--data.cache-dir", str(corpus / "cache"),
               "--model.vocab", "300", "--comm.transport", "torch", "--train.steps", "100000", "--run-dir",
               str(run_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not (run_dir / "metrics.jsonl").exists() or not lines(run_dir / "metrics.jsonl"):
            assert time.monotonic() < deadline and parent.poll() is None, "the run has not begun"
            time.sleep(0.2)
        rank = next(child for child in psutil.Process(parent.pid).children(recursive=True)
                    if "train" in child.cmdline() and not child.children())
        rank.send_signal(signal.SIGKILL)
        _, err = parent.communicate(timeout=60)
    finally:
        parent.kill()
        parent.communicate()
    assert parent.returncode == 1
    _, _, table = err.partition("was killed by SIGKILL (by the kernel, if memory ran out)")
    assert table and "predicted memory, MiB:" in table and "activations" in table, err


class Alone:
    """A group of one rank, or with another rank that has found that only the schedule with this number fits."""

    def __init__(self, other=0):
        self.other = other

    def gather_number(self, number):
        return [number, self.other]


def test_ranks_take_the_schedule_that_fits_on_all_machines(monkeypatch):
    run = ResolvedRun(mesh=Mesh(data=2, pipe=2))
    world = World(backend=type("Backend", (), {"rank": 0, "size": 4})(), store=None, launcher="srun",
                  device=torch.device("cpu"), local_rank=0, local_size=2, local_ranks=(0, 1))
    for number, expected in enumerate(schedules(run)):
        assert memory.check_fits(run, world, Alone(number)).pipeline == expected.pipeline


def test_the_memory_of_a_machine_is_that_of_the_ranks_on_it(monkeypatch):
    """Ranks 1 and 3 are both of the second stage, and share a machine because ranks are distributed cyclically."""
    run = ResolvedRun(mesh=Mesh(data=2, pipe=2))
    stage_bytes = [entry.device_bytes + entry.host_bytes for entry in laid_out(run)[1]]
    assert stage_bytes[0] != stage_bytes[1]
    backend = type("Backend", (), {"rank": 1, "size": 4})()
    world = World(backend=backend, store=None, launcher="srun", device=torch.device("cpu"), local_rank=0, local_size=2,
                  local_ranks=(1, 3))
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2 * stage_bytes[1])
    alone = Alone()
    memory.check_fits(run, world, alone)
    least = schedules(run)[-1]
    assert least.pipeline.policy == "1f1b"
    plain_bytes = [entry.device_bytes + entry.host_bytes for entry in laid_out(least)[1]]
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2 * plain_bytes[1])
    assert memory.check_fits(run, world, alone).pipeline in [each.pipeline for each in schedules(run)]
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2 * plain_bytes[1] - 1)
    with raises("memory-too-small", 2, 1):
        memory.check_fits(run, world, alone)
    assert World(backend=backend, store=None, launcher="torchrun", device=torch.device("cpu"), local_rank=1,
                 local_size=2).local_ranks == (0, 1)
