"""Robots: the OpenPI protocol, its frames, its sessions and its ways to say what is wrong."""
