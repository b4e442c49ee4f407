"""Settings: the values that a user asks for, their origins, and their problems."""
