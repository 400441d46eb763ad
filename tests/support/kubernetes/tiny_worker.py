"""Stands for a worker where no cluster is needed: says who it is, and ends as files in its folder say."""

import os
import signal
import sys
import time
from pathlib import Path

folder, number = Path(sys.argv[1]), sys.argv[-1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
print(f"worker {number} has {os.environ.get('ENVFLEET_KEYS')}", flush=True)
(folder / f"started-{number}-{os.getpid()}").touch()
deadline_s = time.monotonic() + 60
while time.monotonic() < deadline_s:
    for order in (folder / f"exit-once-{number}", folder / f"exit-always-{number}"):
        if order.exists():
            code = int(order.read_text())
            if "once" in order.name:
                order.unlink()
            print(f"worker {number}: good bye", flush=True)
            sys.exit(code)
    time.sleep(0.02)
