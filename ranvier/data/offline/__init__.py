"""Models and datasets from published packages, for machines without a model hub. The only other module of ranvier.data
that it imports is cache."""
