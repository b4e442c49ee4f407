"""The reference model of preference tuning: its log-probabilities are computed once, and kept in the run's folder.

    RUN/reference.json     {"data": fingerprint, "sets": {SET: [[chosen, rejected], ...], ...}}, as `_sets` names them

The reference is the model with which the run begins, without adapters. A run that resumes has other weights, so it
reads the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.comm.protocol import Group
from ranvier.data.preference import WithReference
from ranvier.data.task import Prepared
from ranvier.errors import CheckpointError, ConfigError, DataError, RanvierError
from ranvier.inference.evaluation import SAMPLES_AT_ONCE, evaluation_loader, log_p_of_pairs
from ranvier.system.atomic_file import write_atomically
from ranvier.system.untrusted_file import read_json
from ranvier.train.logs import writing
from ranvier.train.runtime import RankRuntime
from ranvier.train.saving import Start
from ranvier.train.setup import fingerprint

NAME = "reference.json"
"""File in the run's folder."""
_MOST_BYTES = 1 << 32


def fill_reference(runtime: RankRuntime, data: Prepared, everyone: Group, resumed: Start) -> list[str]:
    """Add the reference's log-probabilities to the pairs of a run whose loss needs them. Collective over the world, all
    ranks of which are in the mesh. Returns a note for the user if they were computed.

    CheckpointError if a resumed run's folder lacks them, DataError if it has those of other pairs, and ConfigError if
    the run begins with another run's adapters, which its checkpoint does not separate from the base model.
    """
    run, sets = runtime.run, _sets(data)
    if run.data.task != "preference" or not run.preference.needs_reference:
        return []
    assert run.run_dir is not None
    path, note = run.run_dir / NAME, list[str]()
    values: Mapping[str, np.ndarray]
    if resumed.continues:
        values = _read_by_first(path, data, everyone)
    else:
        if run.lora.rank and resumed.loaded is not None and resumed.step:
            raise ConfigError("has adapters, and the reference is the model without them",
                              code="reference-with-adapters", where="resume", value=str(resumed.loaded.folder),
                              remedy="Write a full model with `ranvier export`, and begin with it: "
                                     "`--model.pretrained`.")
        values = {name: _log_p(runtime, pairs) for name, pairs in sets.items()}
        if everyone.index == 0:
            with writing(path):
                write_atomically(path, json.dumps({"data": fingerprint(data), "sets": {
                    name: found.tolist() for name, found in values.items()}}))
        count = sum(len(pairs) for pairs in sets.values())
        note = [f"computed the reference's log-probabilities of {count:,} pairs, kept in {path}"]
    for name, pairs in sets.items():
        pairs.reference = values[name]
    return note


def _sets(data: Prepared) -> dict[str, WithReference]:
    """The pairs of a run by set name; training and held-out pairs have names that no set can have."""
    named = {"": data.train, "eval-": data.eval, **{name: eval_set.data for name, eval_set in data.eval_sets.items()}}
    return {name: pairs for name, pairs in named.items() if isinstance(pairs, WithReference)}


def _log_p(runtime: RankRuntime, pairs: WithReference) -> np.ndarray:
    at_once = max(runtime.run.batch.global_size, SAMPLES_AT_ONCE * runtime.run.mesh.num_replicas)
    loader = evaluation_loader(runtime.run, runtime.engine, pairs, len(pairs), at_once=at_once)
    return log_p_of_pairs(runtime.engine, runtime.ranks, loader)


def _read_by_first(path: Path, data: Prepared, everyone: Group) -> Mapping[str, np.ndarray]:
    """The values in the file, which only rank 0 reads. Collective over the world."""
    problem, values = None, None
    if everyone.index == 0:
        try:
            values = {name: found.tolist() for name, found in _read(path, data).items()}
        except RanvierError as error:
            problem = error
    values = everyone.gather_objects(values)[0]
    if values is None:
        raise problem or CheckpointError("cannot be used; rank 0 says why", code="reference-of-first", where=str(path),
                                         remedy="See the error of rank 0.")
    return {name: np.asarray(found, dtype=np.float64) for name, found in values.items()}


def _read(path: Path, data: Prepared) -> Mapping[str, np.ndarray]:
    """The values in the file. RanvierError if it cannot be used."""
    try:
        document: Any = read_json(path, _MOST_BYTES, own=True)
        same = document["data"] == fingerprint(data)
        values = {name: np.asarray(document["sets"][name], dtype=np.float64) for name in _sets(data) if same}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("cannot be read, and the weights of a run that resumes are not its reference",
                              code="no-reference", where=str(path), value=f"{type(error).__name__}: {error}"[:200],
                              remedy="Begin the run again in another folder, or set `--preference.loss simpo`."
                              ) from error
    if not same:
        raise DataError("has the reference's log-probabilities of other pairs", code="reference-of-other-pairs",
                        where=str(path),
                        remedy="Resume with the same data, or begin the run again in another folder.")
    for name, pairs in _sets(data).items():
        if values[name].shape != (len(pairs), 2) or not all(map(math.isfinite, values[name].flat)):
            raise CheckpointError("does not have two numbers for each pair", code="damaged-reference", where=str(path),
                                  value=str(values[name].shape), remedy="Begin the run again in another folder.")
    return values
