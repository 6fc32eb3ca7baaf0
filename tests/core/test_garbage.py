"""Garbage waits for the end of what must not be interrupted."""

from __future__ import annotations

import gc

import pytest

from octavo.core.garbage import collecting_no_garbage


def test_garbage_is_collected_again_afterwards() -> None:
    """Also after a failure; who had it off keeps it off."""
    with pytest.raises(RuntimeError), collecting_no_garbage():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting_no_garbage():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_stays_is_not_searched_later() -> None:
    """`keep`: what there is at the end is left out of all later collections; not after a failure, which the process may outlive."""
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError), collecting_no_garbage(keep=True):
        raise RuntimeError
    assert gc.get_freeze_count() == before
    try:
        with collecting_no_garbage(keep=True):
            made: list[list[int]] = [[] for _ in range(100)]
        assert gc.isenabled() and gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()
