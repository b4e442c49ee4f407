"""Tensor parallelism: layers whose weights and activations are sharded over the row x col ranks of a stage.

    layers/              the layers of a model; on one rank they equal torch's
    split/               their split forms on a mesh: products in three schemes, embeddings, heads, norms, losses
    columns/             the tensors in the code between layers: each carries its layout over the columns
    splittable           the protocol of layers that can be split; boundaries: where layers and a block's code meet
    mesh, activations    the groups of rows and columns, and the layouts of the residual stream on them
    weight_gradients     the queue of deferred weight gradients; deferred_linear: plain layers that use it

Imports go one way: layers -> split -> boundaries -> columns, splittable -> mesh -> activations.
"""
