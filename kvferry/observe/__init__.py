"""What one endpoint has done and is waiting for: its event log, its numbers, and who may read them."""

import kvferry.session  # noqa: F401  (first: an endpoint has an observer, and observers read the session's events)
