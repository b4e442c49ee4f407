"""A translator of two LSTMs: the second starts with the final state of the first, a tuple."""

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self, vocab=20, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        encoded, state = self.encoder(x)
        decoded, _ = self.decoder(encoded, state)
        return self.head(decoded).transpose(1, 2)


def build():
    return Translator()


def batch(step):
    """16 sequences of 8 tokens, and the same in reverse order."""
    tokens = torch.randint(0, 20, (16, 8), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.flip(1)
