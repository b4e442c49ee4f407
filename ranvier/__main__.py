"""`python -m ranvier`: the command, where no script of that name is on the path."""

from ranvier.cli import main

if __name__ == "__main__":
    main()
