"""One door of each kind: the files that may import by name, start processes or open files that others can write."""

import ast
from pathlib import Path

import ranvier

ROOT = Path(ranvier.__file__).parent

NAMED_CODE = {
    "__init__.py": "Ranvier's own names",
    "config/named_object.py": "the door",
    "train/experiment_trackers.py": "packages of a constant table",
    "data/cifar.py": "an unpickler that finds arrays only",
    "checkpoint/hf/pretrained.py": "torch.load(weights_only=True)",
    "launch/function_rank.py": "the function of ranvier.run, in a folder of this process",
    "launch/run_function.py": "the results of ranvier.run, in a folder of this process",
}
RUNS_CODE = {"importlib.import_module", "import_module", "__import__", "exec", "eval", "pickle.load", "pickle.loads",
             "torch.load", "np.load", "joblib.load", "runpy.run_path", "runpy.run_module", "marshal.loads",
             "pickle.Unpickler", "importlib.reload", "importlib.util.spec_from_file_location"}


def sources():
    return [path for path in sorted(ROOT.rglob("*.py")) if "__pycache__" not in path.parts]


def name_of(node):
    """The dotted name of an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := name_of(node.value)):
        return f"{start}.{node.attr}"
    return ""


def calls(path):
    """(dotted name, call) for each call in a file, and the names of base classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield name_of(node.func), node
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield name_of(base), node


def without_pickle(call):
    return any(keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is False
               for keyword in getattr(call, "keywords", ()))


def found_in(names):
    return {str(path.relative_to(ROOT)) for path in sources() for name, call in calls(path)
            if name in names and not without_pickle(call)}


def test_code_that_a_text_names_is_imported_in_one_place():
    assert found_in(RUNS_CODE) == set(NAMED_CODE)


def test_the_current_folder_is_put_first_nowhere():
    assert not found_in({"sys.path.insert", "path.insert"})


STARTS_PROCESSES = {
    "system/child.py": "the door",
    "system/parent_death.py": "becomes the command that the door starts",
    "launch/mpi_start_watch.py": "forks a watcher that runs no program",
    "data/parallel.py": "a pool whose processes start inside `safe_spawning`",
}
STARTERS = ("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
            "subprocess.getoutput", "Popen", "os.system", "os.popen", "os.fork", "os.forkpty", "pty.fork",
            "ProcessPoolExecutor", "os.posix_spawn", "os.posix_spawnp", "asyncio.create_subprocess_exec",
            "asyncio.create_subprocess_shell")


def starts(name):
    return name in STARTERS or name.startswith(("os.exec", "os.spawn", "multiprocessing."))


def test_child_processes_are_started_in_one_place():
    found = {str(path.relative_to(ROOT)) for path in sources() for name, _ in calls(path) if starts(name)}
    assert found == set(STARTS_PROCESSES)


def test_only_the_door_builds_the_command_line_of_an_interpreter():
    # ranks of a user's own program run as the program does; mpiexec lies beside the interpreter
    allowed = {"system/child.py", "launch/start.py", "launch/mpiexec.py"}
    assert {str(path.relative_to(ROOT)) for path in sources() if "sys.executable" in path.read_text()} == allowed
