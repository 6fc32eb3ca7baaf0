"""Text in and out: prompts become token ids, sampled ids become text, piece by piece, and a stop string ends it.

Must not know: torch, transformers, the engine.
"""
