"""The configuration of a run: one tree of frozen dataclasses.

The text under a field is its help on the command line and its documentation. Flags are the fields' names with hyphens
(`--batch.global-size`); run.toml has the same names with underscores. A recipe (or a run.toml) overrides the defaults,
and a flag overrides the recipe. `auto` is a value: it is replaced in this tree when it is resolved, and the run's
folder keeps the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import StringConstraints, model_validator
from pydantic_core import ArgsKwargs

from ranvier.config import aliases
from ranvier.config.section import section
from ranvier.errors import ConfigError
from ranvier.mesh import AXES, Mesh, Size

Positive = Annotated[int, Ge(1)]
Bytes = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0), Le(1e8)]
ObjectName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""A Python object of the user's: module:name (ranvier/config/named_object.py)."""


@section
class MeshSettings:
    """Sizes of the mesh along its four axes, some of which may be auto."""

    data: Size | Literal["auto"] = 1
    """Data parallel size: replicas of the model, which share each global batch. auto: the planner chooses the fastest
    sizes of all axes that are auto, for the number of ranks that are started."""
    pipe: Size | Literal["auto"] = 1
    """Pipeline parallel size: number of stages, each of consecutive blocks."""
    row: Size | Literal["auto"] = 1
    """Tensor parallel size along the rows of the tensor mesh, which split a microbatch's sequences. With tensor.scheme
    stationary rows are FSDP (ZeRO-3): each rank holds its part of the weights and gathers the rest when it is needed.
    auto, with data and pipe given: the shape of the tensor mesh whose ranks receive the fewest bytes."""
    col: Size | Literal["auto"] = 1
    """Tensor parallel size along the columns of the tensor mesh, which split the hidden dimension."""
    tile: tuple[Size, Size] | None = None
    """Shape of the part of the tensor mesh that is on one node, as rows x columns. none: the shape with the fewest
    bytes between nodes, if all nodes have the same number of ranks; otherwise ranks are numbered row by row. Unused on
    stages of one rank."""

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The axes that are auto."""
        return tuple(axis for axis in AXES if getattr(self, axis) == "auto")

    def with_sizes(self, **sizes: int) -> Mesh:
        """The mesh with these sizes along its open axes. ConfigError if an axis stays open, or from `Mesh`."""
        known = {axis: getattr(self, axis) for axis in AXES if axis not in self.open_axes} | sizes
        for axis in self.open_axes:
            if axis not in known:
                raise ConfigError("is auto, and must be a number here", code="mesh-axis-auto", where=f"mesh.{axis}",
                                  value="auto",
                                  remedy=f"Set `--mesh.{axis}`, or plan the run first (ranvier.planner.auto).")
        return Mesh(**known, tile=self.tile)


@section
class Batch:
    """The global batch and its microbatches."""

    global_size: Positive = 32
    """Global batch size: sequences in one optimizer step, over all data parallel replicas."""
    microbatch_size: Positive | Literal["auto"] = 4
    """Microbatch size: sequences in one forward and backward of the pipeline. Gradients of the microbatches of a step
    are accumulated. The last microbatch of a replica may be smaller. auto: a plan chooses the fastest size."""


@section
class Train:
    """Length of the run, learning rate, evaluation and sample text."""

    steps: Positive = 100
    """Optimizer steps."""
    epochs: Positive | None = None
    """Epochs: passes over the training data; overrides `steps`."""
    learning_rate: Annotated[float, Gt(0)] = 1e-3
    """Peak learning rate."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Learning-rate warmup: steps over which the learning rate rises linearly from 0 to its peak."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning-rate schedule after the warmup, until the last step. wsd (warmup, stable, decay): constant, with a decay
    at the end."""
    final_learning_rate: Annotated[float, Ge(0)] = 0.0
    """Learning rate at the last step of the schedules linear, cosine and wsd."""
    decay_share: Annotated[float, Gt(0), Le(1)] = 0.2
    """wsd: share of the run's steps in which the learning rate decays; the decay begins after the warmup in any
    case."""
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    """wsd: form of the decay: linear, or 1 minus the square root of the decay's progress, which falls faster at
    first."""
    eval_every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations on held-out data; 0 evaluates at the end only."""
    eval_sequences: Positive = 64
    """Held-out sequences in one evaluation, over all replicas."""
    eval_ema: bool = False
    """Evaluate the moving average of the parameters (`optim.ema`) instead of the parameters."""
    early_stopping: Annotated[int, Ge(0)] = 0
    """Early stopping: evaluations without improvement after which the run ends; 0 for never. The metric is that of
    `checkpoint.best`, or else the held-out loss."""
    early_stopping_delta: Annotated[float, Ge(0)] = 0.0
    """Early stopping: smallest change of the metric that counts as an improvement."""
    sample_tokens: Annotated[int, Ge(0)] = 120
    """Tokens of sample text that the trained model generates at the end of the run; 0 for none. A line above
    it says what to expect of the text, from the held-out loss."""
    prompt: str = ""
    """Prompt of the sample text; empty takes the start of a held-out line."""


@section
class Pipeline:
    """Pipeline parallelism: schedule, in-flight limit, partition into stages, deferred weight gradients."""

    policy: Literal["message-driven", "1f1b", "gpipe"] = "message-driven"
    """Pipeline schedule: message-driven runs work whose inputs have arrived, in the order in which it is due; 1f1b and
    gpipe follow a fixed order."""
    in_flight: Positive | Literal["auto"] = "auto"
    """In-flight limit: microbatches of one replica that may be in the pipeline at the same time. auto: the fastest in a
    simulation of the schedule, within `memory`. Unused with gpipe, which has all of them in flight."""
    boundaries: tuple[Positive, ...] | None = None
    """First block of each stage after the first, by number; overrides `partition`."""
    partition: Literal["cost", "uniform"] = "cost"
    """Partition of blocks into stages: the slowest stage as fast as possible (cost), or equal numbers of blocks
    (uniform)."""
    defer_bytes: Bytes | Literal["auto"] = "auto"
    """Memory budget of deferred weight gradients on a rank: bytes of the inputs and output gradients that they keep. 0
    computes each weight gradient in its backward. auto: those of `deferred` microbatches."""
    deferred: tuple[Annotated[int, Ge(0)], ...] | None = None
    """Deferred weight gradients, if `defer_bytes` is auto: for each pipeline rank, the number of microbatches whose
    weight gradients may be deferred. none: what the fastest simulated schedule uses, within `memory`."""
    defer_last: Positive | None = None
    """Deferred weight gradients, if `defer_bytes` is auto: only those of this many last microbatches of a step are
    deferred. Others are computed in their backward, which is faster on CPUs, where the operands are still in the cache.
    none: with `deferred`, those of any microbatch; without, what the fastest simulated schedule uses."""
    memory: Annotated[float, Ge(1)] | None = 1.1
    """Memory limit for automatic `in_flight`, `deferred` and `defer_last`: this multiple of what the largest stage
    needs under 1f1b (with interleaved stages: under interleaved 1F1B).
    The simulation uses counted costs; after the first steps on each mesh it is repeated once with measured times (not
    with `memory_report`). If the ranks have too little memory for the limits, those for 1 are used, or else the
    schedule 1f1b (with several stages per rank, one that defers nothing). none: no simulation; as many microbatches
    are in flight as there are stages, plus the number of stages without trainable parameters."""
    stages_per_rank: Positive = 1
    """Virtual stages: number of stages (model chunks) on each rank of the pipeline. More stages make the bubble smaller
    if there are few microbatches, but send more messages. Needs the message-driven or gpipe schedule."""
    placement: Literal["v-shape", "interleaved"] = "v-shape"
    """Assignment of stages to ranks, with several stages per rank. v-shape: forwards go to the last rank and back (as
    in ZB-V), so the first rank also has the model's end; interleaved: round after round (as in Megatron-LM)."""
    look_ahead: Annotated[int, Ge(0)] | Literal["auto"] = "auto"
    """On CUDA: actions that the host may enqueue ahead of the device when it chooses the next one. A small number
    lets it choose from more messages; 0 waits for each action. auto: 1 with several stages, no limit with one."""


@section
class TensorParallel:
    """Tensor parallelism on the row x col ranks of a stage, and sequence parallelism."""

    scheme: Literal["stationary", "summa", "megatron"] = "stationary"
    """Tensor parallel scheme: how the row x col ranks of a stage compute a block. stationary: one operand of each
    matrix product stays where it is; summa: broadcasts and reductions, as in Optimus; megatron: as in Megatron-LM, on
    columns only."""
    sequence_sharding: bool = False
    """Sequence parallel, not with summa: between matrix products, each column keeps a part of the sequence, with
    stationary instead of a part of the hidden width, with megatron instead of all activations. Norms then need no
    communication. The columns must divide the sequence."""
    keep_weights: bool = False
    """With stationary on several rows only: keep gathered weights for all microbatches of a step instead of gathering
    them again (as FSDP's reshard_after_forward=False), and add up the microbatches' weight gradients before they are
    reduced over rows, once a step. Costs the memory of all gathered weights and gradients of a stage."""
    reduce_dtype: Literal["auto", "fp32", "half"] = "auto"
    """Number format in which half-precision activations are summed over columns; auto is fp32 on CPU, half on CUDA.
    half takes half the bytes, and rounds each column's part before the sum, with an error as large as the product's
    own; NCCL rounds after each addition, too. Gradients are always summed over rows and columns in fp32."""
    panel_bytes: Positive | Literal["auto"] = "auto"
    """Not with summa: activations are gathered and reduced along columns in panels of at most this many bytes; one is
    sent while another is multiplied. On CUDA there are more panels if they hide more time than smaller products lose.
    auto: 4 MiB on CPU, 64 MiB on CUDA."""

    @property
    def shards_sequence(self) -> bool:
        """Whether columns share the sequence between products."""
        return self.sequence_sharding and self.scheme != "summa"


@section
class Comm:
    """Communication between ranks."""

    transport: Literal["auto", "torch", "mpi"] = "auto"
    """Communication library: torch.distributed (Gloo, NCCL) or MPI. auto: MPI on CPU if mpi4py and mpiexec are
    installed, otherwise torch."""
    collectives: Literal["auto", "torch", "mpi"] = "auto"
    """Library of the collectives, if `transport` is mpi: torch.distributed (Gloo, NCCL) or MPI. auto: NCCL between CUDA
    devices, MPI between CPUs. AxoNN uses MPI for messages and NCCL for collectives."""
    timeout_seconds: Seconds = 300.0
    """Timeout of one message or collective, in seconds; after it, the run fails with a report of which rank waits for
    which."""


@section
class Optim:
    """The optimizer: update rule, gradient reduction, loss scaling, offload and sharding of its states."""

    algorithm: Literal["adamw", "sgd", "lion", "muon", "adafactor"] | ObjectName = "adamw"
    """Optimizer (docs/optimizers.md): AdamW (Loshchilov and Hutter, 2019); SGD with momentum; Lion (Chen et al., 2023);
    Muon (Jordan et al., 2024) for the matrices of layers, with AdamW for all other parameters; Adafactor (Shazeer and
    Stern, 2018). Or an update rule of your own, as module:name."""
    options: tuple[str, ...] = ()
    """Keyword arguments of the function or class that an `algorithm` of your own names, as NAME=VALUE."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments, with muon for the parameters that AdamW updates; Lion's
    interpolation factors, which were published as 0.9,0.99."""
    epsilon: Annotated[float, Gt(0)] = 1e-8
    """AdamW's term added to the denominator for numerical stability."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum of SGD, and of Muon (Nesterov), which was published with 0.95."""
    muon_scale: Literal["match-rms-adamw", "original"] = "match-rms-adamw"
    """Muon's factor on the learning rate of an m x n matrix. match-rms-adamw: 0.2 sqrt(max(m, n)), so that learning
    rate and weight decay of AdamW fit; original: sqrt(max(1, m / n))."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Weight decay: added to the gradient in SGD, decoupled in the other optimizers."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, or only those with two or more dims (no biases and norms)."""
    groups: tuple[str, ...] = ()
    """Parameter groups, as PATTERN:FACTOR:DECAY with a pattern of parameter names, a factor on the learning rate and a
    weight decay, for example *.bias:1:0. A parameter belongs to the first group whose pattern matches."""
    clip_norm: Annotated[float, Ge(0)] = 0.0
    """Gradient clipping: maximum global gradient norm (L2); larger gradients are scaled down to it. 0 does not clip."""
    clip_from: Literal["step", "previous-step"] = "step"
    """Norm by which `clip_norm` clips: that of the step itself, or that of the step before, so that no update waits for
    the full gradient, not even in the backward (`update_in_backward`). With previous-step the results differ: a step
    whose gradient grows suddenly is clipped too little, and the first step of a run is not clipped."""
    accumulate: Literal["fp32", "half"] = "fp32"
    """Number format of gradient accumulation over microbatches, with bf16 and fp16 parameters."""
    reduce_dtype: Literal["auto", "fp32", "half"] = "auto"
    """Number format of the gradient all-reduce between data parallel replicas; auto is the format of the parameters.
    Gradients that are also summed over rows or columns, such as those of norms, are always sent in fp32."""
    offload: Literal["none", "stream", "host", "hybrid", "auto"] = "auto"
    """CPU offload of optimizer states. none: states on the device; stream: states in host memory, streamed through the
    device bucket by bucket for the update; host: states in host memory, updated by the CPU; hybrid: a part of the
    states on the device, the others streamed. auto: none if the device has enough memory, otherwise stream."""
    offload_share: Annotated[float, Ge(0), Le(1)] | Literal["auto"] = "auto"
    """Share of the optimizer states in host memory with offload hybrid. auto: the smallest share with which the other
    states fit on the device; 0.5 on a CPU."""
    bucket_size: Positive | Literal["auto"] = "auto"
    """Bucket size: parameters that the optimizer updates together; auto is 4,194,304 on CUDA and 262,144 on CPU."""
    chunk_buckets: Positive = 4
    """Buckets in a chunk, whose gradients are reduced over `data` in one collective. DDP calls a chunk a bucket."""
    buckets_in_flight: Positive = 3
    """Buckets on the device at the same time with offload stream or hybrid: one is copied in, one is updated, one is
    copied out."""
    shard: bool = False
    """Sharding of optimizer states as in ZeRO-1 (a distributed optimizer): each rank that holds the same parameters
    (data parallel replicas; for biases and norms also the rows) keeps and updates its shard of the optimizer states,
    and gathers the parameters that the others update. With muon and adafactor one of these ranks
    updates each tensor as a whole."""
    initial_loss_scale: Annotated[float, Gt(0)] = 65536.0
    """Loss scaling, with fp16 only: initial loss scale. It is halved when a gradient overflows."""
    loss_scale_window: Positive = 2000
    """Loss scaling, with fp16 only: steps without overflow after which the loss scale is doubled."""
    ema: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Exponential moving average of the parameters: its decay, for example 0.999; 0 keeps none. It is kept in fp32 with
    the optimizer states, and saved with them; `ranvier evaluate`, `generate` and `export` take it with --ema."""
    update_in_backward: bool = False
    """Update each block right after its backward and reuse the memory of its gradients. Needs a single microbatch,
    since blocks cannot share memory in which the gradients of several are accumulated. A bad step is found only after
    its update."""


@section
class Memory:
    """Activation recomputation, to save memory."""

    recompute: Literal["none", "auto", "selective", "alternate", "axonn"] | Positive = "none"
    """Activation recomputation (activation checkpointing): layers between stored activations; the others are computed
    again in the backward. auto: on each stage, the choice that needs the least memory; selective: the outputs of matrix
    products and attention in every block are kept, and only norms, activations and other elementwise operations run
    again; alternate: every second layer keeps its activations, which costs half of the time of 1; axonn: AxoNN's
    rule."""

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, given: Any) -> Any:
        """Accept the other spellings (`ranvier.config.aliases`) as keyword arguments, too."""
        if not isinstance(given, ArgsKwargs) or given.kwargs is None:
            return given
        if {"checkpoint", "recompute"} <= given.kwargs.keys():  # as dataclasses.replace passes them
            raise TypeError("Memory() got checkpoint and recompute, which are two names of one field; use recompute")
        pairs = (aliases.canonical(f"memory.{name}", value) for name, value in given.kwargs.items())
        return ArgsKwargs(given.args, {name.removeprefix("memory."): value for name, value in pairs})


@section
class Checkpoint:
    """When checkpoints are written, and which are kept."""

    dir: Path | None = None
    """Folder of the run's checkpoints, which all ranks must be able to access; by default `checkpoint` in the run's
    folder."""
    every: Annotated[int, Ge(0)] = 100
    """Steps between checkpoints; 0 writes one at the end of the run and one when the run is stopped."""
    keep: Positive = 3
    """Number of latest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Checkpoints of steps that are a multiple of this are never deleted; 0 for none."""
    best: Annotated[str, StringConstraints(pattern=r"^eval_\w+$")] | None = None
    """Metric of the best checkpoint, which is kept in addition to the latest ones and marked by the link `best` in
    their folder: eval_loss, eval_accuracy, or a metric of an evaluation set, such as eval_wiki_loss. Losses are
    minimised, other metrics maximised. none keeps no best checkpoint."""
    background: bool = True
    """Copy parameters and optimizer states to host memory, and write them while training continues. false: training
    waits until they are written, and no memory is needed for copies."""
    on_error: Literal["continue", "stop"] = "continue"
    """Reaction to a checkpoint that cannot be written: continue and try again at the next one, or stop."""


@section
class Guard:
    """Reaction to a bad step: NaN, infinity, or a loss spike."""

    bad_step: Literal["stop", "skip", "rollback", "none"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite, or to a loss spike. stop: end the run before the step is
    applied, and name the block and the microbatch; skip: skip the step; rollback: roll back to the last checkpoint and
    skip the data since then; none: check only the loss, after the step, and end the run."""
    loss_spike_factor: Annotated[float, Ge(0)] = 0.0
    """Loss spikes: a step is bad when its loss is more than this times the median of the last 20 good steps; 0 for no
    limit."""
    max_bad_steps: Positive = 3
    """Consecutive bad steps after which skip and rollback end the run."""
    compare_every: Annotated[int, Ge(0)] = 0
    """Steps between checks that the parameters of data parallel replicas are bit-identical; 0 for no checks."""


@section
class Log:
    """Console output, and experiment trackers in addition to the run's own files and TensorBoard."""

    tracker: tuple[Literal["wandb", "mlflow", "aim"], ...] = ()
    """Experiment trackers that get the curves and settings of the run: wandb (Weights & Biases), mlflow, aim; several
    separated by commas. Each is an extra of the same name, for example ranvier[mlflow]."""
    project: str = "ranvier"
    """Project (wandb) or experiment (mlflow, aim) to which the run belongs."""
    store: str | None = None
    """mlflow: tracking URI, for example file:mlruns or http://host:5000; aim: repository. none is the package's own
    default."""
    offline: bool = False
    """wandb: keep everything in the run's folder, for `wandb sync`, and connect to no server."""
    every: Positive = 10
    """Steps from one printed line to the next. A line is also printed after the first and the last step, after each
    evaluation, and when none was printed for 30 seconds; metrics.jsonl has every step."""


@section
class Launch:
    """Start of the ranks, and their devices."""

    launcher: Literal["auto", "local", "torchrun", "mpiexec", "srun"] = "auto"
    """Launcher that started the ranks; auto reads the launchers' environment variables, and contradictions are
    errors."""
    threads: Positive | Literal["auto"] = "auto"
    """Compute threads per rank; auto divides the cores of the machine among its ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; auto is CUDA when each rank of a machine can have its own device."""
    cluster: str | None = None
    """Cluster for which `auto` in mesh.data, mesh.pipe and batch.microbatch-size is planned, and a pipeline's limits
    that are `auto` are chosen: a shipped cluster or a TOML file (`ranvier doctor --measure`); none uses nominal figures
    of the devices here."""
    trial: Annotated[int, Ge(0)] = 0
    """Number of best predicted plans for `auto` that are run for a few steps each before the run starts; the fastest is
    used. On CPUs one rank with all cores is tried, too. 0: the best prediction is used. No trial if it would take more
    than a tenth of the run's predicted time, when a run is resumed, or under torchrun, mpiexec and srun."""
    stopped_seconds: Annotated[float, Ge(0), Le(1e8)] = 5.0
    """Seconds for which a rank may be stopped by a signal (SIGSTOP) before the run ends and names the rank; 0 for no
    limit."""
    hang_seconds: Annotated[float, Ge(0), Le(1e8)] | Literal["auto"] = "auto"
    """Longest time of one forward, backward or weight gradient, in seconds, before its rank counts as hung and the run
    ends. auto: 20 times the longest so far, at least 30 s, once some of its kind have been measured; 0 for no limit.
    Waits for other ranks and time in a debugger do not count."""
    join_address: str | None = None
    """Address of this machine on which ranks may join the run later (`ranvier join`): 127.0.0.1 for ranks on this
    machine only, or an address by which other machines reach this one; none lets no rank join. Needs plain python as
    the launcher, and comm.transport torch, which auto then chooses."""
    survive_losses: bool = False
    """Continue without killed ranks, if other replicas have all of their state: the survivors return to the last
    finished step, on their largest valid mesh. Each rank keeps copies of its state after the last two steps in host
    memory, with optim.shard also of the previous replica's share. Rank 0 must survive. Needs plain python as the
    launcher, CPUs, and comm.transport torch, which auto then chooses; other losses end the run, or restart it
    (max-restarts)."""


@section
class Transformer:
    """Architecture and sizes of the model."""

    family: Literal["auto", "gpt", "llama", "bert", "vit", "transformers"] | ObjectName = "auto"
    """Architecture; auto is what `data.task` takes: gpt for lm, bert for classification and qa, vit for images. llama
    stands for Llama, Mistral, Phi, Qwen, Gemma, OLMo, SmolLM and Granite, for lm and classification (docs/models.md);
    transformers for any other language model in the folder `pretrained`, on data and pipe axes. Or a model family of
    your own, as module:function (docs/extending.md)."""
    preset: str | None = None
    """Sizes of a published model, by name, for example llama-3.2-1b (docs/models.md). Other settings of the model
    override it."""
    options: tuple[str, ...] = ()
    """Keyword arguments of the function that a `family` of your own names, as NAME=VALUE, for example kernel=5."""
    pretrained: str | None = None
    """Pretrained model, for weights, sizes and tokenizer: a folder in Hugging Face format (config.json and
    safetensors), a GGUF file, OWNER/NAME or OWNER/NAME@REVISION of the Hugging Face hub, or a name: minilm,
    dinov2-small, smollm2-135m-instruct. Parameters that it lacks, such as a classifier, are initialised from the
    seed."""
    compile: bool | Literal["auto"] = "auto"
    """Compile blocks with torch.compile, each as one graph: fewer and larger kernels, but a longer start. true: a block
    that cannot be compiled is an error; auto: compile on CUDA, and run such a block uncompiled, with a warning. On
    several rows or columns only chains of elementwise operations are compiled: those of norms over sharded features,
    rotary embeddings, gated activations, and dropout with the residual sum."""
    float8: bool = False
    """Compute the products of linear layers in float8 while training, with one scale for each tensor: e4m3, and e5m2
    for gradients of outputs. Layers of the first and the last block, and those with a size that 16 does not divide,
    keep the run's precision, and so do parameters, activations and evaluation. Needs compute capability 8.9 or more on
    CUDA; a CPU computes the same products slowly."""
    attention_kernel: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """On CUDA: attention kernel that is preferred: FlashAttention, cuDNN's, the memory-efficient one, or plain products
    (math). auto measures them at the start, on the run's shapes, and uses the fastest."""
    num_layers: Positive = 4
    """Transformer layers."""
    hidden: Positive = 128
    """Hidden size."""
    heads: Positive = 4
    """Attention heads; divides `hidden`."""
    vocab: Annotated[int, Ge(2)] = 2048
    """Size of the vocabulary; the byte-level tokenizer needs at least 257. If it is larger than that of
    model.pretrained, embeddings are added, which start from the mean of the others."""
    sequence: Positive = 128
    """Tokens in one training sequence."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout probability of embeddings and sublayer outputs; every mesh drops the same elements."""
    intermediate: Positive | None = None
    """Intermediate size of an MLP; none is 4 times `hidden`, which gpt always has."""
    norm_epsilon: Annotated[float, Gt(0)] | None = None
    """Epsilon of layer norms; none is the value that the family was published with, which gpt always has."""
    num_classes: Positive | Literal["auto"] = "auto"
    """bert, llama and vit: number of classes; auto takes it from the data."""
    image_size: Positive = 32
    """vit: pixels of an image's height and width, as the model sees it."""
    patch_size: Positive = 4
    """vit: pixels of a patch's height and width; divides `image_size`."""
    untied: bool = False
    """gpt, transformers: whether the projection onto the vocabulary has its own weights, as in models that were
    exported after layers had frozen. Otherwise it shares the weights of the token embedding."""
    max_positions: Positive | None = None
    """llama: maximum number of positions of the model, for exports (max_position_embeddings); none is `sequence`."""
    kv_heads: Positive | None = None
    """llama: heads of keys and values in grouped-query attention; divides `heads`, and none is `heads`."""
    head_dim: Positive | None = None
    """llama: features of a head; none is `hidden` / `heads`."""
    activation: Literal["silu", "gelu", "gelu-tanh"] = "silu"
    """llama: activation of the gate of an MLP: silu for SwiGLU, gelu (exact) or gelu-tanh for GeGLU."""
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    """llama: linear layers with a bias: none, those of queries, keys and values (qkv), with the output projection
    (attention), or with the MLP (all)."""
    tied: bool = False
    """llama: whether the projection onto the vocabulary shares the weights of the token embedding."""
    norms: Literal["before", "after", "both"] = "before"
    """llama: where a sublayer has its RMS norm: before it, after it (OLMo 2 and 3), or both (Gemma 2 and 3)."""
    norm_offset: Annotated[int, Ge(0), Le(1)] = 0
    """llama: number that RMS norms add to their weight: 1 in Gemma, whose weights start from 0."""

    qk_norm: Literal["none", "head", "all"] = "none"
    """llama: RMS norm of queries and keys: none, of each head (Qwen 3), or of all heads together (OLMo 2)."""
    query_pre_attn_scalar: Annotated[float, Gt(0)] | None = None
    """llama: number by whose square root attention scores are divided; none is `head_dim`."""
    window: Positive | None = None
    """llama: sliding window: tokens that a token attends to, including itself; none is all tokens up to it."""
    full_every: Annotated[int, Ge(0)] = 0
    """llama: one layer in this many attends to all tokens instead of the window (Gemma 2: 2); 0 for none."""
    full_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """llama: numbers of further layers, from 0, that attend to all tokens instead of the window (Qwen 2 and 3: the
    first ones)."""
    nope_layers: tuple[Annotated[int, Ge(0)], ...] = ()
    """llama: numbers of the layers, from 0, without rotary embeddings (SmolLM 3: every fourth)."""
    rope_base: Annotated[float, Gt(1)] = 10000.0
    """llama: base of the frequencies of rotary embeddings (rope_theta)."""
    window_rope_base: Annotated[float, Gt(1)] | None = None
    """llama: base of the frequencies, which are not scaled, in layers with a window (Gemma 3, OLMo 3); none is as in
    other layers."""
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    """llama: scaling of rotary embeddings to longer sequences."""
    rope_factor: Annotated[float, Ge(1)] = 1.0
    """llama: factor of `rope_scaling`."""
    rope_positions: Positive | None = None
    """llama: positions of the model before `rope_scaling`; all but linear need it."""
    rope_limits: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]] | None = None
    """llama: with llama3 low_freq_factor and high_freq_factor, none is 1,4; with yarn beta_slow and beta_fast, none is
    1,32."""
    rope_magnitude: Annotated[float, Gt(0)] | None = None
    """llama: with yarn attention_factor, by which queries and keys are multiplied; none is 0.1 ln(factor) + 1."""
    embedding_scale: Literal["one", "sqrt-hidden"] | Annotated[float, Gt(0)] = "one"
    """llama: factor of token embeddings: one, the square root of `hidden` (Gemma), or a number (Granite)."""
    residual_multiplier: Annotated[float, Gt(0)] = 1.0
    """llama: factor of the sublayers' outputs (Granite)."""
    logits_scaling: Annotated[float, Gt(0)] = 1.0
    """llama: number by which logits are divided (Granite)."""
    attention_softcap: Annotated[float, Ge(0)] = 0.0
    """llama: cap of attention scores, as cap x tanh(score / cap) (Gemma 2); 0 for none."""
    logit_softcap: Annotated[float, Ge(0)] = 0.0
    """llama: cap of logits, in the same form; 0 for none."""


@section
class Lora:
    """Low-rank adapters (LoRA, DoRA): they train, and the model's own weights are frozen (docs/lora.md)."""

    rank: Annotated[int, Ge(0)] = 0
    """Rank of the adapters, PEFT's `r`; 0 for no adapters."""
    alpha: Annotated[float, Gt(0)] = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | Literal["auto"] = "auto"
    """Linear layers with adapters, as patterns of their names or of the ends of their names, for example query,value or
    layer?.mlp.*. auto: the projections of queries and values; for gpt, where they are one layer with the keys, qkv."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout probability of the adapters' inputs."""
    method: Literal["lora", "dora"] = "lora"
    """lora (Hu et al., 2021); dora: with a separate magnitude for each row (Liu et al., 2024)."""
    train_head: bool | Literal["auto"] = "auto"
    """Whether the linear layers of the model's head train in addition to the adapters. auto: those of classifiers and
    of question answering, not of language models."""
    base_format: Literal["precision", "int8", "nf4"] = "precision"
    """Number format in which the frozen weights of the layers' linear layers are stored: that of `precision`, int8, or
    nf4 (QLoRA; Dettmers et al., 2023), which needs ranvier[quantized]. Products are computed in `precision`."""
    adapters: Path | None = None
    """Folder of adapters in PEFT's format (adapter_config.json, adapter_model.safetensors) to continue from; it decides
    rank, alpha, targets and method."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank


@section
class Data:
    """Task, data sets and tokenizer."""

    task: Literal["lm", "chat", "preference", "reward", "classification", "qa", "images"] | ObjectName = "lm"
    """Task: language modelling (lm), fine-tuning on conversations (chat), preference tuning on pairs of a chosen and a
    rejected answer (preference), a reward model trained on such pairs (reward), classification of sentences or sentence
    pairs, extractive question answering (qa), or classification of images. Or a task of your own, as module:function
    (docs/extending.md)."""
    options: tuple[str, ...] = ()
    """Keyword arguments of the function that a `task` of your own names, as NAME=VALUE, for example length=16."""
    train: str | None = None
    """Training data of all tasks except lm (docs/data.md): a name (sst2 and the other GLUE tasks, sentiment; squad;
    cifar10, cifar100, imagenet), the name of a Hugging Face data set, or a file or folder. classification: TSV, CSV,
    JSONL or Parquet; chat: JSONL or Parquet, or quiz, which is generated; qa: JSON in SQuAD 1.1's form; images: a
    folder with one folder of images for each class."""
    eval: str | None = None
    """Evaluation data, in the formats of `train`; none takes the data set's own evaluation split, or every tenth sample
    if there is none. lm: a corpus, all of whose text is held out; none holds out a part of `corpus`."""

    eval_sets: tuple[str, ...] = ()
    """Further evaluation data in the same formats, as NAME=DATA, for example wiki=wiki.jsonl,code=code.jsonl. Each set
    is evaluated separately, and its metrics have its name, such as eval_wiki_loss."""
    train_samples: Positive | None = None
    """Number of training samples to use, the first in the order of the seed; none is all. A recipe's value applies only
    to its own data."""
    eval_samples: Positive | None = None
    """Number of evaluation samples to use, the first in the order of the seed; none is all. A recipe's value applies
    only to its own data."""
    text_column: str | None = None
    """Column of the text. none: `text`, or the only column of text (lm); `sentence`, else `text`
    (classification)."""
    pair_column: str | None = None
    """classification: column of the second text of a pair, for example hypothesis, with premise as the first; none for
    single texts."""
    label_column: str | None = None
    """classification: column of the label; none is `label`."""
    messages_column: str | None = None
    """chat: column of the conversation, a list of messages with `role` and `content`; none is the first existing one of
    `messages`, `conversation` and `conversations`."""
    form: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion"] | ObjectName = "auto"
    """chat, preference and reward: form of the rows (docs/data.md). auto: by their columns; messages: OpenAI's;
    sharegpt: turns with `from` and `value`; alpaca: instruction, input and output; prompt-completion; or a function of
    your own that makes one of these, or a pair, of a row, as module:function."""
    chat_template: Path | None = None
    """chat: file of a Jinja template that replaces the chat template of the tokenizer."""
    mixture: tuple[str, ...] = ()
    """lm and chat: several corpora or data sets instead of `corpus` or `train`, as NAME=WEIGHT, for example
    wiki.jsonl=3,code=1. Weights are shares of the samples of a batch."""
    packing: bool = False
    """Pack several samples (documents, conversations) into one sequence, for the tasks lm and chat. Tokens attend only
    to their own sample, and positions restart with each sample. Without packing, lm cuts the text into sequences
    regardless of documents, and chat pads each conversation."""
    padding: Literal["longest", "maximum"] = "longest"
    """Padding of samples with different lengths. longest: batches are grouped by length, in an order that depends only
    on the seed, and each microbatch is padded to its longest sample; maximum: to `model.sequence`, in random order."""
    augment: Literal["none", "flip-crop"] = "none"
    """images: data augmentation by random flips and shifted crops, which depend only on seed, epoch and sample."""
    augment_repeats: bool = False
    """Each epoch repeats the augmentation of the first, so that outputs of frozen layers can be cached."""
    corpus: str = "python-stdlib"
    """Text of the task lm: python-stdlib, sotu, a file or folder of text, JSONL, Parquet or CSV, the name of a Hugging
    Face data set (wikitext-103), or a corpus of your own, as module:function (docs/extending.md). Each row of a table
    is a document, whose column `text_column` is its text."""
    tokenizer: str = "bpe"
    """Tokenizer. bpe: a byte-level BPE with model.vocab entries, trained on the first 4 MB of the corpus; gpt2: GPT-2's
    own; or the path of a tokenizer.json (for decoders a byte-level BPE, for bert a WordPiece). chat takes a folder
    with tokenizer.json, tokenizer_config.json and a chat template."""
    max_bytes: Positive | Literal["auto"] = "auto"
    """Bytes of text to read from the corpus; a warning reports when the rest is left out. auto: all of a file or
    folder, 16 MB of a corpus that is given by name."""
    cache_dir: Path | None = None
    """Cache folder for downloaded corpora, tokenizers and token files; by default the user's cache folder."""


@section
class Preference:
    """Loss of the task preference."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """dpo (Rafailov et al., 2023) and ipo (Azar et al., 2023) compare with the likelihoods of a reference, which are
    computed before the first step, with the run's initial weights, without adapters; simpo (Meng et al., 2024) needs no
    reference."""
    beta: Annotated[float, Gt(0)] = 0.1
    """Scale of the rewards: the larger, the closer the model stays to the reference. simpo is used with 2 to 2.5."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """dpo and simpo: probability that a pair's answers are swapped."""
    gamma: Annotated[float, Ge(0)] = 0.0
    """simpo: target margin between the rewards of a pair."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss != "simpo"


@section
class Elastic:
    """Freezing of layers, and its consequences: AutoPipe, AutoDP, AutoCache (PipeTransformer; He et al., 2021)."""

    freeze: Literal["none", "gradient-norm", "cap", "manual", "untrained"] | ObjectName = "none"
    """Freeze policy: which layers stop training, from the first on. gradient-norm: up to the layer with the smallest
    gradient norm, but at most the share `alpha` of the layers that still train (the rule of PipeTransformer); cap: that
    share at each evaluation; manual: the schedule in `manual`; untrained: only the layers below the first one with
    adapters, from the start; module:name: a policy of your own (docs/extending.md)."""
    options: tuple[str, ...] = ()
    """Arguments of your own freeze policy, as NAME=VALUE, for example patience=2."""
    alpha: Annotated[float, Gt(0), Lt(1)] = 1 / 3
    """Largest share of the layers still training that one evaluation of the policy freezes."""
    every: Annotated[int, Ge(0)] = 0
    """Steps between evaluations of the policy; 0 evaluates it after each epoch."""
    manual: tuple[str, ...] = ()
    """Frozen layers by step, as STEP:LAYERS, for example 100:2,200:4."""
    dry_run: bool = False
    """Report what would be frozen, and change nothing."""
    auto_pipe: bool = False
    """AutoPipe: reshard the pipeline into fewer stages as layers freeze."""
    auto_dp: bool = False
    """AutoDP: add data parallel replicas on the ranks that a shorter pipeline frees. Otherwise these ranks are idle."""
    cut: Literal["exact", "reference"] = "exact"
    """Choice of the new partition by AutoPipe: by predicted time and memory of all meshes (exact), or by the greedy
    rule of PipeTransformer (reference)."""
    global_batch: Literal["keep", "scale", "grow"] = "keep"
    """Global batch size when replicas are added. keep: unchanged; scale: in proportion to the replicas, and the
    learning rate with it; grow: in proportion, with the same learning rate, as in PipeTransformer."""
    profile_microbatches: bool = False
    """Measure several numbers of microbatches for each pair of pipeline and data parallel sizes, during steps of the
    run, and keep the fastest."""
    cache: bool = False
    """AutoCache: cache the outputs of frozen layers, and read them in later epochs instead of computing them again."""
    cache_from: Positive | Literal["auto"] = "auto"
    """Frozen layers from which outputs are cached; auto measures whether reading is faster than computing."""
    cache_dir: Path | None = None
    """Folder on each machine for cached outputs; none uses the system's temporary folder."""
    cache_bytes: Bytes = 8_000_000_000
    """Maximum size of the run's cache on a machine, in bytes."""
    cache_precision: Literal["half", "full"] = "half"
    """Number format of cached outputs."""
    frozen_dropout: bool = True
    """Whether dropout is active in frozen layers; the cache needs false (or no dropout)."""


@section
class Run:
    """All settings of a run, some of which may be auto; `ranvier.config.resolve` replaces auto by values."""

    mesh: MeshSettings | Mesh = Mesh()
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
    log: Log = Log()
    model: Transformer = Transformer()
    lora: Lora = Lora()
    data: Data = Data()
    preference: Preference = Preference()
    elastic: Elastic = Elastic()
    seed: Annotated[int, Ge(0)] = 0
    """Random seed of initial weights, sample order and dropout, which do not depend on the mesh."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format of parameters and activations. bf16 and fp16 keep fp32 master weights; fp16 uses loss scaling."""
    deterministic: bool = False
    """On CUDA: use deterministic algorithms, so that repeated runs, and resumed and uninterrupted runs, are
    bit-identical. Slower, most of all in attention."""
    memory_report: bool = False
    """Print predicted and measured memory by category, side by side, at the end of the run."""
    verbose: bool = False
    """Print more: all settings and stages at the start, and how the schedule's limits are chosen."""
    resume: str = "none"
    """Checkpoint to resume from: the newest complete one in the run's folder (auto; without one the run starts from the
    beginning), a checkpoint or a folder of checkpoints (a path), or none. auto reshards to another mesh if another
    number of ranks is started."""
    max_restarts: Annotated[int, Ge(0)] = 0
    """Under plain python: how often the run restarts from its newest checkpoint after a fault, on the remaining ranks
    if one was killed, stopped or hung. Other launchers have their own settings for this."""
    run_dir: Path | None = None
    """Folder of the run's outputs; by default runs/RECIPE-DATE."""

    def samples_of(self, steps: int) -> int:
        """Samples of `steps` steps of the global batch."""
        return steps * self.batch.global_size
