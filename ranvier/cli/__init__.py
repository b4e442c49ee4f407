"""The command `ranvier`: one file per subcommand, joined in `ranvier.cli.main`."""
