"""A person's side of a live conversation: what is spoken, what is heard, and how long each answer took."""
