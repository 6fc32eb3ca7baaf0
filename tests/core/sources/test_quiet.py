"""transformers' own progress bars stay away where ours are drawn, and come back."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from octavo.core.sources.quiet import without_progress_bars
from tests.models import tiny


def test_bars_are_off_within_and_on_after(capfd: pytest.CaptureFixture[str]) -> None:
    """Loading weights draws a bar outside the block and none inside, and the setting is as before, also after an error."""
    folder = tiny("llama_gqa")
    capfd.readouterr()  # making the folder draws bars too
    with without_progress_bars():
        AutoModelForCausalLM.from_pretrained(folder)
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err
    with pytest.raises(ZeroDivisionError), without_progress_bars():
        raise ZeroDivisionError
    assert logging.is_progress_bar_enabled()


def test_bars_that_were_off_stay_off() -> None:
    """Who switched them off meant it."""
    logging.disable_progress_bar()
    try:
        with without_progress_bars():
            assert not logging.is_progress_bar_enabled()
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()
