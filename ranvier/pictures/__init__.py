"""Parts that pictures of a run and of a plan share."""
