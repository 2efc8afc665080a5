"""What a traced step does with each leaf of its state."""
