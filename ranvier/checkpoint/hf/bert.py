"""BERT in Hugging Face's format: names, layout, config.json.

Queries, keys and values are separate tensors there; here the rows of one head are together. Files of pretrained models
often have other heads than the one that a run trains, or no head.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranvier.checkpoint.hf import form as hf
from ranvier.config.run import Transformer
from ranvier.models.bert import NORM_EPSILON, NUM_TYPES
from ranvier.models.family import inner_width, num_classes


def places(config: Transformer, head: str) -> dict[str, hf.TensorMapping]:
    """Our parameters, in our order, and their places there."""
    hidden, width = config.hidden, inner_width(config)
    found = {"embedding.token.weight": hf.same("bert.embeddings.word_embeddings.weight", config.vocab, hidden),
             "embedding.position.weight": hf.same("bert.embeddings.position_embeddings.weight", config.sequence,
                                                  hidden),
             "embedding.token_type.weight": hf.same("bert.embeddings.token_type_embeddings.weight", NUM_TYPES, hidden),
             **hf.linear("embedding.norm", "bert.embeddings.LayerNorm", hidden)}
    for layer in range(config.num_layers):
        prefix = f"bert.encoder.layer.{layer}"
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            wide = (width,) if columns else ()
            of_layer = {
                "attention.qkv": hf.parts_of_heads([f"{prefix}.attention.self.{part}.{kind}" for part in (
                    "query", "key", "value")], config.heads, 3 * hidden, *columns),
                "attention.projection": hf.same(f"{prefix}.attention.output.dense.{kind}", hidden, *columns),
                "attention.norm": hf.same(f"{prefix}.attention.output.LayerNorm.{kind}", hidden),
                "mlp.fc1": hf.same(f"{prefix}.intermediate.dense.{kind}", width, *columns),
                "mlp.fc2": hf.same(f"{prefix}.output.dense.{kind}", hidden, *wide),
                "mlp.norm": hf.same(f"{prefix}.output.LayerNorm.{kind}", hidden),
            }
            found |= {f"layer{layer}.{name}.{kind}": place for name, place in of_layer.items()}
    if head == "span":
        return found | hf.linear("head.span", "qa_outputs", 2, hidden)
    return found | hf.linear("head.pooler", "bert.pooler.dense", hidden, hidden) | hf.linear(
        "head.classifier", "classifier", num_classes(config), hidden)


_SIZES = {"vocab_size": "vocab", "max_position_embeddings": "sequence", "hidden_size": "hidden",
          "num_hidden_layers": "num_layers", "num_attention_heads": "heads", "intermediate_size": "intermediate"}
_FUNCTION = {
    "hidden_act": ("gelu", ("gelu",)), "position_embedding_type": ("absolute", ("absolute",)),
    "type_vocab_size": (2, (2,)), "is_decoder": (False, (False,)), "add_cross_attention": (False, (False,)),
}
_DROPS = {"hidden_dropout_prob": 0.1, "classifier_dropout": None, "attention_probs_dropout_prob": 0.1}
_CLASSES = {"classes": "BertForSequenceClassification", "span": "BertForQuestionAnswering"}


def write(config: Transformer, head: str) -> dict[str, object]:
    """The content of config.json, the arguments of transformers.BertConfig, for the same function as `config`'s."""
    return {
        "model_type": "bert", "architectures": [_CLASSES[head]], "vocab_size": config.vocab,
        "max_position_embeddings": config.sequence, "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.heads,
        "intermediate_size": inner_width(config), "hidden_act": "gelu", "type_vocab_size": 2,
        "layer_norm_eps": config.norm_epsilon or NORM_EPSILON, "position_embedding_type": "absolute",
        "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": 0.0, "classifier_dropout": None,
        "pad_token_id": 0, **hf.numbered_labels(num_classes(config) if head == "classes" else 2),
    }


def read(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    """The inverse of `write`, for any config.json: (settings, notes on what they leave out).

    ModelError for a BERT that does not compute the same as ours.
    """
    config = hf.read_settings(document, _SIZES, _FUNCTION, {
        "family": "bert", "dropout": document.get("hidden_dropout_prob", 0.1),
        "norm_epsilon": document.get("layer_norm_eps", 1e-12), "num_classes": hf.num_labels(document)})
    return config, hf.left_out(document, config, _DROPS)


BERT = hf.Form(title="BERT", family="bert", prefix="bert.", places=places, read=read, write=write,
               per_layer=16, class_of=_CLASSES, aside=r"(bert\.)?embeddings\.position_ids")
