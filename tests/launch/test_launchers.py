"""Which launcher started this process: every launcher's variables, alone, nested and contradicting each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.errors import ConfigError
from ranvier.launch.launchers import Started, detect, first_host, local_variables, tasks_per_node
from tests.errors import raises

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "node[01-04]",
          "SLURM_NTASKS": "8", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x4)"}
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "node[02-04],node7", "SLURM_STEP_TASKS_PER_NODE": "3,2(x3)", "SLURM_NODEID": "1"}


def test_plain_python():
    assert detect({"HOME": "/", "MASTER_ADDR": "left over"}) is None


def test_torchrun():
    assert detect(TORCHRUN) == Started(launcher="torchrun", rank=3, size=8, local_rank=1, local_size=2,
                                       master=("node01", 29500), agent_store=True)


BY_HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                                             "MASTER_PORT")}


def test_ranks_that_are_started_by_hand():
    assert detect(BY_HAND) == Started(launcher="torchrun", rank=3, size=8, local_rank=1, local_size=2,
                                      master=("node01", 29500))
    assert detect({**BY_HAND, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for name in BY_HAND.keys() - {"RANK", "WORLD_SIZE"}:
        with raises("launcher-variable-missing", name):
            detect({key: value for key, value in BY_HAND.items() if key != name})


@pytest.mark.parametrize(("launcher", "variables"), [("srun", SRUN), ("mpiexec", MPICH)])
def test_a_job_script_may_export_torchs_variables(launcher, variables):
    of_all = {name: BY_HAND[name] for name in BY_HAND.keys() - {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}}
    for exported in (BY_HAND, of_all, {**of_all, "RANK": "0"}):
        started = detect({**variables, **exported})
        assert (started.launcher, started.rank, started.master) == (launcher, 3, ("node01", 29500))
    with raises("launcher-ambiguous", "torchrun says rank 0 of 8", f"{launcher} says rank 3 of 8"):
        detect({**variables, **BY_HAND, "RANK": "0"})


@pytest.mark.parametrize("variables", [MPICH, OPEN_MPI], ids=["mpich", "open-mpi"])
def test_mpiexec(variables):
    assert detect(variables) == Started(launcher="mpiexec", rank=3, size=8, local_rank=1, local_size=2, mpi=True)


def test_srun():
    started = detect(SRUN)
    assert (started.launcher, started.rank, started.size, started.mpi) == ("srun", 3, 8, False)
    assert (started.local_rank, started.local_size) == (1, 2)
    assert started.master[0] == "node02"
    assert started.master == detect({**SRUN, "SLURM_PROCID": "5"}).master
    assert started.master[1] != detect({**SRUN, "SLURM_STEP_ID": "1"}).master[1]


def test_srun_with_an_address_that_the_user_gives():
    assert detect({**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "1234"}).master == ("here", 1234)


@pytest.mark.parametrize("step", [None, "", "4294967291", "4294967290", "-5"],
                         ids=["salloc", "empty", "batch", "interactive", "negative"])
def test_a_job_script_is_not_a_rank(step):
    variables = SBATCH if step is None else {**SBATCH, "SLURM_STEP_ID": step}
    assert detect(variables) is None


def test_mpiexec_inside_a_job_script_is_mpiexec():
    assert detect({**SBATCH, **MPICH}).launcher == "mpiexec"


def test_srun_with_an_mpi_plugin():
    started = detect({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "8"})
    assert (started.launcher, started.mpi, started.local_size) == ("srun", True, 2)
    assert detect({**SRUN, "PMIX_RANK": "3"}).mpi


def test_one_torchrun_for_each_task_of_srun():
    agents = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    assert detect({**agents, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(("variables", "names"), [
    ({**SRUN, **MPICH, "PMI_SIZE": "4"}, ("mpiexec", "srun")),
    ({**SRUN, **MPICH, "PMI_RANK": "1"}, ("mpiexec", "srun")),
    ({**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, ("torchrun", "mpiexec")),
    ({**TORCHRUN, **SRUN}, ("torchrun", "srun")),
], ids=["sizes", "ranks", "torchrun in mpiexec", "torchrun in srun"])
def test_contradictions_name_both_and_the_remedy(variables, names):
    with raises("launcher-ambiguous") as error:
        detect(variables)
    for name in names:
        assert f"{name} says rank" in str(error.value)
        assert name in error.value.remedy
        assert detect(variables, name).launcher == name
    assert "--launch.launcher" in error.value.remedy


def test_two_kinds_of_mpiexec():
    with raises("mpi-ambiguous", 3, 8, 0, 2):
        detect({**MPICH, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize("setting", ["torchrun", "mpiexec", "srun"])
def test_a_launcher_that_did_not_start_us(setting):
    with raises("launcher-absent", setting):
        detect({}, setting)


def test_local_ignores_other_launchers():
    assert detect({**SRUN, **MPICH, "PMI_SIZE": "4"}, "local") is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT",
                                     "MASTER_ADDR"])
def test_incomplete_variables(missing):
    with raises("launcher-variable-missing", missing):
        detect({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²"])
def test_a_number_that_is_none(value):
    with raises("launcher-variable-not-number"):
        detect({**MPICH, "PMI_RANK": value})


@pytest.mark.parametrize(("variables", "fact"), [
    ({**MPICH, "PMI_RANK": "8"}, "rank 8 of 8"), ({**TORCHRUN, "LOCAL_RANK": "9"}, "rank 9 of"),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "of 0 on this machine"),
    ({**TORCHRUN, "MASTER_PORT": "99999"}, "port 99999"), ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "port 0")])
def test_what_cannot_be_so(variables, fact):
    """Undetected, they would become a wrong device, a division by zero and an OverflowError of torch."""
    with raises("launcher-contradicts", fact):
        detect(variables)


def test_our_own_ranks_before_any_other_launcher():
    ours = local_variables(2, 4, ("10.0.0.7", 5000), "torch", "why")
    started = detect({**SRUN, **ours})
    assert started == Started(launcher="local", rank=2, size=4, local_rank=2, local_size=4, agent_store=True,
                              master=("10.0.0.7", 5000), reason="why")


def test_our_own_ranks_through_mpiexec():
    ours = local_variables(None, 8, ("127.0.0.1", 5000), "mpi", "")
    started = detect({**ours, **MPICH})
    assert (started.launcher, started.rank, started.local_rank, started.mpi) == ("local", 3, 3, True)
    with raises("mpiexec-rank-count", 8):
        detect(ours)
    with raises("mpiexec-rank-count", 8, 3, 4):
        detect({**ours, **MPICH, "PMI_SIZE": "4"})


def test_the_first_host_of_a_node_list():
    assert first_host("node[01-03,7],login") == "node01" and first_host("gpu-1,gpu-2") == "gpu-1"
    assert first_host("a[1-2]-b[3,04].c") == "a1-b3.c"


@pytest.mark.parametrize("nodes", ["", "a[", "a[5-]", ",", "a[]", " ", "a,,b"])
def test_not_a_node_list(nodes):
    with raises("node-list"):
        first_host(nodes)


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("nonsense") == []


VALUES = st.sampled_from(["0", "1", "2", "3", "8", "", "x", "node[1-2]", "True", "4294967291", "2(x4)"])
NAMES = st.sampled_from(sorted({*TORCHRUN, *MPICH, *OPEN_MPI, *SRUN, "RANVIER_LOCAL_SIZE", "RANVIER_TRANSPORT",
                                "RANVIER_STORE_ADDRESS", "RANVIER_STORE_PORT",
                                "RANVIER_LOCAL_RANK"}))


@given(st.dictionaries(NAMES, VALUES), st.sampled_from(["auto", "local", "torchrun", "mpiexec", "srun"]))
def test_any_environment_is_a_rank_or_an_error(environ, setting):
    try:
        started = detect(environ, setting)
    except ConfigError as error:
        assert error.remedy
    else:
        assert started is None or 0 <= started.rank < started.size
