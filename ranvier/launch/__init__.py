"""Start of ranks under any launcher, and their end with a clear message after a fault."""
