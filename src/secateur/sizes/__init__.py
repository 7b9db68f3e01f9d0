"""Where the sizes in a model's code come from, and what must hold for them after a cut."""
