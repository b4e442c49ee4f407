"""User information in URLs: refused from any source of settings, and never shown."""

from dataclasses import replace

import pytest

from ranvier.config import read
from ranvier.config.run import Log, Run
from ranvier.config.urls import has_user_information, without_user_information
from ranvier.train.experiment_trackers import tracker_problems
from tests.errors import check

SECRET = "http://me:geheim@host:5000/x"


@pytest.mark.parametrize("text", [SECRET, "https://token@host", "s3://a:b@c", ["x", "https://a:b@c/d"]])
def test_user_information_is_found_and_hidden(text):
    assert has_user_information(text)
    shown = without_user_information(text)
    assert "...@" in shown and not {"geheim", "token", "a:b"} & set(shown.replace("@", "/").split("/"))


@pytest.mark.parametrize("text", ["http://host:5000/a@b", "file:mlruns", "me@host:x", "/a@b", None, 5, "s3://bucket/x@y"])
def test_other_values_pass(text):
    assert not has_user_information(text)


@pytest.mark.parametrize("layer", [
    read.Layer(origin="flag", values={"log.store": SECRET}, is_text=True),
    read.Layer(origin="file x.toml", values={"log.store": SECRET}),
    read.Layer(origin="file x.toml", values={"log.tracker": [SECRET]}),
    read.Layer(origin="flag", values={"data.corpus": SECRET}, is_text=True)])
def test_a_setting_with_a_password_is_refused_without_showing_it(layer):
    merged = read.merge([layer])
    problem, = merged.problems
    check(problem, "password-in-url", "...@host", where=next(iter(layer.values)))
    assert "geheim" not in str(problem)
    assert "geheim" not in str(read.document(merged.run))


def test_settings_from_python_are_refused_too():
    problem, = tracker_problems(Log(store=SECRET))
    check(problem, "password-in-log-store", where="log.store")
    assert "geheim" not in str(problem)


def test_checkpoints_name_no_tracker():
    from ranvier.train.saving import _SAVED_SETTINGS

    document = read.document(replace(Run(), log=Log(project="p", store="http://host")), _SAVED_SETTINGS)
    assert "log" not in document and "model" in document
    assert {name for name in read.settings() if name not in _SAVED_SETTINGS} == {
        "log.tracker", "log.project", "log.store", "log.offline", "log.every"}
