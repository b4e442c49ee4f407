"""The pipeline schedule and its simulation: pure, without torch."""
