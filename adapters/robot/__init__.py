"""Robot policies: what a policy is, the engine that serves it to many robots at once, and the pure parts of that."""
