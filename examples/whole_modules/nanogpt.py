"""A GPT in the manner of nanoGPT: its forward creates positions and checks the length, and both ends share a weight."""

import torch
from torch import nn
from torch.nn import functional


class CausalSelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for one in self.c_attn(x).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), CausalSelfAttention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32, block_size=16, layers=4, heads=4, hidden=32):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab, hidden), wpe=nn.Embedding(block_size, hidden), drop=nn.Dropout(0.0),
            h=nn.ModuleList(Block(hidden, heads) for _ in range(layers)), ln_f=nn.LayerNorm(hidden)))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x)).transpose(1, 2)


def build():
    return GPT()


def batch(step):
    """16 sequences that count upwards, and the same one token on."""
    start = torch.randint(0, 15, (16, 1), generator=torch.Generator().manual_seed(step))
    tokens = start + torch.arange(17)
    return tokens[:, :-1], tokens[:, 1:]
