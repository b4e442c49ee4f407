"""`ranvier export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ranvier.cli.options import NUMBER_FORMATS, json_option, quiet_option, text_output


@click.command("export", short_help="Write a checkpoint in Hugging Face's format.")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=NUMBER_FORMATS, help="Number format of the files; by default that of the checkpoint's "
                                                   "fp32 master copies, if there are any, else of its parameters.")
@click.option("--shard-bytes", type=click.IntRange(min=1), default=1_000_000_000, show_default=True,
              help="Maximum size of a file of tensors in bytes; a larger tensor gets a file of its own.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json; by default that of the run.")
@click.option("--ema", is_flag=True,
              help="Write the moving average of the parameters (optim.ema) instead of the parameters.")
@click.option("--adapters", is_flag=True, help="Write only the adapters (--lora.rank), in PEFT's format.")
@quiet_option
@json_option
def export_run(run: Path, out: Path, dtype: str | None, shard_bytes: int, tokenizer: Path | None, ema: bool,
               adapters: bool, quiet: bool, as_json: bool) -> int:
    """Write a checkpoint of RUN to the new folder OUT in Hugging Face's format, which transformers loads. Adapters are
    merged into the weights.

    RUN is a run's folder (its newest complete checkpoint), a folder of checkpoints, or a single checkpoint. At the end
    the logits of OUT are compared with those of the checkpoint.
    """
    from ranvier.checkpoint.hf.export_model import export, export_adapters

    with text_output(as_json, quiet):
        if adapters:
            export_adapters(run, out, dtype=dtype, ema=ema)
        else:
            export(run, out, dtype=dtype, shard_bytes=shard_bytes, tokenizer=tokenizer, ema=ema)
        print(f"written to {out}")
    if as_json:
        print(json.dumps({"written": str(out)}))
    return 0
