"""Every contender of benchmarks/tensor computes what plain PyTorch does, and the program runs from start to file."""

from __future__ import annotations

import contextlib
import json
import re

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from benchmarks.pipeline.contender import Place
from benchmarks.pipeline.team import Stand
from benchmarks.tensor.autograd_stack import AutogradStack
from benchmarks.tensor.contender import Contender, builder, contenders
from benchmarks.tensor.run import WorkDiffers, check_work, main, measure
from benchmarks.tensor.stem import Stem, reference
from benchmarks.tensor.team import phase_seconds
from ranvier.comm.mpi_backend import MPIBackend
from ranvier.testing.ranks import run_processes
from ranvier.testing.reference import relative_error
from tests.mpi import NEEDS_MPI

RANKS = 4
STEM = Stem(num_layers=2, hidden=32, heads=4, sequence=8, microbatch=4, dtype="float64")
TINY = ["--layers", "1", "--hidden", "16", "--heads", "4", "--sequence", "8", "--microbatch", "4", "--quick"]
HERE = "tests.benchmarks.test_tensor_peers"


# ---------------------------------------------------------------------- on the ranks


def compared(world, transport: str) -> dict[str, dict]:
    """Contender of this transport -> differences of its second step, and the resources that it needs."""
    return {one.name: _compared(one, world) for one in contenders(RANKS) if one.transport == transport}


def _compared(contender: Contender, world) -> dict:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    wanted_y, wanted_dx, wanted = reference(STEM)
    with builder(contender)(STEM, contender, Place(rank=world.rank, size=world.size, store=world.store)) as stack:
        x, dy = stack.share(STEM.inputs()), stack.share(STEM.output_gradients())
        saved_bytes = stack.saved_bytes(x)
        is_peer = isinstance(stack, AutogradStack)
        for _ in range(2):
            stack.clear()
            moves = CommDebugMode(), CommDebugMode()  # has backward hooks on modules, which layers on columns refuse
            with moves[0] if is_peer else contextlib.nullcontext():
                y = stack.forward(x)
            with moves[1] if is_peer else contextlib.nullcontext():
                dx = stack.backward(dy)
        stack.finish()
        stack.wait()
        partial = [name for name, parameter in stack.network.named_parameters() if isinstance(parameter.grad, DTensor)
                   and any(placement.is_partial() for placement in parameter.grad.placements)] if is_peer else []
        gradients = dict(stack.gradients())
        return {"y": relative_error(stack.assemble(y), wanted_y), "dx": relative_error(stack.assemble(dx), wanted_dx),
                **{name: relative_error(gradients[name], wanted[name]) for name in wanted},
                "unknown": sorted(gradients.keys() - wanted.keys()), "partial": partial, "saved_bytes": saved_bytes,
                "forward": _counts(moves[0]), "backward": _counts(moves[1])}


def _counts(moves) -> dict[str, int]:
    return {str(name).rpartition(".")[2]: count for name, count in moves.get_comm_counts().items()}


@contextlib.contextmanager
def open_over_mpi(stem: Stem, contender: Contender, place: Place):
    """All ranks compute everything; only `wait` goes through MPI."""
    backend = MPIBackend(torch.device("cpu"), 60.0)
    assert (backend.rank, backend.size) == (place.rank, place.size)
    group, flag = backend.group("wait", [range(place.size)]), torch.zeros(1)
    stack = AutogradStack(stem.network(), dim=None)
    stack.wait = lambda: group.all_reduce(flag).wait()
    yield stack
    group.close()
    backend.close()


@contextlib.contextmanager
def open_alone(stem: Stem, contender: Contender, place: Place):
    """One rank. With the setting `wrong`, the last bias is zero."""
    network = stem.network()
    if contender.settings.get("wrong"):
        list(network.children())[-1].mlp.fc2.bias.data.zero_()
    stack = AutogradStack(network, dim=None)
    stack.wait = lambda: None
    yield stack


# ---------------------------------------------------------------------- here


@pytest.fixture(scope="module")
def over_gloo() -> list[dict]:
    return run_processes(f"{HERE}:compared", RANKS, "torch", args=["gloo"], timeout_seconds=240)


def _check(ranks: list[dict], transport: str) -> None:
    for found in ranks:
        assert list(found) == [one.name for one in contenders(RANKS) if one.transport == transport]
        for name, values in found.items():
            errors = {what: value for what, value in values.items() if isinstance(value, float)}
            assert {"y", "dx", "layer1.mlp.fc2.bias"} <= errors.keys() and len(errors) == 2 + 2 * 12
            assert all(error < 1e-10 for error in errors.values()), (name, errors)
            assert values["unknown"] == values["partial"] == [], name


@pytest.mark.slow
def test_all_contenders_over_gloo_compute_what_plain_pytorch_does(over_gloo):
    _check(over_gloo, "gloo")


@pytest.mark.slow
@pytest.mark.mpi
@NEEDS_MPI
@pytest.mark.skipif(all(one.transport != "mpi" for one in contenders(RANKS)), reason="no contender over MPI")
def test_all_contenders_over_mpi_compute_what_plain_pytorch_does():
    _check(run_processes(f"{HERE}:compared", RANKS, "mpi", args=["mpi"], timeout_seconds=240), "mpi")


@pytest.mark.slow
def test_peers_move_each_sublayer_s_tensors_once_each_way(over_gloo):
    sublayers = 2 * STEM.num_layers
    for found in over_gloo:
        for way in ("forward", "backward"):
            assert found["dtensor-sp"][way] == {"all_gather_into_tensor": sublayers, "reduce_scatter_tensor": sublayers}
            assert found["dtensor"][way] == {"all_reduce": sublayers}
        assert found["fsdp2"]["forward"] == {"_allgather_base_": STEM.num_layers}
        assert found["fsdp2"]["backward"] == {"_allgather_base_": STEM.num_layers,
                                              "_reduce_scatter_base_": STEM.num_layers}


@pytest.mark.slow
def test_saved_bytes_are_those_of_the_activations(over_gloo):
    """A layer keeps x and x + attention, both norms, qkv and heads, fc1 and GELU, in units of one tensor [B, S, H];
    and four statistics of norms and one of the softmax per head, in units of [B, S]."""
    kept = {"fsdp2": (2 / 4 + 2 / 4 + 4 / 4 + 8 / 4, 4 / 4 + STEM.heads / 4),
            "dtensor-sp": (2 / 4 + 2 + 4 / 4 + 8 / 4, 4 / 4 + STEM.heads / 4),
            "dtensor": (2 + 2 + 4 / 4 + 8 / 4, 4 + STEM.heads / 4)}
    for found in over_gloo:
        for name, (tensors, statistics) in kept.items():
            elements = STEM.num_layers * STEM.microbatch * STEM.sequence * (tensors * STEM.hidden + statistics)
            assert found[name]["saved_bytes"] == 8 * elements, name


def test_a_phase_lasts_from_the_first_start_to_the_last_end():
    spans = [[[(0.0, 1.0), (2.0, 3.0), (4.0, 4.5)]], [[(0.5, 1.5), (1.75, 3.25), (4.0, 4.25)]]]
    assert phase_seconds(spans) == {"forward": (1.5,), "backward": (1.5,), "finish": (0.5,)}


def test_work_within_rounding_passes_and_other_work_does_not():
    assert check_work("a", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0.0
    assert 0 < check_work("a", [1.0, 2.00001, 3.0], [1.0, 2.0, 3.0]) < 1e-4
    for other in ([1.0, 2.001, 3.0], [1.0, 2.0, float("nan")]):
        with pytest.raises(WorkDiffers, match="no ratios: a "):
            check_work("a", other, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError):
        check_work("a", [1.0], [1.0, 2.0, 3.0])


@pytest.mark.slow
def test_results_are_complete(tmp_path, capsys):
    path = tmp_path / "result.json"
    main([*TINY, "--ranks", "2", "--only", "dtensor", "fsdp2", "--base", "dtensor", "--output", str(path)])
    result = json.loads(path.read_text())
    assert {"date", "commit", "machine", "versions", "command", "stem", "base", "rounds", "steps_per_round"
            } <= result.keys()
    assert [one["name"] for one in result["contenders"]] == ["dtensor", "fsdp2"]
    for one in result["contenders"]:
        assert one["work_differs_by"] < 1e-4 and one["transport"] == "gloo"
        assert len(one["saved_bytes"]) == 2 and min(one["saved_bytes"]) > 0
        assert len(one["rounds"]) == 2
        for entry in one["rounds"]:
            assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in entry["phase_seconds"].values())
            assert entry["phase_seconds"].keys() == one["milliseconds"].keys() == {"forward", "backward", "finish"}
            assert len(entry["peak_bytes"]) == len(entry["peak_above_rest_bytes"]) == 2
            assert all(0 <= rest < imports < peak for rest, imports, peak in zip(
                entry["peak_above_rest_bytes"], entry["peak_above_imports_bytes"], entry["peak_bytes"], strict=True))
    base, other = result["contenders"]
    assert base["speed_over_base"]["both"] == {"least": 1.0, "middle": 1.0, "greatest": 1.0}
    assert set(other["speed_over_base"]) == {"forward", "backward", "both"}
    assert re.search(r"(?m)^fsdp2 +gloo +2x1( +[0-9.]+){3}( +[0-9.]+ \[.*?\]){3}", capsys.readouterr().out)
    assert not psutil.Process().children(recursive=True)


def _measured(tmp_path, contender: Contender, rounds: int = 1) -> list[dict]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stand = Stand(store=store, port=store.port, folder=tmp_path, cores=1, timeout_seconds=120)
    return measure(STEM, [contender], stand, rounds=rounds, steps=1, say=lambda text: None)


@pytest.mark.slow
@pytest.mark.mpi
@NEEDS_MPI
def test_ranks_are_started_by_mpiexec_too(tmp_path):
    (entry,) = _measured(tmp_path, Contender(name="all", build=f"{HERE}:open_over_mpi", mesh=(2, 1),
                                                          transport="mpi"))
    assert entry["ranks"] == 2 and len(entry["rounds"][0]["peak_bytes"]) == 2


@pytest.mark.slow
def test_a_contender_that_computes_something_else_gets_no_ratio(tmp_path):
    with pytest.raises(WorkDiffers, match="wrong does not compute"):
        _measured(tmp_path, Contender(name="wrong", build=f"{HERE}:open_alone", mesh=(1, 1),
                                      settings={"wrong": True}))
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_each_block_starts_its_own_processes_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.tensor.run._ACTIVE_BYTES", 1 << 60)
    (entry,) = _measured(tmp_path, Contender(name="alone", build=f"{HERE}:open_alone", mesh=(1, 1)), rounds=2)
    assert not entry["processes_kept"] and len(entry["rounds"]) == 2
    assert len(list(tmp_path.glob("team*.txt"))) == 2


def test_options_that_fit_nothing_are_refused(capsys):
    for arguments, said in ((["--base", "nobody"], "--base nobody takes no part"), (["--heads", "3"], "do not divide")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err
    assert contenders(2)[0].mesh == (1, 2)
