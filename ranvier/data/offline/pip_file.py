"""Fetches one file of a project from the package indexes that pip is configured with, without running any of its code.

    python -m ranvier.data.offline.pip_file PROJECT FILENAME        the file, in this folder

`pip download` runs the code of a source distribution to get its metadata, even with --no-deps, and before any checksum
is compared. This module fetches the file by its name. The settings of pip apply (index-url, find-links, no-index,
proxies, certificates, credentials), since pip's own session reads the index and the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

_BLOCK_BYTES = 1 << 20


def fetch_file(project: str, filename: str, folder: Path) -> bool:
    """Write `filename`, one of the files of `project`, into `folder`; False if there is none. Raises pip's errors."""
    from pip._internal.commands.download import DownloadCommand

    command = DownloadCommand("download", "")
    options, _ = command.parser.parse_args([])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options=options, session=session, ignore_requires_python=True)
        links = [candidate.link for candidate in finder.find_all_candidates(project)]
        for link in links:
            if link.filename == filename:
                with session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"},
                                 stream=True) as answer, open(folder / filename, "wb") as file:
                    answer.raise_for_status()
                    while block := answer.raw.read(_BLOCK_BYTES):
                        file.write(block)
                return True
    return False


def main(project: str, filename: str) -> int:
    """The command: fetch the file into the current folder. Returns the exit code."""
    try:
        found = fetch_file(project, filename, Path.cwd())
    except ImportError as error:
        print(f"needs pip: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # any error of pip, the network or an index
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if not found:
        print(f"no index that pip is configured with has {filename} of {project}", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
