"""Moving bytes: where a worker's memory is in this process, the landing memory of a target, and the ways to reach it."""
