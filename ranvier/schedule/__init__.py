"""Which action a stage runs next, and how long that takes: pure, without torch."""
