"""Services of the operating system: whole files, leases on folders, cores, memory, processes."""
