"""What a step, a stage, a byte and a transition cost on a cluster."""
