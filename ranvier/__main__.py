"""The command `ranvier`, also as `python -m ranvier`, if no script of that name is on the path."""

import os
import sys
from typing import NoReturn

from ranvier.system.terminal import open_closed_streams


def main() -> NoReturn:
    """Run the command line of this process, and exit. Ctrl-C during the imports ends it like any other."""
    open_closed_streams()
    try:
        from ranvier.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]  # which -m adds: no file of the current folder may shadow a package
    main()
