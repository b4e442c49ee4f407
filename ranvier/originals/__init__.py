"""What blocks share with the module that they were made of: modes, tensors, attributes that its code reads."""
