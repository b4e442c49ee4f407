"""Using a trained model on any mesh: text that it writes, and what it scores."""
