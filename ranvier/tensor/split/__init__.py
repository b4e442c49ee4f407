"""Tensor-parallel layers: one rank's part of each layer of `ranvier.tensor.layers`, and of the loss."""
