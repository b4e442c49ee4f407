"""Starts ranks under any launcher, and ends them with a clear message after a fault."""
