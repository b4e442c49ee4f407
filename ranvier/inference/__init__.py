"""Inference with a trained model on any mesh: text generation and evaluation."""
