"""Omni models of transformers as three stages: a thinker that writes text, a talker that follows it, a vocoder.

The stages know no model by name. What tells one from another is in a module of its own (`qwen2_5`, `qwen3`): small
functions from what one part puts out to what the next one takes, and the parts themselves; `families` lists them.
"""
