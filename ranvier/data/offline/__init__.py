"""Models and datasets from published packages, for machines without a model hub. Of ranvier.data it imports cache
only."""
