"""Every setting of a run changes its predicted step or its predicted memory, or is listed here with the reason. The
test walks over all fields, so it finds new settings automatically."""

import types
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from ranvier.config import effects, rules
from ranvier.config.resolve import ResolvedBatch, ResolvedRun
from ranvier.config.run import Launch, Optim, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.planner.run_cost import run_cost
from ranvier.planner.work import Work

CLUSTER, WORK = load_cluster("h100"), Work()
ALONE = ResolvedRun(precision="bf16", launch=Launch(device="cuda"), batch=ResolvedBatch(global_size=32),
                    model=Transformer(family="llama", num_layers=2, hidden=256, heads=4, vocab=512, sequence=128))
MESH = replace(ALONE, mesh=Mesh(data=2, pipe=2, row=2, col=2), optim=Optim(shard=True, bucket_size=1 << 16))
RUNS = (ALONE, MESH)

VALUES = {
    "mesh": [Mesh(data=2)], "pipeline.in_flight": [1], "pipeline.boundaries": [(1,)], "pipeline.memory": [2.0],
    "pipeline.deferred": [(1, 1)], "pipeline.defer_last": [1], "tensor.panel_bytes": [1 << 14],
    "optim.clip_norm": [1.0], "optim.chunk_buckets": [1], "optim.bucket_size": [1 << 17], "optim.offload_share": [0.25],
    "optim.groups": [("*.norm*:rate=0.1",)], "model.image_size": [64], "model.full_layers": [(0,)],
    "model.nope_layers": [(0,)], "model.window": [16], "model.dropout": [0.1], "model.intermediate": [512],
    "model.head_dim": [32], "model.norm_offset": [1], "model.rope_factor": [2.0], "model.window_rope_base": [5e3],
    "model.rope_limits": [(2.0, 3.0)], "lora.targets": [("query",)]}
"""Values to use instead of those derived from the type."""
LORA, YARN = {"lora.rank": 8}, {"model.rope_scaling": "yarn", "model.rope_positions": 64}
BERT = {"model.family": "bert", "data.task": "classification", "model.num_classes": 2}
VIT = {"model.family": "vit", "data.task": "images", "model.num_classes": 10}
STAGES = {"mesh": Mesh(pipe=2)}
UNGUARDED, WINDOW = {"guard.bad_step": "none"}, {"model.window": 16}
WHOLE = UNGUARDED | {"optim.shard": False}  # while parameters are gathered, updates cost no time
BESIDE = {
    "optim.offload_share": {"optim.offload": "hybrid"}, "optim.buckets_in_flight": {"optim.offload": "stream"},
    "guard.bad_step": {"optim.shard": False}, "optim.clip_norm": WHOLE,
    "optim.clip_from": WHOLE | {"optim.clip_norm": 1.0},
    "optim.update_in_backward": UNGUARDED | {"batch.global_size": 8},
    **dict.fromkeys(("pipeline.boundaries", "pipeline.memory", "pipeline.defer_last"), STAGES),
    "pipeline.placement": {"pipeline.stages_per_rank": 2}, "pipeline.partition": {"model.vocab": 1 << 16},
    "launch.survive_losses": {"launch.device": "cpu"}, "model.untied": {"model.family": "gpt"},
    "model.num_classes": BERT, "lora.train_head": LORA | BERT, "model.image_size": VIT, "model.patch_size": VIT,
    "model.rope_scaling": {"model.rope_positions": 64},
    **dict.fromkeys(("model.full_every", "model.full_layers", "model.window_rope_base"), WINDOW),
    **dict.fromkeys(("model.rope_factor", "model.rope_positions", "model.rope_limits", "model.rope_magnitude"), YARN),
    **dict.fromkeys(("lora.alpha", "lora.dropout", "lora.targets", "lora.method", "lora.base_format"), LORA)}
"""Settings without which other settings have no effect, or none that shows with this model and these meshes."""

NUMBERS = "a number of the update, or of the model, with which the same is computed"
NOT_OF_A_STEP = "beside the steps: how often, how long, where, and what is told"
DATA = "which data are read, and what becomes of the outputs: of microbatches only the sizes count"
LISTED = {
    NUMBERS: ("optim.betas", "optim.epsilon", "optim.momentum", "optim.muon_scale", "optim.weight_decay", "optim.decay",
              "optim.groups", "optim.initial_loss_scale", "optim.loss_scale_window", "model.norm_epsilon",
              "model.max_positions", "model.activation", "model.query_pre_attn_scalar", "model.rope_base",
              "model.window_rope_base", "model.rope_scaling", "model.rope_factor", "model.rope_positions",
              "model.rope_limits", "model.rope_magnitude", "lora.alpha", "seed"),
    NOT_OF_A_STEP: ("train.*", "log.*", "comm.*", "checkpoint.dir", "checkpoint.every", "checkpoint.keep",
                    "checkpoint.keep_every", "checkpoint.best", "checkpoint.on_error", "guard.loss_spike_factor",
                    "guard.max_bad_steps", "guard.compare_every", "launch.launcher", "launch.cluster", "launch.trial",
                    "launch.stopped_seconds", "launch.hang_seconds", "launch.join_address", "memory_report", "verbose",
                    "resume", "max_restarts", "run_dir"),
    DATA: ("data.options", "data.train", "data.eval", "data.eval_sets", "data.train_samples", "data.eval_samples",
           "data.text_column", "data.pair_column", "data.label_column", "data.messages_column", "data.form",
           "data.chat_template", "data.mixture", "data.padding", "data.augment", "data.augment_repeats",
           "data.corpus", "data.tokenizer", "data.max_bytes", "data.cache_dir", "preference.*"),
    "of whole trainings, which test_whole_trainings has": ("elastic.*",),
    "names code of a user's own, files, or sizes that other settings have when they are read": (
        "model.options", "optim.options", "model.pretrained", "model.preset", "lora.adapters"),
    "the host's waits and cores are not predicted": ("pipeline.look_ahead", "launch.threads"),
    "which kernels are not deterministic is not known": ("deterministic",)}
"""Settings that change no prediction, by reason."""
WHY = {name: reason for reason, names in LISTED.items() for name in names}


def annotations():
    """Name and type of each setting in all sections of a run."""
    for field, hint in get_type_hints(ResolvedRun, include_extras=True).items():
        if is_dataclass(section := getattr(ALONE, field)) and field != "mesh":
            hints = get_type_hints(type(section), include_extras=True)
            yield from ((f"{field}.{own.name}", hints[own.name]) for own in fields(section))
        elif field in {own.name for own in fields(ResolvedRun)}:
            yield field, hint


SETTINGS = dict(annotations())


def value_of(run, name):
    section, _, field = name.rpartition(".")
    return getattr(getattr(run, section) if section else run, field)


def changed(run, values):
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        run = replace(run, **{field: value} if not section else {
            section: replace(getattr(run, section), **{field: value})})
    return run


def others(hint, value):
    """Values of the type `hint` that differ from `value`."""
    if get_origin(hint) is Literal:
        return [one for one in get_args(hint) if one != value]
    if hint is bool:
        return [one for one in (True, False) if one is not value]
    if hint is int:
        return [2 * value if isinstance(value, int) and value else 2]
    if hint is float:
        return [value / 2 if isinstance(value, float) and value else 0.5]
    if get_origin(hint) in (Union, types.UnionType, Annotated):
        return [one for each in get_args(hint) for one in others(each, value)]
    return []


def is_listed(name):
    return name in WHY or f"{name.partition('.')[0]}.*" in WHY


@cache
def predicted(run):
    """Seconds, and bytes by rank, place and category."""
    cost = run_cost(run, CLUSTER, WORK.stages(run))
    return (cost.seconds, cost.hardware_flops), {
        (rank.pipeline_rank, place, category): size for rank in WORK.memory(run, cluster=CLUSTER)
        for place in ("device", "host") for category, size in getattr(rank, place).items() if size}


def comparisons(name, runs=RUNS):
    """(step, memory) with one value of the setting and with another, in every run in which it could matter."""
    for base in (changed(run, BESIDE.get(name, {})) for run in runs):
        if name in effects.CONDITIONS and effects.CONDITIONS[name](base):
            continue
        for value in VALUES.get(name) or others(SETTINGS[name], value_of(base, name)):
            other = changed(base, {name: value})
            if value != value_of(base, name) and not list(rules.problems(other, num_blocks=None)):
                yield predicted(base), predicted(other)


@pytest.mark.parametrize("name", [name for name in SETTINGS if not is_listed(name)])
def test_a_setting_changes_the_step_or_the_memory(name):
    assert any(before != after for before, after in comparisons(name)), (
        f"no prediction depends on {name}: predict it (planner/count, planner/run_cost), add what it needs to BESIDE, "
        "or list it with the reason in LISTED")


@pytest.mark.parametrize("name", [
    pytest.param("model.attention_kernel", marks=pytest.mark.slow), "model.float8", "model.compile", "memory.recompute",
    "tensor.sequence_sharding"])
def test_what_computes_otherwise_changes_both(name):
    found = list(comparisons(name))
    assert all(any(before[what] != after[what] for before, after in found) for what in (0, 1))


def test_what_is_listed_changes_nothing():
    sections = {name.partition(".")[0] for name in SETTINGS}
    assert not {name for name in WHY if name not in SETTINGS and name.removesuffix(".*") not in sections}
    assert not {name for name in SETTINGS if is_listed(name)
                and any(before != after for before, after in comparisons(name, RUNS[:1]))}
