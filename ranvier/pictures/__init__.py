"""Shared parts of the pictures of runs and plans."""
