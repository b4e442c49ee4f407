"""Services of the operating system: atomic files, leases on folders, cores, memory, processes."""
