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
