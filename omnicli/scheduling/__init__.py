"""Who runs together, and when: ints and lists, never a model's inside."""
