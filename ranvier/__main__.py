"""`python -m ranvier`: the command, where no script of that name is on the path."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]  # which -m puts there: no file of the current folder takes the place of a package
    from ranvier.cli.main import main

    main()
