"""How a server is started so that all of its processes can be found and ended."""

from __future__ import annotations

import sys
from typing import Any

# In a session of its own a server would be scheduled as one task beside all others ("autogroup"): with more busy
# processes than cores, as here, each of its threads then waits for tenths of a second, now and then
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""For `Popen`: in a process group of its own, and where Python can, in our session."""
