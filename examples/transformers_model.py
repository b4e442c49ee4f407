"""A model of transformers as it is, on four ranks; needs `pip install transformers`.

    python examples/transformers_model.py          or under torchrun or mpiexec

`from_transformers` cuts it at its own list of layers. In place of the small random model here, take what
`AutoModelForCausalLM.from_pretrained("folder").train()` returns.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ranvier


def counting(seed, replica, replicas):
    """This replica's share of 32 sequences that count upwards from a random start, in microbatches of 4."""
    start = torch.randint(0, 48, (32, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + torch.arange(17)).chunk(replicas)[replica]
    return ranvier.microbatches(ids[:, :-1], ids[:, 1:], 4)


world = ranvier.start(data=2, pipe=2)
torch.manual_seed(0)
theirs = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
engine = ranvier.Engine(ranvier.from_transformers(theirs), world,
                        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
replica = engine.coordinates.data, engine.mesh.data
for step in range(40):
    result = engine.train_batch(counting(step, *replica))
    if step % 10 == 0 and world.rank == 0:
        print(f"step {step}: loss {result.loss:.4f}")
held_out = engine.evaluate(counting(1_000_000, *replica))
if world.rank == 0:
    print(f"held out: loss {held_out.loss:.4f}")
engine.close()
