"""Octavo beside other engines on this machine: the same work, the same weights, one working at a time. `python -m octavo.bench.peers`."""
