"""Channel spaces: which channels of a traced model live together."""
