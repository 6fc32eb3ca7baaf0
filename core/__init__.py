"""The engine's core: what a scheduler, an allocator, a kernel and a model are, and the step that joins them.

Knows no plugin by name, no server and no benchmark. Half of it imports without torch: see `docs/explanation/layers.md`.
"""
