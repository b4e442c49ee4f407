"""What pictures of a run and of a plan have in common."""
