"""Structured outputs: which tokens a grammar allows next. `compiler` for the engine, `masks` for a runner.

Must not know: requests, plans, torch. The grammar engine is llguidance; it is loaded when the first grammar is compiled.
"""
