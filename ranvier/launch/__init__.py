"""From a command under any launcher to started ranks, and from a fault to an end in words."""
