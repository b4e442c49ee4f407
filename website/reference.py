"""The parts of the reference that are made from the package: settings, terms, commands.

A setting's other names are those of the tables in docs/coming-from: a row names another system's settings in its first
column, and Ranvier's in its second. When a setting has no effect is what `ranvier.config.effects` says of the runs in
`probes`, among which each condition holds at least once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import cleandoc
from itertools import groupby

import click

from ranvier.arguments import literal_values
from ranvier.cli.main import command
from ranvier.config import aliases, effects, read
from ranvier.config.run import (
    Checkpoint,
    Data,
    Elastic,
    Launch,
    Log,
    Lora,
    Memory,
    Optim,
    Pipeline,
    Run,
    TensorParallel,
    Train,
)
from ranvier.mesh import Mesh
from website import links

PAGES = links.ROOT / "docs"
OF_THE_RUN = "run"
"""Heading of the settings that are in no section."""


# ---------------------------------------------------------------------- settings

def probes() -> Iterator[Run]:
    """Runs in which settings have no effect, for every reason that there is."""
    plain = Run()
    yield plain
    yield replace(plain, mesh=Mesh(data=2, pipe=2), launch=Launch(device="cpu"))
    for policy in ("1f1b", "gpipe"):
        yield replace(plain, mesh=Mesh(pipe=2), pipeline=Pipeline(policy=policy, boundaries=(3,)))
    yield replace(plain, mesh=Mesh(pipe=2), optim=Optim(update_in_backward=True),
                  pipeline=Pipeline(in_flight=2, defer_bytes=0))
    yield replace(plain, mesh=Mesh(pipe=2), memory=Memory(recompute="auto"))
    yield replace(plain, mesh=Mesh(pipe=2), elastic=Elastic(freeze="cap"))
    for scheme in ("stationary", "summa", "megatron"):
        yield replace(plain, mesh=Mesh(col=2), tensor=TensorParallel(scheme=scheme), precision="bf16")
    for algorithm in literal_values(read.settings()["optim.algorithm"].annotation):
        yield replace(plain, optim=Optim(algorithm=algorithm, weight_decay=0.0, offload="none"))
    yield replace(plain, precision="bf16")
    yield replace(plain, train=Train(epochs=1, schedule="cosine", early_stopping=0), log=Log(tracker=("wandb",)))
    yield replace(plain, train=Train(schedule="linear", sample_tokens=0, eval_every=100), log=Log(tracker=("mlflow",)))
    yield replace(plain, checkpoint=Checkpoint(every=0))
    yield replace(plain, checkpoint=Checkpoint(every=100))
    for policy in ("stop", "none"):
        yield replace(plain, guard=replace(plain.guard, bad_step=policy, compare_every=100), mesh=Mesh(data=2))
    yield replace(plain, elastic=Elastic(freeze="manual", manual=("1:1",)))
    yield replace(plain, elastic=Elastic(freeze="cap", dry_run=True))
    yield replace(plain, elastic=Elastic(freeze="cap", auto_pipe=True), lora=Lora(rank=8))
    yield replace(plain, mesh=Mesh(data=2), comm=replace(plain.comm, transport="torch"))
    for task, family in (("lm", "llama"), ("chat", "llama"), ("chat", "gpt"), ("classification", "bert"),
                         ("qa", "bert"), ("images", "vit")):
        for packing in (False, True):
            yield replace(plain, data=Data(task=task, packing=packing),
                          model=replace(plain.model, family=family, pretrained="folder" if packing else None))


def reasons() -> dict[str, list[str]]:
    """Setting -> why it has no effect, in one run or another."""
    found: dict[str, list[str]] = {}
    for run in probes():
        for name, reason in (*effects.CONDITIONS.items(), *effects.ASKED.items()):
            why = reason(run)  # type: ignore[arg-type]
            if why is not None and why not in found.setdefault(name, []):
                found[name].append(why)
    return {name: joined(whys) for name, whys in found.items()}


def joined(texts: Sequence[str]) -> list[str]:
    """Texts that differ in one word as one: "the task lm has no images", "the task qa has no images"."""
    merged: list[tuple[list[str], int | None, list[str]]] = []  # words, the place that differs, the words there
    for text in texts:
        words = text.split(" ")
        for known, place, there in merged:
            differing = [index for index, pair in enumerate(zip(known, words, strict=False)) if pair[0] != pair[1]]
            if len(known) == len(words) and len(differing) == 1 and place in (None, differing[0]):
                merged[[each[0] for each in merged].index(known)] = (known, differing[0], [*there, words[differing[0]]]
                                                                     if place is not None else
                                                                     [known[differing[0]], words[differing[0]]])
                break
        else:
            merged.append((words, None, []))
    made = []
    for words, place, there in merged:
        if place is not None:
            words = [*words[:place], f"{', '.join(there[:-1])} or {there[-1]}", *words[place + 1:]]
        made.append(" ".join(words))
    return made


def rows(markdown: str) -> Iterator[list[str]]:
    """The cells of every row of every table, without headings."""
    for line, following in zip(markdown.splitlines(), [*markdown.splitlines()[1:], ""], strict=True):
        is_heading = set(following.replace(" ", "")) <= set("|-:") and following.startswith("|")
        if line.startswith("|") and not is_heading and not set(line) <= set("|-: "):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def flags_in(text: str) -> list[str]:
    """Settings that a text names as flags, `--mesh.row 4`, by dotted name with underscores."""
    names = re.findall(r"--(?:no-)?([a-z][\w.-]*)", text)
    return [name.replace("-", "_") for name in names if name.replace("-", "_") in read.settings()]


def other_names() -> dict[str, list[tuple[str, str]]]:
    """Setting -> (system, its name there), from the tables of docs/coming-from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page in sorted((PAGES / "coming-from").glob("*.md")):
        text = page.read_text()
        system = re.search(r"^# Coming from (.+)$", text, flags=re.MULTILINE)
        for theirs, ours, *_ in rows(text):
            for setting in dict.fromkeys(flags_in(ours)):
                for name in re.findall(r"`([^`]+)`", theirs):
                    found.setdefault(setting, []).append((system[1] if system else page.stem, name))
    return found


def settings_page() -> str:
    """Every setting, by section."""
    why, others, also = reasons(), other_names(), {new: old for old, new in aliases.NAMES.items()}
    lines: list[str] = []
    for section, names in groupby(read.settings(), key=lambda name: name.rpartition(".")[0]):
        lines += [f"## {section or OF_THE_RUN} {{#{section or OF_THE_RUN}}}", "", _about(section), ""]
        for name in names:
            setting = read.settings()[name]
            default = f"`{text}`" if (text := read.as_text(setting.default)) else "empty"
            lines += [f"#### {setting.flag} {{#{setting.flag.replace('.', '-')}}}", "",
                      f"`--{setting.flag}` · default {default} · {setting.expected}", "",
                      setting.help.replace("\n", " "), ""]
            notes = [f"No effect where {_listed(why[name])}."] if name in why else []
            if name in others:
                by_system = groupby(others[name], key=lambda pair: pair[0])
                notes.append("Elsewhere: " + "; ".join(f"{system} " + ", ".join(f"`{theirs}`" for _, theirs in pairs)
                                                       for system, pairs in by_system) + ".")
            notes += [f"Also: `{read.flag(also[name])}`."] if name in also else []
            lines += [item for note in notes for item in (f"- {note}", "")][:-1] if notes else []
            lines.append("")
    return links.named_as_links("\n".join(lines), "docs/reference/settings.md")


def _listed(whys: Sequence[str]) -> str:
    return "; or ".join(re.sub(r"\b((?:[a-z]+\.)[a-z][\w-]*)", r"`\1`", why) for why in whys)


def _about(section: str) -> str:
    if not section:
        return "Settings of no section; in a recipe they come before the first one."
    held = {"mesh": "MeshSettings"}
    from ranvier.config import run

    for cls in vars(run).values():
        if isinstance(cls, type) and cls.__module__ == run.__name__ and cls.__name__ != "Run" and (
                held.get(section) == cls.__name__ or type(getattr(Run(), section)) is cls):
            return (cls.__doc__ or "").replace("\n", " ")
    raise AssertionError(f"no class for the section {section}")


# ---------------------------------------------------------------------- terms and commands

def terms() -> str:
    """The table of terms in docs/architecture.md."""
    text = (PAGES / "architecture.md").read_text()
    section = re.search(r"^## Terms\n(.*?)^## ", text, flags=re.MULTILINE | re.DOTALL)
    assert section is not None, "docs/architecture.md has no section Terms"
    return section[1].strip()


def _commands(group: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(group, click.Group):
        for each in group.commands.values():
            yield from _commands(each, f"{name} {each.name}")
    else:
        yield name, group


def commands() -> str:
    """Every command with its arguments and options; settings are left out."""
    lines: list[str] = []
    flags = {setting.flag for setting in read.settings().values()} | {read.flag(old) for old in aliases.NAMES}
    for name, each in _commands(command, "ranvier"):
        context = click.Context(each, info_name=name)
        lines += [f"## {name}", "", f"```text\n{each.get_usage(context).removeprefix('Usage: ')}\n```", ""]
        for paragraph in re.split(r"\n\s*\n", cleandoc(each.help or "")):
            is_kept = paragraph.startswith("\b")  # click's mark for lines that are not wrapped
            lines += ["```text", paragraph.removeprefix("\b").strip("\n"), "```", ""] if is_kept else [paragraph, ""]
        found = [record for option in each.get_params(context) if isinstance(option, click.Option)
                 and option.opts[0].lstrip("-") not in flags and (record := option.get_help_record(context))]
        if found:
            lines += ["| option | |", "|---|---|"]
            lines += [f"| `{option}` | {' '.join(text.split())} |" for option, text in found]
            lines.append("")
    return links.named_as_links("\n".join(lines), "docs/reference/commands.md")


# ---------------------------------------------------------------------- Python

_GROUPS = {
    "Start": ("start", "run", "World", "Mesh"),
    "Train": ("Engine", "Model", "Initial", "Microbatch", "microbatches", "shard_loader", "BatchResult", "blocks_of",
              "with_adapters", "from_transformers", "train"),
    "Checkpoints": ("Checkpoints",),
}
"""Public names in the order of the page; errors and settings have groups of their own."""
_BESIDES = {
    "Protocols": (
        "ranvier.models.family.ModelFamily", "ranvier.data.task.Task", "ranvier.data.corpus.Corpus",
        "ranvier.optim.rules.ElementwiseRule", "ranvier.optim.rules.TensorRule",
        "ranvier.elastic.freezing.FreezePolicy", "ranvier.train.events.Tracker", "ranvier.schedule.schedule.Policy"),
    "Checks of objects of your own": (
        "ranvier.testing.families.check_family", "ranvier.testing.tasks.check_task",
        "ranvier.testing.corpora.check_corpus", "ranvier.testing.rules.check_rule",
        "ranvier.testing.freezing.check_freeze_policy", "ranvier.testing.trackers.check_tracker",
        "ranvier.testing.policies.check_policy", "ranvier.testing.split.check_split",
        "ranvier.testing.ranks.run_ranks"),
}


def python() -> str:
    """Every public name, for mkdocstrings: those of `ranvier`, of `ranvier.tensor.layers`, and the protocols."""
    import ranvier
    from ranvier.tensor import layers

    homes = {name: f"{getattr(ranvier, name).__module__}.{name}" for name in ranvier.__all__}
    errors = [name for name in ranvier.__all__ if getattr(ranvier, name).__module__ == "ranvier.errors"]
    listed = {name for names in _GROUPS.values() for name in names}
    settings = [name for name in ranvier.__all__ if getattr(ranvier, name).__module__ == "ranvier.config.run"]
    groups = {title: [homes[name] for name in names] for title, names in _GROUPS.items()}
    groups["Settings"] = [homes[name] for name in settings]
    groups["Others"] = [homes[name] for name in ranvier.__all__ if name not in {*listed, *errors, *settings}]
    groups["Layers"] = [f"{getattr(layers, name).__module__}.{name}" for name in layers.__all__]
    groups |= {title: list(names) for title, names in _BESIDES.items()}
    groups["Errors"] = [homes[name] for name in errors]
    lines: list[str] = []
    for title, names in groups.items():
        if names:
            lines += [f"## {title}", "", *(line for name in names for line in (f"::: {name}", ""))]
    return "\n".join(lines)


def step() -> str:
    """The fields of a step in metrics.jsonl, for mkdocstrings."""
    return ("::: ranvier.train.events.StepEvent\n    options:\n        heading_level: 4\n"
            "        show_root_heading: false\n        show_signature: false\n")
