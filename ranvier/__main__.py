"""`python -m ranvier`: the command, where no script of that name is on the path."""

from ranvier.cli.main import main

if __name__ == "__main__":
    main()
