"""`kvferry bench transfer`: real processes move synthetic caches, beside the same bytes moved without kvferry."""
