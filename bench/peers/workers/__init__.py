"""One engine in a process of its own, in whatever environment it is installed in: a module an engine, and the loop that all share.

These files run without Octavo: they import the standard library and their engine, and each other by relative imports.
"""
