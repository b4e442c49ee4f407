"""A trained model of any task, with its settings, from a run's checkpoint or a folder in Hugging Face's format, and its
evaluation.

A run is rebuilt from the settings of the model and of its data, which flags may change; each rank then reads the
parameters of its own blocks. A user's code is imported only if the user names it again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ranvier.block import Initial, freeze, without_gradients
from ranvier.checkpoint import state
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.export_model import TrainedSource, averages_in, newest_whole, tokenizer_of
from ranvier.checkpoint.hf.from_pretrained import load_pretrained, with_model
from ranvier.checkpoint.hf.image_files import check_pixels
from ranvier.checkpoint.hf.import_model import check_source
from ranvier.checkpoint.hf.peft import AdapterFolder, load_adapters, with_adapter_settings
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.hf.tokenizer_files import TOKENIZER, tokenizer_beside
from ranvier.checkpoint.manifest import Saved, find, run_folders
from ranvier.config import read
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.run import Run, TensorParallel, Transformer
from ranvier.config.task_form import form_of
from ranvier.data import tokenizer as tokenizers
from ranvier.data.cache import user_cache_folder
from ranvier.data.class_numbers import labels_in, with_labels
from ranvier.data.offline.pretrained_models import local_path
from ranvier.data.prepare import prepare
from ranvier.data.task import Prepared
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import CheckpointError, ConfigError, DataError
from ranvier.inference.evaluation import SAMPLES_AT_ONCE, Evaluated, evaluation_loader
from ranvier.inference.evaluation import evaluate as evaluate_samples
from ranvier.inference.lm_eval_tasks import HarnessTasks
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.models.families import family_named
from ranvier.models.family import num_classes
from ranvier.optim.rules import EMA
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.state_dict import set_extra_states
from ranvier.precision import DTYPES
from ranvier.world import World

KEPT = ("model.", "lora.", "preference.", "batch.", "seed", "precision", "train.eval_sequences", "data.task",
        "data.options", "data.train_samples", "data.eval_samples", "data.text_column", "data.pair_column",
        "data.label_column", "data.messages_column", "data.form", "data.packing", "data.padding", "data.augment",
        "data.augment_repeats", "data.max_bytes")
"""Prefixes of the run's settings that its evaluation keeps; settings of placement and performance are chosen again."""
PLACES = ("data.corpus", "data.mixture", "data.train", "data.eval", "data.eval_sets", "data.tokenizer",
          "data.chat_template", "model.pretrained")
"""Settings that name data. A path is read only if the run's run.toml, owned by this user, also names it."""
_LONGEST = 1024
"""Tokens of a sequence of a folder's model, if it has that many positions."""
_TASK_OF = {"tokens": "lm", "score": "reward", "span": "qa", "classes": "classification"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model. settings: by dotted name, of the model, its data and its batch. fill: reads this rank's
    parameters into an engine. frozen: layers that its run has frozen. origin: the folder that was read. labels: names
    of its classes, by number; tokenizer: the fingerprint of its tokenizer; pretrained: for a folder in Hugging Face's
    format. unnamed: settings with paths that only the checkpoint names; they are not in `settings`."""

    settings: Mapping[str, object]
    fill: Callable[[Engine], object]
    origin: Path
    labels: tuple[str, ...] = ()
    tokenizer: str | None = None
    pretrained: Pretrained | None = None
    frozen: int = 0
    unnamed: Mapping[str, object] = field(default_factory=dict)

    def layer(self) -> read.Layer:
        """The settings as a layer below flags, which may not name Python objects."""
        return read.Layer(origin=str(self.origin), values=self.settings, is_users=False)

    def check_places(self, flags: Collection[str]) -> list[ConfigError]:
        """Errors for paths of data that only the checkpoint names, and no flag: they may be any path, so they are not
        read."""
        return [ConfigError("is a path that only the checkpoint names, and not your run.toml",
                            code="path-named-by-checkpoint", where=read.flag(name), value=read.as_text(value),
                            remedy=f"Name it yourself if it is meant: `--{read.flag(name)} {read.as_text(value)}`.")
                for name, value in self.unnamed.items() if name not in flags]

    def with_model_sizes(self, run: Run) -> Run:
        """The run with the sizes of the folder's model, and the settings of `lora.adapters`. ConfigError for adapters
        of a checkpoint, which has its own, and for another alpha than theirs."""
        if self.pretrained is not None:
            return with_adapter_settings(with_model(run, self.pretrained))
        if run.lora.adapters is not None:
            raise ConfigError("would replace those of a checkpoint, which are evaluated with it",
                              code="adapters-of-checkpoint", where="lora.adapters", value=run.lora.adapters,
                              remedy="Leave it out, or evaluate the folder in Hugging Face's format to which the "
                                     "adapters belong.")
        alpha = self.settings.get("lora.alpha", run.lora.alpha)
        if run.lora.rank and run.lora.alpha != alpha:  # the rank and the method show in the tensors
            raise ConfigError(f"is not that of the checkpoint's adapters, {alpha}", code="other-alpha-than-trained",
                              where="lora.alpha", value=run.lora.alpha, remedy="Leave it out.")
        return run

    def with_model_classes(self, data: Prepared) -> Prepared:
        """The data with the model's class numbers. DataError if it has other classes or tokens."""
        fingerprint = None if data.tokenizer is None else data.tokenizer.fingerprint
        if self.tokenizer is not None and fingerprint not in (None, self.tokenizer):
            raise DataError("is not the tokenizer that the model was trained with: the same numbers would be other "
                            "tokens", code="other-tokenizer-than-trained", where="data.tokenizer",
                            remedy="Set `--data.tokenizer` to the run's tokenizer.json.")
        found = with_labels(data, self.labels, all_there=False) if self.labels and data.class_names else data
        if found is None:
            raise DataError("has other classes than the model was trained on", code="other-classes-than-trained",
                            where="data.eval", value=list(data.class_names[:20]),
                            remedy=f"Give data with its classes, or their numbers: {list(self.labels[:20])}.")
        return found


def open_trained(path: Path, tell: Callable[[str], None], *, ema: bool = False) -> Trained:
    """The model at `path`: a run's folder (its newest complete checkpoint), a folder of checkpoints, a checkpoint, a
    folder in Hugging Face's format, a GGUF file, or a model's name. CheckpointError, ModelError or DataError if there
    is none.

    ema: use the moving averages of a checkpoint's parameters; otherwise the exact master copies are used, if there are
    any.
    """
    path = _in_folder(path, tell)
    if (path / "config.json").is_file():
        if ema:
            raise no_averages(path)
        return _from_folder(path, tell)
    saved = newest_whole(path, tell)
    averages = averages_in(saved) if ema else {}
    run = saved.manifest.about.get("run")
    if not isinstance(run, dict) or "model" not in run:
        raise CheckpointError("does not say which model it is of", code="checkpoint-without-run",
                              where=f"checkpoint {saved.folder}", remedy="Name a checkpoint of `ranvier train`.")
    settings = read.from_dict(run, str(saved.folder)).values
    values = {name: value for name, value in settings.items() if name.startswith(KEPT) or name in PLACES}
    values.pop("lora.adapters", None)  # the adapters' initial values; the checkpoint has the trained ones
    tokenizer, labels = saved.manifest.about.get("tokenizer"), saved.manifest.about.get("labels")
    if not saved.manifest.step:  # an import
        for place in run_folders(path, saved.folder):
            check_pixels(place, tell)
        _check_head(saved.manifest.about.get("missing"), saved.folder)
        if not labels and values.get("data.task") in ("classification", "images"):
            labels = _default_class_names(values.get("model.num_classes"))
    beside = tokenizer_beside(path, saved.folder)
    if beside is not None and values.get("data.task") not in ("chat", "preference", "reward"):
        values |= {"data.tokenizer": str(beside)}
        if values.get("model.family") != "transformers":
            values.pop("model.pretrained", None)  # named for its sizes, which are in the settings, and its tokenizer
    own = next(filter(None, map(read.own_settings, run_folders(path, saved.folder))), {})
    unnamed = {name: value for name in PLACES if name in values and values[name] == settings.get(name)
               and own.get(name) != (value := values[name]) and any(map(_is_path, _words(value)))}
    values = {name: value for name, value in values.items() if name not in unnamed}
    return Trained(settings=values, fill=lambda engine: _fill(engine, saved, averages), origin=saved.folder,
                   labels=tuple(map(str, labels)) if isinstance(labels, list) else (),
                   tokenizer=tokenizer if isinstance(tokenizer, str) else None, frozen=saved.manifest.frozen_layers,
                   unnamed=unnamed)


def _in_folder(path: Path, tell: Callable[[str], None]) -> Path:
    """`local_path`, unless there are checkpoints: RUN/best has the form of a model's name on the hub."""
    return path if find(path) else local_path(path, tell)


def _words(value: object) -> list[str]:
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return [word for entry in entries for word in (str(entry), *str(entry).split("="))]


def _is_path(text: str) -> bool:
    """Whether a file or folder of this name exists."""
    try:
        return os.path.lexists(os.path.expanduser(text))
    except ValueError:
        return False


def _from_folder(path: Path, tell: Callable[[str], None]) -> Trained:
    found = Pretrained(path)
    _check_head(found.missing, path)
    check_source(found, user_cache_folder(), tell)
    config = found.config
    task = "images" if config.family == "vit" else _TASK_OF[found.head]
    values: dict[str, object] = {"model.pretrained": str(path), "data.task": task, "model.family": config.family}
    if config.family == "vit":
        check_pixels(path, tell)
        values["model.image_size"] = config.image_size
    else:
        values["model.sequence"] = min(config.max_positions or config.sequence, _LONGEST)
    unnamed = _default_class_names(num_classes(config)) if found.head == "classes" else []
    return Trained(settings=values, fill=lambda engine: load_pretrained(engine, found), origin=path, pretrained=found,
                   labels=labels_in(path) or tuple(unnamed))


def _check_head(missing: object, origin: Path) -> None:
    """CheckpointError if parameters of a model's head are not in its files."""
    if missing and isinstance(missing, Collection):
        raise CheckpointError(f"has no trained head: it lacks {', '.join(map(str, missing))}", code="untrained-head",
                              where=str(origin), remedy="Train it first: `ranvier train --model.pretrained`.")


def _default_class_names(count: object) -> list[str]:
    """The names that transformers gives to classes without names."""
    return [f"LABEL_{number}" for number in range(count)] if isinstance(count, int) else []


def _fill(engine: Engine, saved: Saved, averages: Collection[str]) -> None:
    """Load this rank's boxes of the parameters in a checkpoint, and its buffers. averages: the parameters whose moving
    averages are loaded instead. CheckpointError for another model."""
    state.check_fits(engine, saved)
    source = state.with_origins(engine, saved)
    kinds = source.manifest.tensors
    with torch.no_grad():
        for piece in state.pieces_held(engine):
            kind = piece.kind
            if kind == "parameter":
                kind = EMA if piece.name in averages else "master" if piece.name in kinds.get("master", {}) else kind
            if piece.name in kinds.get(kind, {}) and not piece.name.endswith(state.EXTRA_STATE):
                source.read_into(kind, piece.name, piece.box, piece.tensor)
    set_extra_states(engine, state.extra_states(engine, source))


def build_engine(run: ResolvedRun, trained: Trained, world: World) -> Engine:
    """An engine with the parameters of `trained`, and no optimizer. Collective over the ranks of `world`."""
    inputs, targets = families.sample_of(run, run.row_microbatch_size)
    sample = Microbatch(inputs=inputs, targets=targets, samples=torch.arange(run.row_microbatch_size))
    model = without_gradients(freeze(families.model_of(run), trained.frozen))  # frozen layers tie no weights
    engine = Engine(replace(model, initial=lambda name: Initial("constant", 0.0)), world, mesh=run.mesh,
                    pipeline=run.pipeline, tensor=run.tensor, seed=run.seed, dtype=DTYPES[run.precision], sample=sample,
                    timeout_seconds=run.comm.timeout_seconds, flags=True)
    trained.fill(engine)
    if run.lora.adapters is not None:
        folder = AdapterFolder(Path(os.path.expanduser(run.lora.adapters)))
        load_adapters(engine, folder, families.config_of(run), families.head_of(run))
    return engine


# --- a language model alone -------------------------------------------------------------------------------------------

# The language model in a run, a checkpoint, or a folder in Hugging Face's format, as an engine for inference.
#
# Each rank reads the parameters of its own blocks, one tensor at a time, and keeps its part of each, so the mesh may
# differ from that of the training.


_SAMPLE_TOKENS = 128
"""Tokens of the sequence whose costs determine the assignment of blocks to stages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A decoder's settings and parameters.

    read: our name of a parameter -> its full value. tokenizer: its tokenizer.json, if there is one. origin: the folder
    that was read.
    """

    config: Transformer
    read: Callable[[str], Tensor]
    tokenizer: Path | None
    origin: Path

    @property
    def longest(self) -> int:
        """The model's context length in tokens."""
        return self.config.max_positions or self.config.sequence


def open_model(path: Path, tell: Callable[[str], None], *, ema: bool = False) -> LanguageModel:
    """The model at `path`: a run's folder (its newest complete checkpoint), a folder of checkpoints, a checkpoint, a
    folder in Hugging Face's format, a GGUF file, or a model's name. ema: use the moving averages of a checkpoint's
    parameters instead. CheckpointError, ModelError or DataError if there is no model, or it is not a decoder."""
    path = _in_folder(path, tell)
    if (path / "config.json").is_file():
        if ema:
            raise no_averages(path)
        pretrained = Pretrained(path)
        own = path / TOKENIZER
        found = _decoder_model(pretrained.head, LanguageModel(
            config=pretrained.config, read=pretrained.read, tokenizer=own if own.is_file() else None, origin=path))
        check_source(pretrained, user_cache_folder(), tell)
        return found
    source = TrainedSource(newest_whole(path, tell), None, ema=ema)
    return _decoder_model(source.head, LanguageModel(config=source.config, read=source.exact,
                                                     tokenizer=tokenizer_of(path, source), origin=source.saved.folder))


def no_averages(path: Path) -> CheckpointError:
    """The error for a folder in Hugging Face's format if moving averages are requested."""
    return CheckpointError("has no moving average of the parameters: it is a folder in Hugging Face's format",
                           code="folder-without-ema", where=str(path),
                           remedy="Export it with `ranvier export --ema`, or leave `--ema` out.")


def _decoder_model(head: str, model: LanguageModel) -> LanguageModel:
    if head != "tokens":
        raise CheckpointError("is not a language model", code="not-a-language-model", where=str(model.origin),
                              value=f"head {head!r}",
                              remedy="Name a run of the task lm or chat, or a folder of a GPT-2 or a Llama.")
    return model


def build_language_engine(model: LanguageModel, world: World, mesh: Mesh, *, tensor: TensorParallel, dtype: torch.dtype
                          ) -> Engine:
    """An engine with the model's parameters in `dtype`; it has no optimizer. Collective over the ranks of `world`.
    CheckpointError for a value that is NaN or infinite there: the text would be any."""
    blocks = without_gradients(family_named(model.config.family).model(model.config, "tokens", dtype=dtype))
    ids_BS = torch.zeros(1, min(model.longest, _SAMPLE_TOKENS), dtype=torch.int64)
    sample = Microbatch(inputs=ids_BS, targets=ids_BS, samples=torch.zeros(1, dtype=torch.int64))
    engine = Engine(replace(blocks, initial=lambda name: Initial("constant", 0.0)), world, mesh=mesh,
                    tensor=replace(tensor, sequence_sharding=False), dtype=dtype, sample=sample, flags=True)
    state.set_parameters(engine, lambda name: hf.finite(model.read(name).to(dtype), name, model.origin))
    return engine


# --- evaluation -------------------------------------------------------------------------------------------------------

# The measurements of `ranvier evaluate`: held-out data of the model's task, and lm-evaluation-harness.
# Each set of held-out data is prepared like the run's own; the model is built once. The harness supports only language
# models.


Results = dict[str, dict[str, float]]
"""Name of a data set -> metric -> value."""


def evaluate(trained: Trained, run: ResolvedRun, runs: Mapping[str, ResolvedRun], tasks: HarnessTasks | None,
             world: World, tell: Callable[[str], None]) -> Results:
    """Evaluate the model on all requested data and tasks; the same results on every rank. Collective over the ranks of
    `world`.

    runs: by name, the run with each set of held-out data. tell: takes lines about the preparation of data, on rank 0.
    """
    if tasks is not None and families.head_of(run) != "tokens":
        raise ConfigError("is of language models only", code="evaluation-of-language-models", where="lm-eval",
                          value=f"the task {run.data.task}",
                          remedy="Name a run of the task lm or chat, or a folder of a GPT-2 or a Llama.")
    if any(one.data.task == "preference" and one.preference.needs_reference for one in runs.values()):
        raise ConfigError("compares with a reference, which the model alone does not define: the run's metrics have "
                          "its scores", code="evaluation-of-reference", where="preference.loss",
                          value=run.preference.loss,
                          remedy="Set `--preference.loss simpo` for the rewards without a reference, or name data of "
                                 "the task chat and set `--data.task chat`.")
    line = tell if world.rank == 0 else (lambda text: None)
    prepared = {name: trained.with_model_classes(prepare(one, line)) for name, one in runs.items()}
    for data in prepared.values():
        run = resolve(run, Facts(num_classes=data.num_classes))
    engine = build_engine(run, trained, world)
    ranks = world.backend.group("evaluate", [tuple(range(world.size))])
    results: Results = {}
    for name, data in prepared.items():
        total = len(data.eval) if data.scoring else min(run.train.eval_sequences, len(data.eval))
        loader = evaluation_loader(run, engine, data.eval, total, at_once=SAMPLES_AT_ONCE * run.mesh.num_replicas)
        results[name] = _scores(run, evaluate_samples(engine, ranks, loader, data.scoring, line))
    if tasks is not None:
        results |= tasks.run(engine, ranks, _tokenizer(trained, run, prepared),
                             longest=run.model.max_positions or run.model.sequence,
                             microbatch_size=run.batch.microbatch_size, vocab=run.model.vocab)
    engine.close()
    ranks.close()
    return results


def _scores(run: ResolvedRun, evaluated: Evaluated) -> dict[str, float]:
    """The scores of one evaluation by name, including perplexity if the loss is over tokens."""
    targets = form_of(run.data).targets
    perplexity = math.inf if evaluated.loss > 709 else math.exp(evaluated.loss)  # the largest exponent of a float
    return {"loss": evaluated.loss, **({"perplexity": perplexity} if targets == "tokens" else {}),
            **{name.removeprefix("eval_"): score for name, score in evaluated.scores.items() if name != "eval_count"},
            targets: evaluated.scores.get("eval_count", evaluated.weight)}


def _tokenizer(trained: Trained, run: ResolvedRun, prepared: Mapping[str, Prepared]) -> Tokenizer:
    """The tokenizer of the language model. ConfigError if there is none."""
    for data in prepared.values():
        if isinstance(data.tokenizer, Tokenizer):
            return data.tokenizer
    named = Path(os.path.expanduser(run.data.tokenizer))
    places = [named, named / TOKENIZER, trained.origin / TOKENIZER]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError("is missing", code="evaluation-tokenizer-missing", where="data.tokenizer",
                          value=run.data.tokenizer,
                          remedy="Name the tokenizer.json of the model: `--data.tokenizer FILE`.")
    return tokenizers.load(found)
