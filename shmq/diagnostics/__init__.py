"""Diagnosis of a host and of what brokers keep on it: shared memory and data paths.

    doctor           all checks of a host and its instances, and the repair of what they find
    host             checks of /dev/shm, kernel, limits, logind, and of a data path
    instance_checks  checks of one instance
    instances        which instances there are, their state and contents
    removal          removal of instances that nobody can use any more
    inspect          the report on one file
    segment          ... on a shared segment
    disk_files       ... on a file in a data path
    bench            the speed of this installation on this machine
    findings         results: findings of the checks, reports on files
    readable         durations, sizes, times and bodies as text

The checks and reports only read; `removal` removes shared memory, and `bench` starts an instance of
its own. Nothing here prints: the commands `doctor`, `inspect`, `ls`, `rm` and `bench` do.
"""
