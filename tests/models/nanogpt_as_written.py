"""A GPT whose forward is written as nanoGPT's (Andrej Karpathy, MIT), with torch's transformer layers as its blocks.

It has its own file, because pytest rewrites the assertions of tests, and this forward's assertion is traced.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class GPTConfig:
    """As nanoGPT's."""

    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int


class GPT(nn.Module):
    """nanoGPT's model (Andrej Karpathy, MIT), with torch's transformer layers instead of its blocks. Its forward is
    nanoGPT's, since blocks are cut from the code as it is written."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd), wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(0.0), ln_f=nn.LayerNorm(config.n_embd),
            h=nn.ModuleList([nn.TransformerEncoderLayer(config.n_embd, config.n_head, 4 * config.n_embd, 0.0,
                                                        batch_first=True) for _ in range(config.n_layer)])))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        device = idx.device
        b, t = idx.size()  # noqa: RUF059  # as it is written
        assert t <= self.config.block_size, (
            f"Cannot forward sequence of length {t}, block size is only {self.config.block_size}")
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss
