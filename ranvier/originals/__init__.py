"""State that blocks share with the module that they were made from: modes, tensors, attributes that its code reads."""
