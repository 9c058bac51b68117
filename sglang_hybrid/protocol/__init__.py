"""Where scheduler and worker meet: the mailbox for data, messages for control."""
