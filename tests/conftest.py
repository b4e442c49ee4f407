"""Ranks are often threads here: each computes with one thread, so that many ranks fit on few cores, and threads of
ranks with several do not spin. Times of hypothesis' examples mean nothing on a machine that others also use.

`make test` runs the same examples each time, so that no change is refused for a fault that it does not have.
`make test-all` draws other and more examples (`--hypothesis-profile random`)."""

import ctypes
import functools
import gc
import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: waiting threads release their core

from collections import Counter
from datetime import date
from functools import cache, partial
from pathlib import Path
from zlib import crc32

import hypothesis
import pytest

from tests.processes import python_path

os.environ.pop("COLUMNS", None)  # set by the terminal in which tests are started
os.environ["PYTHONPATH"] = python_path(Path(__file__).with_name("interpreter"))  # its sitecustomize runs first
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
gc.disable()  # until all tests are collected: objects of modules and tests stay
gc.set_threshold(20_000)  # before `ranvier.cli.ranks` is imported, as ranks in this process restore this value

hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("ranvier", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.load_profile("ranvier")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Set again for each file, because `ranvier.start` in the tests' own process sets the threads of its ranks."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def new_objects():
    """Exclude objects that earlier files left, such as torch's compiler, from garbage collections and from searches for
    tensors, which took half of the time of such tests in a process that has run many files."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def product_rate():
    """Each rank of a run measures its rate of matrix products for a tenth of a second; here it multiplies once, and on
    CPUs once in a process for each number format."""
    import torch

    from ranvier.train import metrics  # only after the variables above are set

    measured = partial(metrics.matrix_product_rate, seconds=0.0)
    on_cpu = cache(partial(measured, torch.device("cpu")))
    return lambda device, dtype, **options: (
        on_cpu(dtype) if device.type == "cpu" else measured(device, dtype, **options))


@pytest.fixture(scope="module", autouse=True)
def short_measurements(request, product_rate):
    """Runs draw pictures only in test files marked for it, because drawing takes longer than training."""
    from ranvier.train import metrics, report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "matrix_product_rate", product_rate)
        if request.node.get_closest_marker("pictures") is None:
            for draw in ("draw_elastic_run", "draw_loss", "timeline_picture"):
                patch.setattr(report, draw, lambda *args: None)
        yield


LONGEST = ("test_closed_memory.py", "test_lost_ranks.py", "test_compiled_blocks.py", "test_launcher_dies.py",
           "test_elastic_decoders.py", "test_transition.py", "test_torch.py", "test_stopped_ranks.py",
           "test_unfreezing.py", "test_fused_chains.py", "test_golden_runs.py", "test_readme.py", "test_lease.py",
           "test_resized_rows.py", "test_gpu_suite.py", "test_elastic_run.py", "test_mpi.py", "test_search.py",
           "test_command.py", "test_faults.py", "test_tensor_gradients.py", "test_writing.py", "test_run_function.py",
           "test_any_mesh.py", "test_any_transformers.py", "test_from_transformers.py", "test_lora_gradients.py",
           "test_stop_signals.py", "test_start_trial.py", "test_resume.py", "test_how_to.py", "test_real_starts.py",
           "test_elastic_settings.py", "test_costs.py")
"""A file runs in one process, so the files that take longest begin first, and no process ends long after the others.
The first one watches each operation, which takes four times as long once torch's compiler is imported. The other files
follow by their number of tests. `make test` sets --no-loadscope-reorder, as pytest-xdist's own order runs files with a
single long test last."""


def on_one_core(run_ranks):
    """Ranks that are threads share the interpreter's lock, which each torch operation releases: on one core they take
    less CPU time, with many collectives half, because a release wakes no other core. `make test-all` runs them on all
    cores, where they overtake each other more often."""
    @functools.wraps(run_ranks)
    def run(fn, size, **options):
        core = ctypes.CDLL(None).sched_getcpu()

        def rank(world):
            os.sched_setaffinity(0, [core])  # for this thread only
            return fn(world)

        return run_ranks(rank if callable(fn) else fn, size, **options)  # other values are refused by name

    return run


def pytest_addoption(parser):
    parser.addoption("--one-case", action="store_true", help="of each test function one case, each day another one")


def pytest_configure(config):
    """Each worker begins to read the files at another place: rewriting all asserts takes 40 CPU seconds, and workers
    load what others have written. The process that starts the workers loads no torch, as they wait for it."""
    worker = getattr(config, "workerinput", None)
    if worker is None and config.getoption("numprocesses", None):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        if torch.version.cuda is not None:  # torch's first trace calls this, and crashes after some tests
            torch._C._ensureCUDADeviceGuardSet()
    if hasattr(os, "sched_setaffinity") and config.getoption("--hypothesis-profile") != "random":
        from ranvier.testing import ranks

        ranks.run_ranks = on_one_core(ranks.run_ranks)
    leaves_out = config.getoption("ignore") or config.getoption("ignore_glob")  # a file would not be in these folders
    if worker is not None and not leaves_out and all(Path(argument).is_dir() for argument in config.args):
        files = sorted({str(path) for argument in config.args for path in Path(argument).rglob("test_*.py")})
        start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args[:] = files[start:] + files[:start]


@pytest.hookimpl(trylast=True)  # after markers have selected tests
def pytest_collection_modifyitems(config, items):
    if config.getoption("one_case"):
        cases = {}
        for item in sorted(items, key=lambda item: crc32(f"{date.today()} {item.nodeid}".encode())):
            cases.setdefault(item.nodeid.partition("[")[0], item)
        config.hook.pytest_deselected(items=[item for item in items if item not in cases.values()])
        items[:] = cases.values()
    order = {name: place for place, name in enumerate(LONGEST)}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (order.get(item.path.name, len(order)), -counts[item.path], item.path))


def pytest_collection_finish():
    """Exclude the millions of objects of modules and tests, which stay, from garbage collections. Collections after
    20,000 new objects instead of 700 save a fifteenth of the CPU time."""
    gc.freeze()
    gc.enable()
