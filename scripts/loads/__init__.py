"""Loads for real deployments, and judges of what comes back: what soak, kill_run, storm and fuzz are made of."""
