from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile

# what this machine measured must not decide a test; the child processes inherit it
os.environ["KVFERRY_COSTS"] = "/nonexistent/costs.json"

# where the endpoints of the tests can be asked, apart from others on this machine
os.environ["KVFERRY_RUN"] = tempfile.mkdtemp(prefix="kvferry-tests-")
atexit.register(shutil.rmtree, os.environ["KVFERRY_RUN"], ignore_errors=True)

# started in the background by a shell, we and all our children would ignore Ctrl-C, which some tests send
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
