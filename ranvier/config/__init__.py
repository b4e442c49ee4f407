"""Settings: what a person asks for, where each value comes from, and what is wrong with it."""
