"""The configuration of a run: one tree of frozen dataclasses.

The text under a field is its help on the command line and its documentation. Flags are the fields' names with hyphens
(`--batch.global-size`), run.toml has the same names with underscores. Every value comes from, in rising order: the
field's default, the recipe, the run file, a flag. `auto` is a value: whoever resolves it replaces it here, and the
run's folder keeps the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ranvier.mesh import Mesh

_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

Positive = Annotated[int, Ge(1)]
Bytes = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True, config=_config)
class Batch:
    global_size: Positive = 32
    """Sequences in one step, over all replicas."""
    microbatch_size: Positive | Literal["auto"] = 4
    """Sequences that travel the pipeline together. The last microbatch of a replica may be smaller. auto is what a plan
    finds to be fastest."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Train:
    steps: Positive = 100
    """Optimizer steps."""
    epochs: Positive | None = None
    """Times that every sample is seen; decides `steps` where it is set."""
    learning_rate: Annotated[float, Gt(0)] = 1e-3
    """Highest step size of the optimizer."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until the last step."""
    final_learning_rate: Annotated[float, Ge(0)] = 0.0
    """Where linear and cosine end."""
    eval_every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations on held-out text; 0 evaluates at the end only."""
    eval_sequences: Positive = 64
    """Held-out sequences in one evaluation, over all replicas."""
    sample_tokens: Annotated[int, Ge(0)] = 120
    """Tokens of text that the trained model writes at the end; 0 for none."""
    prompt: str = ""
    """Text that the sample continues; empty starts from a held-out line."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Pipeline:
    policy: Literal["message-driven", "1f1b", "gpipe"] = "message-driven"
    """Which ready action a stage runs next: whatever has arrived (backward first), or a fixed order."""
    in_flight: Positive | Literal["auto"] = "auto"
    """Microbatches that may be in the pipeline of one replica at once. gpipe takes all and ignores it."""
    boundaries: tuple[Positive, ...] | None = None
    """First block of each stage after the first, by number; overrides `partition`."""
    partition: Literal["cost", "uniform"] = "cost"
    """How blocks are cut into stages: least cost of the dearest stage, or equal numbers of blocks."""
    defer_bytes: Bytes | Literal["auto"] = "auto"
    """Bytes that postponed weight gradients may keep alive on a rank; 0 computes them at once. auto: none on
    the first stage, whose input gradient nobody waits for, and more on later ones, which store fewer activations."""


@dataclass(frozen=True, kw_only=True, config=_config)
class TensorParallel:
    scheme: Literal["stationary", "summa", "megatron"] = "stationary"
    """How blocks are computed on row x col ranks: with one operand of each product staying where it is; by Optimus'
    broadcasts and reductions; or as Megatron, on columns only."""
    sequence_sharding: bool = False
    """megatron only: columns share the sequence between products, instead of each keeping all activations."""
    keep_weights: bool = False
    """stationary only: weights that a column has gathered stay for all microbatches of a step, where rows are many."""
    reduce_dtype: Literal["auto", "fp32", "half"] = "auto"
    """Number format in which half-precision sums travel along rows and columns; auto is that of the activations. NCCL
    adds in this format, hosts add in fp32 whatever travels."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Comm:
    transport: Literal["auto", "torch", "mpi"] = "auto"
    """torch.distributed (Gloo, NCCL) or MPI; auto takes MPI on CPU where mpi4py and mpiexec are found."""
    timeout_seconds: Annotated[float, Gt(0), Le(1e8)] = 300.0
    """Longest wait for one message or collective before the run fails with a report of who waits for what."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Optim:
    algorithm: Literal["adamw", "sgd"] = "adamw"
    """AdamW (Loshchilov and Hutter, 2019), or SGD with momentum."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    epsilon: Annotated[float, Gt(0)] = 1e-8
    """AdamW's denominator offset."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """SGD's momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Weight decay: decoupled in AdamW, added to the gradient in SGD."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay: all, or only those of two and more dims (no biases and norms)."""
    groups: tuple[str, ...] = ()
    """Parameters with settings of their own, as PATTERN:FACTOR:DECAY with a pattern of names, a factor on the learning
    rate and a weight decay, for example *.bias:1:0; the first that fits counts."""
    clip_norm: Annotated[float, Ge(0)] = 0.0
    """Longest global gradient, by L2 norm; longer ones are shortened to it. 0 does not clip."""
    accumulate: Literal["fp32", "half"] = "fp32"
    """Number format in which half-precision gradients of several microbatches add up."""
    reduce_dtype: Literal["auto", "fp32", "half"] = "auto"
    """Number format in which gradients travel between replicas; auto is that of the parameters."""
    offload: Literal["none", "stream", "host", "auto"] = "auto"
    """Where optimizer states live and parameters are updated: all on the device; states in host memory, streamed
    through the device in buckets; both on the host. auto: none where the device has room, else stream."""
    bucket_size: Positive | Literal["auto"] = "auto"
    """Parameters that are updated in one piece; auto is 4,194,304 on CUDA and 262,144 on CPU."""
    chunk_buckets: Positive = 4
    """Buckets whose gradients are averaged over `data` in one piece."""
    buckets_in_flight: Positive = 3
    """Buckets that offload=stream has on the device at once: one comes in, one is updated, one goes out."""
    shard: bool = False
    """Each of the ranks that hold the same parameters (replicas; of biases and norms also the rows) keeps and updates
    its share of their optimizer states, and gathers what the others update."""
    initial_loss_scale: Annotated[float, Gt(0)] = 65536.0
    """fp16 only: factor on the loss at the start; halved when a gradient overflows."""
    loss_scale_window: Positive = 2000
    """fp16 only: steps without overflow after which the loss scale doubles."""
    update_in_backward: bool = False
    """Update each block right after its backward and use its gradient's memory again; with one microbatch only."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Memory:
    checkpoint: Literal["none", "auto", "paper"] | Positive = "none"
    """Layers between stored activations, the others being computed again in the backward; auto is what needs the least
    memory on each stage, paper is AxoNN's rule."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Checkpoint:
    dir: Path | None = None
    """Folder of the run's checkpoints, which all ranks can reach; by default `checkpoint` in the run's folder."""
    every: Annotated[int, Ge(0)] = 100
    """Steps between checkpoints; with 0 there is one at the end and one where the run is told to stop."""
    keep: Positive = 3
    """Latest checkpoints that are kept."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Checkpoints of steps that are a multiple of this are kept for good; 0 keeps none of them."""
    on_error: Literal["continue", "stop"] = "continue"
    """What a run does when a checkpoint cannot be written: go on and try again the next time, or stop."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Guard:
    bad_step: Literal["stop", "skip", "back", "none"] = "stop"
    """What a run does when a loss or gradient is no finite number, or explodes: stop before it is applied, with the
    block and microbatch named; skip the step; go back to the last checkpoint and leave out the data in between; or look
    at the loss alone, once the step is over (none), and stop."""
    explode: Annotated[float, Ge(0)] = 0.0
    """A step is bad, too, when its loss is more than this times the median of the last 20 good ones; 0: never."""
    most_bad_steps: Positive = 3
    """Bad steps in a row after which skip and back stop the run."""
    compare_every: Annotated[int, Ge(0)] = 0
    """Steps between comparisons of the replicas' parameters, bit by bit; 0 never compares."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Launch:
    launcher: Literal["auto", "local", "torchrun", "mpiexec", "srun"] = "auto"
    """Who started the ranks; auto tells by the launchers' own variables and refuses contradictions."""
    threads: Positive | Literal["auto"] = "auto"
    """Compute threads per rank; auto shares the cores of the machine among its ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute; auto takes CUDA when each local rank can have a device of its own."""
    cluster: str | None = None
    """What `auto` in mesh.data, mesh.pipe and batch.microbatch-size is planned for: a shipped cluster or a TOML file
    (`ranvier doctor --measure`); none takes nominal figures of the devices here."""
    stopped_seconds: Annotated[float, Ge(0), Le(1e8)] = 5.0
    """Seconds for which a signal may stop a rank (SIGSTOP) before the run is ended and the rank named; 0 lets it be."""
    hang_seconds: Annotated[float, Ge(0), Le(1e8)] | Literal["auto"] = "auto"
    """Longest time that one forward or backward of a microbatch may compute before its rank counts as hanging and the
    run is ended; auto is 20 times the longest so far, at least 30 s, once some of its kind have been measured; 0 never
    ends it. Waits for other ranks, and time in a debugger, do not count."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Transformer:
    family: Literal["auto", "gpt", "bert", "vit"] = "auto"
    """Architecture; auto is what `data.task` takes: gpt for lm, bert for classification and qa, vit for images."""
    pretrained: str | None = None
    """Weights that training starts from, and sizes: a folder in Hugging Face's form (config.json and safetensors), or a
    name: minilm, dinov2-small. What the folder does not have, such as a classifier, starts from the seed."""
    num_layers: Positive = 4
    """Transformer layers."""
    hidden: Positive = 128
    """Width of the hidden states."""
    heads: Positive = 4
    """Attention heads; divides `hidden`."""
    vocab: Annotated[int, Ge(2)] = 2048
    """Size of the vocabulary; the byte-level tokenizer needs at least 257."""
    sequence: Positive = 128
    """Tokens in one training sequence."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of embeddings and sublayer outputs, keyed so that every mesh drops the same elements."""
    intermediate: Positive | None = None
    """Width between the two products of an MLP; none is 4 times `hidden`."""
    norm_epsilon: Annotated[float, Gt(0)] | None = None
    """Added to the variance in norms; none is what the family was published with."""
    num_classes: Positive | Literal["auto"] = "auto"
    """bert and vit: what the head tells apart; auto takes it from the data."""
    image_size: Positive = 32
    """vit: pixels of an image's height and width, as the model sees it."""
    patch_size: Positive = 4
    """vit: pixels of a patch's height and width; divides `image_size`."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Data:
    task: Literal["lm", "classification", "qa", "images"] = "lm"
    """What is learnt: the next token of a text, the class of a sentence, the span of a text that answers a question, or
    the class of an image."""
    train: str | None = None
    """Training data of all tasks but lm: a name (sst2, sentiment; squad; cifar10, cifar100, imagenet), or a file or
    folder: TSV with the columns label and sentence, JSON in SQuAD 1.1's form, a folder with one folder of images for
    each class."""
    eval: str | None = None
    """Held-out data in the same forms; none takes the data set's own, or where it has none every tenth sample."""
    train_samples: Positive | None = None
    """Training samples that are used, the first ones by the seed's order; none is all."""
    eval_samples: Positive | None = None
    """Held-out samples that are used, likewise."""
    augment: Literal["none", "flip-crop"] = "none"
    """images: flips and shifted crops by chance, keyed by seed, epoch and sample."""
    augment_repeats: bool = False
    """Each epoch repeats the first one's augmentation, so that outputs of frozen layers can be cached."""
    corpus: str = "python-stdlib"
    """python-stdlib, sotu, a file or folder of text, or the name of a Hugging Face data set (wikitext-103). Of files
    that end in .jsonl or .ndjson each line is a JSON object, whose field `text` is a document."""
    tokenizer: str = "bpe"
    """bpe: a byte-level BPE with model.vocab entries, trained on the first 4 MB of the corpus; gpt2: GPT-2's own; or
    the path of a tokenizer.json (a byte-level BPE for the task lm, a WordPiece for classification and qa)."""
    max_bytes: Positive | Literal["auto"] = "auto"
    """Bytes of text read from the corpus; the run tells when the rest is left out. auto: all of a file or folder, 16 MB
    of a corpus that is given by name."""
    cache_dir: Path | None = None
    """Where fetched corpora, tokenizers and token files are kept; by default the user's cache folder."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Elastic:
    freeze: Literal["none", "gradient-norm", "cap", "manual"] = "none"
    """Which layers stop training, from the first on: up to the one with the least gradient, but at most the share
    `alpha` of those that still train (the PipeTransformer article's rule); that share each time (cap); or as `manual`
    says."""
    alpha: Annotated[float, Gt(0), Lt(1)] = 1 / 3
    """Largest share of the layers still training that one evaluation of the rule freezes."""
    every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations of the rule; 0 evaluates it after each epoch."""
    manual: tuple[str, ...] = ()
    """Frozen layers by step, as STEP:LAYERS, for example 100:2,200:4."""
    dry_run: bool = False
    """Tell what would be frozen, and change nothing."""
    auto_pipe: bool = False
    """Pack the pipeline into fewer stages as layers freeze."""
    auto_dp: bool = False
    """Make replicas of the ranks that a shorter pipeline leaves over; without, they are idle."""
    cut: Literal["exact", "reference"] = "exact"
    """How the pipeline is packed: by predicted time and memory over all shapes, or by the article's greedy rule."""
    global_batch: Literal["keep", "scale", "grow"] = "keep"
    """What becomes of the global batch when replicas are added: it stays; it grows with them, and the learning rate
    with it; or it grows alone, as in the article."""
    profile_microbatches: bool = False
    """Try several numbers of microbatches for each pair of pipeline length and replicas, in steps of the run, and keep
    the fastest."""
    cache: bool = False
    """Keep the outputs of frozen layers, and read them in the epochs that follow instead of computing them again."""
    cache_from: Positive | Literal["auto"] = "auto"
    """Frozen layers from which outputs are cached; auto measures whether reading is faster than computing."""
    cache_dir: Path | None = None
    """Folder on each machine for cached outputs, which stay there; none takes one of its own and removes it."""
    cache_bytes: Bytes = 8_000_000_000
    """Bytes that cached outputs may take on a machine."""
    cache_precision: Literal["half", "full"] = "half"
    """Number format of cached outputs."""
    frozen_dropout: bool = True
    """Whether frozen layers drop out as others do; the cache needs false (or no dropout)."""


@dataclass(frozen=True, kw_only=True, config=_config)
class Run:
    mesh: Mesh = Mesh()
    batch: Batch = Batch()
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    tensor: TensorParallel = TensorParallel()
    optim: Optim = Optim()
    memory: Memory = Memory()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    launch: Launch = Launch()
    model: Transformer = Transformer()
    data: Data = Data()
    elastic: Elastic = Elastic()
    seed: Annotated[int, Ge(0)] = 0
    """Decides initial weights, sample order and dropout, whatever the mesh."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format of parameters and activations. bf16 and fp16 keep fp32 master copies; fp16 scales the loss."""
    memory_report: bool = False
    """Print predicted and measured memory by category, side by side, at the end of the run."""
    resume: str = "none"
    """Where the run goes on from: the newest whole checkpoint of its folder (auto; the start where there is none), a
    checkpoint or a folder of them (a path), or nowhere (none). auto takes another mesh where there are other ranks."""
    max_restarts: Annotated[int, Ge(0)] = 0
    """Plain python: how often the run is started again from its newest checkpoint after a fault, on the ranks that are
    left where one was killed, stopped or hung. Other launchers have settings of their own for that."""
    run_dir: Path | None = None
    """Folder for everything the run writes; by default runs/RECIPE-DATE."""
