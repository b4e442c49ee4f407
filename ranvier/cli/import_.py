"""`ranvier import`: a Hugging Face folder as a checkpoint. (`import` is a keyword of Python, hence the file's name.)"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import click

from ranvier.cli.options import NUMBER_FORMATS, json_option, quiet_option, text_output


@click.command("import", short_help="Read a Hugging Face model as the start of a run.")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--precision", type=NUMBER_FORMATS, help="Number format of the parameters; by default that of MODEL's "
                                                       "files.")
@quiet_option
@json_option
def import_model(model: Path, out: Path, precision: str | None, quiet: bool, as_json: bool) -> int:
    """Convert the model MODEL to a checkpoint in the new folder OUT.

    Architectures: GPT-2, Llama, Mistral, Phi-3 and 4, Qwen 2 and 3, Gemma 1 to 3, OLMo 2 and 3, SmolLM 2 and 3,
    Granite, BERT, ViT and DINOv2.

    MODEL is a folder with config.json and model.safetensors (or shards with their index, or pytorch_model.bin), a GGUF
    file, OWNER/NAME of the Hugging Face hub, or a name that --model.pretrained takes. At the end the logits of OUT are
    compared with those of MODEL; `ranvier train OUT/run.toml --resume OUT` continues the training.
    """
    from ranvier.checkpoint.files import check_free
    from ranvier.checkpoint.hf.import_model import flags
    from ranvier.checkpoint.hf.import_model import import_model as make
    from ranvier.data.offline.pretrained_models import local_path

    check_free(out)  # before anything is downloaded
    with text_output(as_json, quiet):
        recipe = make(local_path(model, print), out, precision=precision)
        print(f"written to {out}, with its settings in run.toml")
        print(f"to continue the training: ranvier train {quote(str(out / 'run.toml'))} --resume {quote(str(out))}")
    if as_json:
        print(json.dumps({"written": str(out), "recipe": str(out / "run.toml"), "flags": list(flags(recipe))}))
    return 0
