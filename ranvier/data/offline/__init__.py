"""Models and datasets from published packages, for machines without a model hub. The only other modules of ranvier.data
that it imports are cache and tables."""
