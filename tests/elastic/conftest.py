"""Runs that the tests of this folder share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ranvier.config.run import Elastic
from ranvier.launch.stop import StopRequest
from ranvier.train import loop
from tests.elastic.processes import Command, Joining
from tests.elastic.runs import BY_HAND, losses_of_one_rank, write_sentences


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A folder of labelled sentences."""
    folder = tmp_path_factory.mktemp("sentences")
    write_sentences(folder)
    return folder


@pytest.fixture(scope="module")
def in_one_process(sentences, tmp_path_factory):
    """Losses of the run that freezes the same layers after the same steps, on one rank."""
    return losses_of_one_rank(sentences, tmp_path_factory, replace(BY_HAND, auto_pipe=False, auto_dp=False))


@pytest.fixture(scope="module")
def plain_losses(sentences, tmp_path_factory):
    """Losses of the run that freezes nothing, on one rank."""
    return losses_of_one_rank(sentences, tmp_path_factory, Elastic())


@pytest.fixture
def requests(monkeypatch):
    """The stop requests of all ranks."""
    made = []

    def kept(signals):
        made.append(StopRequest(signals))
        return made[-1]

    monkeypatch.setattr(loop, "StopRequest", kept)
    return made


def end_all(started):
    for each in started:
        each.process.kill()
        if not each.process.stdout.closed:
            each.process.communicate()


@pytest.fixture
def start(sentences, tmp_path):
    started = []

    def begin(transport="torch", **options):
        started.append(Command(sentences, options.pop("folder", tmp_path / "run"), transport, **options))
        return started[-1]

    yield begin
    end_all(started)


@pytest.fixture
def start_run(sentences, tmp_path):
    started = []

    def begin(ranks, **options):
        options = {"manual": "", "launch__join_address": "127.0.0.1", "launch__stopped_seconds": 0,
                   "launch__threads": 1, "comm__timeout_seconds": 300} | options  # longer than ranks stay stopped
        started.append(Command(sentences, tmp_path / "run", "torch", ranks=ranks, **options))
        return started[-1]

    def join(run, *options, **where):
        started.append(Joining(run, *options, **where))
        return started[-1]

    yield begin, join
    end_all(started)
