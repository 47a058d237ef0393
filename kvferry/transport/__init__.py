"""Moving bytes: where a worker's memory is, the landing memory of a target, and the ways to reach it."""
