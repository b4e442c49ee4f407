"""Any file or command line is resolved or refused with a RanvierError; nothing else is raised."""

from datetime import date

import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier.cli import check
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.errors import ConfigError
from ranvier.planner.auto import with_plan
from ranvier.planner.problems import problems, warnings

NUMBERS = st.one_of(st.integers(-3, 70), st.sampled_from([2**31, 2**62, 2**63, 10**30]), st.floats(), st.booleans())
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(
    ["auto", "none", "mpi", "gpipe", "fp64", "1,2", "1,,2", "", "-1", "1e9", "٣", "true"]))
LEAVES = st.one_of(NUMBERS, TEXTS, st.dates(date(2000, 1, 1)), st.lists(NUMBERS, max_size=3),
                   st.lists(TEXTS, max_size=2),
                   st.dictionaries(st.sampled_from(["steps", "x"]), NUMBERS, max_size=2))
SECTIONS = sorted({name.partition(".")[0] for name in read.settings()})
KEYS = st.one_of(st.sampled_from(sorted({name.rpartition(".")[2] for name in read.settings()})), st.text(max_size=6))
TREES = st.dictionaries(st.one_of(st.sampled_from(SECTIONS), KEYS),
                        st.one_of(LEAVES, st.dictionaries(KEYS, LEAVES, max_size=4)), max_size=4)


def assert_in_words(problems):
    for problem in problems:
        assert isinstance(problem, ConfigError)
        assert problem.where and problem.what and problem.remedy
        check.as_dict(problem)


@given(TREES)
def test_any_tree(tree):
    found = read.merge([read.from_dict(tree, "file x.toml")])
    assert_in_words(found.problems)
    run, more = with_plan(found.run, 4)
    assert_in_words([*more, *problems(run, 4)])
    assert_in_words(warnings(run))
    again = read.merge([read.Layer(origin="flag", is_text=True, values={
        name: read.as_text(value) for name, value in read.flatten(found.run).items()
        if name not in ("train.prompt", "data.corpus")})])
    assert again.problems == ()


@given(TREES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_that_is_written_and_read(tmp_path, tree):
    path = tmp_path / "x.toml"
    path.write_bytes(tomli_w.dumps(tree).encode("utf-8", "surrogatepass"))
    try:
        layer = read.load(str(path))[1]
    except ConfigError as error:
        assert_in_words([error])
        return
    assert_in_words(read.merge([layer]).problems)


@given(st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes(tmp_path, content):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    try:
        read.load(str(path))
    except ConfigError as error:
        assert_in_words([error])


FLAGS = st.one_of(st.sampled_from([f"--{setting.flag}" for setting in read.settings().values()]),
                  st.sampled_from(["--ranks", "--json", "--help", "--run-di", "--", "-x", "gpt-tiny"]))


@given(st.lists(st.one_of(FLAGS, TEXTS, st.integers(-2, 80).map(str)), max_size=6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_command_line(capsys, args):
    code = run_command(["check", "gpt-tiny", *args])
    out, err = capsys.readouterr()
    assert code in (0, 2)
    assert (code == 0 or "problem" in out) if not err else (code == 2 and err.count("\n") == 1)
