"""Hugging Face models in and out."""
