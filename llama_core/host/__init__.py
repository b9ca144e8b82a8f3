"""What this machine has for the process: memory, and limits of its control groups."""
