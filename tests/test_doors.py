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


OPENS = ("open", "os.open", "io.open", "safe_open", "np.memmap", "np.fromfile", "np.loadtxt",
         "np.lib.format.open_memmap", "tarfile.open", "zipfile.ZipFile", "Image.open", "fcntl.open")
READS_AND_WRITES = ("read_text", "read_bytes", "write_text", "write_bytes", "touch")
OPENS_FILES = {
    "system/untrusted_file.py": "the door",
    "system/atomic_file.py": "new files under random names, which replace others",
    "elastic/cache/store.py": "rows that are written in place, with the door's own flags",
    # the kernel's files, and devices
    "cli/options.py": "/dev/null", "cli/train.py": "/dev/null", "train/newcomer.py": "/dev/null",
    "launch/failures.py": "/dev/null", "launch/start.py": "the terminal of the command",
    "launch/devices.py": "/proc", "system/machine.py": "/proc and /sys", "system/processes.py": "/proc",
    "system/lease.py": "/proc; a lease that `open_regular_file` has read", "train/timeline.py": "/proc",
    "data/template_process.py": "/proc",
    # folders that this process has made, and nobody else can write
    "planner/trial.py": "a temporary folder", "launch/function_rank.py": "a temporary folder",
    "launch/rank_processes.py": "a temporary folder", "launch/run_function.py": "a temporary folder",
    "checkpoint/tensor_file.py": "a new folder", "checkpoint/hf/export_model.py": "a new folder",
    "checkpoint/hf/import_model.py": "a new folder", "data/offline/pip_file.py": "a new folder",
    "data/offline/pretrained_models.py": "a new folder", "data/offline/gguf_file.py": "a new folder",
    "data/offline/gguf_tokenizer.py": "a new folder",
    # files that the user names
    "config/read.py": "a recipe", "cost/cluster_files.py": "a cluster file", "cli/generate.py": "a file of prompts",
    "data/cifar.py": "images", "data/corpus.py": "a corpus", "data/image_files.py": "images",
    "data/named_files.py": "tables", "data/sentences.py": "tables", "data/tables.py": "tables",
    # files that `member` or a size and a checksum have judged
    "checkpoint/hf/peft.py": "tensors of `member`; a new configuration", "checkpoint/saved.py": "parts of a manifest",
    "checkpoint/files.py": "a folder, for fsync", "checkpoint/hf/pretrained.py": "tensors of `member`",
    "checkpoint/hf/tokenizer_files.py": "files of `member`", "data/arrays.py": "maps what the door has opened",
    "data/tokens.py": "maps what the door has opened", "data/offline/fetch.py": "packages, by sha256",
    "data/chat_template.py": "files that transformers has read", "data/tokenizer.py": "vocabularies, checked",
}


def test_files_that_others_can_write_are_opened_in_one_place():
    found = {str(path.relative_to(ROOT)) for path in sources() for name, call in calls(path)
             if name in OPENS or (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and
                                  (call.func.attr in READS_AND_WRITES or
                                   (call.func.attr == "open" and name.rpartition(".")[0] in ("path", "file"))))}
    assert found - set(OPENS_FILES) == set(), "use ranvier.system.untrusted_file, or say why not"
    assert set(OPENS_FILES) - found == set(), "these open nothing any more"
