"""Tables and lines of all commands fit 80 columns, and no number is lost there; colours are for terminals."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import Run
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.system.terminal import Screen, TextTable, fields, terminal_width, wrap_lines, wrap_text
from ranvier.train import memory
from ranvier.train.events import StartEvent, StepEvent
from ranvier.train.trackers import LiveConsole, PlainConsole, console

COMMANDS = [
    ("plan", "gpt-tiny", "--cluster", "h100", "--ranks", "2", "--explain", "--search", "mesh"),
    ("check", "gpt-12b", "--ranks", "48", "--all"),
    ("check", "gpt-tiny", "--mesh.col", "2", "--train.steps", "7", "--cluster", "laptop"),
    ("simulate", "gpt-tiny", "--cluster", "laptop", "--mesh.data", "1", "--mesh.pipe", "4",
     "--batch.microbatch-size", "1", "--slow", "0:1:1.5", "--mtbf-hours", "100"),
    ("doctor",)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(capsys, *words):
    assert run_command(list(words)) == 0
    return capsys.readouterr().out


def numbers(text):
    return {word.strip("(),;:") for word in text.split() if re.search(r"\d", word)}


@pytest.mark.parametrize("words", [pytest.param(
    words, id="-".join(words[:2]), marks=pytest.mark.slow if "gpt-12b" in words else ()) for words in COMMANDS])
def test_what_a_command_prints_fits_80_columns_and_hides_nothing(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "400")
    wide = printed(capsys, *words)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = printed(capsys, *words)
    assert max(len(line) for line in narrow.splitlines() if "/" not in line) <= 80, "except paths, which are complete"
    assert max(map(len, wide.splitlines())) > 80, "nothing is broken without need"
    assert len(numbers(wide) ^ numbers(narrow)) <= 2, "except for the machine's free memory"
    assert "…" not in narrow and "\x1b" not in narrow


def test_tables_in_a_pipe_fit_80_columns_and_sentences_stay_lines(capsys):
    out = printed(capsys, *COMMANDS[1])
    sentences = ("warning", "all ranks", "schedule: ")
    assert max(len(line) for line in out.splitlines() if not line.startswith(sentences)) <= 80
    assert re.search(r"^warning: memory of this machine.* with more ranks\.$", out, flags=re.MULTILINE)
    assert not re.search(r" $", out, flags=re.MULTILINE)


def test_the_width_is_that_of_columns(monkeypatch):
    assert terminal_width() == 80, "the width for a file"
    for text, width in (("120", 120), ("3", 40), ("many", 80)):
        monkeypatch.setenv("COLUMNS", text)
        assert terminal_width() == width


def test_columns_that_do_not_fit_move_below_beside_the_keys():
    table = TextTable(header=["stage", *(f"host\nthing {name}" for name in "abcdefgh")],
                      rows=[[str(row), *(f"{1000 * row + column:,}.5" for column in range(8))] for row in (3, 4)])
    assert table.text(40).splitlines() == [
        "          host     host     host", "stage  thing a  thing b  thing c",
        "    3  3,000.5  3,001.5  3,002.5", "    4  4,000.5  4,001.5  4,002.5", "",
        "          host     host     host", "stage  thing d  thing e  thing f",
        "    3  3,003.5  3,004.5  3,005.5", "    4  4,003.5  4,004.5  4,005.5", "",
        "          host     host", "stage  thing g  thing h", "    3  3,006.5  3,007.5", "    4  4,006.5  4,007.5"]
    assert len(table.text(200).splitlines()) == 4


def test_words_get_narrower_before_columns_move():
    table = TextTable(header=("setting", "value", "from"), words=(0, 1, 2), rows=[
        ("model.preset", "one two three four five six", "recipe a-name, and then a flag"), ("seed", "[x]", ":smile:")])
    lines = table.text(50).splitlines()
    assert len(lines) == 4 and lines[0].split() == ["setting", "value", "from"] and lines[3].endswith(":smile:")
    assert lines[1].startswith("model.preset  one two") and "[x]" in lines[3] and max(map(len, lines)) <= 50


def test_words_of_a_table_are_never_broken():
    path = "/a/" + 60 * "b"
    table = TextTable(header=("name", "path", "n"), words=(0, 1), rows=[("cache", f"it is {path}", "7")])
    assert path in table.text(40) and table.text(40).splitlines()[1].split() == ["cache", "it", "is", "7"]


def test_lines_are_broken_between_words_alone():
    assert wrap_text("  a --long.flag-name-of it\nb", 18) == "  a\n    --long.flag-name-of\n    it\nb"
    assert wrap_text("  name   some words", 14, indent=9) == "  name   some\n         words"
    assert fields(["step 1", "loss 2", "rate 3"], 16) == "step 1  loss 2\n  rate 3"


def test_sentences_of_files_stay_lines(monkeypatch):
    text = "a sentence " * 20
    assert wrap_lines(text, io.StringIO()) == text
    assert max(map(len, wrap_lines(text, Terminal()).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, wrap_lines(text, io.StringIO()).splitlines())) <= 60


def test_colours_are_for_terminals_and_obey_no_color(monkeypatch):
    def shown(stream):
        screen = Screen(stream)
        screen.print("problem", style="red")
        screen.print(TextTable(header=("a", "b"), rows=[("1", "2")], styles=["red"]))
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[0-9;]*3\d")
    assert len(colour.findall(shown(Terminal()))) == 2
    assert shown(io.StringIO()) == "problem\na  b\n1  2\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(shown(Terminal()))


# --- the console of a run --------------------------------------------------------------------------------------------


def step(number, **changes):
    return StepEvent(**dict(step=number, loss=10.1234, tokens=10**6, step_seconds=4.0, wait_seconds=0.1,
                            bubble_fraction=1.0, grad_norm=1.0, learning_rate=1e-3, flops_per_second=1e12,
                            model_flops_utilisation=1.0) | changes)


EVALUATED = {"eval_loss": 9.8765, "eval_scores": {
    "eval_accuracy": 0.8123, "eval_count": 10000.0, "eval_code_loss": 1.5, "eval_prose_loss": 2.5}}


def start():
    return StartEvent(recipe="x", run_dir=Path("/tmp"), steps=10_000, mesh=Mesh(data=2), stages="", unit="tokens",
                      settings={"data": "a corpus of many words " * 8, "folder": "/tmp/" + "x" * 40})


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_of_the_live_console_fit_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tracker = LiveConsole(stream)
    for event in (start(), step(10_000, **EVALUATED)):
        tracker.event(event)
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    assert max(map(len, shown.splitlines())) <= width
    assert all(text in shown for text in ("loss 10.1234", "250,000 tokens/s", "waits 100 ms", "prose 2.5000"))


def test_a_terminal_without_cursor_has_the_plain_console(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console(Terminal(), Run()), PlainConsole)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(console(Terminal(), Run()), LiveConsole)


def test_the_memory_of_many_stages_fits_80_columns():
    """In the report after a run, and in the error when memory runs out."""
    _, layer = read.load("gpt-12b")
    run = resolve(replace(read.merge([layer]).run, mesh=Mesh(data=1, pipe=12)))
    predicted = laid_out(run)[1]
    measured = [{"device": dict(entry.device), "host": dict(entry.host)} for entry in predicted]
    text = memory.report_text(predicted, measured, stage_of=lambda rank: rank)
    assert max(map(len, text.splitlines())) <= 80 and "stage 11" in text
    assert text.count("device in all") == 4, "three stages next to each other"
    error = memory.explain_out_of_memory(MemoryError("no room"), run, where="rank 0")
    table = str(error).partition("In this order")[0]
    assert max(map(len, table.splitlines())) <= 80 and "activations" in table
