from __future__ import annotations

import os

# what this machine measured must not decide a test; the child processes inherit it
os.environ["KVFERRY_COSTS"] = "/nonexistent/costs.json"
