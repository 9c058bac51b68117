"""The scheduler's side of the CPU worker: start or attach to a worker, watch and restart it, compute in its place."""
