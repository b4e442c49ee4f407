"""Another mesh if the launcher has started other ranks: the order, all ranks used, and what must follow."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from ranvier.cli import main as cli
from ranvier.config.other_mesh import difference, fallback, fallback_meshes, microbatch_size, on_mesh, refit
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Optim, Pipeline, Transformer
from ranvier.errors import ConfigError
from ranvier.launch import start as launch
from ranvier.launch.failures import publish_mesh, read_mesh
from ranvier.mesh import Mesh
from ranvier.planner.problems import problems
from tests.errors import raises

SIZES = st.integers(1, 64)
MESHES = st.builds(Mesh, data=SIZES, pipe=st.integers(1, 16), row=st.integers(1, 8), col=st.integers(1, 8))


def shapes(mesh, num_ranks):
    return [candidate.shape for candidate in fallback_meshes(mesh, num_ranks)]


@pytest.mark.parametrize(("mesh", "num_ranks", "expected"), [
    (Mesh(data=4, pipe=2), 6, [(3, 2), (2, 3), (1, 6), (6, 1)]),
    (Mesh(data=2, pipe=2), 3, [(1, 3), (3, 1)]),
    (Mesh(data=1, pipe=4), 8, [(2, 4), (1, 8), (4, 2), (8, 1)]),
    (Mesh(data=1, pipe=3), 7, [(1, 7), (7, 1)]),
    (Mesh(), 1, [(1, 1)])])
def test_replicas_change_first_and_then_stages(mesh, num_ranks, expected):
    assert [shape[:2] for shape in shapes(mesh, num_ranks)] == expected


def test_columns_and_then_rows_change_last():
    assert shapes(Mesh(data=2, pipe=1, row=2, col=4), 8) == [
        (1, 1, 2, 4),
        (2, 1, 2, 2), (1, 2, 2, 2),
        (4, 1, 2, 1), (2, 2, 2, 1), (1, 4, 2, 1),
        (2, 1, 1, 4), (1, 2, 1, 4),
        (4, 1, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2),
        (8, 1, 1, 1), (4, 2, 1, 1), (2, 4, 1, 1), (1, 8, 1, 1)]


@given(mesh=MESHES, num_ranks=SIZES)
def test_every_candidate_uses_all_ranks_and_comes_once_in_the_stated_order(mesh, num_ranks):
    found = shapes(mesh, num_ranks)
    assert found == shapes(mesh, num_ranks)
    assert all(data * pipe * row * col == num_ranks for data, pipe, row, col in found)
    assert found, "one stage of one rank is always possible"

    def place(shape):
        _, pipe, row, col = shape
        return -row, -col, (0, 0) if pipe == mesh.pipe else (1, pipe) if pipe > mesh.pipe else (2, -pipe)

    assert [place(shape) for shape in found] == sorted({place(shape) for shape in found})
    possible = [(data, pipe, row, col) for data in range(1, num_ranks + 1) if num_ranks % data == 0
                for pipe in range(1, num_ranks // data + 1) if num_ranks // data % pipe == 0
                for row in range(1, mesh.row + 1) if mesh.row % row == 0
                for col in range(1, mesh.col + 1) if mesh.col % col == 0
                if data * pipe * row * col == num_ranks]
    assert sorted(found) == sorted(possible)


@given(mesh=MESHES, num_ranks=SIZES, allowed=st.sets(st.integers(0, 30)))
def test_the_first_legal_candidate_is_taken(mesh, num_ranks, allowed):
    candidates = list(fallback_meshes(mesh, num_ranks))
    problem = ConfigError("is not allowed", where="mesh.pipe", remedy="Set another.")
    legal = [candidate for number, candidate in enumerate(candidates) if number in allowed]

    def problems(candidate):
        return [] if candidate in legal else [problem]

    if legal:
        assert fallback(mesh, num_ranks, problems) == legal[0]
        return
    with pytest.raises(ConfigError) as error:
        fallback(mesh, num_ranks, problems)
    assert str(error.value).count("is not allowed") == min(len(candidates), 4)
    assert str(candidates[0]) in str(error.value)
    assert (f"; {len(candidates) - 4} more" in str(error.value)) == (len(candidates) > 4)


def test_a_tile_is_kept_with_the_stages_it_lies_on():
    mesh = Mesh(data=3, pipe=2, row=2, col=4, tile=(2, 2))
    kept, *others = fallback_meshes(mesh, 16)
    assert kept == mesh.resized(data=1)
    assert others and all(other.tile is None for other in others)


@given(wanted=SIZES, global_size=SIZES, data=st.integers(1, 16), row=st.integers(1, 4))
def test_microbatches_fall_to_a_replicas_share(wanted, global_size, data, row):
    mesh = Mesh(data=data, row=row)
    size, share = microbatch_size(wanted, global_size=global_size, mesh=mesh), -(-global_size // data)
    assert 1 <= size <= wanted
    if wanted <= share:
        assert size == wanted
    else:
        assert size == max((part for part in range(1, share + 1) if part % row == 0), default=1)


@pytest.mark.parametrize(("old", "new", "text"), [
    (Mesh(data=4), Mesh(data=3), "fewer replicas"), (Mesh(data=2, pipe=2), Mesh(pipe=3), "more stages, fewer replicas"),
    (Mesh(row=2, col=4), Mesh(col=2), "fewer rows, fewer columns"), (Mesh(), Mesh(), "nothing")])
def test_what_changed_in_words(old, new, text):
    assert difference(old, new) == text


SMALL = ResolvedRun(model=Transformer(num_layers=3, hidden=16, heads=4, vocab=260, sequence=16),
                    batch=Batch(global_size=16, microbatch_size=4))


@given(data=st.integers(1, 4), pipe=st.integers(1, 8), row=st.sampled_from((1, 2)), col=st.sampled_from((1, 2, 4)),
       num_ranks=st.integers(1, 24), boundaries=st.booleans())
def test_a_refitted_run_is_legal(data, pipe, row, col, num_ranks, boundaries):
    mesh = Mesh(data=data, pipe=pipe, row=row, col=col)
    run = replace(SMALL, mesh=mesh, pipeline=Pipeline(
        boundaries=tuple(range(1, pipe)) if boundaries and pipe > 1 else None))
    assert problems(run) == []
    try:
        refitted, warning = refit(run, num_ranks, "torchrun", problems)
    except ConfigError as error:
        assert error.where == "mesh"
        assert all(problems(on_mesh(run, candidate)) for candidate in fallback_meshes(mesh, num_ranks))
        return
    assert problems(refitted, num_ranks) == []
    assert refitted.batch.global_size == run.batch.global_size
    if refitted.mesh.shape[1:] == mesh.shape[1:]:
        assert refitted.pipeline == run.pipeline
    else:
        assert refitted.pipeline == replace(run.pipeline, boundaries=None)
    assert str(refitted.mesh) in str(warning) and str(mesh) in str(warning)
    smaller = refitted.batch.microbatch_size < 4
    assert (f"microbatches of {refitted.batch.microbatch_size} sequences" in str(warning)) == smaller


def test_more_replicas_may_make_microbatches_smaller():
    refitted, warning = refit(replace(SMALL, mesh=Mesh(data=2)), 8, "srun", problems)
    assert (refitted.mesh, refitted.batch.microbatch_size) == (Mesh(data=8), 2)
    assert "8 ranks that srun started" in str(warning) and "microbatches of 2 sequences" in str(warning)


def test_no_mesh_is_legal():
    run = replace(SMALL, mesh=Mesh(data=4, pipe=1), optim=Optim(update_in_backward=True))
    with raises("no-mesh-for-ranks", 3, 1, "optim.update-in-backward"):
        refit(run, 3, "torchrun", problems)


# ------------------------------------------------------------------------------------------------ the command


class Reached(Exception):
    """The command has reached the start of its ranks."""


@pytest.fixture
def train(monkeypatch, tmp_path):
    """(mesh, arguments of launch.start_ranks) as the command has them when it starts its rank."""
    def command(rank, size, *flags):
        for name, value in {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank,
                            "MPI_LOCALNRANKS": size}.items():
            monkeypatch.setenv(name, str(value))

        def start(mesh, comm, settings, **arguments):
            raise Reached(mesh, arguments)

        monkeypatch.setattr(launch, "start_ranks", start)
        with pytest.raises(Reached) as reached:
            cli.run_command(["train", "gpt-tiny", "--run-dir", str(tmp_path), *flags])
        return reached.value.args

    return command


@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_takes_another_mesh_and_rank_0_says_so(train, capsys, rank):
    mesh, arguments = train(rank, 3, "--resume", "auto")
    assert mesh == Mesh(data=1, pipe=3)
    assert arguments["saves_on_stop"]
    err = capsys.readouterr().err
    expected = (r"ranvier: warning: mesh: does not fit the 3 ranks that mpiexec started: the run resumes with data 1 "
                r"x pipe 3 x row 1 x col 1 \(more stages, fewer replicas\) "
                r"\(got 'data 2 x pipe 2 x row 1 x col 1'\)\. .*")
    assert bool(re.search(expected, err)) == (rank == 0)
    assert rank == 0 or err == ""


def test_the_command_takes_another_mesh_for_one_that_is_open(train, capsys):
    mesh, _ = train(0, 3, "--resume", "auto", "--mesh.data", "1", "--mesh.row", "auto", "--mesh.col", "auto")
    assert mesh == Mesh(data=1, pipe=3)
    assert "the run resumes with" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--resume", "auto", "--mesh.pipe", "1"], []])
def test_the_command_keeps_a_mesh_that_fits_and_that_of_a_run_that_does_not_resume(train, capsys, flags):
    mesh, _ = train(0, 2, *flags)
    assert mesh == Mesh(data=2, pipe=1 if flags else 2)
    assert "resumes with" not in capsys.readouterr().err


def test_restarts_are_for_the_launcher_where_there_is_one(train, capsys):
    _, arguments = train(0, 3, "--resume", "auto", "--max-restarts", "2")
    assert arguments["restart"] is None
    assert "ranvier: warning: max-restarts: has no effect under mpiexec (got 2)." in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--mesh.col", "3", "mesh.col: does not divide model.heads 4"),
    ("--model.vocab", "10", "model.vocab: is less than a byte-level tokenizer has")])
def test_a_run_with_problems_of_its_own_is_refused_for_them(monkeypatch, capsys, tmp_path, flag, value, message):
    for name, text in {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}.items():
        monkeypatch.setenv(name, text)
    assert cli.run_command(["train", "gpt-tiny", "--resume", "auto", "--run-dir", str(tmp_path), flag, value]) == 2
    assert re.fullmatch(rf"ranvier: error: {message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("mesh", [Mesh(data=2, pipe=2), Mesh(row=4), Mesh(pipe=2, col=2)], ids=str)
def test_the_supervisor_hears_of_every_axis_of_a_new_mesh(mesh):
    """It names ranks by their coordinates in the new mesh."""
    store = HashStore()
    assert read_mesh(store, Mesh(row=2, col=2)) == Mesh(row=2, col=2)
    publish_mesh(store, mesh)
    assert read_mesh(store, Mesh(row=2, col=2)) == mesh
