"""Rooms that must stay pure, and forbidden imports: read from the sources, and checked by a process without torch."""

import ast
import subprocess
import sys
from functools import cache

import pytest

from tests.sources import ROOT, nodes

FORBIDDEN = ("torch", "time", "datetime", "socket", "os", "pathlib", "io", "subprocess", "threading", "random",
             "secrets", "tempfile", "shutil", "asyncio", "multiprocessing", "mpi4py")
PURE = ("mesh", "layout", "config.aliases", "config.resolve", "config.rules", "config.parameter_groups",
        "config.other_mesh", "config.urls", "schedule.partition", "schedule.schedule",
        "schedule.policies", "schedule.limits", "schedule.simulator", "schedule.computed_limits",
        "cost.blocks", "cost.kernels", "plan.limits", "cost.hardware", "cost.collectives",
        "cost.node_placement", "cost.stage_messages", "cost.mesh_shape", "cost.volume", "cost.memory",
        "cost.published_peaks", "cost.device_overhead", "cost.step", "cost.transition",
        "plan.partition",
        "elastic.inputs", "elastic.freezing", "elastic.auto_pipe", "elastic.microbatch_profile",
        "elastic.mesh_candidates", "elastic.ledger", "elastic.cache_profile",
        "elastic.change", "elastic.state", "elastic.controller", "optim.learning_rate", "train.progress")


def sources(*names):
    """The files of these modules, and all files of these packages."""
    found = []
    for name in names:
        path = ROOT.joinpath(*name.split("."))
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert found and not [path for path in found if not path.is_file()]
    return found


@cache
def imported(path):
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in nodes()[path]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_pure_modules_import_neither_clocks_nor_io():
    wrong = []
    for path in sources(*PURE):
        calls = {node.func.id for node in nodes()[path]
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        names = {name for name in imported(path) if within(name, FORBIDDEN)}
        names |= calls & {"open", "print", "input", "__import__", "eval", "exec"}
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not wrong, "\n".join(wrong)


def test_pure_modules_import_pure_modules_only():
    """Our modules that they import are pure too, so that nothing else is imported indirectly."""
    pure = {f"ranvier.{name}" for name in PURE} | {
        "ranvier.errors", "ranvier.config.run", "ranvier.config.section"}  # the fields, with paths
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path in sources(*PURE) for name in sorted(imported(path))
             if name.startswith("ranvier") and name != "ranvier.config" and not within(name, pure)]
    assert not wrong, "\n".join(wrong)


def test_pure_modules_load_without_torch():
    """A simulation of a hundred thousand ranks starts immediately."""
    program = ("import importlib.metadata, sys; sys.modules['torch'] = None; sys.modules['socket'] = None\n"
               + "\n".join(f"import ranvier.{name}" for name in PURE)
               + "\nfrom ranvier.schedule.simulator import StageTimes, simulate\n"
               "from ranvier.schedule.policies import MessageDriven\n"
               "stage = StageTimes(forward=1.0, backward=1.0, weight=1.0)\n"
               "print(simulate([stage] * 2, 4, MessageDriven(), 2).seconds)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 15.0


def test_models_know_neither_the_pipeline_nor_communication():
    for path in sources("models"):
        wrong = {name for name in imported(path) if within(name, ("ranvier.pipeline", "ranvier.comm", "ranvier.train",
                                                                  "torch.distributed"))}
        assert not wrong, f"{path.name}: {wrong}"


def test_only_the_command_imports_the_training_loop():
    """Except the public names, and the conformance check of trackers, which receive the loop's events."""
    allowed = {*sources("cli"), ROOT / "testing" / "trackers.py", *sources("train"), ROOT / "__init__.py"}
    for path in sorted(nodes().keys() - allowed):
        wrong = {name for name in imported(path) if within(name, ("ranvier.train",))}
        assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


def test_only_the_command_imports_the_command():
    allowed = {*sources("cli"), ROOT / "__main__.py"}
    for path in sorted(nodes().keys() - allowed):
        assert not [name for name in imported(path) if within(name, ("ranvier.cli",))], path.relative_to(ROOT)


def test_settings_depend_on_no_other_room():
    rooms = {f"ranvier.{path.name}" for path in ROOT.iterdir() if path.is_dir()} - {"ranvier.config", "ranvier.system"}
    for path in sources("config"):
        assert not [name for name in imported(path) if within(name, rooms)], path.relative_to(ROOT)


@pytest.mark.slow
def test_a_rank_starts_without_what_only_pictures_and_compiled_blocks_need():
    """Also after it has built blocks without storage to count them."""
    program = ("import sys, torch, ranvier.cli.main, ranvier.train.loop\n"
               "from ranvier.block import meta_device\n"
               "with meta_device(): torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4))\n"
               "print([one for one in sys.modules if one in ('matplotlib', 'torch._dynamo')])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_communication_knows_nothing_of_training():
    for path in sources("comm"):
        wrong = {name for name in imported(path) if within(name, ("ranvier.pipeline", "ranvier.models", "ranvier.optim",
                                                                  "ranvier.train"))}
        assert not wrong, f"{path.name}: {wrong}"


def test_every_file_says_why_it_exists_and_keeps_no_state():
    """Every file has a docstring and no `global` statement."""
    assert [path for path, (tree, *_) in nodes().items() if tree.body and not ast.get_docstring(tree)] == []
    assert [path for path, found in nodes().items() if any(isinstance(node, ast.Global) for node in found)] == []
