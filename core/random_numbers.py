"""Uniform random numbers as a pure function of (seed, sample index, position): a request's draws depend on nothing else in the batch.

Nothing is kept between draws, so a token that was dropped and is computed again (a preemption, a rollback) comes out the same.
Must not know: torch, requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInts = npt.NDArray[np.uint64]


def uniforms(seeds: UInts, sample_indices: UInts, positions: UInts) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each triple, with 52 random bits."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        bits = _mix(_mix(_mix(seeds) + sample_indices) + positions)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: UInts) -> UInts:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): a bijection in which each bit of x flips half of the result's bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
