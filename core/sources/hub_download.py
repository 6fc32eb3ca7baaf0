"""Download a probed repository, in a child process that is ended when nothing arrives any more.

The hub's client retries by itself, for minutes where every answer is late. A child process (`hub_fetch.py`) can be ended
whatever it is doing; what it has fetched stays in the staging folder, and the next try goes on from there.

Must not know: the cache's layout, the catalogue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import NO_ROOM
from octavo.core.sources.hub_probe import Listing, endpoint

STALL_S = 30.0


def download(hub_id: str, *, listing: Listing, staging: Path) -> None:
    """Run the hub's client in a child process, and end it when nothing arrives any more."""
    task = {
        "repo_id": hub_id,
        "revision": listing.commit,
        "local_dir": str(staging),
        "allow_patterns": list(listing.files),
        "endpoint": endpoint(),
    }
    script = Path(__file__).with_name("hub_fetch.py")
    # The probe tried plain HTTP; the chunk protocol's own hosts may be blocked where that works.
    environment = {"HF_HUB_DISABLE_XET": "1", **os.environ}
    terminal = sys.stderr is not None and sys.stderr.isatty()
    with subprocess.Popen(
        [sys.executable, "-P", str(script), json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if terminal else subprocess.DEVNULL,  # the client's progress bars
        env=environment,
        text=True,
    ) as child:
        try:
            _watch(child, received=lambda: _size(staging))
            output, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        failure: dict[str, Any] = json.loads(output) if output else {"reason": f"exit status {child.returncode}"}
        if failure.get("errno") in NO_ROOM:
            raise OSError(failure["errno"], os.strerror(failure["errno"]), failure["filename"] or str(staging))
        raise ModelSourceError(f"fetching {hub_id} from the hub failed: {failure['reason']}")


def _watch(child: subprocess.Popen[Any], *, received: Callable[[], int]) -> None:
    """Return when `child` ends; raise when `received()` has not grown for `STALL_S` seconds."""
    size, since = received(), time.monotonic()
    while True:
        try:
            child.wait(timeout=0.2)
            return
        except subprocess.TimeoutExpired:
            now = received()
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                raise ModelSourceError(
                    f"the hub at {endpoint()} sent nothing for {STALL_S:.0f} s. Try again: what arrived is kept and the download goes on."
                ) from None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total
