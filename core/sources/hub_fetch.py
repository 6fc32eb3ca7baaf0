"""Child process of `hub.py`: download the files named in the JSON of the first argument, and print why that failed, as JSON.

Run as a script, so that it starts without the rest of Octavo. Progress bars go to stderr.
"""

from __future__ import annotations

import json
import sys

from huggingface_hub import snapshot_download


def main() -> int:
    task = json.loads(sys.argv[1])
    try:
        snapshot_download(
            task["repo_id"],
            revision=task["revision"],
            local_dir=task["local_dir"],
            allow_patterns=task["allow_patterns"],
            endpoint=task["endpoint"],
        )
    except Exception as error:  # the parent says what it means for the user
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps({"reason": reason, "errno": getattr(error, "errno", None), "filename": getattr(error, "filename", None)}))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
