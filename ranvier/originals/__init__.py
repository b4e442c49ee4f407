"""State that blocks share with the module from which they were made: modes, tensors, attributes that its code reads."""
