"""`ranvier doctor`: the command. The findings come from `ranvier.cli.doctor_report`, which needs torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from ranvier.cli.options import json_option, text_output
from ranvier.config import read
from ranvier.errors import ConfigError


@click.command(short_help="Show this machine's hardware and software.")
@click.option("--measure", is_flag=True, help="Measure this machine for `ranvier plan`; takes less than a minute.")
@click.option("--out", type=click.Path(path_type=Path),
              help="File for the measured values; by default cluster.toml. Needs --measure.")
@json_option
def doctor(measure: bool, out: Path | None, as_json: bool) -> int:
    """Show the hardware and software of this machine, and the value of each `auto` setting on it."""
    if out is not None and not measure:
        raise ConfigError("has no effect without `--measure`", code="out-without-measure", where="--out",
                          value=str(out), remedy="Add `--measure`.")
    file = out or Path("cluster.toml")
    if measure:
        read.check_out(file)
    from ranvier.cli.doctor_report import examine, measure_to, print_table

    findings = examine()
    with text_output(as_json):
        print_table(findings)
        if measure:
            measure_to(file)
    if as_json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings],
                          "cluster": str(file) if measure else None}))
    return 2 if any(finding.remedy for finding in findings) else 0
