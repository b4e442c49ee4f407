"""For each kind of door, the only files that may import by name, start processes, open files that others can write, or
talk to other processes."""

import pytest

from tests.references import ROOT, Reference, references, references_of_files

# --- code that a text names ------------------------------------------------------------------------------------------

NAMED_CODE = {
    "__init__.py": "Ranvier's own names",
    "config/named_object.py": "the door",
    "data/prepare.py": "modules of shipped tasks, by a constant table",
    "models/families.py": "modules of shipped families, by a constant table",
    "train/experiment_trackers.py": "packages of a constant table",
    "checkpoint/hf/pretrained.py": "torch.load(weights_only=True)",
    "launch/run_function.py": "the function of ranvier.run and its results, in a folder of this process",
}
RUNS_CODE = {"importlib.import_module", "importlib.reload", "importlib.util.spec_from_file_location",
             "importlib.util.module_from_spec", "__import__", "exec", "eval", "pickle.load", "pickle.loads",
             "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load", "dill.load",
             "dill.loads", "cloudpickle.load", "cloudpickle.loads", "runpy.run_path", "runpy.run_module",
             "pkgutil.resolve_name", "pydoc.locate", "numpy.load", "torch.load", "torch.jit.load", "torch.hub.load",
             "torch.export.load", "sys.path.insert"}


def runs_code(reference: Reference) -> bool:
    if reference.name == "numpy.load" and reference.call is not None:  # unpickles only on request
        return any(keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False
                   for keyword in reference.call.keywords)
    return reference.name in RUNS_CODE or reference.name.startswith("importlib.machinery.Source")


# --- child processes -------------------------------------------------------------------------------------------------

STARTS_PROCESSES = {
    "system/child.py": "the door",
    "system/parent_death.py": "becomes the command that the door starts",
    "launch/heartbeat.py": "forks a watcher that runs no program",
    "data/worker_processes.py": "a pool whose processes start inside `safe_spawning`",
}
STARTERS = {"os.system", "os.popen", "os.fork", "os.forkpty", "concurrent.futures.ProcessPoolExecutor", "psutil.Popen",
            "torch.distributed.run.run", "torch.distributed.run.main"}
STARTING = ("os.exec", "os.spawn", "os.posix_spawn", "pty.", "subprocess.", "multiprocessing.", "_posixsubprocess.",
            "asyncio.create_subprocess_", "asyncio.subprocess.", "torch.distributed.launcher.")
"""Prefixes of names."""
STARTS_NOTHING = {"subprocess.PIPE", "subprocess.STDOUT", "subprocess.DEVNULL", "subprocess.SubprocessError",
                  "subprocess.TimeoutExpired", "subprocess.CalledProcessError", "subprocess.CompletedProcess"}


def starts_process(reference: Reference) -> bool:
    name = reference.name
    return name not in STARTS_NOTHING and (name in STARTERS or name.startswith(STARTING))


# --- files that others can write -------------------------------------------------------------------------------------

OPENS_FILES = {
    "system/untrusted_file.py": "the door",
    "system/atomic_file.py": "new files under random names, which replace others",
    "elastic/cache_file.py": "rows that are written in place, with the door's own flags",
    "system/file_lock.py": "folders that are locked, with the door's own flags",
    # the kernel's files, and devices
    "cli/options.py": "/dev/null", "cli/train.py": "/dev/null", "train/joining.py": "/dev/null",
    "launch/failures.py": "/dev/null", "launch/start.py": "the terminal of the command",
    "launch/devices.py": "/proc", "system/machine.py": "/proc and /sys", "system/processes.py": "/proc",
    "system/lease.py": "/proc; a lease that `open_regular_file` has read", "pictures/timelines.py": "/proc",
    "data/template_process.py": "/proc",
    # files of the package
    "config/read.py": "a shipped recipe", "config/presets.py": "shipped presets",
    "cost/cluster_files.py": "a shipped cluster", "pictures/report_page.py": "the template of report.html",
    # folders that this process has created, and that no other user can write
    "planner/trial.py": "a temporary folder",
    "launch/rank_processes.py": "a temporary folder", "launch/run_function.py": "a temporary folder",
    "system/tensor_file.py": "a new folder", "checkpoint/hf/export_model.py": "a new folder",
    "checkpoint/hf/import_model.py": "a new folder", "data/offline/pip_file.py": "a new folder",
    "data/offline/pretrained_models.py": "a new folder", "data/offline/gguf_file.py": "a new folder",
    "data/offline/gguf_tokenizer.py": "a new folder",
    # files that the user names
    "cli/generate.py": "a file of prompts", "data/corpus.py": "a corpus",
    "data/images.py": "images", "data/named_files.py": "tables", "data/sentences.py": "tables",
    "data/tables.py": "tables",
    # files that `member`, or a size and a checksum, have checked
    "checkpoint/hf/peft.py": "tensors of `member`; a new configuration",
    "checkpoint/manifest.py": "parts of a manifest",
    "checkpoint/files.py": "a folder, for fsync", "checkpoint/hf/pretrained.py": "tensors of `member`",
    "checkpoint/hf/tokenizer_files.py": "files of `member`", "checkpoint/hf/image_files.py": "files of `member`",
    "models/any_transformers.py": "files of `member`, tensors alone", "data/arrays.py": "maps what the door has opened",
    "data/offline/fetch.py": "packages, by sha256",
    "data/chat_template.py": "files that transformers has read", "data/tokenizer.py": "vocabularies, checked",
}
OPENS = {"open", "os.open", "os.fdopen", "codecs.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open",
         "tarfile.TarFile", "zipfile.ZipFile", "dbm.open", "shelve.open", "sqlite3.connect", "mmap.mmap",
         "linecache.getlines", "linecache.getline", "fileinput.input", "shutil.copyfile", "shutil.copy",
         "shutil.copy2", "shutil.copytree", "shutil.move", "shutil.unpack_archive", "numpy.load", "numpy.memmap",
         "numpy.fromfile", "numpy.loadtxt", "numpy.genfromtxt", "numpy.lib.format.open_memmap", "torch.load",
         "torch.from_file", "safetensors.safe_open", "safetensors.load_file", "safetensors.load_model",
         "PIL.Image.open",
         "pyarrow.parquet.ParquetFile", "pyarrow.parquet.read_table", "pyarrow.memory_map", "pandas.read_csv",
         "pandas.read_json", "pandas.read_parquet", "datasets.load_from_disk", "gguf.GGUFReader", "onnx.load"}
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "from_file", "from_pretrained"}
"""Methods of paths and of classes that read files."""
OTHER_OPENS = {**dict.fromkeys(("comm/gloo_transport.py", "comm/inprocess.py", "comm/mpi_transport.py",
                               "pipeline/parts.py"), "edges"),
               "inference/generate.py": "caches of keys", "models/forward_trace.py": "a line of the user's own code",
               "plan/function_tree.py": "the source of functions of the user's own code",
               "system/terminal.py": "/dev/null",
               "checkpoint/hf/logits.py": "models of transformers, from folders that `Pretrained` has read"}


def opens_file(reference: Reference) -> bool:
    holder, _, last = reference.name.rpartition(".")
    return reference.name in OPENS or (last in OPENING and (not holder or holder.startswith("pathlib.") or
                                                            holder.startswith("tokenizers.") or last.startswith("from_")
                                                            ) and reference.name != last)


# --- parsers of text that others can write ---------------------------------------------------------------------------

PARSES_JSON = {
    "system/untrusted_file.py": "the door",
    # texts that ranks of this run have written
    **dict.fromkeys(("launch/devices.py", "launch/failures.py", "launch/heartbeat.py", "launch/supervision.py",
                     "launch/joining.py", "launch/lost_ranks.py", "checkpoint/checkpoints.py", "train/joining.py"),
                    "values of the signed store"),
    **dict.fromkeys(("comm/collectives.py", "comm/message.py", "train/commands.py", "elastic/transition.py",
                     "elastic/transition.py"), "messages of ranks"),
    "launch/rank_processes.py": "a temporary folder", "planner/trial.py": "a temporary folder",
    "errors.py": "its own text",
    "checkpoint/user_optimizer.py": "its own text",
    "data/template_process.py": "lines of the process that started it",
    "testing/freezing.py": "its own text",
    "testing/tasks.py": "its own text",
    # texts that a checksum has checked
    "checkpoint/objects.py": "objects of a checkpoint", "data/images.py": "a package",
    "data/tokenizer.py": "a vocabulary, checked",
}


def parses_text(reference: Reference) -> bool:
    return reference.name in ("json.loads", "json.load", "json.JSONDecoder", "tomllib.loads", "tomllib.load")


# --- connections -----------------------------------------------------------------------------------------------------

CONNECTS = {
    "launch/stores.py": "the door: TCPStore, and the port that it listens on",
    "launch/contact.py": "whether anybody listens, before the door",
    "cli/watch.py": "a page on the loopback address",
    "comm/torch_backend.py": "duplicates of the backend's own, which it ends",
    "system/machine.py": "asks the kernel for this machine's address",
}
CONNECTORS = {"torch.distributed.TCPStore", "torch.distributed.FileStore", "torch.distributed.rendezvous",
              "socket.socket", "socket.create_server", "socket.create_connection", "socket.fromfd",
              "asyncio.start_server", "asyncio.open_connection", "asyncio.start_unix_server"}
CONNECTING = ("torch.distributed.rendezvous.", "torch.distributed.rpc.", "torch.distributed.elastic.", "socketserver.",
              "http.", "xmlrpc.", "multiprocessing.connection.", "multiprocessing.managers.", "urllib.request.",
              "requests.")


def connects(reference: Reference) -> bool:
    name, call = reference.name, reference.call
    if name == "torch.distributed.init_process_group":  # torch creates no store if it gets one
        given = {keyword.arg for keyword in call.keywords} if call is not None else set()
        return "store" not in given or "init_method" in given or None in given or len(call.args) > 1
    return name in CONNECTORS or name.startswith(CONNECTING)


# --- every file ------------------------------------------------------------------------------------------------------

DOORS = {runs_code: NAMED_CODE, starts_process: STARTS_PROCESSES, opens_file: OPENS_FILES | OTHER_OPENS,
         parses_text: PARSES_JSON, connects: CONNECTS}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_only_these_files_do_it(door):
    found = {}
    for file, all_of_it in references_of_files().items():
        if names := sorted({reference.name for reference in all_of_it if door(reference)}):
            found[file] = names
    allowed = DOORS[door]
    assert {file: names for file, names in found.items() if file not in allowed} == {}, "use the door, or say why not"
    assert allowed.keys() - found.keys() == set(), "these files no longer do it"


def test_only_the_door_builds_the_command_line_of_an_interpreter():
    # ranks of a user's own program run like the program; mpiexec is next to the interpreter
    allowed = {"system/child.py", "launch/start.py", "launch/mpiexec.py"}
    assert {file for file, found in references_of_files().items()
            if any(reference.name == "sys.executable" for reference in found)} == allowed


def test_one_file_hosts_a_store_on_all_interfaces():
    assert {file for file, found in references_of_files().items()
            if any(reference.name.endswith(".create_store_everywhere") for reference in found)} == {
                "launch/shared_store.py"}


def test_modules_are_known_by_their_names_in_every_file():
    """No file imports all names of a module, or gets an attribute of a module by a computed name."""
    watched = ("os", "sys", "io", "subprocess", "importlib", "pickle", "builtins", "torch.distributed", "socket")
    for file, found in references_of_files().items():
        assert not [reference.name for reference in found if reference.name.endswith(".*")], file
        for reference in found:
            if reference.name in ("getattr", "vars") and reference.call is not None:
                holder, *names = reference.call.args
                constant = bool(names) and isinstance(getattr(names[0], "value", None), str)
                assert constant or getattr(holder, "id", None) not in watched, (file, reference.call.lineno)


SECOND_DOORS = {
    runs_code: [
        "import importlib as i\ni.import_module(name)", "from importlib import import_module as load\nload(name)",
        "import importlib\ngetattr(importlib, 'import_module')(name)", "__import__(name)",
        "__builtins__.__dict__['eval']\nimport builtins\nbuiltins.eval(text)", "map(eval, texts)",
        "from torch import load\nload(path)", "import torch as t\nt.load(path, weights_only=False)",
        "from pickle import Unpickler\nclass Mine(Unpickler): pass",
        "import numpy as n\nn.load(path, allow_pickle=True)",
        "import importlib.util as u\nu.spec_from_file_location(name, path)", "import sys\nsys.path.insert(0, folder)",
        "from importlib.machinery import SourceFileLoader as S\nS(name, path)",
        "import sys as s\ns.path.insert(0, '')"],
    starts_process: [
        "import subprocess as sp\nsp.run(words)", "from subprocess import check_output as ask\nask(words)",
        "import os\nos.posix_spawn(path, words, {})", "from os import posix_spawnp\nposix_spawnp(path, words, {})",
        "import os as o\no.execvp(path, words)", "from multiprocessing import get_context\nget_context().Process()",
        "import multiprocessing as mp\nmp.Process(target=f).start()", "import torch.multiprocessing as mp\nmp.spawn(f)",
        "from torch import multiprocessing\nmultiprocessing.spawn(f)",
        "from concurrent.futures import ProcessPoolExecutor as Pool\nPool()",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import subprocess\nstart = subprocess.Popen\nstart(words)", "import pty\npty.spawn(words)",
        "import subprocess\nfrom functools import partial\npartial(subprocess.run, check=True)(words)",
        "import importlib\nimportlib.import_module('subprocess').run(words)", "import sys\nsys.modules['os'].fork()",
        "import asyncio\nasyncio.create_subprocess_exec(*words)", "import os\ngetattr(os, 'system')(text)"],
    opens_file: [
        "open(path)", "import io\nio.open(path)", "from io import open as o\no(path)", "import os\nos.open(path, 0)",
        "from os import open as o\no(path, 0)", "from pathlib import Path\nPath(path).read_text()", "path.open()",
        "(folder / name).open('rb')", "self.path.read_bytes()", "from pathlib import Path\nPath.read_text(path)",
        "getattr(path, 'read_bytes')()", "import json\njson.load(open(path))", "import torch\ntorch.load(path)",
        "from numpy import fromfile\nfromfile(path)", "from safetensors.torch import load_file\nload_file(path)",
        "import shutil\nshutil.copyfile(a, b)", "from shutil import copy2 as c\nc(a, b)",
        "import builtins as b\nb.open(p)",
        "from tokenizers import Tokenizer\nTokenizer.from_file(path)", "list(map(open, paths))",
        "import gzip\ngzip.open(p)",
        "with path.open() as file: pass", "read = path.read_text\nread()", "from PIL import Image\nImage.open(path)"],
    parses_text: [
        "import json\njson.loads(text)", "from json import loads as parse\nparse(text)",
        "import json as j\nj.load(file)",
        "import tomllib\ntomllib.loads(text)", "from tomllib import load\nload(file)",
        "import json\nmap(json.loads, lines)"],
    connects: [
        "from torch.distributed import TCPStore\nTCPStore(host, port)",
        "import torch.distributed as d\nd.TCPStore(h, 1)",
        "import torch\ntorch.distributed.TCPStore(host, 1)",
        "from torch import distributed\ndistributed.FileStore(p, 1)",
        "import torch.distributed as dist\ndist.init_process_group(init_method='tcp://h:1', rank=0, world_size=1)",
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "import torch.distributed as dist\ndist.init_process_group('gloo', 'tcp://h:1', store=s)",
        "from torch.distributed import init_process_group as begin\nbegin('gloo', init_method='env://')",
        "import torch.distributed as dist\ndist.init_process_group(**words)",
        "from torch.distributed.rendezvous import rendezvous\nrendezvous('tcp://')",
        "import torch.distributed.rpc as rpc\nrpc.init_rpc('a')", "import socket\nsocket.create_server(('', 0))",
        "from socket import socket as S\nS().bind(('', 1))", "import socketserver\nsocketserver.TCPServer(a, b)",
        "from torch.distributed.distributed_c10d import init_process_group\ninit_process_group()",
        "import torch.distributed as dist\ngetattr(dist, 'TCPStore')(host, 1)"],
}


@pytest.mark.parametrize(("door", "code"), [(door, code) for door, codes in SECOND_DOORS.items() for code in codes],
                         ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_second_door_is_noticed(door, code):
    assert any(door(reference) for reference in references(code))


@pytest.mark.parametrize(("door", "code"), [
    (starts_process, "import subprocess\ndef f(child: subprocess.Popen[str]) -> None: subprocess.PIPE"),
    (opens_file, "self.edges.open_all(sources)\nreopen(path)"),
    (connects, "import torch.distributed as dist\ndist.init_process_group('gloo', store=store, rank=0)"),
    (connects, "from torch.distributed import TCPStore\ndef f(store: TCPStore) -> TCPStore: return store"),
    (runs_code, "import re, numpy as np\nre.compile(text)\nnp.load(path)\nmodel.eval()"),
])
def test_what_is_no_door(door, code):
    assert not any(door(reference) for reference in references(code))


def test_the_tree_is_read():
    assert len(references_of_files()) > 300 and (ROOT / "system/child.py").exists()
