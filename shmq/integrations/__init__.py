"""Programs of others on shmq. Each module needs the package of its name, which is an extra."""
