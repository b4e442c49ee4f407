"""All that `ranvier evaluate` measures: held-out data of the model's task, and lm-evaluation-harness.

Each set of held-out data is prepared as the run's own; the model is built once. The harness takes language models only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ranvier.checkpoint.hf.tokenizer_files import TOKENIZER
from ranvier.config.resolve import Facts, ResolvedRun, resolve
from ranvier.config.task_form import form_of
from ranvier.data import tokenizer as tokenizers
from ranvier.data.prepare import prepare
from ranvier.data.task import Prepared
from ranvier.data.tokenizer import Tokenizer
from ranvier.errors import ConfigError
from ranvier.inference.evaluation import SAMPLES_AT_ONCE, Evaluated, evaluation_loader
from ranvier.inference.evaluation import evaluate as evaluate_samples
from ranvier.inference.lm_eval_tasks import HarnessTasks
from ranvier.inference.trained import Trained, build_engine
from ranvier.models.families import head_of
from ranvier.world import World

Results = dict[str, dict[str, float]]
"""Name of a data set -> metric -> value."""


def evaluate(trained: Trained, run: ResolvedRun, runs: Mapping[str, ResolvedRun], tasks: HarnessTasks | None,
             world: World, tell: Callable[[str], None]) -> Results:
    """Everything that is asked for; the same on every rank. Collective over the ranks of `world`.

    runs: by name, the run with each set of held-out data. tell: takes lines about the preparation of data, on rank 0.
    """
    if tasks is not None and head_of(run) != "tokens":
        raise ConfigError("is of language models only", code="evaluation-of-language-models", where="lm-eval",
                          value=f"the task {run.data.task}",
                          remedy="Name a run of the task lm or chat, or a folder of a GPT-2 or a Llama.")
    if any(one.data.task == "preference" and one.preference.needs_reference for one in runs.values()):
        raise ConfigError("compares with a reference, and the model alone does not tell which: the run's metrics have "
                          "its scores", code="evaluation-of-reference", where="preference.loss",
                          value=run.preference.loss,
                          remedy="Set `--preference.loss simpo` for the rewards without a reference, or name data of "
                                 "the task chat and set `--data.task chat`.")
    line = tell if world.rank == 0 else (lambda text: None)
    prepared = {name: trained.fitted(prepare(one, line)) for name, one in runs.items()}
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


def _scores(run: ResolvedRun, found: Evaluated) -> dict[str, float]:
    """The numbers of one evaluation by name; of language models their perplexity."""
    targets = form_of(run.data).targets
    perplexity = math.inf if found.loss > 709 else math.exp(found.loss)  # of more the exponential is no number
    return {"loss": found.loss, **({"perplexity": perplexity} if head_of(run) == "tokens" else {}),
            **{name.removeprefix("eval_"): score for name, score in found.scores.items() if name != "eval_count"},
            targets: found.scores.get("eval_count", found.weight)}


def _tokenizer(trained: Trained, run: ResolvedRun, prepared: Mapping[str, Prepared]) -> Tokenizer:
    """The tokenizer of the language model. ConfigError where there is none."""
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
