"""The `octavo` command itself: its exit status, and how it ends when somebody stops it or nobody reads on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from octavo import __version__
from octavo.cli import COMMANDS, main

Start = Callable[..., "subprocess.Popen[str]"]


def test_alone_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, as a mistake."""
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: octavo") and all(command in printed.err for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Name and number."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_help_and_wrong_settings_import_nothing_heavy(command: str) -> None:
    """Help, a typo in a setting and an unknown plugin are answered before torch is loaded."""
    code = (
        "import sys\nfrom octavo.cli import main\nstatuses = []\n"
        "for words in (['--help'], ['--set', 'engine.sed=1'], ['--kernel', 'fast'], ['--config', 'nowhere.toml']):\n"
        "    try: statuses.append(main([sys.argv[1], *words, *sys.argv[2:]]))\n"
        "    except SystemExit as end: statuses.append(end.code)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'triton'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else f'{statuses}')"
    )
    prompt = {"generate": ["hello"], "chat": ["hello"], "demo": []}[command]
    done = subprocess.run([sys.executable, "-c", code, command, *prompt], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "[0, 2, 2, 2]"
    assert "engine.sed: Extra inputs are not permitted (did you mean seed?)" in done.stderr
    assert "octavo: no kernel plugin 'fast' is installed" in done.stderr
    assert "octavo: config file nowhere.toml cannot be read: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_the_output(start: Start, unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe ends the command quietly, whether it shows while printing or at the last flush."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reading, writing = os.pipe()
    os.close(reading)
    child = start("plugins", stdout=writing)
    os.close(writing)
    _, complaint = child.communicate(timeout=60)
    assert (child.returncode, complaint) == (141, "")


@pytest.mark.slow
def test_a_stream_that_nobody_reads_ends(start: Start, engine_words: list[str]) -> None:
    """`octavo chat ... | head -c 1` stops when the pipe closes, not at the end of a long answer."""
    child = start("chat", "Hi", *engine_words, "--ignore-eos", stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert child.stdout is not None and child.stdout.read(1)
    child.stdout.close()
    _, complaint = child.communicate(timeout=60)
    assert child.returncode == 141 and "Traceback" not in complaint and "BrokenPipe" not in complaint


@pytest.mark.slow
def test_ctrl_c_ends_it(start: Start, engine_words: list[str]) -> None:
    """With status 130 and no traceback, also while it waits for the next question."""
    child = start("chat", *engine_words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("Hi\n")
    child.stdin.flush()
    assert child.stdout.read(1)  # it is answering
    child.send_signal(signal.SIGINT)
    _, complaint = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in complaint


def test_ctrl_c_while_it_works(monkeypatch: pytest.MonkeyPatch, engine_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of generating."""
    from octavo.core.engine import Engine

    def interrupted(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    assert main(["generate", "Hello", *engine_words]) == 130
    assert capsys.readouterr().out == ""


def test_other_errors_of_ours_are_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can't be had: its message, no traceback."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["generate", "Hello", "--model", "./nowhere"]) == 1
    assert capsys.readouterr().err.startswith("octavo: there is no file or folder nowhere.")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    """Where the output goes has no room: status 1 and one line, no traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "octavo", "plugins"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "octavo: the output could not be written: No space left on device\n"
