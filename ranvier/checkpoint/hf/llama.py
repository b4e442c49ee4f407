"""The family llama in Hugging Face's format: Llama, Mistral, Phi-3 and 4, Qwen 2 and 3, Gemma 1 to 3, OLMo 2 and
3, SmolLM 3 and Granite.

    model_type     what it adds to Llama's block
    mistral        a sliding window
    phi3           a sliding window; several matrices in one tensor there; import only
    qwen2          biases of queries, keys and values
    qwen3          a norm of each head's queries and keys
    olmo2          norms after sublayers, and of all queries and keys together
    gemma          norms that add 1 to their weight, scaled embeddings, GeGLU
    gemma2         norms on both sides, caps of scores and logits, a window in every other layer
    gemma3_text    Gemma 2's with a norm of each head, and another rotary base in layers with a window
    olmo3          OLMo 2's with a window in three of four layers, whose rotary embeddings are not scaled
    smollm3        layers without rotary embeddings
    granite        multipliers of embeddings, scores and residuals, and a divisor of logits

Weights have the same layout here and there. A model is exported under the type that its settings need: a model without
a window that was imported as Mistral or Phi-3 is exported as Llama, which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from ranvier.checkpoint.hf import form as hf
from ranvier.config.presets import COMPUTED
from ranvier.config.run import Transformer
from ranvier.errors import ModelError
from ranvier.models.family import inner_width
from ranvier.models.llama import NORM_EPSILON, head_dim, kv_heads, num_scores, window_of

MOST_LAYERS = 10_000
LONGEST_SEQUENCE = 2048
"""Longest sequence in the settings that are read: models have positions for far more than a training sequence usually
has."""
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
"""Factors of Granite."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A model_type. defaults: of transformers, for keys that config.json lacks; fixed: settings that it always has.
    is_fused: whether projections of one input are one tensor there, which can only be read."""

    model_type: str
    title: str
    model_class: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    is_fused: bool = False


_DEFAULTS = {"rms_norm_eps": 1e-6}
"""Defaults of all kinds, unless they have others."""
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA_FIXED = {"norm_offset": 1, "embedding_scale": "sqrt-hidden"}
_GEMMA_WINDOW = {**_GEMMA, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
                 "query_pre_attn_scalar": 256}
_KINDS = {kind.model_type: kind for kind in (
    _Kind(model_type="llama", title="Llama", model_class="LlamaForCausalLM"),
    _Kind(model_type="mistral", title="Mistral", model_class="MistralForCausalLM", defaults={"sliding_window": 4096}),
    _Kind(model_type="phi3", title="Phi-3", model_class="Phi3ForCausalLM", is_fused=True,
          defaults={"rms_norm_eps": 1e-5, "sliding_window": None}),
    _Kind(model_type="qwen2", title="Qwen 2", model_class="Qwen2ForCausalLM", defaults={"sliding_window": 4096},
          fixed={"bias": "qkv"}),
    _Kind(model_type="qwen3", title="Qwen 3", model_class="Qwen3ForCausalLM",
          defaults={"sliding_window": 4096, "head_dim": 128}, fixed={"qk_norm": "head"}),
    _Kind(model_type="olmo2", title="OLMo 2", model_class="Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5},
          fixed={"norms": "after", "qk_norm": "all"}),
    _Kind(model_type="gemma", title="Gemma", model_class="GemmaForCausalLM",
          defaults={**_GEMMA, "hidden_act": "gelu_pytorch_tanh"}, fixed=_GEMMA_FIXED),
    _Kind(model_type="gemma2", title="Gemma 2", model_class="Gemma2ForCausalLM",
          defaults={**_GEMMA_WINDOW, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
          fixed={**_GEMMA_FIXED, "norms": "both"}, activation_key="hidden_activation"),
    _Kind(model_type="gemma3_text", title="Gemma 3", model_class="Gemma3ForCausalLM",
          defaults={**_GEMMA_WINDOW, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
          fixed={**_GEMMA_FIXED, "norms": "both", "qk_norm": "head"}, activation_key="hidden_activation"),
    _Kind(model_type="olmo3", title="OLMo 3", model_class="Olmo3ForCausalLM",
          defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
          fixed={"norms": "after", "qk_norm": "all"}),
    _Kind(model_type="smollm3", title="SmolLM 3", model_class="SmolLM3ForCausalLM",
          defaults={"tie_word_embeddings": True, "sliding_window": None, "rope_theta": 2e6, "num_key_value_heads": 4}),
    _Kind(model_type="granite", title="Granite", model_class="GraniteForCausalLM",
          defaults=dict.fromkeys(_MULTIPLIERS, 1.0)))}


def _class_of(kind: _Kind) -> Mapping[str, str]:
    """Head -> class of transformers, which has no classifiers for Granite."""
    stem = kind.model_class.removesuffix("ForCausalLM") + ("Text" if kind.model_type == "gemma3_text" else "")
    scores = () if kind.model_type == "granite" else ("classes", "score")
    return {"tokens": kind.model_class, **dict.fromkeys(scores, f"{stem}ForSequenceClassification")}


_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}
"""Interval of layers with full attention if config.json has no layer_types; other types have the window in all
layers."""
_SWITCHED = ("qwen2", "qwen3", "smollm3")
"""Types whose window has an effect only with use_sliding_window."""
_TWO_ROTARY = ("gemma3_text", "olmo3")
"""Types whose layers with a window have separate rotary embeddings."""


# --- places ----------------------------------------------------------------------------------------------------------


def places(config: Transformer, head: str = "tokens") -> dict[str, hf.TensorMapping]:
    """Our parameters, in our order, and their places there."""
    hidden = config.hidden
    found = {"embedding.token.weight": hf.same("model.embed_tokens.weight", config.vocab, hidden)}
    for layer in range(config.num_layers):
        found |= {f"layer{layer}.{name}": place
                  for name, place in _layer_mappings(config, f"model.layers.{layer}").items()}
    found["head.norm.weight"] = hf.same("model.norm.weight", hidden)
    if head != "tokens":
        found["head.score.weight"] = hf.same("score.weight", num_scores(config, head), hidden)
    elif not config.tied:
        found["head.projection.weight"] = hf.same("lm_head.weight", config.vocab, hidden)
    return found


def _layer_mappings(config: Transformer, prefix: str) -> dict[str, hf.TensorMapping]:
    hidden, width, inner = config.hidden, head_dim(config), inner_width(config)
    queries, keys = config.heads * width, kv_heads(config) * width
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    norms = _norm_names(config)
    found = {f"{ours}.weight": hf.same(f"{prefix}.{name}.weight", hidden) for ours, name in norms.items()
             if ours.startswith("attention")}
    biased = config.bias != "none"
    for ours, name, features in (("query", "q_proj", queries), ("key", "k_proj", keys), ("value", "v_proj", keys)):
        found |= hf.linear(f"attention.qkv.{ours}", f"{attention}.{name}", features, hidden, bias=biased)
    found |= hf.linear("attention.projection", f"{attention}.o_proj", hidden, queries,
                       bias=config.bias in ("attention", "all"))
    if config.qk_norm != "none":
        each = config.qk_norm == "head"
        found |= {"attention.query_norm.weight": hf.same(f"{attention}.q_norm.weight", width if each else queries),
                  "attention.key_norm.weight": hf.same(f"{attention}.k_norm.weight", width if each else keys)}
    found |= {f"{ours}.weight": hf.same(f"{prefix}.{name}.weight", hidden) for ours, name in norms.items()
              if ours.startswith("mlp")}
    for ours, name, features, into in (("fc1.gate", "gate_proj", inner, hidden), ("fc1.up", "up_proj", inner, hidden),
                                       ("fc2", "down_proj", hidden, inner)):
        found |= hf.linear(f"mlp.{ours}", f"{mlp}.{name}", features, into, bias=config.bias == "all")
    return found


def _norm_names(config: Transformer) -> dict[str, str]:
    """A layer's norms here and there."""
    match config.norms:
        case "before":
            return {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
        case "after":
            return {"attention.norm_after": "post_attention_layernorm", "mlp.norm_after": "post_feedforward_layernorm"}
    return {"attention.norm": "input_layernorm", "attention.norm_after": "post_attention_layernorm",
            "mlp.norm": "pre_feedforward_layernorm", "mlp.norm_after": "post_feedforward_layernorm"}


_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


def _fused_places(config: Transformer, head: str = "tokens") -> dict[str, hf.TensorMapping]:
    """`places` if rows of several matrices are one tensor there."""
    found = places(config, head)
    for whole, parts in _FUSED:
        by_tensor: dict[str, list[str]] = {}
        for ours, place in found.items():
            stem, _, kind = place.names[0].rpartition(".")
            owner, _, name = stem.rpartition(".")
            if name in parts:
                by_tensor.setdefault(f"{owner}.{whole}.{kind}", []).append(ours)
        for theirs, members in by_tensor.items():
            rows = [found[ours].shape[0] for ours in members]
            for number, ours in enumerate(members):
                shape = found[ours].shape
                found[ours] = hf.TensorMapping(
                    names=(theirs,), shapes=((sum(rows), *shape[1:]),), shape=shape,
                    join=partial(_rows_of, sum(rows[:number]), rows[number]), part=_not_written)
    return found


def _rows_of(start: int, count: int, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0][start:start + count]


def _not_written(tensor: Tensor) -> Sequence[Tensor]:
    raise AssertionError("the form is import only")


def tied(config: Transformer) -> Mapping[str, str]:
    """The head's projection, if it is tied to the token embedding."""
    return {"head.projection.weight": "embedding.token.weight"} if config.tied else {}


# --- config.json: reading --------------------------------------------------------------------------------------------

_SIZES = {"vocab_size": "vocab", "hidden_size": "hidden", "num_hidden_layers": "num_layers",
          "num_attention_heads": "heads", "intermediate_size": "intermediate",
          "max_position_embeddings": "max_positions"}
_OPTIONAL = {"num_key_value_heads": "kv_heads", "head_dim": "head_dim", "rms_norm_eps": "norm_epsilon",
             "tie_word_embeddings": "tied"}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_new": "gelu-tanh"}
_FUNCTION = {"use_bidirectional_attention": (None, (None, False)), "partial_rotary_factor": (1.0, (1.0, None)),
             "is_causal": (True, (True,))}
_DROPS = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _read(kind: _Kind, document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    """The settings in config.json, and notes on what they leave out. ModelError for a model that does not compute the
    same as ours."""
    document = {**_DEFAULTS, **kind.defaults, **document}
    activation = document.get(kind.activation_key, "silu")
    if kind.model_type == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # as transformers reads Gemma's first files
    functions: dict[str, tuple[object, tuple[object, ...]]] = {**_FUNCTION, kind.activation_key: (
        "silu", tuple(_ACTIVATIONS))}
    if kind.model_type == "gemma3_text":  # transformers has the key but no cap
        functions["attn_logit_softcapping"] = (None, (None, 0.0))
    named = document.get("architectures")
    has_classes = isinstance(named, list) and _class_of(kind).get("classes") in named
    optional = {key: ours for key, ours in _OPTIONAL.items() if document.get(key) is not None}
    config = hf.read_settings(document, _SIZES | optional, functions, {
        "family": "llama", "num_classes": hf.num_labels(document) if has_classes else "auto", "bias": _bias(document),
        "activation": _ACTIVATIONS.get(str(activation), "silu"),
        **_rotary(kind, document), **_nope(kind, document), **_window(kind, document), **_factors(kind, document),
        **kind.fixed})
    return replace(config, sequence=min(config.max_positions or LONGEST_SEQUENCE, LONGEST_SEQUENCE)), hf.left_out(
        document, config, _DROPS)


def _bias(document: Mapping[str, object]) -> str:
    attention, mlp = bool(document.get("attention_bias")), bool(document.get("mlp_bias"))
    if mlp and not attention:
        raise _config_error("llama-mlp-bias", "mlp_bias", True,
                            "is set without attention_bias, which no model here supports")
    return "all" if mlp else "attention" if attention else "none"


def _factors(kind: _Kind, document: Mapping[str, object]) -> dict[str, object]:
    """Factors and caps."""
    if kind.model_type == "granite":
        for key in _MULTIPLIERS:
            value = document[key]
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
                raise _config_error("granite-multiplier", key, value, "must be a positive number")
        attention, embedding = float(f"{document['attention_multiplier']}"), document["embedding_multiplier"]
        return {"query_pre_attn_scalar": attention ** -2, "embedding_scale": "one" if embedding == 1 else embedding,
                "residual_multiplier": document["residual_multiplier"], "logits_scaling": document["logits_scaling"]}
    if "query_pre_attn_scalar" not in kind.defaults:
        return {}
    return {"attention_softcap": document.get("attn_logit_softcapping") or 0.0,
            "logit_softcap": document.get("final_logit_softcapping") or 0.0,
            "query_pre_attn_scalar": document.get("query_pre_attn_scalar")}


def _window(kind: _Kind, document: Mapping[str, object]) -> dict[str, object]:
    """The sliding window, and which layers have none."""
    window, layers = document.get("sliding_window"), document.get("num_hidden_layers")
    if "sliding_window" not in kind.defaults or not isinstance(layers, int) or not 0 < layers < MOST_LAYERS:
        return {}  # this number of layers is refused with the other sizes
    is_on = window is not None and (kind.model_type not in _SWITCHED or bool(document.get("use_sliding_window")))
    kinds = document.get("layer_types")
    if kinds is None:
        if not is_on:
            return {}
        if kind.model_type not in _SWITCHED:
            every = _FULL_EVERY.get(kind.model_type, 0)
            return {"window": window, "full_every": document.get("sliding_window_pattern", every)
                    if kind.model_type == "gemma3_text" else every}
        first = document.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise _config_error("llama-max-window-layers", "max_window_layers", first, "must be a number of layers")
        nope = _nope(kind, document).get("nope_layers", ())
        windows = nope if kind.model_type == "smollm3" else range(first, layers)
        kinds = ["sliding_attention" if layer in windows else "full_attention" for layer in range(layers)]
    has_both = kind.model_type in (*_SWITCHED, *_FULL_EVERY)  # the other types do not read layer_types
    allowed = (["full_attention"] if has_both or not is_on else []) + (["sliding_attention"] if is_on else [])
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in allowed for kind in kinds):
        raise _config_error("llama-layer-types", "layer_types", kinds,
                            f"must be {' or '.join(allowed)} for each of the "
                            f"{layers} layers, according to other keys")
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == layers:
        return {}
    every = full[0] + 1 if full else 0
    is_regular = not full or full == list(range(every - 1, layers, every))
    return {"window": window} | ({"full_every": every} if is_regular else {"full_layers": full})


def _nope(kind: _Kind, document: Mapping[str, object]) -> dict[str, list[int]]:
    """The layers without rotary embeddings."""
    layers = document.get("num_hidden_layers")
    if kind.model_type != "smollm3" or not isinstance(layers, int) or not 0 < layers < MOST_LAYERS:
        return {}
    turned, every = document.get("no_rope_layers"), document.get("no_rope_layer_interval", 4)
    if turned is None and isinstance(every, int) and every > 0:
        turned = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(turned, list) or len(turned) < layers or any(one not in (0, 1) for one in turned):
        raise _config_error("llama-rope-layers", "no_rope_layers", turned,
                            f"must be 0 or 1 for each of the {layers} layers")
    return {"nope_layers": [layer for layer in range(layers) if not turned[layer]]}


_ROPE_TYPES = {"default": "none", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn"}
_ROPE_READ = {
    "default": (), "linear": ("factor",), "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")}
"""Kind of rotary scaling -> its keys that are read, in addition to rope_type and rope_theta."""
_ROPE_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1.0,), "truncate": (True,), "attention_factor": (1.0,), "factor": (1.0,)}
"""Further keys -> values, in addition to null, that do not change what is computed."""


def _rotary(kind: _Kind, document: Mapping[str, object]) -> dict[str, object]:
    """Rotary embeddings of all layers, or of the layers without a window, and the base of those with one."""
    if kind.model_type not in _TWO_ROTARY:
        return _rope(document)
    rope = document.get("rope_parameters") or {}
    local: object = {"rope_theta": document.get("rope_local_base_freq", document.get("rope_theta"))}
    if rope and not (isinstance(rope, dict) and "full_attention" in rope):
        raise _config_error("rope-of-kinds", "rope_parameters", rope, "must have those of full_attention")
    if isinstance(rope, dict) and "full_attention" in rope:  # transformers 5
        local = rope.get("sliding_attention") or local
        document = {**document, "rope_parameters": rope["full_attention"]}
    of_window = _rope({"rope_parameters": local})
    if of_window.get("rope_scaling") != "none":
        raise _config_error("rope-of-window", "sliding_attention", local, "must not be scaled")
    found = _rope(document)
    is_same = found["rope_scaling"] == "none" and found["rope_base"] == of_window["rope_base"]
    return found if is_same else {**found, "window_rope_base": of_window["rope_base"]}


def _rope(document: Mapping[str, object]) -> dict[str, object]:
    """Rotary embeddings, under the keys of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    old, new = document.get("rope_scaling") or {}, document.get("rope_parameters") or {}
    if not (isinstance(old, dict) and isinstance(new, dict)):
        raise _config_error("rope-scaling-not-object", "rope_scaling", old or new, "must be an object")
    rope = new or old
    if old and new and _rope({**document, "rope_scaling": None}) != _rope({**document, "rope_parameters": None}):
        raise _config_error("rope-twice", "rope_scaling", old,
                            "is another rotary embedding than that of rope_parameters, and "
                            "versions of transformers take one or the other")
    found: dict[str, object] = {"rope_base": rope.get("rope_theta", document.get("rope_theta", 10000.0))}
    named = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(named, str) or named not in _ROPE_TYPES or any(isinstance(one, dict) for one in rope.values()):
        raise _config_error("rope-type", "rope_type", named,
                            f"must be {', '.join(_ROPE_TYPES)}, the same in all layers")
    for key, value in rope.items():
        known = key in ("rope_type", "type", "rope_theta", *_ROPE_READ[named])
        if not known and value is not None and value not in _ROPE_NEUTRAL.get(key, ()):
            raise _config_error("rope-setting-not-supported", key, value,
                                f"of the rotary scaling {named} changes what is computed, and is not supported")
    scaling = found["rope_scaling"] = _ROPE_TYPES[named]
    if scaling == "none":
        return found
    if rope.get("factor") is None:
        raise _config_error("rope-factor-missing", "factor", None, f"of the rotary scaling {named} is missing")
    found["rope_factor"] = rope["factor"]
    if scaling == "dynamic":  # original_max_position_embeddings has no effect
        found["rope_positions"] = document.get("max_position_embeddings")
    elif scaling != "linear":
        key = "original_max_position_embeddings"
        inner, outer = rope.get(key), document.get(key)
        if inner and outer and inner != outer:
            raise _config_error("rope-positions-twice", key, outer, f"is not that of the rotary scaling, {inner}, "
                                "and versions of transformers take one or the other")
        found["rope_positions"] = inner or document.get(key, document.get("max_position_embeddings"))
    if scaling == "llama3":
        found["rope_limits"] = [rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)]
    elif scaling == "yarn":
        found |= {"rope_limits": [rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0],
                  "rope_magnitude": rope.get("attention_factor")}
    return {key: value for key, value in found.items() if value is not None}


def _config_error(code: str, key: str, value: object, what: str) -> ModelError:
    return hf.wrong_key(code, key, what, value, hf.OTHER_MODEL)


# --- config.json: writing --------------------------------------------------------------------------------------------


def model_type(config: Transformer) -> str:
    """The type under which a model is exported: the first whose block supports the settings."""
    windows = [window_of(config, layer) for layer in range(config.num_layers)]
    needs = {"gemma3_text": config.norms == "both" and config.qk_norm == "head", "gemma2": config.norms == "both",
             "gemma": bool(config.norm_offset), "olmo3": config.norms == "after" and config.window is not None,
             "olmo2": config.norms == "after",
             "qwen3": config.qk_norm == "head", "qwen2": config.bias == "qkv",
             "smollm3": bool(config.nope_layers) or len(set(windows)) > 1, "mistral": config.window is not None,
             "granite": config.embedding_scale != "one" or config.residual_multiplier != 1
             or config.logits_scaling != 1 or config.query_pre_attn_scalar is not None}
    return next((name for name, needed in needs.items() if needed), "llama")


def _write(kind: _Kind, config: Transformer, head: str = "tokens") -> dict[str, object]:
    """The content of config.json for the same function as `config`'s. ModelError if no architecture there computes
    it."""
    document: dict[str, object] = {
        "model_type": kind.model_type, "architectures": [_class_of(kind)[head]], "vocab_size": config.vocab,
        "hidden_size": config.hidden, "num_hidden_layers": config.num_layers, "num_attention_heads": config.heads,
        "num_key_value_heads": kv_heads(config), "head_dim": head_dim(config),
        "intermediate_size": inner_width(config), "max_position_embeddings": config.max_positions or config.sequence,
        "rms_norm_eps": config.norm_epsilon or NORM_EPSILON, "tie_word_embeddings": config.tied,
        kind.activation_key: next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation),
        "attention_bias": config.bias in ("attention", "all"), "mlp_bias": config.bias == "all",
        "attention_dropout": 0.0, **_written_rope(config), **_written_window(kind, config),
        **_written_scores(config, head)}
    if "query_pre_attn_scalar" in kind.defaults:
        document |= {"query_pre_attn_scalar": _int_if_whole(config.query_pre_attn_scalar or head_dim(config)),
                     "attn_logit_softcapping": config.attention_softcap or None,
                     "final_logit_softcapping": config.logit_softcap or None}
    if kind.model_type == "granite":
        scale = (config.query_pre_attn_scalar or head_dim(config)) ** -0.5
        document |= {"attention_multiplier": float(f"{scale:.12g}"),
                     "embedding_multiplier": 1.0 if config.embedding_scale == "one" else config.embedding_scale,
                     "residual_multiplier": config.residual_multiplier, "logits_scaling": config.logits_scaling}
    if kind.model_type in _TWO_ROTARY:
        scaling = document.pop("rope_scaling")
        rope = scaling if isinstance(scaling, dict) else {}
        document["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": config.rope_base, **rope},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.window_rope_base or config.rope_base}}
    again, _ = _read(kind, document)
    for name in COMPUTED:
        wanted, found = (_with_defaults(one, name) for one in (config, again))
        if wanted != found:
            raise ModelError(f"has no form in {kind.title}'s language model, which has {found}",
                             code="no-form-in-hugging-face", where=f"model.{name.replace('_', '-')}", value=wanted,
                             remedy="Only what an architecture of transformers computes can be exported.")
    return document


def _written_scores(config: Transformer, head: str) -> dict[str, object]:
    """Labels, and no padding token unless the tokenizer has one: the defaults of transformers name an arbitrary token,
    and a text that ends in it would be scored at the token before."""
    return {} if head == "tokens" else {**hf.numbered_labels(num_scores(config, head)), "pad_token_id": None}


def _int_if_whole(value: float) -> float:
    """The number as an int if it is whole: transformers accepts only ints there."""
    return int(value) if value == int(value) else value


def _with_defaults(config: Transformer, name: str) -> object:
    """A setting, or its default if it is not set."""
    match name:
        case "kv_heads":
            return kv_heads(config)
        case "head_dim":
            return head_dim(config)
        case "intermediate":
            return inner_width(config)
        case "norm_epsilon":
            return config.norm_epsilon or NORM_EPSILON
        case "query_pre_attn_scalar":
            return float(f"{config.query_pre_attn_scalar or head_dim(config):.9g}")  # Granite stores its inverse root
        case "nope_layers":
            return [layer for layer in range(config.num_layers) if layer in config.nope_layers]
        case "full_every" | "full_layers":  # the same without a window, or with one in all layers
            return [window_of(config, layer) for layer in range(config.num_layers)]
        case "rope_limits":
            return config.rope_limits or {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}.get(config.rope_scaling)
    return getattr(config, name)


def _written_rope(config: Transformer) -> dict[str, object]:
    """Rotary settings under the keys of transformers 4, which 5 reads, too."""
    if config.rope_scaling == "none":
        return {"rope_theta": config.rope_base, "rope_scaling": None}
    rope: dict[str, object] = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    positions: dict[str, object] = {}
    if config.rope_scaling == "dynamic":
        positions["max_position_embeddings"] = config.rope_positions  # from which on its base rises
    elif config.rope_scaling in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = config.rope_positions
    limits = _with_defaults(config, "rope_limits")
    if isinstance(limits, Sequence):
        names = ("low_freq_factor", "high_freq_factor") if config.rope_scaling == "llama3" else (
            "beta_slow", "beta_fast")
        rope |= zip(names, limits, strict=True)
    if config.rope_magnitude is not None:
        rope["attention_factor"] = config.rope_magnitude
    return {"rope_theta": config.rope_base, "rope_scaling": rope, **positions}


def _written_window(kind: _Kind, config: Transformer) -> dict[str, object]:
    if "sliding_window" not in kind.defaults:
        return {}
    found: dict[str, object] = {"sliding_window": config.window}
    if kind.model_type == "mistral":
        return found
    kinds = ["full_attention" if window_of(config, layer) is None else "sliding_attention"
             for layer in range(config.num_layers)]
    if kind.model_type in _FULL_EVERY:  # transformers makes a mask for it even if no layer has it
        found["sliding_window"] = config.window or kind.defaults["sliding_window"]
    found["layer_types"] = kinds
    if kind.model_type in _SWITCHED:
        found |= {"use_sliding_window": config.window is not None, "max_window_layers": next(
            (layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"), config.num_layers)}
    if kind.model_type == "smollm3":
        del found["max_window_layers"]
        found["pad_token_id"] = None  # its default may be outside the vocabulary
        found["no_rope_layers"] = [int(layer not in config.nope_layers) for layer in range(config.num_layers)]
    return found


LLAMA_FORMS: Mapping[str, hf.Form] = {name: hf.Form(
    title=f"{kind.title}'s language model", family="llama", prefix="model.",
    places=_fused_places if kind.is_fused else places, per_layer=6 if kind.is_fused else 9,
    read=partial(_read, kind), write=None if kind.is_fused else partial(_write, kind),
    class_of=_class_of(kind), tied=tied,
    aside=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", any_head=False) for name, kind in _KINDS.items()}
"""model_type -> form. aside: frequencies, which old files list among the parameters."""
