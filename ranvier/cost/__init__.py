"""Cost model: predicted times, bytes and memory of steps, stages and transitions on a cluster."""
