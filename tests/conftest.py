from __future__ import annotations

import os
import signal

# what this machine measured must not decide a test; the child processes inherit it
os.environ["KVFERRY_COSTS"] = "/nonexistent/costs.json"

# started in the background by a shell, we and all our children would ignore Ctrl-C, which some tests send
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
