"""Output whose reader has left is discarded: a command's work and its exit code do not depend on it."""

import io
import os
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from ranvier.cli import main as cli
from ranvier.system import terminal


@contextmanager
def lost_output(monkeypatch):
    """Standard output and error are pipes without a reader. Not a fixture: pytest sets its own streams after
    fixtures."""
    files = []
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        files.append(io.TextIOWrapper(os.fdopen(writer, "wb"), line_buffering=True))
        monkeypatch.setattr(sys, name, files[-1])
        monkeypatch.setattr(sys, f"__{name}__", files[-1])
    try:
        yield files
    finally:
        for file in files:
            with suppress(BrokenPipeError):
                file.close()


def test_output_that_nobody_reads_is_discarded(monkeypatch):
    with lost_output(monkeypatch) as lost:
        terminal.outlive_readers()
        for stream, file in ((sys.stdout, lost[0]), (sys.stderr, lost[1])):
            assert stream is not file and stream.fileno() == file.fileno() and stream.line_buffering
            print("é" * 100_000, file=stream, flush=True)
            print("more", file=stream, flush=True)


def test_no_file_takes_the_place_of_closed_streams(tmp_path):
    """Otherwise printed text, also a child's, would be written into the first file that is opened."""
    program = ("import subprocess, sys\n"
               "from ranvier.__main__ import open_closed_streams\n"
               "open_closed_streams()\n"
               "with open('file', 'w') as file:\n"
               "    print('printed', file=sys.stderr)\n"
               "    print('printed', flush=True)\n"
               "    subprocess.run([sys.executable, '-c', 'print(input())'])\n"
               "    file.write('written')\n")
    run = ["bash", "-c", f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-', program]
    subprocess.run(run, cwd=tmp_path, check=True, timeout=100)
    assert (tmp_path / "file").read_text() == "written"


def test_output_without_a_buffer_stays_so(monkeypatch):
    """For example under PYTHONUNBUFFERED, so that a log has everything that a process wrote before it was killed."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, io.TextIOWrapper(
            os.fdopen(writer, "wb", buffering=0), write_through=True) as mine:
        monkeypatch.setattr(sys, "stdout", mine)
        monkeypatch.setattr(sys, "__stdout__", mine)
        terminal.outlive_readers()
        assert sys.stdout is not mine
        sys.stdout.write("é")
        os.set_blocking(reader, False)
        assert read.read() == "é".encode()


def test_no_size_that_is_there_reads_as_zero():
    assert [terminal.three_digits(number) for number in (0, 0.000123, 0.0461, 1, 12.34, 123.4, 12345)] == [
        "0", "0.000123", "0.0461", "1.00", "12.3", "123", "12,345"]
    assert [terminal.memory_text(size) for size in (5000, 300 << 20, 3 << 30)] == ["0.00477 MiB", "300 MiB", "3.00 GiB"]


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["train", "--nonsense", "--json"], 2)])
def test_the_exit_code_does_not_depend_on_the_reader(monkeypatch, words, code):
    with lost_output(monkeypatch), pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == code


def test_another_stream_in_place_of_standard_output_stays(monkeypatch):
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    terminal.outlive_readers()
    assert sys.stdout is mine
