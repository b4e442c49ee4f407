"""`ranvier doctor`: the command. The findings come from `ranvier.cli.doctor_report`, which needs torch."""

from __future__ import annotations

from pathlib import Path

import click

from ranvier.errors import ConfigError


@click.command(short_help="Show this machine's hardware and software.")
@click.option("--measure", is_flag=True, help="Measure this machine for `ranvier plan`; takes less than a minute.")
@click.option("--out", type=click.Path(path_type=Path),
              help="File for the measured values; by default cluster.toml. Needs --measure.")
def doctor(measure: bool, out: Path | None) -> int:
    """Show the hardware and software of this machine, and the value of each `auto` setting on it."""
    if out is not None and not measure:
        raise ConfigError("has no effect without --measure", where="--out", value=str(out), remedy="Add --measure.")
    from ranvier.cli.doctor_report import examine, measure_to, print_table

    findings = examine()
    print_table(findings)
    if measure:
        measure_to(out or Path("cluster.toml"))
    return 2 if any(finding.remedy for finding in findings) else 0
