"""Interface between a scheduler process and its CPU worker: a mailbox for data, messages for control."""
