"""Each name that a setting lists has an object, whichever file looks it up."""

from pathlib import Path

import pytest

from ranvier.arguments import literal_values
from ranvier.config import effects
from ranvier.config.named_object import load_object
from ranvier.config.read import settings
from ranvier.config.run import Data, Elastic, Optim, Run, Transformer
from ranvier.config.task_form import SHIPPED
from ranvier.data.prepare import task_of
from ranvier.elastic.named_policy import policy_of
from ranvier.models.families import family_of
from ranvier.optim.rules import rules_of
from ranvier.schedule.policies import POLICIES

OBJECT = {
    "optim.algorithm": lambda name: rules_of(Optim(algorithm=name)),
    "elastic.freeze": lambda name: policy_of(Elastic(freeze=name)),
    "model.family": lambda name: family_of(Run(model=Transformer(family=name))),
    "data.task": lambda name: task_of(Run(data=Data(task=name)))}


def names(setting):
    return literal_values(settings()[setting].annotation)


@pytest.mark.parametrize(("setting", "name"), [(setting, name) for setting in OBJECT for name in names(setting)])
def test_each_name_has_an_object(setting, name):
    assert OBJECT[setting](name) is not None


def test_settings_list_all_policies_and_tasks():
    assert names("pipeline.policy") == [policy.name for policy in POLICIES]
    assert names("data.task") == list(SHIPPED)


def test_effects_knows_the_policies_that_defer():
    assert list(effects.DEFERRING_POLICIES) == [policy.name for policy in POLICIES if policy.defers]


@pytest.mark.parametrize("name", names("optim.algorithm"))
def test_each_optimizer_has_a_row_in_its_page(name):
    assert f"| `{name}` |" in (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(), (
        "add a row to the first table of docs/optimizers.md")


def test_a_listed_name_without_an_object():
    with pytest.raises(AssertionError, match=r"optim\.algorithm lists adan"):
        load_object("adan", "optim.algorithm", ())


def test_each_family_does_a_task():
    """A family that no task lists would be refused with every task."""
    listed = {family for form in SHIPPED.values() for family in (form.family, *form.others)}
    assert listed == {*names("model.family")} - {"auto"}
