"""The scheduler's side of the CPU worker: start it or join it, watch it, start it again."""
