"""What a model holds besides its tensors: how to copy it, how to put it back, what a run leaves behind around it."""
