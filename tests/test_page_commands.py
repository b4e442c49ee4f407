"""Every command of the pages exists as printed: programs, subcommands, settings and their values, recipes, extras,
files and make targets.

tests/test_readme.py, tests/test_site.py and tests/launch run the commands that can run unchanged. The slow test below
runs commands that need a reader's files, with substitutes for them.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from torch.distributed.run import get_args_parser

from ranvier.cli.main import command
from ranvier.config import aliases, read

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"),
                *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ELSEWHERE = ("docker", "kubectl", "apptainer", "srun", "sbatch", "sky", "dstack", "pre-commit", "ray", "eval")
"""Third-party programs; of their words only files of this repository and those after `ranvier` are checked."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[str]:
    """Blocks that begin with ```bash, and in other blocks the lines that begin with a prompt."""
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        whole = block.replace("\\\n", " ")
        yield whole if language == "bash" else "\n".join(re.findall(r"^\$ (.*)", whole, flags=re.MULTILINE))


def lines(text: str) -> list[list[list[str]]]:
    """The words of each command of each line, without comments."""
    found = []
    for line in "\n".join(blocks(text)).splitlines():
        found.append([[]])
        for word in shlex.split(line, comments=True):
            if word in ("&&", "||", ";", "|", "&"):
                found[-1].append([])
            else:
                found[-1][-1].append(word)
    return [[words for words in line if words] for line in found]


def commands(text: str) -> list[list[str]]:
    """The words of each command, without comments."""
    return [words for line in lines(text) for words in line]


def spans(text: str) -> list[str]:
    """Code within sentences and tables."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def problem_of(words: list[str], page: Path) -> str | None:
    """Why the command `words` of a page is invalid; None if it is valid."""
    missing = [word for word in words if word.startswith(("examples/", "tests/", "docs/", "benchmarks/"))
               and not (ROOT / word).exists()]
    if missing:
        return f"there is no file {missing[0]}"
    match words:
        case [program, *rest] if "=" in program and not program.startswith("-"):
            return problem_of(rest, page)
        case ["ranvier", *rest]:
            return problem_of_ranvier(rest)
        case ["torchrun", *rest]:
            try:
                found = get_args_parser().parse_args(rest)
            except SystemExit:
                return "torchrun refuses its flags"
            if not found.module or found.training_script != "ranvier":
                return f"torchrun runs {found.training_script}"
            return problem_of_ranvier(found.training_script_args)
        case ["mpiexec", "-n", number, *rest]:
            return problem_of(rest, page) if number.isdigit() else "mpiexec -n wants a number"
        case ["make", target]:
            there = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            return None if there else f"the Makefile has no {target}"
        case ["python" | ".venv/bin/python", "-m", "ranvier", *rest]:
            return problem_of_ranvier(rest)
        case ["python" | ".venv/bin/python", "-m", "pip", *rest] | ["pip", *rest]:
            extras = [extra for word in rest for listed in re.findall(r"\[(.*)\]", word) for extra in listed.split(",")]
            unknown = set(extras) - set(EXTRAS)
            return f"there is no extra {unknown}" if unknown else None
        case ["python" | ".venv/bin/python", "-m", "pytest", *_]:
            return None  # its files exist
        case ["python" | ".venv/bin/python", "-m", module, *rest]:
            path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            return problem_of_program(path.read_text(), rest) if path.exists() else f"there is no module {module}"
        case ["python", file, *rest]:
            if f'title="{file}"' in page.read_text():
                return None  # tests/test_site.py runs it
            return problem_of_program((ROOT / file).read_text(), rest) if (ROOT / file).exists() else (
                f"there is no program {file}")
        case [program, *rest] if Path(program).name in ELSEWHERE:
            at = next((at + 1 for at, word in enumerate(rest[:-1]) if rest[at + 1] in command.commands
                       or word.endswith(".sbatch")), None)
            if at is None:
                return None
            return problem_of_ranvier(rest[at:] if rest[at] in command.commands else ["train", *rest[at + 1:]])
    return "is no command that this test knows"


def problem_of_program(source: str, words: list[str]) -> str | None:
    """The problem of a flag that the program's source does not name; a flag with a dot is a setting, and passed on."""
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag != "--help" and f'"{flag}"' not in source:
            if flag[2:].partition(".")[0] in read.sections() | {"run-dir"}:
                return problem_of_ranvier(["train", *words[words.index("gpt-tiny"):]])
            return f"the program has no {flag}"
    return None


def problem_of_ranvier(words: list[str], *, is_whole: bool = True) -> str | None:
    """The problem that click or the settings find. A recipe that is the reader's file or run is not checked. is_whole:
    false if arguments and values may be left out, as in a sentence."""
    found: click.Command = command
    rest = list(words)
    while isinstance(found, click.Group):
        if not rest or rest[0] not in found.commands:
            return None if rest[:1] == ["--help"] else f"there is no command {' '.join(words)}"
        found = found.commands[rest.pop(0)]
    if {"--help", "--help-all", "--help-section"} & set(rest):
        return None
    try:
        given = found.make_context(found.name, rest).params
    except click.NoSuchOption as error:
        return error.format_message()
    except click.UsageError as error:
        return error.format_message() if is_whole else None
    known = read.settings()
    flags = {setting: value for key, value in given.items()
             if (setting := key.replace("__", ".")) in known or setting in aliases.NAMES if value is not None}
    layers, recipe = [], given.get("recipe")
    if recipe and not recipe.endswith(".toml") and not re.search("^runs/|[A-Z]{3}", recipe):
        try:
            layers = [read.load(recipe)[1]]
        except read.ConfigError as error:
            return str(error)
    merged = read.merge([*layers, read.Layer(origin="page", values=flags, is_text=True)])
    problems = merged.problems
    return str(problems[0]) if problems else None


# --- the pages -------------------------------------------------------------------------------------------------------


def test_commands_of_the_pages_exist(monkeypatch):
    monkeypatch.chdir(ROOT)  # `examples.own_family:recipe` is there
    problems = [f"{name(page)}: {shlex.join(words)}: {problem}" for page in PAGES
                for words in commands(page.read_text()) if (problem := problem_of(words, page))]
    assert not problems, "\n".join(problems)


def test_commands_within_sentences_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    problems = [f"{name(page)}: {span}: {problem}" for page in PAGES for span in spans(page.read_text())
                if re.match(r"ranvier [a-z]+ \S", span)
                and (problem := problem_of_ranvier(shlex.split(span)[1:], is_whole=False))]
    assert not problems, "\n".join(problems)


def test_settings_within_sentences_exist():
    """--section.name, and a value after it if that is one word; docs/experiments may also name earlier settings."""
    problems = []
    for page in PAGES:
        for span in spans(page.read_text()) if page.parent.name != "experiments" else []:
            for negated, flag, value in re.findall(r"--(no-)?([a-z]+\.[a-z][\w-]*)(?: ([\w-]+)$)?", span):
                setting = read.settings().get(flag.replace("-", "_"))
                if setting is None or (negated and not setting.is_switch):
                    problems.append(f"{name(page)}: {span}")
                elif len(value) > 1 and not value.isupper():
                    merged = read.merge([read.Layer(origin="page", values={setting.name: value}, is_text=True)])
                    problems += [f"{name(page)}: {span}: {problem}" for problem in merged.problems]
    assert not problems, "\n".join(problems)


def test_there_are_commands_to_look_at():
    count = {name(page): len(commands(page.read_text())) for page in PAGES}
    assert sum(count.values()) > 90 and count["docs/planner.md"] >= 6 and count["README.md"] >= 10


MISTAKES = [
    ("ranvier train gpt-tiny --mesh.dta 2", "No such option"), ("ranvier trian gpt-tiny", "there is no command"),
    ("ranvier train gpt-tyni", "gpt-tiny"), ("ranvier train gpt-tiny --optim.offload disk", "optim.offload"),
    ("ranvier plan gpt-tiny", "--cluster"), ("make cake", "Makefile"), ("pip install 'ranvier[moon]'", "moon"),
    ("ranvier train gpt-tiny --train.steps 2 && ranvier export runs/x", "Missing argument"),
    ("torchrun --nproc-per-nod 2 --nodess 3 -m ranvier train gpt-tiny", "torchrun"), ("rm -r /", "no command that"),
    ("torchrun --nproc-per-node 2 -m ranvier train gpt-tiny --mesh.pip 2", "No such option"),
    ("mpiexec -n 2 python -m ranvier train gpt-tiny --seed x", "seed"), ("python gone.py", "no program"),
    ("docker run --rm ranvier train gpt-tiny --mesh.dta 2", "No such option"),
    ("docker build --file examples/gone .", "examples/gone"), ("python -m benchmarks.gone", "no module"),
    ("python -m benchmarks.pipeline.pipeline --gone", "no --gone"),
    ("sbatch examples/slurm/train.sbatch /runs/x gpt-tiny --train.stepps 3", "No such option"),
    ("python examples/ray_ranks.py --ranks 4 gpt-tiny --mesh.gone 2", "No such option")]


def test_what_does_not_exist_is_found():
    for text, problem in MISTAKES:
        found = [each for words in commands(f"```bash\n{text}  # as they say\n```\n")
                 if (each := problem_of(words, ROOT / "README.md"))]
        assert len(found) == 1 and problem in found[0], (text, found)


# --- commands that need a reader's files -----------------------------------------------------------------------------

OWN_FILES = ("data", "evaluate", "lora", "models", "optimizers", "planner")
FEW = ("--train.steps 2 --train.warmup-steps 0 --train.eval-sequences 4 --train.sample-tokens 0 --batch.global-size 8 "
       "--batch.microbatch-size 2")
TINY = "--model.num-layers 1 --model.hidden 16 --model.heads 2 --model.vocab 300 --model.sequence 64 " + FEW
SHORTER = {
    "ranvier train bert-sentiment": f"--model.pretrained none --data.eval pairs.csv {TINY} --model.vocab 400 "
                                    "--model.num-layers 4",
    "ranvier train start/run.toml": FEW, "ranvier train best.toml": TINY.replace("--model.vocab 300 ", ""),
    "ranvier train": FEW}
"""Flags appended to commands with these beginnings, so that they take seconds. The plan has the vocabulary of GPT-2's
tokenizer."""
ELSEWHERE_RUN = ("smollm2-sft", "runs/chat", "pip install", "--lm-eval", "--measure", "llama-3.1-8b")
"""Parts of lines that need the network, a package that tests do not have, an idle machine, or minutes."""


def run(text: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(text, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def own_files(tmp_path_factory):
    """Files with the names that the pages use for a reader's files: texts, tables, questions, a run and a model."""
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    folder = tmp_path_factory.mktemp("reader")
    texts = [f"text {number} says that {number} and {number} are {2 * number}, and more" for number in range(300)]
    (folder / "my-texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "my-texts" / f"{number}.txt").write_text(text)
    (folder / "wiki.txt").write_text("\n".join(texts))
    (folder / "wiki.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    parquet.write_table(table({"body": texts}), folder / "articles.parquet")
    parquet.write_table(table({"text": texts}), folder / "code.parquet")
    (folder / "pairs.csv").write_text("premise,hypothesis,gold\n" + "".join(
        f'"{text}","{number} is even",{number % 2}\n' for number, text in enumerate(texts)))
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "ranvier" / "cost" / "clusters" / "laptop.toml", folder / "here.toml")
    run(f"ranvier train llama-tiny --mesh.data 1 --mesh.pipe 1 --data.corpus my-texts {TINY} --model.hidden 64 "
        "--model.sequence 128 --run-dir runs/writer && ranvier export runs/writer models/smollm && mkdir Qwen && "
        "cp -r models/smollm Qwen/Qwen3-0.6B", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", OWN_FILES)
def test_commands_with_files_of_the_reader_run(page, own_files, tmp_path):
    shutil.copytree(own_files, tmp_path, dirs_exist_ok=True)
    for line in lines((ROOT / "docs" / f"{page}.md").read_text()):
        texts = [shlex.join(words) for words in line]
        if any(part in text for text in texts for part in ELSEWHERE_RUN):
            continue
        for text in texts:
            more = next((flags for begin, flags in SHORTER.items() if text.startswith(begin)), "")
            run(f"{text} {more}", tmp_path)
