"""How a run begins: its data and pretrained weights, and what all ranks must agree on before there is an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ranvier import resolve
from ranvier.check import tensor_mesh_facts
from ranvier.checkpoint.from_pretrained import with_model
from ranvier.checkpoint.pretrained import Pretrained
from ranvier.comm.protocol import Group
from ranvier.data.prepare import cache_folder, prepare
from ranvier.data.pretrained_models import folder_of
from ranvier.data.publish import RunProgress, process_name
from ranvier.data.task import Prepared
from ranvier.errors import ConfigError, DataError
from ranvier.run import Run
from ranvier.world import World

PROMPT_TOKENS = 24
"""Tokens of held-out text that the sample continues, at most, where the run has no prompt."""


def prepared(run: Run, world: World, stream: TextIO) -> tuple[Run, Prepared, Pretrained | None]:
    """The run with what only its data and its pretrained model tell, the data, and that model, if there is one. Whoever
    comes first on a machine makes what is not there; rank 0 tells what takes so long."""
    def line(text: str) -> None:
        if world.rank == 0:
            print(text, file=stream, flush=True)

    def key(process: str) -> str:
        return f"ranvier/prepares/{process}"

    world.store.set(key(process_name()), "")
    tell = RunProgress(line, lambda process: world.store.check([key(process)]))
    pretrained = None
    if run.model.pretrained is not None:
        pretrained = Pretrained(folder_of(run.model.pretrained, cache_folder(run), tell))
        run = with_model(run, pretrained)
    data = prepare(run, tell)
    return with_data(run, data), data, pretrained


def with_data(run: Run, data: Prepared) -> Run:
    """The run with the number of classes and of steps that its data gives. ConfigError for another number of classes
    than the data has."""
    model, train = run.model, run.train
    if data.num_classes is not None:
        if model.num_classes not in ("auto", data.num_classes):
            raise ConfigError(f"is not the number of classes in the data, {data.num_classes}",
                              where="model.num-classes", value=model.num_classes,
                              remedy="Leave it out: auto takes it from the data.")
        model = replace(model, num_classes=data.num_classes)
    if train.epochs is not None:
        train = replace(train, steps=-(-train.epochs * len(data.train) // run.batch.global_size))
    return replace(run, model=model, train=train)


def agreed(run: Run, recipe: str, data: Prepared, ranks: Group, world: World) -> Run:
    """The run with its folder, as rank 0 names it, and the tensor mesh as it lies best on the nodes. DataError when
    the ranks have different data, ConfigError when they have different meshes."""
    folder = run.run_dir or resolve.default_folder(recipe)
    everyone = ranks.gather_objects({"folder": str(folder), "text": data.fingerprint,
                                     "local_size": world.local_size,
                                     "plan": f"{run.mesh}, microbatches of {run.batch.microbatch_size}"})
    for rank, other in enumerate(everyone):
        if other["plan"] != everyone[0]["plan"]:
            raise ConfigError(f"differs from that of rank 0 ({everyone[0]['plan']})", where=f"mesh of rank {rank}",
                              value=other["plan"], remedy="Start all ranks with the same settings; where they are auto "
                              "and machines differ, name one cluster with --launch.cluster, or give numbers.")
        if other["text"] != everyone[0]["text"]:
            raise DataError(f"differs from that of rank 0 ({everyone[0]['text']})", where=f"data of rank {rank}",
                            value=other["text"], remedy="Give all machines the same files and versions, or one "
                                                        "shared --data.cache-dir.")
    nodes = {other["local_size"] for other in everyone}
    facts = tensor_mesh_facts(run, nodes.pop() if len(nodes) == 1 else None)
    return replace(run, run_dir=Path(everyone[0]["folder"]),
                   mesh=replace(run.mesh, tile=run.mesh.tile or (facts and facts.tile)))


def held_out_line(data: Prepared) -> list[int]:
    """The start of the first held-out line of some length, as tokens."""
    text = data.tokenizer.decode(data.eval.tokens.head(50 * PROMPT_TOKENS))
    line = next((line for line in text.splitlines() if len(line.split()) >= 4), text)
    return data.tokenizer.encode(line)[:PROMPT_TOKENS] or data.eval.tokens.head(1)
