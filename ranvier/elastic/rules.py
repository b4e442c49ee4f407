"""What cannot be asked of an elastic run."""

from __future__ import annotations

from collections.abc import Iterator

from ranvier.elastic import freezing
from ranvier.errors import ConfigError
from ranvier.run import Run


def problems(run: Run) -> Iterator[ConfigError]:
    """What contradicts itself, as far as the settings alone tell."""
    elastic = run.elastic
    yield from freezing.problems(elastic, run.model.num_layers)
    if elastic.freeze != "none" and run.data.task == "lm":
        yield ConfigError("would freeze the token embedding, which is tied to the head and goes on training there",
                          where="elastic.freeze", value=elastic.freeze,
                          remedy="Set --elastic.freeze none, or choose a --data.task whose model has no such tie.")
    if elastic.freeze == "gradient-norm" and run.model.num_layers < 2:
        yield ConfigError("has nothing to compare in a model of one layer", where="elastic.freeze",
                          value=elastic.freeze, remedy="Set --elastic.freeze cap, or use more layers.")
    if elastic.cache and run.model.dropout and elastic.frozen_dropout:
        yield ConfigError(f"would keep what one epoch's dropout has made (model.dropout is {run.model.dropout:g})",
                          where="elastic.cache", value=True,
                          remedy="Set --elastic.frozen-dropout false: frozen layers then drop nothing.")
    if elastic.cache and run.data.augment != "none" and not run.data.augment_repeats:
        yield ConfigError(f"would keep what one epoch's augmentation has made (data.augment is {run.data.augment})",
                          where="elastic.cache", value=True,
                          remedy="Set --data.augment-repeats true: each epoch then repeats the first one's.")
    if run.optim.update_in_backward and elastic.profile_microbatches:
        yield ConfigError("tries several microbatches, and updates in the backward need one",
                          where="elastic.profile-microbatches", value=True,
                          remedy="Leave out --optim.update-in-backward.")
    if run.optim.update_in_backward and elastic.global_batch != "keep":
        yield ConfigError("needs batches of one microbatch, and this one grows", where="elastic.global-batch",
                          value=elastic.global_batch, remedy="Leave out --optim.update-in-backward.")
