"""Import and export of Hugging Face models."""
